"""Ranks come and go with their engine: however it ends, nothing hangs and nothing stays behind."""

import ast
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from processes import (
    Belongings,
    eventually,
    is_rank,
    listening,
    ports_of,
    ranks,
    resident_bytes,
    script,
    shared_memory,
)
from troubled_model import save_troubled, trouble

from infinilm.debug import HookRegistry
from infinilm.distributed import DistConfig
from infinilm.engine import InferEngine

PACKAGE = Path(__file__).parents[2] / "infinilm"
PROMPT = [5, 6, 7, 8]

BEGINNING = """
import asyncio, atexit, multiprocessing, os, signal, sys, threading, time
from contextlib import suppress
import processes, troubled_model
from infinilm.errors import EngineError
from infinilm import LLM, AsyncLLM, SamplingParams
from infinilm.distributed import DistConfig
from infinilm.engine import InferEngine

path, prompt = sys.argv[1], [5, 6, 7, 8]
greedy = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
endless = SamplingParams(max_tokens=200, ignore_eos=True)

def say(*words):
    print(*words, flush=True)
"""
INFER = BEGINNING + "engine = InferEngine(path, DistConfig(2))\n"
LANGUAGE = BEGINNING + "llm = LLM(path, num_kvcache_blocks=64, tensor_parallel_size=2)\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_troubled(tmp_path_factory.mktemp("troubled"))


# --- the end of a program ------------------------------------------------------------------------------------

EVERY_KIND = (
    LANGUAGE
    + """
engine = InferEngine(path, DistConfig(2))
service = AsyncLLM(path, num_kvcache_blocks=64, tensor_parallel_size=2)
say(llm.generate(prompt, greedy, use_tqdm=False)[0].token_ids)
say(engine.generate([prompt], 10, temperature=0, stop_on_eos=False).token_ids[0])

async def listen_forever():
    with suppress(EngineError):  # which says that the engine was stopped
        while True:
            async for output in service.generate(prompt, endless):
                started.set()

started = threading.Event()
threading.Thread(target=lambda: asyncio.run(listen_forever()), daemon=True).start()
started.wait()
"""
)


def test_a_program_that_closes_nothing_ends(checkpoint: Path, tmp_path: Path) -> None:
    with script(EVERY_KIND, checkpoint, temporary=tmp_path) as forgetful:
        exit_code, output, errors = forgetful.end()
    assert exit_code == 0, errors
    by_llm, by_engine = output.splitlines()
    assert by_llm == by_engine
    # What two engines report of themselves, rank 0 of each; other ranks say nothing. Once, it may be said that there
    # are no native kernels here.
    reports = [line for line in errors.splitlines() if "native CPU kernels are missing" not in line]
    assert len(errors.splitlines()) - len(reports) <= 1
    assert [line.split(" in ")[0] for line in reports] == [f"infinilm: {checkpoint.name}: ready on 2 x cpu"] * 2
    assert list(tmp_path.iterdir()) == []


ENDINGS = {
    "error": (INFER + "raise RuntimeError('the program is wrong')", 1, "RuntimeError: the program is wrong"),
    "death and exit": (INFER + "os.kill(processes.ranks()[0], signal.SIGKILL); sys.exit(7)", 7, None),
    "death in a pass": (
        LANGUAGE + "llm.generate(troubled_model.trouble('exit', 1), use_tqdm=False)",
        1,
        "infinilm.errors.WorkerDiedError: rank 1",
    ),
}


def test_a_program_that_ends_badly_ends(checkpoint: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(script(code, checkpoint, temporary=tmp_path))
            for name, (code, _, _) in ENDINGS.items()
        }
        for name, program in running.items():
            _, expected_code, complaint = ENDINGS[name]
            exit_code, _, errors = program.end()
            assert exit_code == expected_code, (name, errors)
            if complaint is None:
                assert errors == "", name
            else:
                assert errors.splitlines()[-1].startswith(complaint), name
    assert list(tmp_path.iterdir()) == []


