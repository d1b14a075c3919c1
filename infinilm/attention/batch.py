"""The input of one forward pass."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tokens of one step: T new tokens of N requests, laid end to end.

    Request i brings `query_lens[i]` new tokens, the last of its `context_lens[i]` tokens; all earlier ones
    are in the KV cache already. Block j of request i holds its tokens `j * block_size` and following, in the
    cache's block `block_tables[i, j]`.
    """

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, the tokens' places in their requests
    slot_mapping: torch.Tensor  # [T] int64, where each token's key and value go: block * block_size + offset
    block_tables: torch.Tensor  # [N, max_blocks] int64, short rows padded with -1
    query_lens: IntArray  # [N] on the host, all >= 1
    context_lens: IntArray  # [N] on the host, cached + new
