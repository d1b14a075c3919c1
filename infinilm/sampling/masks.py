"""Applies the token masks of grammars: one mask for all of a step's rows that have a grammar. Needs no torch."""

from collections.abc import Callable, KeysView, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from infinilm.sampling_params import RowStart
from infinilm.structured_output import TokenMatcher

if TYPE_CHECKING:
    from infinilm.sampling.device_arrays import DeviceArrays
    from infinilm.sampling.host_arrays import HostArrays


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Drawn tokens that `matchers` have not advanced by yet, and a function that reads them."""

    matchers: Sequence[TokenMatcher]
    read: Callable[[], list[int]]


class TokenMasks:
    """The grammar matchers of rows.

    On a GPU the host reads a token only when the next one is about to be drawn. At that time the device computes the
    logits of the next step while the host computes the mask.
    """

    def __init__(self, vocab_size: int, arrays: "HostArrays | DeviceArrays") -> None:
        self._vocab_size = vocab_size
        self._arrays: Any = arrays
        self._matchers: dict[int, TokenMatcher] = {}  # by row
        self._drawn: _Drawn | None = None

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

    def apply(self, logits: Any, rows: Sequence[int], indices: Sequence[int]) -> dict[int, Exception]:
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
        self._arrays.forbid_masked(logits, np.array(indices, dtype=np.int64), masks)
        return errors

    def record(self, token_ids: Any, rows: Sequence[int], indices: Sequence[int]) -> None:
        """Record the tokens drawn: `token_ids` [n] on the device."""
        if not indices:
            return
        self._catch_up()  # if `apply` did not
        matchers = [self._matchers[rows[index]] for index in indices]
        drawn = token_ids[self._arrays.upload(np.array(indices, dtype=np.int64))[0]]
        self._drawn = _Drawn(matchers, self._arrays.reader(drawn))

    def _catch_up(self) -> None:
        """Advance the matchers by the tokens drawn last."""
        drawn, self._drawn = self._drawn, None
        if drawn is None:
            return
        for matcher, token_id in zip(drawn.matchers, drawn.read(), strict=True):
            matcher.advance(token_id)
