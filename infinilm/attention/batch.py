"""The input of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HostBatch:
    """The tokens of one step: T new tokens of N requests, concatenated. Plain arrays, which can be sent anywhere.

    Request i has `query_lens[i]` new tokens, the last of its `context_lens[i]` tokens; all earlier ones
    are in the KV cache already. Block j of request i holds its tokens `j * block_size` and following, in the
    cache's block `block_tables[i, j]`.

    If the cache has several groups of layers (`cache/specs.py`), `slot_mapping` and `block_tables` are those of the
    first, and `more_slots` and `more_tables` those of the others; None: all groups use the first's.
    """

    input_ids: IntArray  # [T]
    positions: IntArray  # [T], the tokens' places in their requests, for the rotary embedding
    slot_mapping: IntArray  # [T], where each token's key and value go: block * block_size + offset; < 0: nowhere
    block_tables: IntArray  # [N, max_blocks], short rows padded with -1
    query_lens: IntArray  # [N], all >= 1
    context_lens: IntArray  # [N], cached + new
    last_lens: IntArray | None = (
        None  # [N], how many of the last new tokens' hidden states are used after the layers; None: all
    )
    more_slots: IntArray | None = None  # [groups - 1, T]
    more_tables: IntArray | None = None  # [groups - 1, N, max_blocks]

    def to_device(self, device: torch.device, input_ids: torch.Tensor | None = None) -> ForwardBatch:
        """The batch on a device. `input_ids`, if given, are there already and replace the batch's."""
        from infinilm.kernels.copies import to_device

        more = () if self.more_slots is None or self.more_tables is None else (self.more_slots, self.more_tables)
        ids, positions, slots, tables, *others = to_device(
            device, self.input_ids, self.positions, self.slot_mapping, self.block_tables, *more
        )
        return ForwardBatch(
            input_ids=ids if input_ids is None else input_ids,
            positions=positions,
            slot_mapping=slots,
            block_tables=tables,
            query_lens=self.query_lens,
            context_lens=self.context_lens,
            more_groups=tuple(zip(*others, strict=True)),
            host=self,
        )

    def slots_of(self, group: int) -> IntArray:
        """The slots of a group of layers."""
        return self.slot_mapping if group == 0 or self.more_slots is None else self.more_slots[group - 1]

    def tables_of(self, group: int) -> IntArray:
        """The block tables of a group of layers."""
        return self.block_tables if group == 0 or self.more_tables is None else self.more_tables[group - 1]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A `HostBatch` on the device that computes it."""

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slot_mapping: torch.Tensor  # [T] int64
    block_tables: torch.Tensor  # [N, max_blocks] int64
    query_lens: IntArray  # [N] on the host
    context_lens: IntArray  # [N] on the host
    plan: Any = None
    """The attention backend's plan of the batch, if it was made in advance: a captured graph has its own."""
    more_groups: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()  # slot_mapping and block_tables of other groups
    host: HostBatch | None = None  # the batch it was made from; None in a captured graph
    state_plans: Mapping[int, Any] | None = None  # a captured graph's plans of recurrent layers, by group

    def of_groups(self) -> list[ForwardBatch]:
        """The batch as each group of layers sees it; only one if all groups have the same tables."""
        others = (replace(self, slot_mapping=slots, block_tables=tables) for slots, tables in self.more_groups)
        return [self, *others]
