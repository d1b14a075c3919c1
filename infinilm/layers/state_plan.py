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
        rows = np.arange(len(starts))
        sources = np.where(starts > 0, tables[rows, np.maximum(starts - 1, 0) // block_size], -1)
        _check_ends(ends, sources, starts)
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


def _check_ends(ends: IntArray, sources: IntArray, starts: IntArray) -> None:
    """Refuse a text that goes on from a token whose state is not there any more."""
    wrong = np.flatnonzero((sources >= 0) & (ends[np.maximum(sources, 0)] != starts))
    if len(wrong):
        row = int(wrong[0])
        raise InvalidValueError(
            f"request {row} goes on after {starts[row]} tokens, but the recurrent state kept there has seen "
            f"{max(int(ends[sources[row]]), 0)}; a model with recurrent layers can't go back within a block: go on "
            "from the end of the text or of a block, or compute it from the beginning"
        )
