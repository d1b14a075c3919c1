"""Applies the token masks of grammars: one mask for all of a step's rows that have a grammar."""

from collections.abc import KeysView, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from infinilm.kernels.copies import to_device, to_pinned
from infinilm.sampling_params import RowStart
from infinilm.structured_output import TokenMatcher


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Tokens drawn, valid after the event."""

    matchers: Sequence[TokenMatcher]
    token_ids: torch.Tensor  # [number of matchers], on the host
    event: torch.cuda.Event | None


class TokenMasks:
    """The grammar matchers of rows.

    On a GPU the host reads a token only when the next one is about to be drawn. By then the device computes the logits
    of the next step, and the host computes the mask at the same time.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._matchers: dict[int, TokenMatcher] = {}  # by row
        self._drawn: _Drawn | None = None
        # By byte of a mask: which of its eight tokens are forbidden, [256, 8].
        bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
        self._is_forbidden = (bits == 0).to(device)

    @property
    def rows(self) -> KeysView[int]:
        return self._matchers.keys()

    def places(self, rows: Sequence[int]) -> list[int]:
        """The indices of those among `rows` that have a grammar."""
        return [index for index, row in enumerate(rows) if row in self._matchers] if self._matchers else []

    def start(self, start: RowStart) -> None:
        if start.grammar is not None:
            self._matchers[start.row] = start.grammar.matcher(
                start.output_token_ids, start.stop_ids, start.params.min_tokens
            )

    def end(self, row: int) -> None:
        self._matchers.pop(row, None)

    def apply(self, logits: torch.Tensor, rows: Sequence[int], indices: Sequence[int]) -> dict[int, Exception]:
        """Set `logits` [n, vocab] to -inf where the grammars of `rows` [n] forbid tokens.

        `indices` are the rows with a grammar. Returns errors by index.
        """
        if not indices:
            return {}
        self._catch_up()
        masks = np.zeros((len(indices), -(-self._vocab_size // 32)), dtype=np.int32)
        errors: dict[int, Exception] = {}
        for mask, index in zip(masks, indices, strict=True):
            try:
                self._matchers[rows[index]].fill(mask)
            except Exception as error:  # an error of this row only
                errors[index] = error
                mask[:] = -1
        (packed,) = to_device(self._device, masks)
        parts = self._is_forbidden.index_select(0, packed.view(torch.uint8).flatten().int())  # [k * vocab / 8, 8]
        is_forbidden = parts.view(len(masks), -1)[:, : self._vocab_size]
        if len(indices) == len(logits):
            logits.masked_fill_(is_forbidden, -torch.inf)
        else:
            (places,) = to_device(self._device, np.array(indices, dtype=np.int64))
            logits[places] = logits[places].masked_fill_(is_forbidden, -torch.inf)
        return errors

    def record(self, token_ids: torch.Tensor, rows: Sequence[int], indices: Sequence[int]) -> None:
        """Record the tokens drawn: `token_ids` [n] on the device."""
        if not indices:
            return
        self._catch_up()  # if `apply` did not
        matchers = [self._matchers[rows[index]] for index in indices]
        token_ids = token_ids[to_device(self._device, np.array(indices, dtype=np.int64))[0]]
        if self._device.type == "cuda":
            self._drawn = _Drawn(matchers, to_pinned(token_ids), torch.cuda.current_stream().record_event())
        else:
            self._drawn = _Drawn(matchers, token_ids, None)

    def _catch_up(self) -> None:
        """Advance the matchers by the tokens drawn last."""
        drawn, self._drawn = self._drawn, None
        if drawn is None:
            return
        if drawn.event is not None:
            drawn.event.synchronize()
        for matcher, token_id in zip(drawn.matchers, drawn.token_ids.tolist(), strict=True):
            matcher.advance(token_id)
