"""A request as its sender sees it: text, log-probabilities and times, around one or more sequences."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from infinilm.engine.sequence import Sequence
from infinilm.executor.step_io import StepOutput
from infinilm.outputs import AnswerDelta, CompletionOutput, RequestMetrics, RequestOutput, TokenLogprobs
from infinilm.sampling_params import SamplingParams
from infinilm.text.detokenizer import Detokenizer, StopStrings
from infinilm.text.tokenizer import Tokenizer

OnToken = Callable[[RequestOutput], None]


@dataclass(slots=True)
class Reported:
    """How much of an answer one reader has seen."""

    num_tokens: int = 0
    num_chars: int = 0


class Answer:
    """One sequence's text. It is decoded only when it is read, or when a stop string has to be found."""

    def __init__(self, seq: Sequence, tokenizer: Tokenizer | None) -> None:
        self.seq = seq
        self.text = ""
        self.stop_reason: int | str | None = None
        self.logprobs: list[TokenLogprobs] | None = None if seq.params.logprobs is None else []
        self.first_time: float | None = None
        """When the first token came."""
        self.last_time = 0.0
        """When the latest token came."""
        self._detokenizer = Detokenizer(tokenizer) if tokenizer else None
        self._stops = StopStrings(seq.params.stop) if seq.params.stop else None
        self._num_read = seq.num_prompt_tokens
        self._is_complete = False
        self._is_end_reported = False

    def read(self) -> bool:
        """Decode the tokens that are new. Returns whether a stop string ends the answer.

        A step may bring several tokens. Those after the one that completes a stop string are dropped.
        """
        seq = self.seq
        while self._detokenizer is not None and not self._is_complete:
            end = seq.num_tokens if self._stops is None else min(self._num_read + 1, seq.num_tokens)
            is_last = end == seq.num_tokens
            if self._feed(end, is_finished=is_last and seq.is_finished):
                del seq.token_ids[end:]
                return True
            if is_last:
                break
        return False

    def _feed(self, end: int, *, is_finished: bool) -> bool:
        """Decode tokens up to `end`. Returns whether they complete a stop string."""
        assert self._detokenizer is not None
        seq = self.seq
        # The token that ended the answer is no part of its text.
        is_text = not (is_finished and seq.finish_reason == "stop")
        piece = self._detokenizer.feed(seq.token_ids[self._num_read : end if is_text else end - 1])
        self._num_read = end
        if is_finished:
            piece += self._detokenizer.finish()
            self._is_complete = True
        if self._stops is None or end - seq.num_prompt_tokens < seq.params.min_tokens:
            self.text += piece
            return False
        self.text += self._stops.feed(piece)[0]
        if self._is_complete:
            self.text += self._stops.finish()
        if self._stops.matched is None:
            return False
        self.stop_reason = self._stops.matched
        self._is_complete = True
        return True

    def output(self, reported: Reported) -> CompletionOutput:
        """The answer so far, and what is new since it was last `reported` to the same reader."""
        self.read()
        tokens = self.seq.output_token_ids
        output = CompletionOutput(
            index=self.seq.index,
            text=self.text,
            token_ids=tokens,
            new_text=self.text[reported.num_chars :],
            new_token_ids=tokens[reported.num_tokens :],
            logprobs=self.logprobs.copy() if self.logprobs is not None else None,
            finish_reason=self.seq.finish_reason,
            stop_reason=self.stop_reason,
        )
        reported.num_chars = len(self.text)
        reported.num_tokens = len(tokens)
        return output

    def delta(self, reported: Reported) -> AnswerDelta | None:
        """The tokens that are new since it was last `reported`; None if there are none and it has not ended since."""
        seq, request, index = self.seq, self.seq.request, self.seq.index
        first = reported.num_tokens
        if self._is_end_reported or not (seq.is_finished or seq.num_output_tokens > first):
            return None
        token_ids = seq.token_ids[seq.num_prompt_tokens + first :]
        reported.num_tokens = first + len(token_ids)
        logprobs = self.logprobs and self.logprobs[first:]
        prompt_logprobs = request.pop_prompt_logprobs() if token_ids else None
        if not seq.is_finished:
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
    """What was asked, how far the answers are, and who is told about them."""

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
        self.answers = [Answer(seq, tokenizer) for seq in seqs]
        for index, seq in enumerate(seqs):
            seq.request, seq.index = self, index
        self.on_token = on_token
        self.is_reported = is_reported
        """Whether `step` reports it; `generate` and `stream` read their requests themselves."""
        self.error: str | None = None
        self.params: SamplingParams = seqs[0].params
        self.is_plain = not self.params.stop and self.params.logprobs is None and on_token is None
        """Whether nothing has to be done for each single token."""
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
        """Have another answer compute the prompt if `leader` was aborted before it had."""
        followers = [seq for seq in self.seqs if seq.leader is leader and not seq.is_finished]
        if leader.num_output_tokens > 0 or not followers:
            return
        successor, *others = followers
        successor.leader = None
        for seq in others:
            seq.leader = successor

    def start(self, now: float) -> None:
        """Note the first step that works on the request."""
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
        if answer.logprobs is not None:
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
        """The prompt's log-probabilities, for the first delta with a token: all are known by then. None after that."""
        is_first, self._are_prompt_logprobs_sent = not self._are_prompt_logprobs_sent, True
        return self.prompt_logprobs if is_first else None

    def deltas(self) -> list[AnswerDelta]:
        """What is new about each answer since the last call."""
        deltas = (answer.delta(each) for answer, each in zip(self.answers, self._reported, strict=True))
        return [delta for delta in deltas if delta is not None]

    def metrics(self) -> RequestMetrics:
        """How long it waited and how fast it goes, so far."""
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
