"""Where the states of recurrent layers are read and written in one step."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infinilm.attention.batch import ForwardBatch, HostBatch, IntArray
from infinilm.cache.paged import Cache
from infinilm.errors import InvalidValueError
from infinilm.kernels.copies import to_device
from infinilm.kernels.delta_rule import CHUNK


@dataclass(frozen=True, slots=True)
class PromptStates:
    """A request of several new tokens."""

    tokens: slice
    """Its places in the batch."""
    start: int
    """Tokens before the first of them."""
    source: int
    """The block whose state it goes on from; -1: the text begins here."""
    targets: tuple[tuple[int, int], ...]
    """Tokens up to the end of each block that it computes in, or up to its own end, and the block."""
    chunk_size: int
    """Tokens to compute at a time, counted from the text's beginning: blocks end where chunks end."""


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Requests with one new token are computed together, the others one after another."""

    places: Tensor | None  # [n] int64, of the single tokens in the batch; None: all are
    sources: Tensor  # [n] int64, blocks
    is_first: Tensor  # [n] bool: the text begins with this token, so that the source means nothing
    targets: Tensor  # [n] int64, blocks; the spare one behind all others if the state is not kept
    prompts: tuple[PromptStates, ...]

    @classmethod
    def of(
        cls, batch: HostBatch, tables: IntArray, *, block_size: int, device: torch.device, ends: IntArray
    ) -> "StatePlan":
        """`tables` `[N, max_blocks]` are the group's. `ends` `[blocks]` are the tokens of the text that each block's
        state has seen; it is checked and brought up to date here, on the host."""
        lasts = np.cumsum(batch.query_lens)
        starts = batch.context_lens - batch.query_lens
        sources = find_sources(tables, starts, block_size, ends)
        is_kept = batch.slot_mapping[lasts - 1] >= 0  # not in a step that only warms up
        singles = np.flatnonzero(batch.query_lens == 1)
        own = tables[singles, starts[singles] // block_size]
        ends[own[is_kept[singles]]] = batch.context_lens[singles][is_kept[singles]]
        own = np.where(is_kept[singles], own, len(ends))
        prompts = []
        for row in np.flatnonzero(batch.query_lens > 1).tolist():
            start, end = int(starts[row]), int(batch.context_lens[row])
            targets = []
            if is_kept[row]:
                for block in range(start // block_size, -(-end // block_size)):
                    limit = min((block + 1) * block_size, end)
                    targets.append((limit - start, int(tables[row, block])))
                    ends[tables[row, block]] = limit
            tokens = slice(int(lasts[row]) - (end - start), int(lasts[row]))
            prompts.append(PromptStates(tokens, start, int(sources[row]), tuple(targets), math.gcd(block_size, CHUNK)))
        places, origin, target = to_device(device, lasts[singles] - 1, sources[singles], own)
        return cls(places if prompts else None, origin.clamp(min=0), origin < 0, target, tuple(prompts))


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


def find_sources(tables: IntArray, starts: IntArray, block_size: int, ends: IntArray) -> IntArray:
    """The blocks `[N]` whose states texts go on from that have `starts` `[N]` tokens; -1 for those that begin.

    Refuses a text that goes on from a token whose state is not there any more.
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
    """A plan of up to `size` decoding rows that captured graphs read: where it lies stays, what is in it changes."""

    def __init__(self, size: int, cache: Cache, group: int, num_staging: int) -> None:
        self._ends, self._block_size = cache.state_ends[group], cache.block_size
        self._blocks = torch.empty((2, size), dtype=torch.int64, device=cache.device)
        self._is_first = torch.zeros(size, dtype=torch.bool, device=cache.device)
        self._staging = [torch.empty((2, size), dtype=torch.int64, pin_memory=True) for _ in range(num_staging)]
        self._num_steps = 0
        self.clear()

    def clear(self) -> None:
        """Have nothing but padding, which reads and writes the spare block."""
        self._blocks.fill_(len(self._ends))

    def first(self, size: int) -> StatePlan:
        """The plan of `size` rows."""
        sources, targets = self._blocks[:, :size]
        return StatePlan(None, sources, self._is_first[:size], targets, ())

    def fill(self, tables: IntArray, context_lens: IntArray, size: int) -> None:
        """Send a step's blocks to the device, for a graph of `size` rows."""
        starts = context_lens - 1
        staging = self._staging[self._num_steps % len(self._staging)]
        self._num_steps += 1
        blocks = staging.numpy()
        blocks[:, :size] = len(self._ends)
        blocks[0, : len(starts)] = find_sources(tables, starts, self._block_size, self._ends)
        blocks[1, : len(starts)] = tables[np.arange(len(starts)), starts // self._block_size]
        self._ends[blocks[1, : len(starts)]] = context_lens
        self._blocks[:, :size].copy_(staging[:, :size], non_blocking=True)
