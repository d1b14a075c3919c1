"""Sampling parameters of a request, checked when created."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from infinilm.checks import (
    FrozenDict,
    check_flag,
    check_integer,
    check_real,
    check_text,
    make_numbers_plain,
    plain_items,
    plain_number,
)
from infinilm.errors import InvalidTypeError, InvalidValueError
from infinilm.structured_output import Grammar, Reasoning, StructuredOutput

if TYPE_CHECKING:
    import torch

LogitsProcessor = Callable[["Sequence[int]", "torch.Tensor"], "torch.Tensor"]
"""`(token ids generated so far, logits [vocab]) -> logits [vocab]`."""

MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The parameters for which a checkpoint, or a model's card, may have its own defaults."""
MAX_SAMPLES = 256
MAX_LOGPROBS = 1024
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when an answer ends. All values are checked; errors name the parameter.

    NumPy numbers become Python numbers. Lists and dicts are copied: later changes to them have no effect.
    """

    temperature: float = 1.0
    """0 is greedy: the most likely token, and among equals the first."""
    top_k: int = -1
    """Keep the k most likely tokens. 0 and -1 keep all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities sum to at least this."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one."""
    max_tokens: int = 64
    min_tokens: int = 0
    """No end-of-sequence, stop id or stop string before this many tokens."""
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    """One or several texts that end the answer; they are removed from it."""
    stop_token_ids: Sequence[int] = ()
    seed: int | None = None
    """The draw at a position depends only on this and the position. None: the engine picks one."""
    n: int = 1
    """Answers per prompt. They share the prompt's KV cache."""
    repetition_penalty: float = 1.0
    """Divides (or multiplies, if negative) the logits of tokens in the prompt or the answer; 0.01 to 100."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time a token is in the answer."""
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    """Report the log-probability of each token and of this many most likely ones, from the model's own
    distribution: before penalties, temperature and truncation."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    logits_processors: Sequence[LogitsProcessor] = ()
    structured: StructuredOutput | None = None
    """The structure that the answer must have. Only tokens that keep it can be drawn, regardless of other settings. An
    answer ends where it is complete and nothing may follow, even before `min_tokens`.
    """
    reasoning: Reasoning | None = None
    """The model reasons before it answers. `structured` begins after the reasoning, which can be limited."""

    def __post_init__(self) -> None:
        make_numbers_plain(self)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "logits_processors"):
            items = plain_items(getattr(self, name))
            if not isinstance(items, tuple):
                raise InvalidTypeError(f"{name}={items!r} must be a list or tuple")
            object.__setattr__(self, name, items)
        self._check_numbers()
        self._check_stops()
        self._check_bias()
        self._check_structured()
        for processor in self.logits_processors:
            if not callable(processor):
                raise InvalidTypeError(f"logits_processors holds {processor!r}, which is not callable")

    def _check_numbers(self) -> None:
        check_real("temperature", self.temperature, low=0.0, high=100.0)
        check_real("top_p", self.top_p, low=0.0, high=1.0, above_low=True)
        check_real("min_p", self.min_p, low=0.0, high=1.0)
        check_real("repetition_penalty", self.repetition_penalty, low=0.01, high=100.0)
        check_real("presence_penalty", self.presence_penalty, low=-100.0, high=100.0)
        check_real("frequency_penalty", self.frequency_penalty, low=-100.0, high=100.0)
        check_integer("top_k", self.top_k, low=-1)
        check_integer("max_tokens", self.max_tokens, low=1)
        check_integer("min_tokens", self.min_tokens, low=0, high=self.max_tokens)
        check_integer("n", self.n, low=1, high=MAX_SAMPLES)
        if self.seed is not None:
            check_integer("seed", self.seed, low=-(2**63), high=2**64 - 1)
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            check_integer("prompt_logprobs", self.prompt_logprobs, low=0, high=MAX_LOGPROBS)
        check_flag("ignore_eos", self.ignore_eos)

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOPS:
            raise InvalidValueError(f"stop has {len(self.stop)} texts; at most {MAX_STOPS} are allowed")
        for text in self.stop:
            if not isinstance(text, str):
                raise InvalidTypeError(f"stop holds {text!r}; each stop must be a string")
            check_text("stop", text)
            if not 0 < len(text) <= MAX_STOP_LENGTH:
                raise InvalidValueError(
                    f"stop holds a text of {len(text)} characters; use 1 to {MAX_STOP_LENGTH} characters"
                )
        for token_id in self.stop_token_ids:
            check_integer("stop_token_ids", token_id, low=0)

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidTypeError(f"logit_bias={self.logit_bias!r} must map token ids to numbers")
        copied = {plain_number(token_id): plain_number(bias) for token_id, bias in self.logit_bias.items()}
        object.__setattr__(self, "logit_bias", FrozenDict(copied))
        for token_id, bias in copied.items():
            check_integer("logit_bias key", token_id, low=0)
            check_real(f"logit_bias[{token_id}]", bias, low=-100.0, high=100.0)

    def _check_structured(self) -> None:
        if self.reasoning is not None and not isinstance(self.reasoning, Reasoning):
            raise InvalidTypeError(f"reasoning={self.reasoning!r} must be a Reasoning")
        if self.structured is None:
            return
        if not isinstance(self.structured, StructuredOutput):
            raise InvalidTypeError(f"structured={self.structured!r} must be a StructuredOutput")
        if self.ignore_eos:
            raise InvalidValueError("ignore_eos=True can't be combined with structured: its answers end when complete")
        if self.stop:
            raise InvalidValueError(
                "stop can't be combined with structured: it could cut off an answer before it is complete; "
                "leave it out, or use stop_token_ids, which count only where the answer is complete"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always drawn."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens make tokens less, or more, likely."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def allows_drafts(self) -> bool:
        """Whether several tokens can be drawn at once. The rules of a draw must not depend on the tokens before it."""
        is_limited = self.reasoning is not None and self.reasoning.max_tokens is not None
        return not (self.has_penalties or self.logits_processors or self.structured or is_limited)

    def model_defaults(self) -> dict[str, int | float]:
        """The values of the parameters for which models have defaults."""
        return {name: getattr(self, name) for name in MODEL_DEFAULTS}

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> Self:
        """Build from keywords. An unknown one raises an error that names it."""
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in kwargs if name not in known]:
            raise InvalidTypeError(f"unknown sampling parameter {unknown[0]!r}; known are: {', '.join(known)}")
        return cls(**kwargs)


@dataclass(frozen=True, slots=True)
class RowStart:
    """The start of a sequence in a row of the sampler, new or resumed after preemption."""

    row: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    """End-of-sequence and stop ids: blocked until `min_tokens`."""
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int] = ()
    """The answer so far, when the sequence resumes."""
    grammar: Grammar | None = None
    """The compiled `params.structured` and `params.reasoning`."""

    @property
    def samples_on_host(self) -> bool:
        """Whether drawing needs more than the sampling kernel: logits are changed, or log-probabilities returned."""
        params = self.params
        has_early_stop = params.min_tokens > len(self.output_token_ids) and bool(self.stop_ids)
        has_rules = params.has_penalties or bool(params.logit_bias) or bool(params.logits_processors) or has_early_stop
        return has_rules or self.grammar is not None or params.logprobs is not None
