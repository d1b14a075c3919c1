"""What a request changes about its logits before truncation: bias, penalties, `min_tokens`, processors."""

import math
from collections.abc import Sequence

import torch

from infinilm.errors import InvalidTypeError, InvalidValueError
from infinilm.sampling_params import LogitsProcessor, SamplingParams


class RowEdits:
    """The edits of one row, and the counts of its tokens that they need."""

    def __init__(
        self,
        params: SamplingParams,
        stop_ids: Sequence[int],
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._params = params
        self._first_free_position = len(prompt_token_ids) + params.min_tokens
        self._bias_ids: torch.Tensor | None = None  # [b] int64
        self._bias: torch.Tensor | None = None  # [b] float32
        self._stop_ids: torch.Tensor | None = None  # [s] int64
        self._is_seen: torch.Tensor | None = None  # [vocab] bool, tokens of prompt and answer
        self._counts: torch.Tensor | None = None  # [vocab] float32, tokens of the answer
        self._output_ids: list[int] | None = None  # only processors need them on the host
        if params.logit_bias:
            self._bias_ids = torch.tensor(_ids_in_vocabulary(params.logit_bias, vocab_size), device=device)
            self._bias = torch.tensor(
                list(params.logit_bias.values()), dtype=torch.float32, device=device
            )
        if params.min_tokens:
            # An id past the vocabulary cannot be drawn, so it needs no blocking.
            blocked = [token_id for token_id in stop_ids if token_id < vocab_size]
            self._stop_ids = torch.tensor(blocked, dtype=torch.int64, device=device)
        if params.repetition_penalty != 1.0:
            self._is_seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            seen = torch.tensor([*prompt_token_ids, *output_token_ids], dtype=torch.int64, device=device)
            self._is_seen[seen] = True
        if params.frequency_penalty or params.presence_penalty:
            drawn = torch.tensor(output_token_ids, dtype=torch.int64, device=device)
            self._counts = torch.bincount(drawn, minlength=vocab_size).to(torch.float32)
        if params.logits_processors:
            self._output_ids = list(output_token_ids)

    @staticmethod
    def are_needed(params: SamplingParams) -> bool:
        """Whether the parameters ask for any edit."""
        return bool(
            params.logit_bias
            or params.min_tokens
            or params.logits_processors
            or params.repetition_penalty != 1.0
            or params.frequency_penalty
            or params.presence_penalty
        )

    def apply(self, logits: torch.Tensor, position: int) -> None:
        """Change `logits` [vocab], from which the token at `position` is to be drawn, in place."""
        params = self._params
        if self._bias_ids is not None and self._bias is not None:
            logits.index_add_(0, self._bias_ids, self._bias)
        if self._is_seen is not None:
            penalty = params.repetition_penalty
            penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits.copy_(torch.where(self._is_seen, penalised, logits))
        if self._counts is not None:
            logits.sub_(self._counts, alpha=params.frequency_penalty)
            logits.sub_((self._counts > 0).to(logits.dtype), alpha=params.presence_penalty)
        if self._stop_ids is not None and position < self._first_free_position:
            logits.index_fill_(0, self._stop_ids, -torch.inf)
        if self._output_ids is not None:
            for processor in params.logits_processors:
                logits.copy_(_processed(processor, self._output_ids, logits))

    def record(self, token_id: torch.Tensor) -> None:
        """Count the drawn token, [1] int64 on the device. Waits for the device only if there are processors."""
        if self._is_seen is not None:
            self._is_seen.index_fill_(0, token_id, True)
        if self._counts is not None:
            self._counts.index_add_(0, token_id, self._counts.new_ones(1))
        if self._output_ids is not None:
            self._output_ids.append(int(token_id))


def _ids_in_vocabulary(token_ids: Sequence[int] | object, vocab_size: int) -> list[int]:
    ids = list(token_ids)  # type: ignore[call-overload]
    for token_id in ids:
        if token_id >= vocab_size:
            raise InvalidValueError(
                f"logit_bias names token {token_id}, but the vocabulary has {vocab_size}; use ids from 0 to {vocab_size - 1}"
            )
    return ids


def _processed(processor: LogitsProcessor, output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """What the processor makes of `logits` [vocab]. It gets copies, so it can neither keep nor spoil ours."""
    if not math.isfinite(logits.max()):
        return logits
    result = processor(list(output_ids), logits.clone())
    if not isinstance(result, torch.Tensor):
        raise InvalidTypeError(f"{processor!r} returned {type(result).__name__}; a logits processor returns a tensor")
    ...
    return result
