"""The tokens that rows may draw where a grammar decides: one mask for all of a step's rows that have one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinilm.sampling.logprobs import pinned
from infinilm.sampling_params import RowStart
from infinilm.structured_output import TokenMatcher


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Tokens that the device has drawn, or will have by the time of the event."""

    matchers: Sequence[TokenMatcher]
    token_ids: torch.Tensor  # [number of matchers], on the host
    event: torch.cuda.Event | None


class TokenMasks:
    """The matchers of rows, and what they allow.

    On a GPU the host learns of a token only when the next one is about to be drawn. By then the device computes the
    logits for that one, and in the meantime the mask is made.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._matchers: dict[int, TokenMatcher] = {}  # by row
        self._drawn: _Drawn | None = None
        # By byte of a mask: which of its eight tokens are forbidden, [256, 8].
        bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
        self._is_forbidden = (bits == 0).to(device)

    def __contains__(self, row: int) -> bool:
        return row in self._matchers

    def start(self, start: RowStart) -> None:
        """Follow the row's answer, if it is to have a form."""
        if start.grammar is not None:
            self._matchers[start.row] = start.grammar.matcher(
                start.output_token_ids, start.stop_ids, start.params.min_tokens
            )

    def end(self, row: int) -> None:
        """Forget a row."""
        self._matchers.pop(row, None)

    def apply(self, logits: torch.Tensor, rows: Sequence[int], indices: Sequence[int]) -> dict[int, Exception]:
        """Put -inf into `logits` [n, vocab] where the grammars of `rows` [n] forbid tokens.

        `indices` say which of them have one. Returns what went wrong, by index.
        """
        if not indices:
            return {}
        self._catch_up()
        num_items = -(-self._vocab_size // 32)
        masks = torch.zeros(len(indices), num_items, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        errors: dict[int, Exception] = {}
        for mask, index in zip(masks.numpy(), indices, strict=True):
            try:
                self._matchers[rows[index]].fill(mask)
            except Exception as error:  # this row's alone
                errors[index] = error
                mask[:] = -1
        is_forbidden = self._unpacked(masks.to(self._device, non_blocking=True))
        if len(indices) == len(logits):
            logits.masked_fill_(is_forbidden, -torch.inf)
        else:
            places = self._on_device(indices)
            logits[places] = logits[places].masked_fill_(is_forbidden, -torch.inf)
        return errors

    def record(self, token_ids: torch.Tensor, rows: Sequence[int], indices: Sequence[int]) -> None:
        """Take note of what was drawn: `token_ids` [n] on the device."""
        if not indices:
            return
        self._catch_up()  # where `apply` had no reason to
        matchers = [self._matchers[rows[index]] for index in indices]
        token_ids = token_ids[self._on_device(indices)]
        if self._device.type == "cuda":
            self._drawn = _Drawn(matchers, pinned(token_ids), torch.cuda.current_stream().record_event())
        else:
            self._drawn = _Drawn(matchers, token_ids, None)

    def _catch_up(self) -> None:
        """Tell the matchers what was drawn last."""
        drawn, self._drawn = self._drawn, None
        if drawn is None:
            return
        if drawn.event is not None:
            drawn.event.synchronize()
        for matcher, token_id in zip(drawn.matchers, drawn.token_ids.tolist(), strict=True):
            matcher.advance(token_id)

    def _unpacked(self, masks: torch.Tensor) -> torch.Tensor:
        """What masks [k, vocab / 32] int32 forbid, [k, vocab] bool."""
        parts = self._is_forbidden.index_select(0, masks.view(torch.uint8).flatten().int())  # [k * vocab / 8, 8]
        return parts.view(len(masks), -1)[:, : self._vocab_size]

    def _on_device(self, indices: Sequence[int]) -> torch.Tensor:
        values = torch.tensor(indices, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        return values.to(self._device, non_blocking=True)
