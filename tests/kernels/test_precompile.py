"""Compiling kernels side by side, for a GPU that need not be there: in processes that don't use the interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]

PREAMBLE = """
import json
import logging
import sys
import threading

import torch
from offline_triton import broken_kernel, launched
from triton import knobs

from infinilm.kernels.activation import silu_mul
from infinilm.kernels.norm import rms_norm
from infinilm.kernels.precompile import compile_together, preparing_compiler

x = torch.zeros(2, 64, dtype=torch.bfloat16)
from_disk = []  # whether a kernel was there before; only launches count, not the compiling ahead of them
main_thread = threading.current_thread()


def listener(*, src, cache_hit, **_):
    if threading.current_thread() is main_thread:
        from_disk.append((src.name, cache_hit))


knobs.compilation.listener = listener
runs = []


def work():
    first = len(launched)
    rms_norm(x, x[0], 1e-6)
    silu_mul(x)
    rms_norm(x[:1], x[0], 1e-6)
    runs.append(launched[first:])


def report(**values):
    is_clean = threading.active_count() == 1 and knobs.runtime.jit_cache_hook is None
    print(json.dumps({"runs": runs, "from_disk": from_disk, "is_clean": is_clean, **values}))
"""


def run(script: str, cache_dir: Path) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache_dir), "PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + dedent(script)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def listing(directory: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in directory.rglob("*")}


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Triton's cache after kernels were compiled by `compile_together`."""
    path: Path = tmp_path_factory.mktemp("triton")
    report = run("preparing_compiler()\ncompile_together(work)\nreport()", path)
    # At first nothing was launched, and then what a launch looked up was what had been compiled.
    assert report["runs"] == [[], ["_norm_kernel", "_silu_mul_kernel", "_norm_kernel"]]
    assert report["from_disk"] == [["_norm_kernel", True], ["_silu_mul_kernel", True]]
    assert report["is_clean"]
    return path


def test_kernels_on_disk_are_launched_at_once(cache_dir: Path) -> None:
    before = listing(cache_dir)
    report = run("compile_together(work)\nreport()", cache_dir)
    assert report["runs"] == [["_norm_kernel", "_silu_mul_kernel", "_norm_kernel"]]
    assert report["from_disk"] == [["_norm_kernel", True], ["_silu_mul_kernel", True]]
    assert listing(cache_dir) == before  # it may as well be read-only


def test_nothing_reads_what_a_skipped_kernel_should_have_written(cache_dir: Path) -> None:
    """Kernels that are on disk, or were launched before, are not launched after one that is compiled."""
    script = """
    rms_norm(x, x[0], 1e-6)
    narrow = torch.zeros(2, 40, dtype=torch.bfloat16)


    def work_on_more():
        first = len(launched)
        rms_norm(x, x[0], 1e-6)
        rms_norm(narrow, narrow[0], 1e-6)
        rms_norm(x, x[0], 1e-6)
        silu_mul(x)
        runs.append(launched[first:])


    compile_together(work_on_more)
    work()
    report()
    """
    first, second, last = run(script, cache_dir)["runs"]
    assert first == ["_norm_kernel"]
    assert second == ["_norm_kernel"] * 3 + ["_silu_mul_kernel"]
    assert last == ["_norm_kernel", "_silu_mul_kernel", "_norm_kernel"]


def test_trouble(cache_dir: Path) -> None:
    """What can't be compiled or kept fails as it does without; what others launch is launched; their hooks stay."""
    script = """
    messages = []
    logger = logging.getLogger("infinilm.kernels.precompile")
    logger.setLevel(logging.DEBUG)
    logger.addFilter(lambda record: messages.append(record.getMessage()))
    errors = []


    def fail():
        errors.append("begun")
        broken_kernel[1,](x)


    try:
        compile_together(fail)
    except Exception as error:
        errors.append(type(error).__name__)

    attempts = []


    def fail_once():
        attempts.append(len(attempts))
        if len(attempts) == 1:
            raise RuntimeError("only once")


    compile_together(fail_once)

    wide = torch.zeros(2, 256, dtype=torch.bfloat16)


    def launch_from_thread():
        first = len(launched)
        thread = threading.Thread(target=silu_mul, args=(wide[:, :72],))
        thread.start()
        thread.join()
        rms_norm(wide, wide[0], 1e-6)
        runs.append(launched[first:])


    compile_together(launch_from_thread)

    def launch_another():
        rms_norm(wide[:, :48], wide[0], 1e-6)


    cache_dir, knobs.cache.dir = knobs.cache.dir, sys.executable  # a file
    try:
        compile_together(launch_another)
    except OSError as error:
        errors.append(type(error).__name__)
    knobs.cache.dir = cache_dir

    calls = []
    knobs.runtime.jit_cache_hook = lambda **_: calls.append("called")
    compile_together(work)
    is_kept = knobs.runtime.jit_cache_hook is not None
    knobs.runtime.jit_cache_hook = None
    report(errors=errors, attempts=attempts, calls=calls, is_kept=is_kept, messages=messages)
    """
    report = run(script, cache_dir)
    assert report["errors"] == ["begun", "begun", "CompileTimeAssertionFailure", "NotADirectoryError"]
    assert any(message.startswith("broken_kernel is compiled when it is launched") for message in report["messages"])
    assert "kernels are compiled when they are launched: only once" in report["messages"]
    assert report["attempts"] == [0, 1]
    assert report["runs"] == [
        ["_silu_mul_kernel"],
        ["_silu_mul_kernel", "_norm_kernel"],
        ["_norm_kernel", "_silu_mul_kernel", "_norm_kernel"],
    ]
    assert report["is_kept"]
    assert report["calls"] == ["called", "called"]
    assert report["is_clean"]


def test_inputs_anywhere_take_the_same_kernels(tmp_path: Path) -> None:
    """A step's inputs lie wherever others before them end: none of these places may take a kernel of its own."""
    script = """
    from infinilm.kernels.decode_attention import DecodeWorkspace, decode_attention
    from infinilm.kernels.rope_store import rope_store
    from infinilm.kernels.sampling import NUM_SETTINGS, draw

    variants = set()


    def note(*, key, fn, **_):
        variants.add((fn.name, key))
        return True  # nothing is compiled


    knobs.runtime.jit_cache_hook = note
    cache = torch.zeros(4, 16, 2, 1, 64, dtype=torch.bfloat16)
    heads = torch.zeros(3, 4, 64, dtype=torch.bfloat16)
    table = torch.zeros(8, 64)
    logits = torch.zeros(3, 4096)
    settings = torch.zeros(3, NUM_SETTINGS, dtype=torch.int64)
    workspace = DecodeWorkspace(3, 2, 64, "cpu")
    for first in range(4):
        places = torch.zeros(8, dtype=torch.int64)[first : first + 3]
        tables = torch.zeros(8, 3, dtype=torch.int32)[first : first + 3]
        lens = torch.zeros(8, dtype=torch.int32)[first : first + 3]
        rope_store(heads, places, table, places, cache, num_heads=2, num_kv_heads=1)
        decode_attention(heads[:, :2], cache, tables, lens, scale=1.0, window=None, workspace=workspace)
        draw(logits, settings, places, places)
    knobs.runtime.jit_cache_hook = None
    report(variants=sorted(name for name, _ in variants))
    """
    assert run(script, tmp_path)["variants"] == ["_rope_store_kernel", "_scan", "_settle", "decode_kernel"]
