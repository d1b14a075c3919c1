"""Plans: where a step reads and writes the states of recurrent layers."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from infinilm.attention.batch import ForwardBatch, HostBatch, IntArray
from infinilm.cache.paged import Cache
from infinilm.errors import InvalidValueError
from infinilm.kernels.copies import to_device
from infinilm.kernels.delta_chunk import CHUNK
from infinilm.kernels.delta_rule import PromptRows
from infinilm.kernels.support import has_kernels


@dataclass(frozen=True, slots=True)
class PromptStates:
    """R requests with several new tokens each, P tokens in total, concatenated.

    Texts are cut into chunks from their beginning, so that every block ends where a chunk ends. A request's first chunk
    is padded in place of tokens that were computed earlier, its last chunk up to the chunk size.
    """

    places: Tensor  # [P] int64, each token's index in the batch
    requests: Tensor  # [P] int64
    offsets: Tensor  # [P] int64, each token's index in its request
    firsts: Tensor  # [R] int64, index in P of each request's first token
    sources: Tensor  # [R] int64, blocks
    is_first: Tensor  # [R] bool
    chunk_size: int
    chunk_places: Tensor  # [P] int64, each token's index in the chunks
    num_chunks: int
    order: tuple[tuple[Tensor, Tensor], ...]  # see `delta_rule_chunks`
    targets: Tensor  # [Q] int64, blocks
    target_chunks: Tensor  # [Q] int64, the chunk after which the state is stored
    target_requests: Tensor  # [Q] int64
    target_ends: Tensor  # [Q] int64, number of the request's new tokens that the state has seen

    def conv_places(self, width: int) -> Tensor:
        """The inputs that a convolution of this `width` sees for each token: `[P, width]`.

        They are indices into a list of `width - 1` earlier inputs of each request, followed by the new tokens.
        """
        taps = torch.arange(width, device=self.offsets.device)
        return self._inputs_before(self.requests, self.offsets, width, taps)

    def kept_inputs(self, width: int) -> Tensor:
        """The inputs that a convolution must store: `[Q, width - 1]` indices into the same list."""
        taps = torch.arange(width - 1, device=self.offsets.device)
        return self._inputs_before(self.target_requests, self.target_ends, width, taps)

    def _inputs_before(self, requests: Tensor, offsets: Tensor, width: int, taps: Tensor) -> Tensor:
        num_before = width - 1
        firsts = len(self.sources) * num_before + self.firsts
        reached = offsets[:, None] + taps - num_before
        earlier = requests[:, None] * num_before + num_before + reached
        return torch.where(reached < 0, earlier, firsts[requests][:, None] + reached)

    @classmethod
    def of(
        cls,
        rows: IntArray,
        batch: HostBatch,
        tables: IntArray,
        *,
        sources: IntArray,
        ends: IntArray,
        block_size: int,
        device: torch.device,
    ) -> "PromptStates":
        """`rows` are the requests' places in the batch; the rest is as in `StatePlan.of`, which calls this."""
        size = math.gcd(block_size, CHUNK)
        lengths = batch.query_lens[rows]
        starts = batch.context_lens[rows] - lengths
        lasts = np.cumsum(batch.query_lens)[rows]
        requests = np.repeat(np.arange(len(rows)), lengths)
        firsts = np.cumsum(lengths) - lengths
        offsets = np.arange(len(requests)) - firsts[requests]
        num_chunks = -(-(starts % size + lengths) // size)
        first_chunks = np.cumsum(num_chunks) - num_chunks
        order = []
        for index in range(int(num_chunks.max())):
            texts = np.flatnonzero(num_chunks > index)
            text, chunk = to_device(device, texts, first_chunks[texts] + index)
            order.append((text, chunk))
        targets: list[tuple[int, int, int, int]] = []
        for request, row in enumerate(rows.tolist()):
            if batch.slot_mapping[lasts[request] - 1] < 0:
                continue  # a warm-up step stores nothing
            start, end = int(starts[request]), int(batch.context_lens[row])
            for index in range(start // block_size, -(-end // block_size)):
                limit = min((index + 1) * block_size, end)
                last = int(first_chunks[request]) + -(-(start % size + limit - start) // size) - 1
                targets.append((int(tables[row, index]), last, request, limit - start))
                ends[tables[row, index]] = limit
        kept = np.array(targets, dtype=np.int64).reshape(-1, 4)
        chunk_places = (first_chunks * size + starts % size)[requests] + offsets
        places = (lasts - lengths)[requests] + offsets
        arrays = (places, requests, offsets, firsts, sources[rows], chunk_places, *kept.T)
        place, request_of, offset, first, origin, in_chunks, blocks, chunks, owners, limits = to_device(device, *arrays)
        return cls(
            places=place,
            requests=request_of,
            offsets=offset,
            firsts=first,
            sources=origin.clamp(min=0),
            is_first=origin < 0,
            chunk_size=size,
            chunk_places=in_chunks,
            num_chunks=int(num_chunks.sum()),
            order=tuple(order),
            targets=blocks,
            target_chunks=chunks,
            target_requests=owners,
            target_ends=limits,
        )


@dataclass(frozen=True)
class StatePlan:
    """The plan of a step for one group: n requests with one new token, and the other requests (`prompts`)."""

    places: Tensor | None  # [n] int64, the single tokens' indices in the batch; None: all requests have one token
    sources: Tensor  # [n] int64, blocks
    is_first: Tensor  # [n] bool: the text begins with this token, so the source is meaningless
    targets: Tensor  # [n] int64, blocks; the spare block after all others if the state is not stored
    block_size: int
    prompts: PromptStates | PromptRows | None = None

    @cached_property
    def singles(self) -> PromptRows:
        """The requests with one new token, as if they were prompts. Their position in the text does not matter."""
        starts = torch.arange(len(self.sources) + 1, device=self.sources.device)
        return PromptRows(starts, 2 - self.is_first.long(), self.targets[:, None], self.sources, self.block_size)

    @classmethod
    def of(
        cls, batch: HostBatch, tables: IntArray, *, block_size: int, device: torch.device, ends: IntArray
    ) -> "StatePlan":
        """`tables` `[N, max_blocks]` are the group's. `ends` `[blocks]` says how many tokens of the text each block's
        state has seen. It is checked and updated here, on the host."""
        lasts = np.cumsum(batch.query_lens)
        starts = batch.context_lens - batch.query_lens
        sources = find_sources(tables, starts, block_size, ends)
        singles, others = np.flatnonzero(batch.query_lens == 1), np.flatnonzero(batch.query_lens > 1)
        prompts = None
        if len(others):
            where = {"sources": sources, "ends": ends}
            make = _prompt_rows if has_kernels(device) else PromptStates.of
            prompts = make(others, batch, tables, block_size=block_size, device=device, **where)
        own = tables[singles, starts[singles] // block_size]
        is_kept = batch.slot_mapping[lasts[singles] - 1] >= 0
        ends[own[is_kept]] = batch.context_lens[singles][is_kept]
        places, origin, targets = to_device(
            device, lasts[singles] - 1, sources[singles], np.where(is_kept, own, len(ends))
        )
        return cls(None if prompts is None else places, origin.clamp(min=0), origin < 0, targets, block_size, prompts)


def _prompt_rows(
    rows: IntArray,
    batch: HostBatch,
    tables: IntArray,
    *,
    sources: IntArray,
    ends: IntArray,
    block_size: int,
    device: torch.device,
) -> PromptRows:
    """`rows` are the requests' places in the batch; the rest is as in `StatePlan.of`, which calls this."""
    context_lens = np.zeros(len(tables), dtype=np.int64)
    context_lens[rows] = batch.context_lens[rows]
    starts, lens, blocks, origins = to_device(
        device,
        np.concatenate(([0], np.cumsum(batch.query_lens))),
        context_lens,
        _new_blocks(rows, batch, tables, ends, block_size),
        np.maximum(sources, 0),
    )
    return PromptRows(starts, lens, blocks, origins, block_size)


def _new_blocks(rows: IntArray, batch: HostBatch, tables: IntArray, ends: IntArray, block_size: int) -> IntArray:
    """The `tables` of `PromptRows`, for requests at `rows` of the batch. Updates `ends`."""
    firsts = (batch.context_lens - batch.query_lens) // block_size
    lasts = -(-batch.context_lens // block_size)
    blocks = np.full((len(tables), int((lasts - firsts).max())), -1, dtype=np.int64)
    final_tokens = np.cumsum(batch.query_lens) - 1
    for row in rows[batch.slot_mapping[final_tokens[rows]] >= 0].tolist():  # a warm-up step stores nothing
        first, last = int(firsts[row]), int(lasts[row])
        own = tables[row, first:last]
        blocks[row, : len(own)] = own
        ends[own] = np.minimum(np.arange(first + 1, last + 1) * block_size, batch.context_lens[row])
    return blocks


def plan_states(batch: ForwardBatch, cache: Cache, group: int) -> StatePlan:
    """The plan of a step for a group of recurrent layers."""
    assert batch.host is not None
    return StatePlan.of(
        batch.host,
        batch.host.tables_of(group),
        block_size=cache.block_size,
        device=cache.device,
        ends=cache.state_ends[group],
    )


def check_states(batch: ForwardBatch, cache: Cache, group: int) -> None:
    """Refuse a step of a group of recurrent layers if a state that a text continues from is gone."""
    assert batch.host is not None
    starts = batch.context_lens - batch.query_lens
    find_sources(batch.host.tables_of(group), starts, cache.block_size, cache.state_ends[group])


def find_sources(tables: IntArray, starts: IntArray, block_size: int, ends: IntArray) -> IntArray:
    """The blocks `[N]` with the states that texts continue from after `starts` `[N]` tokens; -1 for new texts.

    Refuses a text if the state that it continues from is gone.
    """
    rows = np.arange(len(starts))
    sources = np.where(starts > 0, tables[rows, np.maximum(starts - 1, 0) // block_size], -1)
    wrong = np.flatnonzero((sources >= 0) & (ends[np.maximum(sources, 0)] != starts))
    if len(wrong):
        row = int(wrong[0])
        raise InvalidValueError(
            f"request {row} goes on after {starts[row]} tokens, but the recurrent state kept there has seen "
            f"{max(int(ends[sources[row]]), 0)}; a model with recurrent layers can't go back within a block: go on "
            "from the end of the text or of a block, or compute it from the beginning"
        )
    return sources


class GraphStates:
    """A plan of up to `size` decoding rows for captured graphs. Its memory stays in place; its contents change."""

    def __init__(self, size: int, cache: Cache, group: int, num_staging: int) -> None:
        self._ends, self._block_size = cache.state_ends[group], cache.block_size
        self._blocks = torch.empty((2, size), dtype=torch.int64, device=cache.device)
        self._is_first = torch.zeros(size, dtype=torch.bool, device=cache.device)
        self._staging = [torch.empty((2, size), dtype=torch.int64, pin_memory=True) for _ in range(num_staging)]
        self._num_steps = 0
        self.clear()

    def clear(self) -> None:
        """Fill the plan with padding, which reads and writes the spare block."""
        self._blocks.fill_(len(self._ends))

    def first(self, size: int) -> StatePlan:
        """The plan of `size` rows."""
        sources, targets = self._blocks[:, :size]
        return StatePlan(None, sources, self._is_first[:size], targets, self._block_size)

    def fill(self, tables: IntArray, context_lens: IntArray, size: int) -> None:
        """Copy a step's blocks to the device, for a graph of `size` rows."""
        starts = context_lens - 1
        staging = self._staging[self._num_steps % len(self._staging)]
        self._num_steps += 1
        blocks = staging.numpy()
        blocks[:, :size] = len(self._ends)
        blocks[0, : len(starts)] = find_sources(tables, starts, self._block_size, self._ends)
        blocks[1, : len(starts)] = tables[np.arange(len(starts)), starts // self._block_size]
        self._ends[blocks[1, : len(starts)]] = context_lens
        self._blocks[:, :size].copy_(staging[:, :size], non_blocking=True)


class GraphPrompts:
    """A plan of up to `num_rows` requests with up to `num_tokens` tokens for captured graphs.

    Decoding rows come first. The plan's memory stays in place; its contents change.
    """

    def __init__(self, num_tokens: int, num_rows: int, cache: Cache, group: int, num_staging: int) -> None:
        self._ends, self._block_size = cache.state_ends[group], cache.block_size
        self._num_singles = min(num_rows, num_tokens)
        self._num_rows, self._columns = num_rows, num_tokens // cache.block_size + 2
        size = 1 + (5 + self._columns) * num_rows
        self._values = torch.empty(size, dtype=torch.int64, device=cache.device)
        self._places = torch.arange(self._num_singles, device=cache.device)
        self._is_first = torch.zeros(self._num_singles, dtype=torch.bool, device=cache.device)
        is_pinned = cache.device.type == "cuda"
        self._staging = [torch.empty(size, dtype=torch.int64, pin_memory=is_pinned) for _ in range(num_staging)]
        self._num_steps = 0
        self.clear()

    def _parts(self, values: Tensor) -> tuple[Tensor, ...]:
        """Views: the requests' first tokens and lengths, sources of prompts, sources and targets of decoding rows, and
        tables."""
        rows = self._num_rows
        *parts, tables = torch.split(values, [rows + 1, rows, rows, rows, rows, rows * self._columns])
        return (*parts, tables.view(rows, -1))

    def clear(self) -> None:
        """Fill the plan with padding."""
        for part, value in zip(self._parts(self._values), self._padding, strict=True):
            part.fill_(value)

    @property
    def _padding(self) -> tuple[int, ...]:
        spare = len(self._ends)  # a block that no request reads
        return 0, 0, 0, spare, spare, -1

    def plan(self) -> StatePlan:
        starts, lens, origins, sources, targets, tables = self._parts(self._values)
        prompts = PromptRows(starts, lens, tables, origins, self._block_size)
        singles = slice(self._num_singles)
        places = (self._places, sources[singles], self._is_first, targets[singles])
        return StatePlan(*places, self._block_size, prompts)

    def fill(self, batch: HostBatch, tables: IntArray, num_decoding: int) -> None:
        """Copy a step's blocks to the device; `tables` are the group's."""
        staging = self._staging[self._num_steps % len(self._staging)]
        self._num_steps += 1
        parts = [part.numpy() for part in self._parts(staging)]
        for part, value in zip(parts, self._padding, strict=True):
            part[:] = value
        starts, lens, origins, sources, targets, blocks = parts
        num_rows, singles, others = len(tables), np.arange(num_decoding), np.arange(num_decoding, len(tables))
        before = batch.context_lens - batch.query_lens
        found = find_sources(tables, before, self._block_size, self._ends)
        starts[1 : num_rows + 1] = np.cumsum(batch.query_lens)
        starts[num_rows + 1 :] = starts[num_rows]
        lens[others] = batch.context_lens[others]
        origins[others] = np.maximum(found[others], 0)
        sources[singles] = found[singles]
        targets[singles] = own = tables[singles, before[singles] // self._block_size]
        self._ends[own] = batch.context_lens[singles]
        new = _new_blocks(others, batch, tables, self._ends, self._block_size)
        blocks[:num_rows, : new.shape[1]] = new
        self._values.copy_(staging, non_blocking=True)
