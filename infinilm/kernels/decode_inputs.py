"""The input of a decode step, unpacked on the device from one small copy.

A decode step needs a few numbers per row. They are sent as one array of int32, so that a step costs one copy:

    [num_columns, num_shared, ids × B, rows × B, context_lens × B, tables × (B · num_columns)]

`ids` are token ids, or -1 for the token that the row drew last, which only the device knows. Row -1 is padding.
"""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

HEADER = 2
FIELDS = 3


def pack_decode_inputs(
    packed: npt.NDArray[np.int32],
    ids: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    context_lens: npt.NDArray[np.int64],
    tables: npt.NDArray[np.int64],
    num_shared: int,
    size: int,
) -> int:
    """Fill `packed` with the inputs of n rows, padded to `size`; returns how much of it is used.

    `tables` is `[n, num_columns]`.
    """
    num_rows, num_columns = tables.shape
    packed[:HEADER] = num_columns, num_shared
    fields = packed[HEADER : HEADER + FIELDS * size].reshape(FIELDS, size)
    fields[:, num_rows:] = [[0], [-1], [0]]
    fields[:, :num_rows] = ids, rows, context_lens
    start = HEADER + FIELDS * size
    end: int = start + size * num_columns
    packed[start:end].reshape(size, num_columns)[:num_rows] = tables
    return end


class DecodeInputs:
    """The unpacked inputs of up to `size` rows, in memory that stays where it is."""

    def __init__(self, size: int, max_blocks: int, device: torch.device) -> None:
        self.size = size
        self.packed = torch.zeros(self.num_values(size, max_blocks), dtype=torch.int32, device=device)
        self.packed[HEADER + size : HEADER + 2 * size] = -1  # nothing but padding
        self.ids = torch.zeros(size, dtype=torch.int64, device=device)  # [B]
        self.rows = torch.full((size,), -1, dtype=torch.int64, device=device)  # [B], -1: padding
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)  # [B]
        self.slots = torch.full((size,), -1, dtype=torch.int64, device=device)  # [B], -1: nowhere
        self.context_lens = torch.zeros(size, dtype=torch.int32, device=device)  # [B]
        self.tables = torch.zeros(size, max_blocks, dtype=torch.int32, device=device)  # [B, max_blocks]
        self.num_shared = torch.zeros(1, dtype=torch.int32, device=device)

    @staticmethod
    def num_values(size: int, max_blocks: int) -> int:
        """How many numbers the packed inputs of `size` rows can be."""
        return HEADER + (FIELDS + max_blocks) * size

    def unpack(self, last_token: Tensor, block_size: int) -> None:
        """Spread out what was copied into `packed`; `last_token` `[max_rows]` int64 is what rows drew last."""
        _unpack[(self.size,)](
            self.packed,
            last_token,
            self.ids,
            self.rows,
            self.positions,
            self.slots,
            self.context_lens,
            self.tables,
            self.num_shared,
            self.tables.stride(0),
            self.size,
            BLOCK_SIZE=block_size,
            COLUMNS=256,
        )


@triton.jit(do_not_specialize=["size", "table_stride"])  # or every graph would compile one of its own
def _unpack(
    packed,
    last_token,
    ids,
    rows,
    positions,
    slots,
    context_lens,
    tables,
    num_shared,
    table_stride,
    size,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    index = tl.program_id(0)
    num_columns = tl.load(packed)
    if index == 0:
        tl.store(num_shared, tl.load(packed + 1))
    fields = packed + 2 + index
    token = tl.load(fields).to(tl.int64)
    row = tl.load(fields + size).to(tl.int64)
    context_len = tl.load(fields + 2 * size)
    token = tl.where(token < 0, tl.load(last_token + tl.maximum(row, 0)), token)
    tl.store(ids + index, token)
    tl.store(rows + index, row)
    tl.store(context_lens + index, context_len)
    position = tl.maximum(context_len - 1, 0)
    tl.store(positions + index, position.to(tl.int64))
    own = packed + 2 + 3 * size + index * num_columns
    block = tl.load(own + position // BLOCK_SIZE, mask=row >= 0, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(slots + index, tl.where(row >= 0, slot, -1))
    if row >= 0:
        for first in range(0, num_columns, COLUMNS):
            columns = first + tl.arange(0, COLUMNS)
            inside = columns < num_columns
            blocks = tl.load(own + columns, mask=inside, other=0)
            tl.store(tables + index * table_stride + columns, blocks, mask=inside)
