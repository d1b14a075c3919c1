"""A request as its sender sees it: one or more sequences, with text, log-probabilities and times."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from infinilm.engine.sequence import Sequence
from infinilm.executor.step_io import StepOutput
from infinilm.outputs import AnswerDelta, CompletionOutput, RequestMetrics, RequestOutput, TokenLogprobs
from infinilm.sampling_params import SamplingParams
from infinilm.text.answer import Answer
from infinilm.text.tokenizer import Tokenizer

OnToken = Callable[[RequestOutput], None]


@dataclass(slots=True)
class Reported:
    """How much of an answer one reader has seen."""

    num_tokens: int = 0
    num_chars: int = 0


class SequenceAnswer(Answer):
    """One sequence's answer. Its text is decoded only when it is read or searched for stop strings."""

    def __init__(self, seq: Sequence, tokenizer: Tokenizer | None) -> None:
        super().__init__(tokenizer, stops=seq.params.stop, min_tokens=seq.params.min_tokens)
        self.seq = seq
        self.first_time: float | None = None
        """When the first token came."""
        self.last_time = 0.0
        """When the latest token came."""
        self._is_end_reported = False

    def read(self) -> bool:
        """Decode the new tokens. Returns whether a stop string ends the answer.

        Tokens after the one that completes a stop string are removed from the sequence.
        """
        if self.is_done:
            return False
        seq = self.seq
        self.append(seq.token_ids[seq.num_prompt_tokens + self.num_tokens :], seq.finish_reason, self.stop_reason)
        if self._stops is None or self._stops.matched is None:
            return False
        del seq.token_ids[seq.num_prompt_tokens + self.num_tokens :]
        return True

    def output(self, reported: Reported) -> CompletionOutput:
        """The answer so far, and the part that the reader of `reported` has not seen yet."""
        self.read()
        tokens = self.seq.completion_token_ids
        output = CompletionOutput(
            index=self.seq.index,
            text=self.text,
            token_ids=tokens,
            new_text=self.text[reported.num_chars :],
            new_token_ids=tokens[reported.num_tokens :],
            logprobs=self.logprobs.copy() if self.seq.params.logprobs is not None else None,
            finish_reason=self.seq.finish_reason,
            stop_reason=self.stop_reason,
        )
        reported.num_chars = len(self.text)
        reported.num_tokens = len(tokens)
        return output

    def delta(self, reported: Reported) -> AnswerDelta | None:
        """The tokens since the last report. None if there are none and the answer has not ended since."""
        seq, request, index = self.seq, self.seq.request, self.seq.index
        first = reported.num_tokens
        token_ids = seq.token_ids[seq.num_prompt_tokens + first :]
        if self._is_end_reported or not (token_ids or seq.finish_reason):
            return None
        reported.num_tokens = first + len(token_ids)
        logprobs = self.logprobs[first:] if seq.params.logprobs is not None else None
        prompt_logprobs = request.pop_prompt_logprobs() if token_ids else None
        if seq.finish_reason is None:
            return AnswerDelta(request.request_id, index, token_ids, logprobs, None, prompt_logprobs=prompt_logprobs)
        self._is_end_reported = True
        return AnswerDelta(
            request.request_id,
            index,
            token_ids,
            logprobs,
            seq.finish_reason,
            self.stop_reason,
            prompt_logprobs,
            request.error,
            request.metrics(),
        )


