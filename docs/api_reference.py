"""Writes the reference of the public API from its docstrings: `make docs`."""

import sys
import warnings
from importlib import import_module
from pathlib import Path

import pdoc

MODULES = ["infinilm"] + [
    f"infinilm.{name}"
    for name in ("cache", "debug", "distributed", "engine", "errors", "generation", "layers", "models")
]


def main(directory: Path) -> None:
    for name in MODULES:
        module = import_module(name)
        for public in getattr(module, "__all__", ()):  # names that load on first use load now
            setattr(module, public, getattr(module, public))
    # Types that a module names only for the type checker stay as they are written.
    warnings.filterwarnings("ignore", "Error parsing type annotation")
    pdoc.pdoc(*MODULES, output_directory=directory)
    print(f"Open {directory / 'index.html'}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
