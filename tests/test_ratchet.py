"""Numbers of the design that a reader feels. They may only be tightened."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from narrow import present

from infinilm import LLM, SamplingParams

PACKAGE = Path(__file__).parents[1] / "infinilm"
FILES = sorted(PACKAGE.rglob("*.py"))

MAX_FILES_CROSSED = 9
MAX_FUNCTION_LINES = 60
MODEL_CODE = ("models", "layers", "attention", "kernels")


@pytest.mark.parametrize("quantization", ["none", "q8"])
def test_files_crossed_by_a_steady_decode_step(tiny_dir: Path, quantization: str) -> None:
    crossed: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            crossed.add(str(path.relative_to(PACKAGE)))

    with LLM(tiny_dir, num_kvcache_blocks=64, quantization=quantization) as llm:
        for prompt in ([3, 4, 5], [6, 7]):
            llm.add_request(prompt, SamplingParams(max_tokens=40, ignore_eos=True))
        for _ in range(3):
            llm.step_deltas()
        sys.setprofile(note)
        try:
            for _ in range(5):
                llm.step_deltas()
        finally:
            sys.setprofile(None)
    found = {name for name in crossed if name.partition("/")[0] not in MODEL_CODE}
    assert len(found) <= MAX_FILES_CROSSED, "\n".join(sorted(found))


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}", node


def test_functions_fit_on_a_screen() -> None:
    long = {
        name: num_lines
        for name, node in functions()
        if not name.startswith("kernels/")
        and (num_lines := present(node.end_lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not long


MUTATORS = {"append", "add", "update", "pop", "clear", "extend", "insert", "remove", "discard", "setdefault", "popitem"}
REGISTRIES = {"cache/layout.py": {"_STRATEGIES"}, "models/registry.py": {"FAMILIES"}}
"""By file: names of module state that may change. They are what `register_…` functions add to."""


def test_no_module_state_changes_but_registries() -> None:
    changed = set()
    for path in FILES:
        tree = ast.parse(path.read_text())
        names = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        name = str(path.relative_to(PACKAGE))
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, ast.Global):
                    changed |= {(name, each) for each in node.names}
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
                    owner = node.func.value
                elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                    owner = node.value
                else:
                    continue
                if isinstance(owner, ast.Name) and owner.id in names:
                    changed.add((name, owner.id))
    assert changed == {(file, name) for file, names in REGISTRIES.items() for name in names}


def test_helpers_exist_once() -> None:
    """One wrapper of child processes, one framing of messages, one helper that copies to a device."""
    uses = {
        "a child process": "subprocess.Popen(",
        "a frame's bytes": ".sendall(",
        "a copy from pinned memory": "pin_memory(",
    }
    found = {
        what: [str(path.relative_to(PACKAGE)) for path in FILES if text in path.read_text()]
        for what, text in uses.items()
    }
    assert {what: len(files) for what, files in found.items()} == dict.fromkeys(uses, 1), found


def test_no_function_is_written_twice() -> None:
    bodies: dict[str, list[str]] = {}
    for name, node in functions():
        body = node.body[1:] if ast.get_docstring(node) else node.body
        text = "\n".join(ast.unparse(statement) for statement in body)
        if text.count("\n") >= 3:
            bodies.setdefault(text, []).append(name)
    assert [names for names in bodies.values() if len(names) > 1] == []