class Request:
    """A prompt with its parameters, the state of its answers, and the listener they are reported to."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        seqs: list[Sequence],
        tokenizer: Tokenizer | None,
        on_token: OnToken | None,
        *,
        is_reported: bool = True,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.seqs = seqs
        self.answers = [SequenceAnswer(seq, tokenizer) for seq in seqs]
        for index, seq in enumerate(seqs):
            seq.request, seq.index = self, index
        self.on_token = on_token
        self.is_reported = is_reported
        """Whether `step` reports it. `generate` and `stream` read their requests directly."""
        self.error: str | None = None
        self.params: SamplingParams = seqs[0].params
        self.is_plain = not self.params.stop and self.params.logprobs is None and on_token is None
        """Whether single tokens need no work: no stop strings, log-probabilities or listener."""
        self._arrival_time = perf_counter()
        self._start_time: float | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            None if self.params.prompt_logprobs is None else [None] * seqs[0].num_prompt_tokens
        )
        self._are_prompt_logprobs_sent = False
        self._reported = [Reported() for _ in seqs]
        self._reported_to_listener = [Reported() for _ in seqs]

    @property
    def is_finished(self) -> bool:
        """Whether every answer has ended."""
        return all(seq.is_finished for seq in self.seqs)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(seq.num_output_tokens for seq in self.seqs)

    def replace_leader(self, leader: Sequence) -> None:
        """Have another answer compute the prompt if `leader` was aborted before it had done so."""
        followers = [seq for seq in self.seqs if seq.leader is leader and not seq.is_finished]
        if leader.num_output_tokens > 0 or not followers:
            return
        successor, *others = followers
        successor.leader = None
        for seq in others:
            seq.leader = successor

    def start(self, now: float) -> None:
        """Note the time of the first step that computes tokens of the request."""
        if self._start_time is None:
            self._start_time = now

    def update(self, answer_index: int, start: int, output: StepOutput, step_index: int, now: float) -> bool:
        """Add one row of a step's output to its answer. Returns whether a stop string ends the answer."""
        answer = self.answers[answer_index]
        if error := output.errors.get(step_index):
            self.error = f"{type(error).__name__}: {error}"
        if self.prompt_logprobs is not None:
            found = output.prompt_logprobs.get(step_index, [])
            self.prompt_logprobs[start + 1 : start + 1 + len(found)] = found
        if not output.tokens_of(step_index) or step_index in output.errors:
            return False
        answer.last_time = now
        if answer.first_time is None:
            answer.first_time = now
        is_stopped = bool(self.params.stop) and answer.read()
        if answer.seq.finish_reason == "stop" and not is_stopped:
            last = answer.seq.token_ids[-1]
            answer.stop_reason = last if last in self.params.stop_token_ids else None
        if self.params.logprobs is not None:
            answer.logprobs += output.logprobs[step_index]
            del answer.logprobs[answer.seq.num_output_tokens :]  # of tokens after the answer's end
        return is_stopped

    def output(self, *, for_listener: bool = False) -> RequestOutput:
        """The request's state, with what is new since the last call for the same reader."""
        leader = self.seqs[0]
        reported = self._reported_to_listener if for_listener else self._reported
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=leader.token_ids[: leader.num_prompt_tokens],
            outputs=[answer.output(each) for answer, each in zip(self.answers, reported, strict=True)],
            finished=self.is_finished,
            metrics=self.metrics(),
            prompt_logprobs=self.prompt_logprobs and self.prompt_logprobs.copy(),
            error=self.error,
        )

    def pop_prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """The prompt's log-probabilities on the first call, None later.

        The first delta with a token has them: all are known by then.
        """
        is_first, self._are_prompt_logprobs_sent = not self._are_prompt_logprobs_sent, True
        return self.prompt_logprobs if is_first else None

    def deltas(self) -> list[AnswerDelta]:
        """The new tokens and ends of answers since the last call."""
        deltas = (answer.delta(each) for answer, each in zip(self.answers, self._reported, strict=True))
        return [delta for delta in deltas if delta is not None]

    def metrics(self) -> RequestMetrics:
        """Waiting time and speed so far."""
        first_times = [answer.first_time for answer in self.answers if answer.first_time is not None]
        last_times = [answer.last_time for answer in self.answers if answer.first_time is not None]
        gaps = [
            (answer.last_time - answer.first_time) / (answer.seq.num_output_tokens - 1)
            for answer in self.answers
            if answer.first_time is not None and answer.seq.num_output_tokens > 1
        ]
        arrival = self._arrival_time
        return RequestMetrics(
            arrival_time=arrival,
            queue_time=self._start_time - arrival if self._start_time is not None else None,
            ttft=min(first_times) - arrival if first_times else None,
            itl=sum(gaps) / len(gaps) if gaps else None,
            tokens_per_second=self.num_output_tokens / (max(last_times) - arrival) if last_times else None,
            num_cached_tokens=self.seqs[0].num_cached_tokens,
            num_preemptions=sum(seq.num_preemptions for seq in self.seqs),
        )
