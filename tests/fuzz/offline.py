"""Cases driven by hand: `add_request` with `step` or `step_deltas`, mixed with `stream` and `generate`."""

import inspect
from collections import Counter, defaultdict
from collections.abc import Generator

from fuzz.cases import Arrival, Case
from fuzz.compare import UNKNOWN, Outcome, SeenAnswer
from fuzz.faults import StepFault
from fuzz.session import Record, Session, take_output
from infinilm import LLM
from infinilm.errors import EngineError

MAX_TICKS = 4000


class OfflineRun:
    """Runs a case to its end."""

    def __init__(self, case: Case, engine: LLM, fault: StepFault | None) -> None:
        self.case = case
        self.engine = engine
        self.fault = fault
        self.session = Session(engine, case.arrivals)
        self.num_begun_streams = 0
        self.streams: dict[str, Generator[str]] = {}
        self.arrivals = defaultdict[int, list[Arrival]](list)
        for arrival in case.arrivals:
            self.arrivals[arrival.tick].append(arrival)
        self.last_tick = max([each.tick for each in case.arrivals] + [each.tick for each in case.aborts])

    def run(self) -> tuple[list[Outcome], list[str]]:
        """What came of each request, and what was wrong on the way."""
        tick = 0
        while tick <= self.last_tick or self.streams or not self.engine.is_finished():
            if tick > MAX_TICKS:
                return self._outcomes([f"not finished after {MAX_TICKS} steps"])
            self._arrive(self.arrivals[tick])
            for abort in self.case.aborts:
                if abort.tick == tick:
                    self._abort(abort.target, abort.answer)
            self._take_turn(self.case.turns[tick % len(self.case.turns)])
            self.engine.scheduler.blocks.check_integrity(self.engine.scheduler.running)
            tick += 1
        return self._outcomes([])

    def _outcomes(self, problems: list[str]) -> tuple[list[Outcome], list[str]]:
        by_deltas = self.case.path == "step_deltas"
        problems += self.session.problems
        entries = Counter(record.arrival.entry for record in self.session.records.values())
        num_requests = entries["add"] + entries["generate"] + self.num_begun_streams
        if self.engine.stats().num_finished != num_requests:
            problems.append(f"{self.engine.stats().num_finished} of {num_requests} requests are counted as finished")
        for record in self.session.records.values():
            if self.fault:
                self.fault.note(record)
            if record.arrival.entry == "add":
                problems += record.finish(by_deltas=by_deltas)
        return [record.outcome for record in self.session.records.values()], problems

    def _arrive(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            if arrival.entry == "add":
                self.session.add(arrival)
            elif arrival.entry == "stream":
                self._start_stream(arrival)
        batch = [arrival for arrival in arrivals if arrival.entry == "generate"]
        if batch:
            specs = [arrival.spec for arrival in batch]
            outputs = self.engine.generate(
                [spec.engine_prompt for spec in specs], [spec.params for spec in specs], use_tqdm=False
            )
            for arrival, output in zip(batch, outputs, strict=True):
                record = self.session.records[arrival.name] = Record(arrival)
                take_output(record.outcome, output)

    def _start_stream(self, arrival: Arrival) -> None:
        record = self.session.records[arrival.name] = Record(arrival)
        record.outcome.answers = [SeenAnswer(UNKNOWN, "", UNKNOWN, None, UNKNOWN)]
        record.outcome.prompt_logprobs = record.outcome.error = UNKNOWN
        self.streams[arrival.name] = self.engine.stream(arrival.spec.engine_prompt, arrival.spec.params)

    def _abort(self, name: str, answer: int | None) -> None:
        if stream := self.streams.pop(name, None):
            stream.close()
            self.session.records[name].outcome.was_left = True
        else:
            self.session.abort(name, answer)

    def _take_turn(self, number: int) -> None:
        """Read a piece of a stream, or step."""
        names = [*self.streams, ""]
        name = names[number % len(names)]
        if name:
            self._read(name)
        elif self.case.path == "step_deltas":
            self.session.take_deltas(self.engine.step_deltas())
        else:
            self.session.take_outputs(self.engine.step())

    def _read(self, name: str) -> None:
        outcome = self.session.records[name].outcome
        seen = outcome.answers[0]
        self.num_begun_streams += inspect.getgeneratorstate(self.streams[name]) == inspect.GEN_CREATED
        try:
            seen.text += next(self.streams[name])
        except StopIteration:
            seen.finish_reason, outcome.error = UNKNOWN, None
            del self.streams[name]
        except EngineError as error:
            seen.finish_reason, outcome.error = "abort", str(error).partition(" failed: ")[2]
            del self.streams[name]
