"""The input of one forward pass."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from infinilm.kernels.copies import to_device

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HostBatch:
    """The tokens of one step: T new tokens of N requests, laid end to end. Plain arrays, to be sent anywhere.

    Request i brings `query_lens[i]` new tokens, the last of its `context_lens[i]` tokens; all earlier ones
    are in the KV cache already. Block j of request i holds its tokens `j * block_size` and following, in the
    cache's block `block_tables[i, j]`.
    """

    input_ids: IntArray  # [T]
    positions: IntArray  # [T], the tokens' places in their requests, for the rotary embedding
    slot_mapping: IntArray  # [T], where each token's key and value go: block * block_size + offset; < 0: nowhere
    block_tables: IntArray  # [N, max_blocks], short rows padded with -1
    query_lens: IntArray  # [N], all >= 1
    context_lens: IntArray  # [N], cached + new

    def to_device(self, device: torch.device, input_ids: torch.Tensor | None = None) -> "ForwardBatch":
        """The same on a device; `input_ids`, if given, are there already and take the place of the batch's."""
        ids, positions, slots, tables = to_device(
            device, self.input_ids, self.positions, self.slot_mapping, self.block_tables
        )
        return ForwardBatch(
            input_ids=ids if input_ids is None else input_ids,
            positions=positions,
            slot_mapping=slots,
            block_tables=tables,
            query_lens=self.query_lens,
            context_lens=self.context_lens,
        )


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
