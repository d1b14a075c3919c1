"""The engine's outputs: one `RequestOutput` per prompt, one `CompletionOutput` per answer."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: dict[int, float] = field(default_factory=dict)
    """The most likely tokens, best first."""


@dataclass(slots=True)
class CompletionOutput:
    """One answer, so far."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    new_text: str = ""
    """The text added since the last output."""
    new_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop id or stop string that ended the answer; None for end-of-sequence."""


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds, of the request as a whole."""

    arrival_time: float = 0.0
    queue_time: float | None = None
    """From arrival until the first step that computes the request."""
    ttft: float | None = None
    """From arrival until the first token."""
    itl: float | None = None
    """Mean time between tokens of one answer."""
    tokens_per_second: float | None = None
    """Tokens generated, over the time since arrival."""
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    num_preemptions: int = 0


class AnswerDelta(NamedTuple):
    """The tokens added to one answer since the last delta, without text. A tuple, which is cheap to make and send."""

    request_id: str
    index: int  # type: ignore[assignment] # hides tuple.index
    """The index of the answer in its request."""
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    """For these tokens, if asked for."""
    finish_reason: FinishReason | None
    """Not None in the answer's last delta."""
    stop_reason: int | str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Set with the request's first token, if asked for."""
    error: str | None = None
    metrics: RequestMetrics | None = None
    """Set in an answer's last delta."""


@dataclass(slots=True)
class RequestOutput:
    """The state of one request. `text`, `token_ids`, … are those of its first answer."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry per prompt token; the first has none."""
    error: str | None = None
    """Why the engine ended the request, if `finish_reason` is "abort" because of an error."""

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first answer's token ids."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first answer ended."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """The first answer's log-probabilities."""
        return self.outputs[0].logprobs

    def __getitem__(self, key: str) -> Any:
        if key in ("text", "token_ids"):
            return getattr(self, key)
        raise KeyError(f"{key!r}: the items are 'text' and 'token_ids'; everything else is an attribute")
