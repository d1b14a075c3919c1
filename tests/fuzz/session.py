"""The requests of a case in one engine: who was told what, and what was done to whom."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial

from fuzz.cases import Arrival, Callback
from fuzz.compare import UNKNOWN, Outcome, SeenAnswer
from infinilm import LLM, RequestOutput
from infinilm.errors import InvalidValueError
from infinilm.outputs import AnswerDelta


class Channel:
    """What one reader was told of a request by outputs, each of which must follow from those before."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.problems: list[str] = []
        self.last: RequestOutput | None = None
        self._texts: list[str] = []
        self._tokens: list[list[int]] = []

    def take(self, output: RequestOutput) -> None:
        if self.last is None:
            self._texts = [""] * len(output.outputs)
            self._tokens = [[] for _ in output.outputs]
        elif self.last.finished:
            self._complain("told more after it had finished")
        if output.finished != all(answer.finish_reason is not None for answer in output.outputs):
            self._complain(f"finished is {output.finished}, but not so its answers")
        for index, answer in enumerate(output.outputs):
            self._texts[index] += answer.new_text
            self._tokens[index] += answer.new_token_ids
            if self._texts[index] != answer.text:
                self._complain(f"[{index}] new texts are {self._texts[index]!r}, the text {answer.text!r}")
            if self._tokens[index] != answer.token_ids:
                self._complain(f"[{index}] new tokens are {self._tokens[index]}, the tokens {answer.token_ids}")
            if answer.logprobs is not None and len(answer.logprobs) != len(answer.token_ids):
                self._complain(f"[{index}] {len(answer.logprobs)} logprobs of {len(answer.token_ids)} tokens")
            reason = self.last and self.last.outputs[index].finish_reason
            if reason is not None and reason != answer.finish_reason:
                self._complain(f"[{index}] it had ended by {reason!r}, now by {answer.finish_reason!r}")
        self.last = output

    def _complain(self, problem: str) -> None:
        self.problems.append(f"{self.label}: {problem}")


class Record:
    """One request."""

    def __init__(self, arrival: Arrival, request_id: str | None = None) -> None:
        self.arrival = arrival
        self.request_id = request_id
        self.heard = Channel(f"{arrival.name} on_token")
        self.reported = Channel(f"{arrival.name} step")
        self.num_calls = 0
        self.deltas: list[AnswerDelta] = []
        self.outcome = Outcome(arrival.name, arrival.spec, [SeenAnswer() for _ in range(arrival.spec.num_answers)])

    def note_abort(self, answer: int | None, *, has_ended: bool) -> None:
        answers = range(self.arrival.spec.num_answers) if answer is None else [answer]
        self.outcome.may_abort.update(answers)
        if has_ended and answer is not None:
            self.outcome.must_abort.add(answer)

    @property
    def is_told_by_deltas(self) -> bool:
        """Whether `step_deltas` tells of it: not if it has a listener, unless that failed."""
        return self.arrival.callback is None or self.outcome.has_raised

    @property
    def has_ended_by_deltas(self) -> bool:
        ended = {delta.index for delta in self.deltas if delta.finish_reason is not None}
        return len(ended) == self.arrival.spec.num_answers

    def finish(self, *, by_deltas: bool) -> list[str]:
        """Fill in the outcome. Returns what was wrong with the way it was told."""
        problems = self.heard.problems + self.reported.problems
        heard, reported = self.heard.last, self.reported.last
        if by_deltas and (heard is None or self.deltas):
            return problems + self._follow_deltas()
        if last := reported or heard:
            take_output(self.outcome, last)
        if heard is not None and reported is not None and not self.outcome.has_raised:
            if not heard.finished:
                problems.append(f"{self.arrival.name}: the end was reported, but its listener was not told")
            elif not is_told_alike(heard, reported):
                problems.append(f"{self.arrival.name}: its listener heard {heard.outputs}, step {reported.outputs}")
        return problems

    def _follow_deltas(self) -> list[str]:
        problems = []
        outcome, wants_logprobs = self.outcome, "logprobs" in self.arrival.spec.settings
        for seen in outcome.answers:
            seen.text = UNKNOWN
            seen.logprobs = [] if wants_logprobs else None
        for delta in self.deltas:
            seen = outcome.answers[delta.index]
            if seen.finish_reason is not None:
                problems.append(f"{outcome.name}[{delta.index}]: told more after it had ended")
            seen.token_ids += delta.token_ids
            if wants_logprobs:
                seen.logprobs += delta.logprobs or []
            seen.finish_reason, seen.stop_reason = delta.finish_reason, delta.stop_reason
            outcome.prompt_logprobs = delta.prompt_logprobs or outcome.prompt_logprobs
            outcome.error = delta.error or outcome.error
        return problems


