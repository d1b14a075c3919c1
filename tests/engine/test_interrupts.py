"""Ctrl-C at any moment: the call ends with `KeyboardInterrupt`, and the engine is as good as before."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread, main_thread
from time import sleep
from types import FrameType
from typing import Any

import pytest
import torch
from checkpoints import make_reference, save
from narrow import present
from processes import ranks, time_limit
from troubled_model import save_troubled

from infinilm import LLM, SamplingParams
from infinilm.distributed import DistConfig
from infinilm.engine import InferEngine
from infinilm.interrupts import Turns, interrupts_allowed, interrupts_held

PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
ENGINE_FILES = ("/infinilm/", "/contextlib.py", "/subprocess.py")
PEER_FILES = (
    "/infinilm/executor/processes.py",
    "/infinilm/executor/worker_processes.py",
    "/infinilm/distributed/channel.py",
    "/infinilm/framing.py",
    "/infinilm/processes.py",
    "/subprocess.py",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_troubled(tmp_path_factory.mktemp("troubled"))


class InterruptAt:
    """Interrupts this process just before the `point`-th line of these files is executed."""

    def __init__(self, point: int | None, files: tuple[str, ...]) -> None:
        self.num_lines = 0
        self.where = "nowhere"
        self._point, self._files = point, files

    def __enter__(self) -> "InterruptAt":
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        return self._on_line if any(name in frame.f_code.co_filename for name in self._files) else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self._point:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._on_line


def interrupt_everywhere(
    call: Callable[[], object], check: Callable[[str], object], files: tuple[str, ...], num_points: int
) -> None:
    """Interrupt the call at this many points of its way, and see after each how things are."""
    with InterruptAt(None, files) as counter:
        call()
    assert counter.num_lines > num_points
    for number in range(num_points):
        point = 1 + number * (counter.num_lines - 1) // num_points
        with InterruptAt(point, files) as interrupt, pytest.raises(KeyboardInterrupt):
            call()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, interrupt.where
        check(interrupt.where)


@pytest.mark.parametrize(
    ("settings", "files", "num_points"),
    [
        ({}, ENGINE_FILES, 250),
        ({"tensor_parallel_size": 2}, ENGINE_FILES, 20),
        ({"tensor_parallel_size": 2}, PEER_FILES, 30),
        ({"pipeline_parallel_size": 2}, (*ENGINE_FILES, *PEER_FILES), 25),
    ],
)
def test_generate(checkpoint: Path, settings: dict[str, int], files: tuple[str, ...], num_points: int) -> None:
    with time_limit(), LLM(checkpoint, num_kvcache_blocks=64, **settings) as llm:

        def generate() -> list[list[int]]:
            return [output.token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]

        def check(where: str) -> None:
            assert generate() == expected, where
            stats = llm.stats()
            assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, 64), where
            assert llm.is_finished(), where

        expected = generate()
        interrupt_everywhere(generate, check, files, num_points)
    assert ranks() == []


def test_stream(checkpoint: Path) -> None:
    with LLM(checkpoint, num_kvcache_blocks=64) as llm:

        def stream() -> str:
            return "".join(llm.stream(PROMPTS[0], GREEDY))

        def check(where: str) -> None:
            assert stream() == expected, where
            assert llm.stats().num_free_blocks == 64, where

        expected = stream()
        interrupt_everywhere(stream, check, ENGINE_FILES, 100)


def test_infer_engine(checkpoint: Path) -> None:
    with time_limit(), InferEngine(checkpoint, DistConfig(2)) as engine:

        def generate() -> list[list[int]]:
            return engine.generate(PROMPTS[:1], 3, temperature=0, stop_on_eos=False).token_ids

        def check(where: str) -> None:
            assert generate() == expected, where

        expected = generate()
        interrupt_everywhere(generate, check, ENGINE_FILES, 20)


def test_the_native_library_calls_no_python_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It converts arguments, and passes over errors in doing so: a Ctrl-C would be lost there."""
    calls = []
    monkeypatch.setattr(torch.Tensor, "__dlpack__", lambda tensor, **_: calls.append(tensor.shape))
    sampled = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=2)
    path = save(make_reference("mixtral", intermediate_size=128), tmp_path)
    with LLM(path, num_kvcache_blocks=64, attention_backend="native") as llm:
        assert all(len(output.token_ids) == 3 for output in llm.generate(PROMPTS, sampled, use_tqdm=False))
    with InferEngine(path, quantization="q8") as engine:
        assert all(len(each) == 3 for each in engine.generate(PROMPTS[:1], 3, stop_on_eos=False).token_ids)
    assert calls == []


def test_a_stream_that_is_not_begun_leaves_nothing_behind(checkpoint: Path) -> None:
    with LLM(checkpoint, num_kvcache_blocks=64) as llm:
        llm.stream(PROMPTS[0], GREEDY)
        assert llm.is_finished()


def test_held_until_the_end_of_the_outermost_block() -> None:
    @interrupts_held()
    def be_interrupted() -> None:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            seen.append("within")
        seen.append("without")

    seen: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        be_interrupted()
    assert seen == ["within", "without"]


def test_held_until_allowed() -> None:
    seen = []
    with interrupts_held():
        signal.raise_signal(signal.SIGINT)
        seen.append("held")
        with pytest.raises(KeyboardInterrupt), interrupts_allowed():
            seen.append("never")
        signal.raise_signal(signal.SIGINT)
        seen.append("held again")
        with pytest.raises(KeyboardInterrupt), interrupts_allowed():
            seen.append("never")
    assert seen == ["held", "held again"]


def test_ignored_interrupts_and_other_threads_are_left_alone() -> None:
    def hold() -> None:
        with interrupts_held():
            seen.append(signal.getsignal(signal.SIGINT))

    seen: list[object] = []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        hold()
    finally:
        signal.signal(signal.SIGINT, before)
    thread = Thread(target=hold)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_IGN, before]


def test_turns_are_taken_in_order_and_an_interrupted_wait_leaves_the_queue() -> None:
    turns, served = Turns(), []
    turns.take()
    turns.take()  # again, by the same thread

    def wait(name: int) -> None:
        with interrupts_held(), turns:
            served.append(name)

    threads = [Thread(target=wait, args=(name,)) for name in range(5)]
    for place, thread in enumerate(threads, start=1):
        thread.start()
        while len(turns._waiting) < place:
            sleep(0.001)
    turns.give_back()
    assert (turns.is_mine, served) == (True, [])
    turns.give_back()
    for thread in threads:
        thread.join()
    assert served == list(range(5))

    is_done = Event()

    def hold() -> None:
        with interrupts_held(), turns:
            while not turns._waiting:
                sleep(0.001)
            signal.pthread_kill(present(main_thread().ident), signal.SIGINT)
            is_done.wait()

    holder = Thread(target=hold)
    holder.start()
    while turns._owner is None:
        sleep(0.001)
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        turns.take(interruptible=True)
    is_mine = [turns.is_mine]
    is_done.set()
    holder.join()
    with interrupts_held(), turns:
        is_mine.append(turns.is_mine)
    assert [*is_mine, turns.is_mine] == [False, True, False]
