"""Attention through Triton kernels, and cuDNN for long prompts if the order of sums does not matter.

A batch may mix requests with one new token (decoding), which `kernels/decode_attention.py` computes, with requests that
have more (prefill), which `kernels/prefill_attention.py` computes. The keys and values of long requests are gathered
first: for that kernel, or without `is_ordered` for cuDNN (`long_prefill.py`), which is faster still. Everything the
layers need is on the device before the first layer, and nothing here waits for the device.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from infinilm.attention.batch import ForwardBatch, IntArray
from infinilm.attention.long_prefill import Cover, LongPrefill
from infinilm.kernels.attention_order import key_tile
from infinilm.kernels.copies import to_device
from infinilm.kernels.decode_attention import DecodeWorkspace, SharedPrefix, decode_attention
from infinilm.kernels.prefill_attention import can_gather, prefill_attention
from infinilm.kernels.store_kv import gather_kv, store_kv
from infinilm.kernels.support import why_no_triton

# From so many pairs of query and key on, gathering takes a small part of the time: a prompt of 2,048 tokens.
_MIN_GATHERED_PAIRS = 2048 * 2048 // 2
# Rows of the smallest decode workspace. Rows are cheap, and growing the workspace is not.
_MIN_WORKSPACE_ROWS = 64


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """One new token per row. Rows of context length 0 and slot -1 are padding. All of it is on the device."""

    has_prompts: ClassVar[bool] = False
    tables: Tensor  # [B, max_blocks] int32
    context_lens: Tensor  # [B] int32
    slots: Tensor  # [B] int32 or int64, where keys and values go
    workspace: DecodeWorkspace | None = None  # None: the backend's own
    shared: SharedPrefix | None = None  # the prefix of all rows


@dataclass(frozen=True, slots=True)
class LongRow:
    """One request that is long enough for its keys and values to be gathered."""

    tokens: slice  # its places in the batch
    table: Tensor  # [max_blocks] int32
    context_len: int
    query_starts: Tensor  # [2] int32: 0 and the number of new tokens
    context_lens: Tensor  # [1] int32
    cover: Cover | None  # what cuDNN computes; None: Triton's kernel does


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """A batch with at least one request of several new tokens."""

    slots: Tensor  # [T] int64, where keys and values go
    tables: Tensor  # [N, max_blocks] int32
    query_starts: Tensor  # [N + 1] int32
    context_lens: Tensor  # [N] int32, 0 for decoding requests
    short_context_lens: Tensor  # [N] int32, 0 for long requests too
    has_short: bool
    long: tuple[LongRow, ...]
    decode: DecodePlan | None
    decode_tokens: slice | Tensor  # the decoding requests' places in the batch


class TritonAttention:
    """Attention through Triton kernels."""

    name = "triton"
    is_ordered = False

    def __init__(self, long_prefill: LongPrefill | None = None) -> None:
        self._long_prefill = long_prefill or LongPrefill()
        # All workspaces so far: a captured graph keeps using the one it was captured with.
        self._workspaces: list[DecodeWorkspace] = []

    def why_not(self, device: torch.device) -> str | None:
        """Why the device can't run the kernels; None if it can."""
        return why_no_triton(device)

    def workspace(self, num_rows: int, heads: int, head_dim: int, device: torch.device) -> DecodeWorkspace:
        """A workspace for decoding `num_rows` rows or more; the same one as long as it is large enough."""
        if self._workspaces:
            last = self._workspaces[-1]
            if num_rows <= last.max_rows and heads <= last.heads and head_dim <= last.head_dim:
                return last
        max_rows = max(_MIN_WORKSPACE_ROWS, 1 << (num_rows - 1).bit_length())
        self._workspaces.append(DecodeWorkspace(max_rows, heads, head_dim, device))
        return self._workspaces[-1]

    def prepare(
        self,
        batch: ForwardBatch,
        *,
        block_size: int,  # noqa: ARG002 - the kernels see it in the cache
        windows: Collection[int | None],  # noqa: ARG002 - no plan depends on them
        dtype: torch.dtype,  # noqa: ARG002 - nor on it
    ) -> DecodePlan | MixedPlan:
        """Lay out the batch: where each request's tokens are, and which kernel computes them."""
        if batch.plan is not None:
            made: DecodePlan | MixedPlan = batch.plan
            return made
        tables = batch.block_tables.to(torch.int32)
        is_decode = batch.query_lens == 1
        if is_decode.all():
            (context_lens,) = _send(tables.device, batch.context_lens)
            return DecodePlan(tables, context_lens, batch.slot_mapping)
        covers = self._covers(batch.query_lens, batch.context_lens)
        is_short = ~is_decode
        is_short[list(covers)] = False
        decoding = np.flatnonzero(is_decode)
        ends = np.cumsum(batch.query_lens)
        decode_lens, query_starts, context_lens, short_context_lens, requests, tokens = _send(
            tables.device,
            batch.context_lens[decoding],
            np.concatenate(([0], ends)),
            np.where(is_decode, 0, batch.context_lens),
            np.where(is_short, batch.context_lens, 0),
            decoding,
            ends[decoding] - 1,
        )
        decode: DecodePlan | None = None
        decode_tokens: slice | Tensor = tokens
        if len(decoding) > 0:
            first, last = int(decoding[0]), int(decoding[-1])
            if last - first + 1 == len(decoding):  # side by side, as they come from the scheduler
                decode_tables = tables[first : last + 1]
                decode_tokens = slice(int(ends[first]) - 1, int(ends[last]))
            else:
                decode_tables = tables.index_select(0, requests)
            decode = DecodePlan(decode_tables, decode_lens, batch.slot_mapping[decode_tokens])
        return MixedPlan(
            slots=batch.slot_mapping,
            tables=tables,
            query_starts=query_starts,
            context_lens=context_lens,
            short_context_lens=short_context_lens,
            has_short=bool(is_short.any()),
            long=tuple(_long_row(batch, tables, request, cover) for request, cover in covers.items()),
            decode=decode,
            decode_tokens=decode_tokens,
        )

    def store(self, new: Tensor, cache: Tensor, plan: DecodePlan | MixedPlan, *, scales: Tensor | None = None) -> None:
        """Write the new tokens' keys and values `[T, 2, kv_heads, head_dim]` into one layer's cache."""
        store_kv(new, cache, plan.slots, scales)

    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        plan: DecodePlan | MixedPlan,
        *,
        scale: float,
        window: int | None,
        cap: float | None = None,
        sinks: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Attend `query` `[T, heads, head_dim]` to each request's context; returns the same shape."""
        scoring: dict[str, Any] = {"scale": scale, "window": window, "cap": cap, "sinks": sinks, "scales": scales}
        if isinstance(plan, DecodePlan):
            return self._decode(query, cache, plan, scoring)
        output = query.new_empty(query.shape)
        if plan.decode is not None:  # first: its padding may write to a prompt's place
            tokens = plan.decode_tokens
            output[tokens] = self._decode(query[tokens], cache, plan.decode, scoring)
        has_short, context_lens = True, plan.context_lens
        if plan.long and self._attend_long(query, cache, plan, output, scoring):
            has_short, context_lens = plan.has_short, plan.short_context_lens
        if has_short:
            options = {**scoring, "out": output, "is_ordered": self.is_ordered}
            prefill_attention(query, cache, plan.tables, plan.query_starts, context_lens, **options)
        return output

    def has_long(self, query_lens: IntArray, context_lens: IntArray) -> bool:
        """Whether a batch has requests that are long enough for cuDNN."""
        return bool(self._covers(query_lens, context_lens))

    def _covers(self, query_lens: IntArray, context_lens: IntArray) -> dict[int, Cover | None]:
        """The long requests. With `is_ordered` they are not for cuDNN, which has its own order of summation."""
        if not self.is_ordered:
            return {**self._long_prefill.covers(query_lens, context_lens)}
        num_pairs = (context_lens**2 - (context_lens - query_lens) ** 2) // 2
        return dict.fromkeys(np.flatnonzero(num_pairs >= _MIN_GATHERED_PAIRS).tolist())

    def _decode(self, query: Tensor, cache: Tensor, plan: DecodePlan, scoring: dict[str, Any]) -> Tensor:
        num_rows, heads, head_dim = query.shape
        return decode_attention(
            query,
            cache,
            plan.tables,
            plan.context_lens,
            workspace=plan.workspace or self.workspace(num_rows, heads, head_dim, query.device),
            shared=plan.shared if scoring["window"] is None else None,
            **scoring,
        )

    def _attend_long(
        self, query: Tensor, cache: Tensor, plan: MixedPlan, output: Tensor, scoring: dict[str, Any]
    ) -> bool:
        """Write the long requests' rows of the output; False if they have to be attended like short ones."""
        window, scale = scoring["window"], scoring["scale"]
        if window is not None and any(row.context_len > window for row in plan.long):
            return False
        if self.is_ordered:
            return self._attend_gathered(query, cache, plan, output, scoring)
        is_plain = scoring["cap"] is None and scoring["sinks"] is None  # cuDNN computes nothing else
        if not is_plain or self._long_prefill.why_not(query) is not None:
            return False
        for row in plan.long:
            assert row.cover is not None
            lengths = {"context_len": row.context_len, "num_tokens": row.cover.first_row + row.cover.num_rows}
            gathered = gather_kv(cache, row.table, **lengths, scales=scoring["scales"], dtype=query.dtype)
            attended = self._long_prefill.attend(
                query[row.tokens], gathered, row.cover, context_len=row.context_len, scale=scale
            )
            if attended is None:
                return False
            output[row.tokens] = attended
        return True

    def _attend_gathered(
        self, query: Tensor, cache: Tensor, plan: MixedPlan, output: Tensor, scoring: dict[str, Any]
    ) -> bool:
        """`_attend_long` with `is_ordered`. Keys and values of a long request are gathered, to be read faster."""
        if scoring["scales"] is not None or not can_gather(query):  # 8-bit floats have their own order
            return False
        tile = key_tile(query.dtype, query.shape[2])
        for row in plan.long:
            num_tokens = -(-row.context_len // tile) * tile
            gathered = gather_kv(cache, row.table, context_len=row.context_len, num_tokens=num_tokens)
            prefill_attention(
                query[row.tokens],
                cache,
                row.table[None],
                row.query_starts,
                row.context_lens,
                **scoring,
                out=output[row.tokens],
                gathered=gathered.to(query.dtype),
            )
        return True


def _long_row(batch: ForwardBatch, tables: Tensor, request: int, cover: Cover | None) -> LongRow:
    end = int(batch.query_lens[: request + 1].sum())
    num_new, context_len = int(batch.query_lens[request]), int(batch.context_lens[request])
    starts, lens = _send(tables.device, np.array([0, num_new]), np.array([context_len]))
    return LongRow(slice(end - num_new, end), tables[request], context_len, starts, lens, cover)


def _send(device: torch.device, *arrays: IntArray) -> tuple[Tensor, ...]:
    """The arrays as int32 on the device, in one copy."""
    (packed,) = to_device(device, np.concatenate(arrays))
    return torch.split(packed.to(torch.int32), [len(array) for array in arrays])