def is_told_alike(one: RequestOutput, other: RequestOutput) -> bool:
    """Whether two outputs say the same of the answers, apart from what is new."""
    names = ("text", "token_ids", "logprobs", "finish_reason", "stop_reason")
    pairs = zip(one.outputs, other.outputs, strict=True)
    return all(getattr(a, name) == getattr(b, name) for a, b in pairs for name in names)


def take_output(outcome: Outcome, output: RequestOutput) -> None:
    """The state of a request, as an output tells it."""
    outcome.answers = [
        SeenAnswer(answer.token_ids, answer.text, answer.logprobs, answer.finish_reason, answer.stop_reason)
        for answer in output.outputs
    ]
    outcome.prompt_logprobs, outcome.error = output.prompt_logprobs, output.error
    outcome.num_cached_tokens = output.metrics.num_cached_tokens


class Session:
    """An engine with the requests of a case that were added to it."""

    def __init__(self, engine: LLM, arrivals: Sequence[Arrival]) -> None:
        self.engine = engine
        self.records: dict[str, Record] = {}
        self.problems: list[str] = []
        self._added_by_hand = {arrival.name: arrival for arrival in arrivals if arrival.entry == "add"}
        self._by_id: dict[str, list[Record]] = {}
        """The latest last. An id may be used again once its request has ended."""

    def add(self, arrival: Arrival) -> None:
        """Add a request, if a listener has not done so already."""
        if arrival.name in self.records:
            return
        record = Record(arrival)
        add = partial(
            self.engine.add_request,
            arrival.spec.engine_prompt,
            arrival.spec.params,
            on_token=self._listener(record, arrival.callback) if arrival.callback else None,
            cache_salt=arrival.cache_salt,
        )
        try:
            record.request_id = add(request_id=arrival.request_id)
        except InvalidValueError as error:
            earlier = self._by_id.get(arrival.request_id or "", [])
            if "in use" not in str(error) or not any(self.is_open(each) for each in earlier):
                self.problems.append(f"{arrival.name}: refused: {error}")
            record.request_id = add(request_id=f"another {arrival.name}")
        self.records[arrival.name] = record
        self._by_id.setdefault(record.request_id, []).append(record)

    def is_open(self, record: Record) -> bool:
        """Whether the end of a request has not been told to anybody yet."""
        told = (record.heard.last, record.reported.last)
        return not any(output and output.finished for output in told) and not record.has_ended_by_deltas

    def abort(self, name: str, answer: int | None) -> None:
        record = self.records.get(name)
        if record is None or record.request_id is None or self._by_id[record.request_id][-1] is not record:
            return
        # Noted before: it may call a listener, who looks.
        record.note_abort(answer, has_ended=False)
        has_ended = self.engine.abort(record.request_id, answer)
        record.note_abort(answer, has_ended=has_ended)

    def _listener(self, record: Record, callback: Callback) -> Callable[[RequestOutput], None]:
        def hear(output: RequestOutput) -> None:
            record.heard.take(output)
            record.num_calls += 1
            if record.num_calls == callback.at_call:
                self._act(record, callback)

        return hear

    def _act(self, record: Record, callback: Callback) -> None:
        if callback.action == "raise":
            record.outcome.has_raised = True
            raise RuntimeError("the listener failed")
        if callback.action == "abort_self":
            self.abort(record.arrival.name, callback.answer)
        elif callback.action == "abort_other":
            self.abort(callback.target, callback.answer)
        elif callback.action == "add_other" and callback.target in self._added_by_hand:
            self.add(self._added_by_hand[callback.target])

    def take_outputs(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            # Of two with the same id the earlier one is told its end first.
            records = self._by_id.get(output.request_id, [])
            open_ones = [each for each in records if not (each.reported.last and each.reported.last.finished)]
            for record in open_ones[:1] or records[-1:]:
                record.reported.take(output)

    def take_deltas(self, deltas: list[AnswerDelta]) -> None:
        for delta in deltas:
            records = self._by_id.get(delta.request_id, [])
            open_ones = [each for each in records if each.is_told_by_deltas and not each.has_ended_by_deltas]
            for record in open_ones[:1] or records[-1:]:
                # As it is now: the engine may go on writing to its lists.
                record.deltas.append(deepcopy(delta))
