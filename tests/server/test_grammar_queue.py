"""Grammars of others that are slow, or no longer needed, don't hold up a request."""

import os
import select
from collections.abc import Iterator
from threading import Condition
from typing import Any

import pytest
from processes import children, eventually
from server_driver import runs

from infinilm.errors import InvalidValueError
from infinilm.sampling_params import SamplingParams
from infinilm.server.grammar_queue import GrammarJob, GrammarQueue
from infinilm.server.messages import Submit
from infinilm.structured.compiler import GrammarCompiler
from infinilm.structured.grammar_sandbox import Cancellation, TrialCancelledError, TrialTimeoutError
from infinilm.structured_output import StructuredOutput

PATIENCE_S = 60.0


class FakeCompiler:
    """Each grammar is a regular expression that says what becomes of it: quick, slow, stuck or bad."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._is_open = True
        self.begun: list[str] = []
        self.limits: dict[str, float | None] = {}

    def compile(self, structured: StructuredOutput, limit_s: float | None, cancellation: Cancellation) -> None:
        name = structured.regex
        assert name is not None
        with self._changed:
            self.begun.append(name)
            self.limits[name] = limit_s
            self._changed.notify_all()
            if name.startswith("slow") and limit_s is not None:
                raise TrialTimeoutError("slow")
            if name.startswith("bad"):
                raise InvalidValueError("bad")
            if name.startswith("stuck"):
                self._changed.wait_for(lambda: cancellation.is_cancelled or self._is_open is False, PATIENCE_S)
        if cancellation.is_cancelled:
            raise TrialCancelledError

    def prepare(self) -> None:
        pass

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def end_all(self) -> None:
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def wait_for(self, *names: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: set(names) <= set(self.begun), PATIENCE_S), self.begun


class Driven:
    """A queue with its compiler, and what came out of it."""

    def __init__(self, compiler: Any) -> None:
        self.compiler = compiler
        self.queue = GrammarQueue(compiler)
        self.done: list[GrammarJob] = []

    def add(self, regex: str, tenant: str | None = None) -> None:
        params = SamplingParams(structured=StructuredOutput(regex=regex))
        self.queue.add(Submit(regex, [1], {}, tenant), params)

    def cancel(self, regex: str) -> None:
        assert self.queue.cancel(regex)
        if isinstance(self.compiler, FakeCompiler):
            self.compiler.wake()

    def wait(self, count: int) -> list[str]:
        """The first so many requests that are done."""
        while len(self.done) < count:
            assert select.select([self.queue.bell], [], [], PATIENCE_S)[0], [each.request for each in self.done]
            self.done += self.queue.pop_compiled()
        return [each.request.request_id for each in self.done]


@pytest.fixture
def driven() -> Iterator[Driven]:
    driven = Driven(FakeCompiler())
    yield driven
    driven.compiler.end_all()
    driven.queue.close()
    for thread in driven.queue._threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def fill_threads(driven: Driven, tenant: str | None = None) -> None:
    """Have both threads at work."""
    driven.add("stuck1", tenant)
    driven.add("stuck2", tenant)
    driven.compiler.wait_for("stuck1", "stuck2")


def test_what_is_cancelled_while_it_waits_is_never_compiled(driven):
    fill_threads(driven)
    for number in range(50):
        driven.add(f"gone{number}")
    driven.add("mine")
    for number in range(50):
        driven.cancel(f"gone{number}")
    driven.compiler.end_all()
    assert set(driven.wait(3)) == {"stuck1", "stuck2", "mine"}
    assert driven.compiler.begun[2:] == ["mine"]


def test_what_is_cancelled_while_it_is_compiled_ends(driven):
    fill_threads(driven)
    driven.add("mine")
    driven.cancel("stuck1")
    assert driven.wait(1) == ["mine"]
    assert not driven.queue.cancel("stuck1")
    assert not driven.queue.cancel("mine")


def test_tenants_take_turns(driven):
    fill_threads(driven, "loud")
    for number in range(5):
        driven.add(f"loud{number}", "loud")
    for tenant in ("quiet", "calm"):
        driven.add(f"{tenant}0", tenant)
        driven.add(f"{tenant}1", tenant)
    driven.cancel("stuck1")  # the other thread stays where it is: the order is that of one thread
    driven.wait(9)
    assert driven.compiler.begun[2:] == [
        *("loud0", "quiet0", "calm0", "loud1", "quiet1", "calm1"),
        *("loud2", "loud3", "loud4"),
    ]


def stick_patient_thread(driven: Driven) -> str:
    """Have the patient thread at work and the quick one idle. Returns the patient one's request."""
    fill_threads(driven)
    quick, patient = sorted(["stuck1", "stuck2"], key=lambda name: driven.compiler.limits[name] is None)
    driven.cancel(quick)
    return patient


def test_slow_ones_leave_a_thread_to_the_others(driven):
    patient = stick_patient_thread(driven)
    driven.add("slow0")
    driven.add("slow1")
    driven.add("quick")
    assert driven.wait(1) == ["quick"]
    driven.cancel(patient)
    assert driven.wait(3) == ["quick", "slow0", "slow1"]
    assert [each.error for each in driven.done] == [None, None, None]


def test_a_slow_one_is_cancelled_while_it_waits_for_the_patient_thread(driven):
    patient = stick_patient_thread(driven)
    driven.add("slow0")
    driven.add("quick")
    assert driven.wait(1) == ["quick"]
    driven.cancel("slow0")
    driven.cancel(patient)
    driven.add("last")
    assert driven.wait(2) == ["quick", "last"]
    assert driven.compiler.begun.count("slow0") == 1


def test_a_bad_one_is_refused_and_the_next_is_served(driven):
    driven.add("bad")
    driven.add("good")
    assert set(driven.wait(2)) == {"bad", "good"}
    errors = {each.request.request_id: each.error for each in driven.done}
    assert errors["good"] is None
    assert isinstance(errors["bad"], InvalidValueError)


def test_cancelling_ends_the_process_that_is_at_it(tiny_dir):
    """With the real compiler: the process ends, and the next grammar gets another one."""
    from infinilm.text.tokenizer import Tokenizer

    def trial_processes() -> set[int]:
        return {pid for pid in children(os.getpid()) if runs(pid, b"infinilm.structured.trial_process")}

    tokenizer = Tokenizer.from_directory(tiny_dir)
    assert tokenizer is not None
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    before = trial_processes()
    cancellation = Cancellation()
    compiler.prepare()
    compiler.compile(StructuredOutput(regex="first"), cancellation=cancellation)
    (process,) = trial_processes() - before
    cancellation.cancel()
    with pytest.raises(TrialCancelledError):
        compiler.compile(StructuredOutput(regex="second"), cancellation=cancellation)
    assert trial_processes() - before == {process}  # it was not asked

    driven = Driven(compiler)
    bomb = {"patternProperties": {f"^p{i}x.*$": {"maxLength": i} for i in range(1000)}}
    for number in range(4):
        params = SamplingParams(structured=StructuredOutput(json_schema={**bomb, "maxProperties": number + 5}))
        driven.queue.add(Submit(str(number), [1], {}, None), params)
    for number in range(4):
        driven.cancel(str(number))
    driven.add("mine")
    assert driven.wait(1) == ["mine"]
    assert driven.done[0].error is None
    driven.queue.close()
    for thread in driven.queue._threads:
        thread.join(PATIENCE_S)
    compiler.close()
    assert eventually(lambda: trial_processes() <= before)
