"""What a request changes about its logits before truncation: bias, penalties, `min_tokens`, processors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from infinilm.errors import InvalidTypeError, InvalidValueError
from infinilm.sampling_params import LogitsProcessor, RowStart, SamplingParams


class Edit(Protocol):
    """One rule, with what it remembers about its row."""

    def apply(self, logits: torch.Tensor, position: int) -> None:
        """Change `logits` [vocab], from which the token at `position` will be drawn, in place."""

    def record(self, token_id: torch.Tensor) -> None:
        """Take note of the drawn token, [1] int64 on the device."""


class Bias:
    """`logit_bias`: a number added to the logit of each token named."""

    def __init__(self, bias: Mapping[int, float], vocab_size: int, device: torch.device) -> None:
        for token_id in bias:
            if token_id >= vocab_size:
                raise InvalidValueError(
                    f"logit_bias names token {token_id}; this model's token ids go from 0 to {vocab_size - 1}"
                )
        self._token_ids = torch.tensor(list(bias), dtype=torch.int64, device=device)  # [b]
        self._values = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)  # [b]

    def apply(self, logits: torch.Tensor, position: int) -> None:  # noqa: ARG002
        """See `Edit`."""
        logits.index_add_(0, self._token_ids, self._values)

    def record(self, token_id: torch.Tensor) -> None:
        """See `Edit`."""


class RepetitionPenalty:
    """`repetition_penalty`: positive logits of tokens in prompt or answer are divided by it, negative multiplied."""

    def __init__(self, penalty: float, token_ids: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self._penalty = penalty
        self._factors = torch.ones(vocab_size, device=device)  # the penalty at tokens seen
        self.record(torch.tensor(token_ids, dtype=torch.int64, device=device))

    def apply(self, logits: torch.Tensor, position: int) -> None:  # noqa: ARG002
        """See `Edit`."""
        # Of quotient and product the one that the sign asks for is the lesser, if the penalty is above 1.
        choose = torch.minimum if self._penalty > 1 else torch.maximum
        logits.copy_(choose(logits / self._factors, logits * self._factors))

    def record(self, token_id: torch.Tensor) -> None:
        """See `Edit`."""
        self._factors.index_fill_(0, token_id, self._penalty)


class CountPenalties:
    """`frequency_penalty` per occurrence in the answer and `presence_penalty` once, both subtracted."""

    def __init__(
        self, params: SamplingParams, output_ids: Sequence[int], vocab_size: int, device: torch.device
    ) -> None:
        self._frequency_penalty = params.frequency_penalty
        self._presence_penalty = params.presence_penalty
        drawn = torch.tensor(output_ids, dtype=torch.int64, device=device)
        self._counts = torch.bincount(drawn, minlength=vocab_size).to(torch.float32)  # [vocab]
        self._one = torch.ones(1, device=device)

    def apply(self, logits: torch.Tensor, position: int) -> None:  # noqa: ARG002
        """See `Edit`."""
        logits.sub_(self._counts, alpha=self._frequency_penalty)
        logits.sub_(self._counts.clamp(max=1), alpha=self._presence_penalty)

    def record(self, token_id: torch.Tensor) -> None:
        """See `Edit`."""
        self._counts.index_add_(0, token_id, self._one)


class MinTokens:
    """`min_tokens`: stop ids cannot be drawn before `first_position`."""

    def __init__(self, first_position: int, stop_ids: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self._first_position = first_position
        # An id past the vocabulary cannot be drawn anyway.
        blocked = [token_id for token_id in stop_ids if token_id < vocab_size]
        self._stop_ids = torch.tensor(blocked, dtype=torch.int64, device=device)  # [s]

    def apply(self, logits: torch.Tensor, position: int) -> None:
        """See `Edit`."""
        if position < self._first_position:
            logits.index_fill_(0, self._stop_ids, -torch.inf)

    def record(self, token_id: torch.Tensor) -> None:
        """See `Edit`."""


class Processors:
    """`logits_processors`: the caller's functions. They see the answer on the host, so each draw is waited for."""

    def __init__(self, processors: Sequence[LogitsProcessor], output_ids: Sequence[int]) -> None:
        self._processors = tuple(processors)
        self._output_ids = list(output_ids)

    def apply(self, logits: torch.Tensor, position: int) -> None:  # noqa: ARG002
        """See `Edit`. Raises what a processor raises, or what is wrong with its result."""
        for processor in self._processors:
            if not math.isfinite(logits.max()):
                return  # not the processor's fault; the sampler reports it
            # Copies: a processor can neither spoil our list nor hold on to our memory.
            result = processor(list(self._output_ids), logits.clone())
            _check_processed(processor, result, logits)
            logits.copy_(result.detach())

    def record(self, token_id: torch.Tensor) -> None:
        """See `Edit`."""
        self._output_ids.append(int(token_id))


def _check_processed(processor: LogitsProcessor, result: object, logits: torch.Tensor) -> None:
    """Refuse a processor's result that could not stand in for `logits` [vocab]."""
    name = f"logits processor {getattr(processor, '__qualname__', repr(processor))}"
    if not isinstance(result, torch.Tensor):
        raise InvalidTypeError(f"{name} returned {type(result).__name__}; it must return the logits, a tensor")
    if result.dtype != logits.dtype or result.device != logits.device:
        raise InvalidTypeError(
            f"{name} returned {result.dtype} on {result.device}; it must return {logits.dtype} on {logits.device}"
        )
    if result.shape != logits.shape:
        raise InvalidValueError(
            f"{name} returned logits of shape {list(result.shape)}; it must return {list(logits.shape)}"
        )
    if not math.isfinite(greatest := result.max().item()):
        raise InvalidValueError(
            f"{name} returned logits whose greatest is {greatest}; use -inf to forbid tokens, "
            "no other value that is not finite, and leave at least one token"
        )


@dataclass(frozen=True, slots=True)
class RowEdits:
    """All edits of one row, in their order."""

    edits: tuple[Edit, ...]

    @classmethod
    def of(cls, start: RowStart, vocab_size: int, device: torch.device) -> "RowEdits":
        """Those that the request's parameters ask for."""
        params, prompt_ids, output_ids = start.params, start.prompt_token_ids, start.output_token_ids
        edits: list[Edit] = []
        if params.logit_bias:
            edits.append(Bias(params.logit_bias, vocab_size, device))
        if params.repetition_penalty != 1.0:
            token_ids = [*prompt_ids, *output_ids]
            edits.append(RepetitionPenalty(params.repetition_penalty, token_ids, vocab_size, device))
        if params.frequency_penalty or params.presence_penalty:
            edits.append(CountPenalties(params, output_ids, vocab_size, device))
        if params.min_tokens > len(output_ids) and start.grammar is None:  # a grammar has its own way with stop ids
            edits.append(MinTokens(len(prompt_ids) + params.min_tokens, start.stop_ids, vocab_size, device))
        if params.logits_processors:
            edits.append(Processors(params.logits_processors, output_ids))
        return cls(tuple(edits))

    def apply(self, logits: torch.Tensor, position: int) -> None:
        """Change `logits` [vocab], from which the token at `position` will be drawn, in place."""
        for edit in self.edits:
            edit.apply(logits, position)

    def record(self, token_id: torch.Tensor) -> None:
        """Take note of the drawn token, [1] int64 on the device."""
        for edit in self.edits:
            edit.record(token_id)
