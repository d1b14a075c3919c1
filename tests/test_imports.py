"""The arrows between rooms, and how quickly the package can be imported."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "infinilm"

# What each room may import of ours. Leaves come first; a room never imports one further down.
LEAVES = {
    "errors",
    "checks",
    "framing",
    "garbage",
    "interrupts",
    "processes",
    "sampling_params",
    "structured_output",
    "outputs",
} | {"platforms", "ray_cluster"}
ALLOWED = {
    "errors": set(),
    "interrupts": set(),
    "framing": set(),
    "garbage": set(),
    "processes": {"interrupts"},
    "checks": {"errors"},
    "platforms": {"errors"},
    "ray_cluster": {"", "errors"},
    "sampling_params": LEAVES,
    "structured_output": {"checks", "errors"},
    "outputs": LEAVES,
    "distributed": LEAVES,
    "cache": LEAVES | {"kernels"},
    "config": LEAVES | {"cache", "distributed"},
    "kernels": LEAVES,
    "attention": LEAVES | {"kernels"},
    "sampling": LEAVES | {"kernels"},
    "debug": LEAVES | {"distributed"},
    "generation": LEAVES | {"sampling"},
    "layers": LEAVES | {"attention", "kernels", "distributed", "cache", "debug", "sampling"},
    "text": LEAVES | {"kernels"},
    "loading": LEAVES | {"distributed", "kernels", "text"},
    "structured": LEAVES | {"text"},
    "models": LEAVES
    | {"layers", "attention", "kernels", "cache", "loading", "text", "distributed", "debug", "generation", "sampling"},
    "executor": LEAVES
    | {"config", "cache", "distributed", "attention", "kernels", "sampling", "layers", "models", "loading", "debug"}
    | {"text"},
    "engine": LEAVES
    | {"config", "cache", "distributed", "executor", "models", "debug", "structured", "text", "lowlevel"},
    "lowlevel": LEAVES
    | {"config", "cache", "distributed", "executor", "attention", "sampling", "layers", "models", "loading", "debug"}
    | {"generation", "text", "engine"},
    "lib": LEAVES | {"cache", "distributed", "debug", "models", "lowlevel"},
    "server": LEAVES | {"", "config", "distributed", "engine", "executor", "loading", "text", "structured"},
    "batch": LEAVES | {"", "config", "distributed", "loading", "server"},
    "cluster": LEAVES | {"", "batch", "config", "engine", "loading", "server"},
    "cli": LEAVES
    | {"", "config", "distributed", "engine", "executor", "models", "loading", "text", "bench", "server", "batch"}
    | {"cluster"},
    "bench": LEAVES
    | {"", "config", "distributed", "engine", "loading", "text", "cache", "debug", "lowlevel", "server"},
    "__main__": {"cli"},
    "": LEAVES | {"config", "engine", "lowlevel"},
}


def imports_of(path: Path) -> set[str]:
    """The rooms that a file imports, by their first name below `infinilm`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.removeprefix("infinilm").lstrip(".").split(".")[0] for name in names if name.startswith("infinilm")}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py").replace("__init__", "")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_rooms_import_only_what_they_may(path: Path) -> None:
    room = room_of(path)
    assert imports_of(path) - {room} <= ALLOWED[room]


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_nothing_in_the_engine_imports_torch() -> None:
    modules = sorted(path.stem for path in (PACKAGE / "engine").glob("[a-z]*.py"))
    assert "llm_engine" in modules
    assert "torch" not in modules_after("import " + ", ".join(f"infinilm.engine.{module}" for module in modules))


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = {
        "torch",
        "numpy",
        "transformers",
        "tokenizers",
        "huggingface_hub",
        "jinja2",
        "typer",
        "rich",
        "tqdm",
        "llguidance",
    }
    assert not heavy & modules_after("import infinilm")


def test_the_engine_imports_with_the_core_dependencies_alone() -> None:
    extras = {"transformers", "gguf", "typer", "rich", "hypothesis", "pytest", "triton", "llguidance"}
    assert not extras & modules_after("from infinilm import LLM, AsyncLLM")


NAMES = {
    "infinilm": "LLM AsyncLLM InferEngine SamplingParams StructuredOutput Config DeviceType",
    "infinilm.engine": "InferEngine RankWorker LLMEngine Scheduler Sequence BlockManager ModelRunner DistConfig",
    "infinilm.cache": "CacheConfig StaticKVCacheConfig PagedKVCacheConfig StaticCacheConfig DynamicCache",
    "infinilm.distributed": "DistConfig RankInfo CommunicationGroup",
    "infinilm.models": "ModelConfig LlamaConfig AutoConfig AutoLlamaModel LlamaForCausalLM InfinilmModel "
    "register_model",
    "infinilm.layers": "ColumnParallelLinear RowParallelLinear QKVParallelLinear GateUpParallelLinear RMSNorm",
    "infinilm.generation": "GenerationMixin infini_to_numpy",
    "infinilm.debug": "HookRegistry tensor_stats compare_tensors",
    "infinilm.lib._infinilm": "InferEngine DistConfig CacheConfig LlamaConfig HookRegistry",
}


@pytest.mark.parametrize("room", NAMES)
def test_rooms_have_the_names_they_promise(room: str) -> None:
    module = importlib.import_module(room)
    assert [name for name in NAMES[room].split() if not callable(getattr(module, name, None))] == []
