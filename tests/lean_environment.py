"""A virtual environment without torch, for tests: what `infinilm` and some extras require, and nothing else.

Packages are linked from this environment instead of being installed, so it is made in a second and needs no network.
What is not required is really not there: a requirement that pyproject.toml forgets is missed.
"""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def make_environment(folder: Path, extras: Iterable[str], also: Iterable[str] = ()) -> Path:
    """Make it in `folder`, with the packages named in `also`, too; its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *also]
    wanted += [each for extra in extras for each in project["optional-dependencies"][extra]]
    packages = next(folder.glob("lib/python*/site-packages"))
    for found in find_distributions(wanted).values():
        for name in top_level_names(found):
            target = Path(str(found.locate_file(name)))
            if target.exists() and not (packages / name).exists():
                (packages / name).symlink_to(target)
    (packages / "infinilm").symlink_to(ROOT / "infinilm")
    return folder / "bin" / "python"


def find_distributions(requirements: Iterable[str]) -> dict[str, Distribution]:
    """Those that are required, directly or by others, by name."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        for extra in ("", *requirement.extras):
            key = requirement.name.lower(), extra
            if key in seen:
                continue
            seen.add(key)
            found[requirement.name.lower()] = own = distribution(requirement.name)
            needed = [Requirement(text) for text in own.requires or ()]
            waiting += [each for each in needed if each.marker is None or each.marker.evaluate({"extra": extra})]
    return found


def top_level_names(found: Distribution) -> set[str]:
    """The files and folders of a package, its metadata included. Scripts and the like lie elsewhere."""
    return {path.parts[0] for path in found.files or () if path.parts[0] not in ("..", "__pycache__")}


def clean_environment() -> dict[str, str]:
    """This process's environment without what would lead to other packages."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