INTERRUPTED = (
    LANGUAGE
    + """
expected = llm.generate(prompt, greedy, use_tqdm=False)[0].token_ids
before = processes.ranks()
for _ in range(int(sys.argv[2])):
    try:
        say("running")
        while True:
            llm.generate([prompt] * 4, endless, use_tqdm=False)
    except KeyboardInterrupt:
        say("interrupted")
    again = llm.generate(prompt, greedy, use_tqdm=False)[0].token_ids
    say(again == expected, processes.ranks() == before, llm.stats().num_free_blocks)
say("running")
llm.generate(troubled_model.trouble("nap", 1) + prompt, endless, use_tqdm=False)
while True:
    llm.generate([prompt] * 4, endless, use_tqdm=False)
"""
)


def test_interrupted_programs_go_on_as_they_like(checkpoint: Path) -> None:
    num_times = 10
    with script(INTERRUPTED, checkpoint, num_times) as program:
        for number in range(num_times):
            assert program.read() == "running"
            time.sleep(0.02 + 0.0037 * number)
            program.interrupt()
            assert program.read() == "interrupted"
            assert program.read() == "True True 64"
        assert program.read() == "running"
        (rank,) = ranks(program.pid)
        time.sleep(0.1)
        program.interrupt()
        exit_code, _, errors = program.end()
        assert exit_code == -signal.SIGINT
        assert errors.splitlines()[-1] == "KeyboardInterrupt"
        assert errors.count("Traceback") == 1
        assert not is_rank(rank)


# --- the end of the engine's process -------------------------------------------------------------------------

LEFT = (
    BEGINNING
    + """
engines = [InferEngine(path, DistConfig(2)) for _ in sys.argv[2:]]
# A child that holds copies of all sockets: they stay open when this process is gone.
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=[60])
child.start()
for engine, sleeper in zip(engines, sys.argv[2:]):
    if sleeper != "none":
        request = {"input_ids": [troubled_model.trouble("sleep", int(sleeper))]}
        threading.Thread(target=engine, kwargs=request, daemon=True).start()
say(child.pid)
time.sleep(60)
"""
)


@pytest.mark.parametrize(
    ("cause", "sleepers"),
    [(signal.SIGKILL, ("none", "0", "1")), (signal.SIGTERM, ("none",))],
    ids=["killed in the middle of a pass", "terminated"],
)
def test_ranks_end_with_the_process_of_their_engine(
    checkpoint: Path, tmp_path: Path, cause: signal.Signals, sleepers: tuple[str, ...]
) -> None:
    memory_before = shared_memory()
    with script(LEFT, checkpoint, *sleepers, temporary=tmp_path) as program:
        child = int(program.read())
        time.sleep(0.3)  # they are in the middle of their passes
        processes = ranks(program.pid)
        ports = ports_of(program.pid).union(*map(ports_of, processes))
        assert len(processes) == len(sleepers)
        assert len(ports) == 3 * len(sleepers)  # the store's, and one of Gloo in each process
        os.kill(program.pid, cause)
        assert program.process.wait(5) == -cause
        try:
            assert eventually(lambda: not any(map(is_rank, processes)))
        finally:
            os.kill(child, signal.SIGKILL)
    assert eventually(lambda: not ports & set(listening().values()))
    assert shared_memory() == memory_before
    assert list(tmp_path.iterdir()) == []


FORKED = (
    INFER
    + """
before = engine(input_ids=[prompt]).output_ids
if os.fork() == 0:
    try:
        engine(input_ids=[prompt])
    except Exception as error:
        say(type(error).__name__, error)
    engine.close()
    atexit._run_exitfuncs()
    os._exit(0)
os.wait()
say(engine(input_ids=[prompt]).output_ids.equal(before))
"""
)


