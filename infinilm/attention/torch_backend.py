"""Attention in plain torch: runs on every device, and is what other backends are checked against.

Requests with one new token (decoding) are attended together, padded to the longest of a group; those with more
(prefill) one by one. Everything that depends on the batch alone is worked out once per step, in `prepare`.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from infinilm.attention.batch import ForwardBatch, IntArray

# A group of decoding requests may read this many padded tokens, and as many again as it has real ones, before
# a second group, with kernel calls of its own, is the lesser cost.
_FREE_PADDING = 256


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Requests with one new token each, attended in one call."""

    rows: Tensor | None  # [B] int64, their tokens' places in the batch; None: it is the whole batch
    blocks: Tensor | slice  # [B * n] int64, the blocks to read, n for each request
    num_keys: int  # keys to keep of the n * block_size read
    mask: Tensor | None  # [B, 1, 1, num_keys], added to the scores; None: every request needs all keys


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    """One request with several new tokens."""

    tokens: slice  # its places in the batch
    blocks: Tensor | slice  # [n] int64, the blocks to read
    num_keys: int  # keys to keep of the n * block_size read
    mask: Tensor | None  # [new tokens, num_keys], added to the scores; None: plain causal, nothing cached


@dataclass(frozen=True, slots=True)
class _WindowPlan:
    decode: list[_DecodeGroup]
    prefill: list[_PrefillRow]


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """What the layers need to know of one batch."""

    slots: Tensor  # [S] int64, where keys and values go
    stored: Tensor | None  # [S] int64, which of the new tokens go there; None: all
    windows: dict[int | None, _WindowPlan]


class TorchAttention:
    """Attention in plain torch."""

    name = "torch"

    def why_not(self, device: torch.device) -> str | None:  # noqa: ARG002 - it serves them all
        """None: every device can be served."""
        return None

    def prepare(
        self, batch: ForwardBatch, *, block_size: int, windows: Collection[int | None], dtype: torch.dtype
    ) -> TorchPlan:
        """Lay out the batch: which blocks each request reads, and what it must not see of them."""
        slots, stored = batch.slot_mapping, None
        if bool((slots < 0).any()):
            stored = (slots >= 0).nonzero().squeeze(1)
            slots = slots[stored]
        layout = _Layout(batch, block_size, dtype)
        return TorchPlan(slots, stored, {window: layout.plan(window) for window in windows})

    def store(self, new: Tensor, cache: Tensor, plan: TorchPlan) -> None:
        """Write the new tokens' keys and values `[T, 2, kv_heads, head_dim]` into one layer's cache."""
        rows = new if plan.stored is None else new[plan.stored]
        cache.flatten(0, 1).index_copy_(0, plan.slots, rows.to(cache.dtype))

    def attend(self, query: Tensor, cache: Tensor, plan: TorchPlan, *, scale: float, window: int | None) -> Tensor:
        """Attend `query` `[T, heads, head_dim]` to each request's context; returns the same shape."""
        kv_heads = cache.shape[3]
        # Query heads that share a kv head lie next to each other.
        query = query.view(len(query), kv_heads, -1, query.shape[-1])  # [T, kv_heads, group, head_dim]
        window_plan = plan.windows[window]
        if len(window_plan.decode) == 1 and window_plan.decode[0].rows is None:
            return _decode(query, cache, window_plan.decode[0], scale).flatten(1, 2)
        output = torch.empty_like(query)
        for group in window_plan.decode:
            output[group.rows] = _decode(query[group.rows], cache, group, scale)
        for row in window_plan.prefill:
            output[row.tokens] = _prefill(query[row.tokens], cache, row, scale)
        return output.flatten(1, 2)


def _read(
    cache: Tensor, blocks: Tensor | slice, num_requests: int, num_keys: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values of some blocks of one layer's cache, each `[requests, kv_heads, num_keys, head_dim]`."""
    found = cache[blocks] if isinstance(blocks, slice) else cache.flatten(1).index_select(0, blocks)
    tokens = found.view(num_requests, -1, *cache.shape[2:])[:, :num_keys].to(dtype)
    key, value = tokens.transpose(1, 3).unbind(2)
    return key, value


def _as_run(blocks: Tensor) -> Tensor | slice:
    """Blocks that lie in a row as a slice, which is read in place. A GPU's are left: asking would wait for it."""
    if blocks.device.type == "cpu" and bool((blocks.diff() == 1).all()):
        return slice(int(blocks[0]), int(blocks[0]) + len(blocks))
    return blocks


def _decode(query: Tensor, cache: Tensor, group: _DecodeGroup, scale: float) -> Tensor:
    """`query` `[B, kv_heads, group, head_dim]`, one token per request.

    The query heads of a kv head take the place of query positions, so no key is repeated for them.
    """
    key, value = _read(cache, group.blocks, len(query), group.num_keys, query.dtype)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=group.mask, scale=scale)


