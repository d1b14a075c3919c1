"""Attention in plain torch: runs on every device, and is the reference that other backends are checked against.

Requests with one new token (decoding) are computed together, padded to the longest of a group. Requests with more
(prefill) are computed one by one. Everything that depends only on the batch is computed once per step, in `prepare`.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from infinilm.attention.batch import ForwardBatch, IntArray
from infinilm.kernels.fp8_cache import read_quantized, store_quantized
from infinilm.kernels.nonfinite import mark_nonfinite

# A group of decoding requests may read this many padding tokens, plus as many as it has real tokens. Beyond that, a
# second group with its own kernel calls costs less.
_FREE_PADDING = 256
# Scores in memory at a time, if they are capped or have sinks. torch's own attention keeps fewer.
_MAX_SCORES = 2**22


@dataclass(frozen=True, slots=True)
class _Run:
    """Slots at even distances: request i's are consecutive from `first + i * stride` on. They are read in place."""

    first: int
    stride: int


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Requests with one new token each, attended in one call.

    Slots past a request's keys repeat its last one, so that nothing from another request is read: a masked key still
    matters if it is NaN.
    """

    rows: Tensor | None  # [B] int64, their tokens' places in the batch; None: it is the whole batch
    slots: Tensor | _Run  # [B * num_keys] int64, the slots to read
    num_keys: int
    mask: Tensor | None  # [B, 1, 1, num_keys], added to the scores; None: every request needs all keys


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    """One request with several new tokens."""

    tokens: slice  # its places in the batch
    slots: Tensor | _Run  # [num_keys] int64, the slots to read
    num_keys: int
    window: int | None
    mask: Tensor | None  # [new tokens, num_keys], added to the scores; None: plain causal, nothing cached


@dataclass(frozen=True, slots=True)
class _Scoring:
    """How the scores of queries and keys become weights."""

    scale: float
    cap: float | None
    sinks: Tensor | None  # [kv_heads, group, 1]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """`query` `[B, kv_heads, group, head_dim]`, a token each; `key` and `value` `[B, kv_heads, keys, head_dim]`."""
        if self.cap is None and self.sinks is None:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scale)
        return self._weigh(query, key, value, mask, self.sinks)

    def attend_tokens(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """`query` `[kv_heads, group, tokens, head_dim]`, `key` and `value` likewise. Without a mask, causally."""
        if self.cap is None and self.sinks is None:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale
            )
        if mask is None:
            mask = query.new_full((query.shape[2], key.shape[2]), float("-inf")).triu_(1)
        sinks = None if self.sinks is None else self.sinks.unsqueeze(-1)
        step = max(1, _MAX_SCORES // (query.shape[0] * query.shape[1] * key.shape[2]))
        parts = zip(torch.split(query, step, dim=2), torch.split(mask, step), strict=True)
        return torch.cat([self._weigh(part, key, value, hidden, sinks) for part, hidden in parts], dim=2)

    def _weigh(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
        scores = (query @ key.transpose(-1, -2)).float() * self.scale
        if self.cap is not None:
            scores = (scores / self.cap).tanh_().mul_(self.cap)
        if mask is not None:
            scores = scores + mask
        if sinks is not None:
            scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
        return scores.softmax(-1)[..., : key.shape[-2]].to(value.dtype) @ value


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
    is_ordered = True

    def why_not(self, device: torch.device) -> str | None:  # noqa: ARG002 - it serves them all
        """None: every device can be served."""
        return None

    def prepare(
        self, batch: ForwardBatch, *, block_size: int, windows: Collection[int | None], dtype: torch.dtype
    ) -> TorchPlan:
        """Lay out the batch: which blocks each request reads, and which of their tokens it must not see."""
        slots, stored = batch.slot_mapping, None
        if bool((slots < 0).any()):
            stored = (slots >= 0).nonzero().squeeze(1)
            slots = slots[stored]
        layout = _Layout(batch, block_size, dtype)
        return TorchPlan(slots, stored, {window: layout.plan(window) for window in windows})

    def store(self, new: Tensor, cache: Tensor, plan: TorchPlan, *, scales: Tensor | None = None) -> None:
        """Write the new tokens' keys and values `[T, 2, kv_heads, head_dim]` into one layer's cache."""
        rows = new if plan.stored is None else new[plan.stored]
        if scales is not None:
            store_quantized(mark_nonfinite(rows), cache, scales, plan.slots)
            return
        cache.flatten(0, 1).index_copy_(0, plan.slots, mark_nonfinite(rows.to(cache.dtype)))

    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        plan: TorchPlan,
        *,
        scale: float,
        window: int | None,
        cap: float | None = None,
        sinks: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Attend `query` `[T, heads, head_dim]` to each request's context; returns the same shape."""
        kv_heads = cache.shape[3]
        # Query heads that share a kv head lie next to each other.
        query = query.view(len(query), kv_heads, -1, query.shape[-1])  # [T, kv_heads, group, head_dim]
        window_plan = plan.windows[window]
        scoring = _Scoring(scale, cap, None if sinks is None else sinks.view(kv_heads, -1, 1))
        if len(window_plan.decode) == 1 and window_plan.decode[0].rows is None:
            return _decode(query, cache, scales, window_plan.decode[0], scoring).flatten(1, 2)
        output = torch.empty_like(query)
        for group in window_plan.decode:
            output[group.rows] = _decode(query[group.rows], cache, scales, group, scoring)
        for row in window_plan.prefill:
            output[row.tokens] = _prefill(query[row.tokens], cache, scales, row, scoring)
        return output.flatten(1, 2)


