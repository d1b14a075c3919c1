"""Divides an input's tokens into requests, using the lengths and offsets that were given."""

from dataclasses import dataclass

import numpy as np

from infinilm.attention.batch import IntArray
from infinilm.errors import InvalidValueError


@dataclass(frozen=True, slots=True)
class RaggedLayout:
    """The requests that tokens belong to: T new tokens of N requests."""

    query_lens: IntArray  # [N] new tokens, all >= 1
    cached_lens: IntArray  # [N] tokens in the cache already, all >= 0
    places: IntArray | None = None  # [T], indices of the tokens in the flattened input_ids; None: all of them

    @property
    def context_lens(self) -> IntArray:
        """`[N]`, cached and new tokens."""
        return self.cached_lens + self.query_lens

    def positions(self) -> IntArray:
        """`[T]`, the tokens' positions in their requests."""
        first_tokens = np.cumsum(self.query_lens) - self.query_lens
        shifts: IntArray = np.repeat(self.cached_lens - first_tokens, self.query_lens)
        return shifts + np.arange(len(shifts))


def divide(
    shape: tuple[int, ...],
    *,
    input_offsets: IntArray | None,
    input_lengths: IntArray | None,
    cache_lengths: IntArray | None,
    block_tables: IntArray | None,
) -> RaggedLayout:
    """Divide `input_ids` of this `shape`: by rows if there are several rows or one request, else end to end."""
    num_requests = _agreed_count(
        {"cache_lengths": cache_lengths, "input_lengths": input_lengths, "block_tables": block_tables}
    )
    batch, seq = shape
    if batch == 1 and (input_offsets is not None or num_requests not in (None, 1)):
        query_lens = _packed_lens(seq, num_requests, input_offsets, input_lengths, cache_lengths)
        cached_lens = _packed_cached(query_lens, input_lengths, cache_lengths)
        _check_lens(query_lens, cached_lens, seq)
        return RaggedLayout(query_lens, cached_lens)
    if num_requests not in (None, batch):
        raise InvalidValueError(
            f"input_ids has {batch} rows, a request each, but the lengths or block_tables are of {num_requests} "
            "requests; give one entry per row, or lay the tokens of all requests end to end as [1, total]"
        )
    if input_offsets is not None:
        _check_row_offsets(input_offsets, batch, seq)
    return _divide_rows(batch, seq, input_lengths, cache_lengths)


def _agreed_count(given: dict[str, IntArray | None]) -> int | None:
    """The number of requests, from the fields with an entry per request; None if there are no such fields."""
    counts = {name: len(array) for name, array in given.items() if array is not None}
    if len(set(counts.values())) > 1:
        seen = ", ".join(f"{name} of {count}" for name, count in counts.items())
        raise InvalidValueError(f"fields disagree about the number of requests: {seen}; give each an entry per request")
    return next(iter(counts.values()), None)


def _divide_rows(batch: int, seq: int, input_lengths: IntArray | None, cache_lengths: IntArray | None) -> RaggedLayout:
    if cache_lengths is not None:
        cached_lens = cache_lengths
    elif input_lengths is not None:
        cached_lens = np.maximum(input_lengths - seq, 0)  # tokens that do not fit in the row
    else:
        cached_lens = np.zeros(batch, dtype=np.int64)
    query_lens = np.full(batch, seq) if input_lengths is None else input_lengths - cached_lens
    _check_lens(query_lens, cached_lens, seq)
    if (query_lens == seq).all():
        return RaggedLayout(query_lens, cached_lens)
    return RaggedLayout(query_lens, cached_lens, np.flatnonzero(np.arange(seq) < query_lens[:, None]))


def _packed_lens(
    total: int,
    num_requests: int | None,
    input_offsets: IntArray | None,
    input_lengths: IntArray | None,
    cache_lengths: IntArray | None,
) -> IntArray:
    """The number of each request's new tokens, `[n]`."""
    if input_offsets is not None:
        return np.diff(_full_offsets(input_offsets, total, num_requests))
    if input_lengths is not None and cache_lengths is not None:
        query_lens = input_lengths - cache_lengths
    elif num_requests == total:
        return np.ones(total, dtype=np.int64)  # each request must have at least one token
    elif input_lengths is not None:
        query_lens = input_lengths
    else:
        raise InvalidValueError(
            f"input_ids holds {total} tokens of {num_requests} requests, and nothing says which are whose; "
            "give input_offsets, or both input_lengths and cache_lengths"
        )
    if query_lens.sum() != total:
        raise InvalidValueError(
            f"input_ids holds {total} tokens, but by input_lengths and cache_lengths the requests bring "
            f"{query_lens.tolist()} new ones, {query_lens.sum()} in all; make them agree, or give input_offsets"
        )
    return query_lens


def _packed_cached(query_lens: IntArray, input_lengths: IntArray | None, cache_lengths: IntArray | None) -> IntArray:
    """The number of each request's cached tokens, `[n]`."""
    if input_lengths is None:
        return np.zeros_like(query_lens) if cache_lengths is None else cache_lengths
    cached_lens = input_lengths - query_lens
    wrong = (cached_lens < 0) if cache_lengths is None else (cached_lens != cache_lengths)
    if wrong.any():
        i = int(wrong.argmax())
        cached = "" if cache_lengths is None else f"cache_lengths[{i}]={cache_lengths[i]} and "
        raise InvalidValueError(
            f"input_lengths[{i}]={input_lengths[i]} does not go with {cached}the {query_lens[i]} new tokens of the "
            "request; input_lengths counts cached and new tokens"
        )
    return cached_lens


def _full_offsets(offsets: IntArray, total: int, num_requests: int | None) -> IntArray:
    """Offsets including the end of the last request, `[n + 1]`."""
    if num_requests is None:
        # A last entry of `total` is the end: as a start it would belong to a request without tokens.
        has_end = len(offsets) > 1 and offsets[-1] == total
    elif len(offsets) in (num_requests, num_requests + 1):
        has_end = len(offsets) == num_requests + 1
    else:
        raise InvalidValueError(
            f"input_offsets has {len(offsets)} entries for {num_requests} requests; give {num_requests} starts, "
            "followed by the end or not"
        )
    full = offsets if has_end else np.append(offsets, total)
    if len(full) < 2 or full[0] != 0 or full[-1] != total or (np.diff(full) < 1).any():
        raise InvalidValueError(
            f"input_offsets={offsets.tolist()} does not divide {total} tokens; it must start at 0, rise with every "
            f"request, and if it has the end, end at {total}"
        )
    return full


def _check_row_offsets(offsets: IntArray, batch: int, seq: int) -> None:
    starts = np.arange(batch + 1) * seq
    if offsets.tolist() not in (starts.tolist(), starts[:-1].tolist()):
        raise InvalidValueError(
            f"input_offsets={offsets.tolist()} is not where the {batch} rows of {seq} tokens start; leave it out, or "
            "lay the tokens end to end as [1, total]"
        )


def _check_lens(query_lens: IntArray, cached_lens: IntArray, most: int) -> None:
    wrong = cached_lens < 0
    if wrong.any():
        i = int(wrong.argmax())
        raise InvalidValueError(f"cache_lengths[{i}]={cached_lens[i]} must be 0 or more")
    wrong = (query_lens < 1) | (query_lens > most)
    if wrong.any():
        i = int(wrong.argmax())
        raise InvalidValueError(
            f"request {i} brings {query_lens[i]} new tokens by input_lengths[{i}]={cached_lens[i] + query_lens[i]}, of "
            f"which {cached_lens[i]} are cached; it must bring 1 to {most}"
        )