def _prefill(query: Tensor, cache: Tensor, row: _PrefillRow, scale: float) -> Tensor:
    """`query` `[new tokens, kv_heads, group, head_dim]` of one request.

    The kv heads take the place of the batch, so that a key is expanded over its query heads, not copied.
    """
    key, value = (
        each.transpose(0, 1).expand(-1, query.shape[2], -1, -1)
        for each in _read(cache, row.blocks, 1, row.num_keys, query.dtype)
    )
    output = F.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3), key, value, attn_mask=row.mask, is_causal=row.mask is None, scale=scale
    )
    return output.permute(2, 0, 1, 3)


class _Layout:
    """Turns one batch's lengths and block tables into plans."""

    def __init__(self, batch: ForwardBatch, block_size: int, dtype: torch.dtype) -> None:
        self.block_tables = batch.block_tables
        self.query_lens = batch.query_lens
        self.context_lens = batch.context_lens
        self.block_size = block_size
        self.dtype = dtype
        self.ends = np.cumsum(batch.query_lens)  # [N] one past each request's last token in the batch

    def plan(self, window: int | None) -> _WindowPlan:
        is_decode = self.query_lens == 1
        # The first token any of a request's queries can see.
        starts = np.zeros_like(self.context_lens)
        if window is not None:
            starts = np.maximum(self.context_lens - self.query_lens - window + 1, 0)
        groups = self._groups(np.flatnonzero(is_decode), starts)
        return _WindowPlan(
            decode=[self._decode_group(group, starts[group]) for group in groups],
            prefill=[self._prefill_row(int(i), int(starts[i]), window) for i in np.flatnonzero(~is_decode)],
        )

    def _groups(self, requests: IntArray, starts: IntArray) -> Iterator[IntArray]:
        """Split decoding requests into groups of like length."""
        lens = self._num_keys(requests, starts[requests])
        order = np.argsort(-lens, kind="stable")
        first = 0
        while first < len(order):
            longest = lens[order[first]]
            real = np.cumsum(lens[order[first:]])
            padded = longest * np.arange(1, len(real) + 1)
            fits = padded <= 2 * real + _FREE_PADDING
            size = len(fits) if fits.all() else int(np.argmin(fits))
            yield np.sort(requests[order[first : first + size]])
            first += size

    def _num_keys(self, requests: IntArray, starts: IntArray) -> IntArray:
        """Keys read for each request: from the start of the block that holds token `starts[i]`."""
        return self.context_lens[requests] - starts // self.block_size * self.block_size

    def _tensor(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(self.block_tables.device)

    def _decode_group(self, requests: IntArray, starts: IntArray) -> _DecodeGroup:
        lens = self._num_keys(requests, starts)
        num_keys = int(lens.max())
        num_blocks = -(-num_keys // self.block_size)
        first_blocks = starts // self.block_size
        columns = self._tensor(first_blocks[:, None] + np.arange(num_blocks))
        rows = self._tensor(self.ends[requests] - 1)
        blocks = self.block_tables[self._tensor(requests)]
        # Columns past a short row's end are masked; they only must not lie outside the table or the cache.
        blocks = blocks.gather(1, columns.clamp(max=blocks.shape[1] - 1)).clamp(min=0)
        places = np.arange(num_keys)
        hidden = (places >= lens[:, None]) | (places < (starts - first_blocks * self.block_size)[:, None])
        mask = self._mask(hidden)[:, None, None, :] if hidden.any() else None
        is_whole_batch = len(requests) == self.ends[-1]
        return _DecodeGroup(None if is_whole_batch else rows, _as_run(blocks.flatten()), num_keys, mask)

    def _prefill_row(self, request: int, start: int, window: int | None) -> _PrefillRow:
        num_new, context = int(self.query_lens[request]), int(self.context_lens[request])
        end = int(self.ends[request])
        first_block, last_block = start // self.block_size, -(-context // self.block_size)
        blocks = self.block_tables[request, first_block:last_block]
        first = first_block * self.block_size
        mask = None
        if num_new < context or (window is not None and window < context):
            places = np.arange(context - num_new, context)[:, None]
            keys = np.arange(first, context)
            hidden = keys > places
            if window is not None:
                hidden |= keys <= places - window
            mask = self._mask(hidden)
        return _PrefillRow(slice(end - num_new, end), _as_run(blocks), context - first, mask)

    def _mask(self, hidden: np.ndarray) -> Tensor:
        """Minus infinity where `hidden`, 0 elsewhere."""
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.block_tables.device)
        return mask.masked_fill_(torch.from_numpy(hidden).to(mask.device), float("-inf"))