def test_a_fork_does_not_touch_the_ranks(checkpoint: Path) -> None:
    with script(FORKED, checkpoint) as program:
        exit_code, output, errors = program.end()
    assert exit_code == 0, errors
    refusal, result = output.splitlines()
    assert refusal.startswith("EngineError the engine's ranks belong to process")
    assert result == "True"


# --- opening and closing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "num_cycles"), [(1, 40), (2, 4)])
def test_opening_and_closing_leaves_nothing_behind(
    checkpoint: Path, size: int, num_cycles: int, capsys: pytest.CaptureFixture[str]
) -> None:
    num_cycles = int(os.environ.get("INFINILM_CYCLES", num_cycles))

    def open_and_close() -> None:
        engine = InferEngine(checkpoint, DistConfig(size))
        engine(input_ids=[PROMPT])
        if size > 1:
            assert len(ranks()) == size - 1
            assert len(ports_of(os.getpid())) == before.ports + 2
        engine.close()

    before = Belongings.now()
    open_and_close()  # what stays after the first time stays for good
    memory_before = resident_bytes()
    assert eventually(lambda: Belongings.now().children == 0)
    before = Belongings.now()
    for _ in range(num_cycles):
        open_and_close()
    assert eventually(lambda: Belongings.now() == before), (before, Belongings.now())
    growth = (resident_bytes() - memory_before) / num_cycles / 1024
    with capsys.disabled():
        if "INFINILM_CYCLES" in os.environ:
            print(f"\n{num_cycles} cycles on {size} ranks: {Belongings.now()}, {growth:.1f} KiB more memory per cycle")


def test_engines_that_are_dropped_are_closed(checkpoint: Path) -> None:
    engine = InferEngine(checkpoint, DistConfig(2))
    (rank,) = ranks()
    del engine
    assert not is_rank(rank)


def test_engines_share_the_cores_only_while_they_compute(checkpoint: Path) -> None:
    num_threads = torch.get_num_threads()
    seen = []
    registry = HookRegistry()
    registry.register_hook("final_norm", lambda *_: seen.append(torch.get_num_threads()))
    with InferEngine(checkpoint, DistConfig(2)) as first, InferEngine(checkpoint, DistConfig(2)) as second:
        for engine in (first, second):
            engine.set_hook_registry(registry)
            engine(input_ids=[PROMPT])
            assert torch.get_num_threads() == num_threads
            with pytest.raises(ValueError, match="a bad value"):
                engine(input_ids=[trouble("value", 0)])
            assert torch.get_num_threads() == num_threads
        first.close()
        second(input_ids=[PROMPT])
    assert torch.get_num_threads() == num_threads
    assert seen == [max(1, num_threads // 2)] * 3


# --- what goes over the wire ---------------------------------------------------------------------------------


def test_everything_listens_on_this_machine_only(checkpoint: Path) -> None:
    before = ports_of(os.getpid())
    with InferEngine(checkpoint, DistConfig(2)):
        (rank,) = ranks()
        ours, theirs = ports_of(os.getpid()) - before, ports_of(rank)
    assert (len(ours), len(theirs)) == (2, 1)
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
    assert {address.split(":")[0] for address in ours | theirs} <= loopback


FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "multiprocessing"}
FORBIDDEN_NAMES = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "eval",
    "exec",
}


def names_in(path: Path) -> Iterator[str]:
    """Every name a file imports, uses or takes from something."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
            if isinstance(node.value, ast.Name):
                yield f"{node.value.id}.{node.attr}"


@pytest.mark.parametrize("room", ["distributed", "engine", "models", "loading"])
def test_nothing_is_pickled(room: str) -> None:
    files = sorted((PACKAGE / room).rglob("*.py"))
    assert files
    forbidden = FORBIDDEN_MODULES | FORBIDDEN_NAMES | {"torch.load", "np.load"}
    for path in files:
        assert not forbidden & set(names_in(path)), path