def _read(
    cache: Tensor, scales: Tensor | None, slots: Tensor | _Run, size: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values in some slots of one layer's cache, each `[requests, kv_heads, num_keys, head_dim]`.

    `size` is the numbers of requests and keys. Latent vectors are keys and values at once.
    """
    shape = (*size, *cache.shape[2:])
    if scales is not None:
        found = read_quantized(cache, scales, _as_slots(slots, size, cache.device), dtype)
    elif isinstance(slots, _Run):
        step = cache.stride(1)
        strides = (slots.stride * step, *cache.stride()[1:])
        found = cache.as_strided(shape, strides, cache.storage_offset() + slots.first * step)
    else:
        found = cache.flatten(2).flatten(0, 1).index_select(0, slots).view(shape)
    parts = found.to(dtype).transpose(1, 3).unbind(2)
    return parts[0], parts[-1]


def _as_run(slots: Tensor) -> Tensor | _Run:
    """Slots `[requests, keys]` as a run if they are one. Slots on a GPU are not checked, which would wait for it."""
    if slots.device.type == "cpu" and bool((slots.diff(dim=1) == 1).all()):
        strides = slots[:, 0].diff()
        stride = int(strides[0]) if len(strides) > 0 else 0
        if stride >= 0 and bool((strides == stride).all()):
            return _Run(int(slots[0, 0]), stride)
    return slots.flatten()


def _as_slots(slots: Tensor | _Run, size: tuple[int, int], device: torch.device) -> Tensor:
    """Slots `[requests, keys]` of a run or a list."""
    if isinstance(slots, Tensor):
        return slots.view(size)
    firsts = slots.first + slots.stride * torch.arange(size[0], device=device)
    return firsts.unsqueeze(1) + torch.arange(size[1], device=device)


def _decode(query: Tensor, cache: Tensor, scales: Tensor | None, group: _DecodeGroup, scoring: _Scoring) -> Tensor:
    """`query` `[B, kv_heads, group, head_dim]`, one token per request.

    The query heads of a kv head take the place of query positions, so no key is repeated for them.
    """
    key, value = _read(cache, scales, group.slots, (len(query), group.num_keys), query.dtype)
    return scoring.attend(query, key, value, group.mask)


def _prefill(query: Tensor, cache: Tensor, scales: Tensor | None, row: _PrefillRow, scoring: _Scoring) -> Tensor:
    """`query` `[new tokens, kv_heads, group, head_dim]` of one request.

    The kv heads take the place of the batch, so that a key is expanded over its query heads, not copied.
    """
    key, value = (each.transpose(0, 1) for each in _read(cache, scales, row.slots, (1, row.num_keys), query.dtype))
    # Torch adds the mask to the scores, and NaN - inf is NaN: a non-finite token would affect those before it.
    is_nonfinite = key[..., 0].isnan()  # [kv_heads, 1, num_keys]
    has_nonfinite = is_nonfinite.device.type != "cpu" or bool(is_nonfinite.any())  # don't wait for a GPU
    if has_nonfinite:
        key = key.masked_fill(is_nonfinite.unsqueeze(-1), 0.0)
        value = value.masked_fill(is_nonfinite.unsqueeze(-1), 0.0)
    output = scoring.attend_tokens(
        query.permute(1, 2, 0, 3),
        key.expand(-1, query.shape[2], -1, -1),
        value.expand(-1, query.shape[2], -1, -1),
        row.mask,
    )
    if has_nonfinite:
        output = output.masked_fill(_sees_any(is_nonfinite, len(query), row.window).unsqueeze(-1), torch.nan)
    return output.permute(2, 0, 1, 3)


def _sees_any(is_nonfinite: Tensor, num_new: int, window: int | None) -> Tensor:
    """Which of the new tokens, which are the last, see a non-finite one: `[..., num_keys]` to `[..., num_new]`."""
    num_keys = is_nonfinite.shape[-1]
    num_before = F.pad(is_nonfinite.cumsum(-1), (1, 0))
    ends = torch.arange(num_keys - num_new + 1, num_keys + 1, device=is_nonfinite.device)
    starts = torch.zeros_like(ends) if window is None else (ends - window).clamp(min=0)
    return num_before[..., ends] > num_before[..., starts]


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
        # The tokens that any of a request's queries can see are its last ones.
        num_keys = self.context_lens
        if window is not None:
            num_keys = np.minimum(num_keys, self.query_lens + window - 1)
        groups = self._groups(np.flatnonzero(is_decode), num_keys)
        return _WindowPlan(
            decode=[self._decode_group(group, num_keys[group]) for group in groups],
            prefill=[self._prefill_row(int(i), int(num_keys[i]), window) for i in np.flatnonzero(~is_decode)],
        )

    def _groups(self, requests: IntArray, num_keys: IntArray) -> Iterator[IntArray]:
        """Split decoding requests into groups of like length."""
        lens = num_keys[requests]
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

    def _tensor(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(self.block_tables.device)

    def _decode_group(self, requests: IntArray, lens: IntArray) -> _DecodeGroup:
        num_keys = int(lens.max())
        places = np.arange(num_keys)
        hidden = places >= lens[:, None]
        ends = self.context_lens[requests]
        firsts, lasts, members = self._tensor(ends - lens), self._tensor(ends - 1), self._tensor(requests)
        # A request shorter than the longest reads its last token again in place of those that it lacks.
        tokens = (firsts.unsqueeze(1) + self._tensor(places)).minimum(lasts.unsqueeze(1))
        slots = self._slots(self.block_tables[members], tokens)
        return _DecodeGroup(
            rows=None if len(requests) == self.ends[-1] else self._tensor(self.ends[requests] - 1),
            slots=_as_run(slots),
            num_keys=num_keys,
            mask=self._mask(hidden)[:, None, None, :] if hidden.any() else None,
        )

    def _slots(self, tables: Tensor, tokens: Tensor) -> Tensor:
        """Where tokens `[B, n]` of the requests with the block `tables` `[B, max_blocks]` are in the cache."""
        blocks = tables.gather(1, tokens // self.block_size)
        return blocks * self.block_size + tokens % self.block_size

    def _prefill_row(self, request: int, num_keys: int, window: int | None) -> _PrefillRow:
        num_new, context = int(self.query_lens[request]), int(self.context_lens[request])
        end = int(self.ends[request])
        keys = np.arange(context - num_keys, context)
        mask = None
        if num_new < context or (window is not None and window < context):
            places = np.arange(context - num_new, context)[:, None]
            hidden = keys > places
            if window is not None:
                hidden |= keys <= places - window
            mask = self._mask(hidden)
        slots = self._slots(self.block_tables[request : request + 1], self._tensor(keys).unsqueeze(0))
        return _PrefillRow(slice(end - num_new, end), _as_run(slots), num_keys, window, mask)

    def _mask(self, hidden: np.ndarray) -> Tensor:
        """Minus infinity where `hidden`, 0 elsewhere."""
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.block_tables.device)
        return mask.masked_fill_(torch.from_numpy(hidden).to(mask.device), float("-inf"))
