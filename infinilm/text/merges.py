"""Finds the merges of a SentencePiece vocabulary. Uses NumPy, because its tokens can be cut in a million ways."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
_SLOT_BITS = 22


class SubstringHashes:
    """Hashes of parts of a text: the sum of `value(character) * base ** place in the part`, modulo 2**64.

    Prefix sums over the text give the hash of any part directly.
    """

    def __init__(self, text: str) -> None:
        values = np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.uint64) + np.uint64(1)
        values *= np.uint64(0xBF58476D1CE4E5B9)  # spreads neighbouring characters
        values ^= values >> np.uint64(29)
        self._sums = np.zeros(len(values) + 1, np.uint64)
        np.cumsum(values * _powers(_BASE, len(values)), out=self._sums[1:])
        self._inverses = _powers(pow(_BASE, -1, 2**64), len(values) + 1)

    def of(self, starts: Ints, ends: Ints) -> Hashes:
        parts: Hashes = (self._sums[ends] - self._sums[starts]) * self._inverses[starts]
        return parts


def _powers(base: int, count: int) -> Hashes:
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)


class _Index:
    """Finds a hash among others: in a table, or by bisection if another hash has its slot."""

    def __init__(self, hashes: Hashes) -> None:
        self._hashes = hashes
        self._table = np.zeros(2**_SLOT_BITS, np.int32)
        self._table[self._slots(hashes)] = np.arange(len(hashes))
        others = np.flatnonzero(hashes[self._table[self._slots(hashes)]] != hashes)
        self._others = others[np.argsort(hashes[others])]

    def find(self, wanted: Hashes) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """The index of each wanted hash, and whether there is one."""
        indices = self._table[self._slots(wanted)].astype(np.int64)
        if len(self._others):
            rest = np.flatnonzero(self._hashes[indices] != wanted)
            places = np.searchsorted(self._hashes[self._others], wanted[rest])
            indices[rest] = self._others[np.minimum(places, len(self._others) - 1)]
        return indices, self._hashes[indices] == wanted

    @staticmethod
    def _slots(hashes: Hashes) -> Hashes:
        return hashes >> np.uint64(64 - _SLOT_BITS)


def derive_merges(tokens: Sequence[str], lengths: Ints, scores: npt.ArrayLike, results: Ints) -> list[tuple[str, str]]:
    """All pairs of tokens that form one of the tokens with the indices `results`, the best score first.

    Ties are broken as in transformers: longer left part, then longer right part, then the result's index. Texts are
    compared by hashes of 64 bits. If two are equal by chance, the tokenizer refuses the merge: its result is no token.
    """
    hashes = SubstringHashes("".join(tokens))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    index = _Index(hashes.of(starts, ends))
    num_cuts = np.maximum(lengths[results] - 1, 0)
    piece = np.repeat(results, num_cuts)
    cuts = starts[piece] + 1 + np.arange(len(piece)) - np.repeat(np.cumsum(num_cuts) - num_cuts, num_cuts)
    left, are_tokens = index.find(hashes.of(starts[piece], cuts))
    left, piece, cuts = left[are_tokens], piece[are_tokens], cuts[are_tokens]
    right, are_tokens = index.find(hashes.of(cuts, ends[piece]))
    left, piece, right = left[are_tokens], piece[are_tokens], right[are_tokens]
    order = np.lexsort((-lengths[right], -lengths[left], -np.asarray(scores, np.float64)[piece]))
    texts = (map(tokens.__getitem__, part[order].tolist()) for part in (left, right))
    return list(zip(*texts, strict=True))
