"""The inputs of a step that is a CUDA graph: one small copy to the device, unpacked there into fixed memory.

In a step in which every row computes the token it drew last (`DecodeInputs`), the copy holds

    [num_columns, num_shared, rows × B, context_lens × B, tables × (B · num_columns)]

and everything else follows from that. A step with prompts (`MixedInputs`) needs its tokens as well. Row -1 is padding.
All numbers are int32.
"""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

Packed = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.int64]

_HEADER = 2
_COLUMNS = 256  # columns of a table that are copied at a time


class DecodeInputs:
    """The inputs of up to `size` decoding rows."""

    def __init__(self, size: int, max_blocks: int, device: torch.device) -> None:
        self.size = size
        self.packed = torch.zeros(self.num_values(size, max_blocks), dtype=torch.int32, device=device)
        self.ids = torch.zeros(size, dtype=torch.int64, device=device)  # [B]
        self.rows = torch.full((size,), -1, dtype=torch.int64, device=device)  # [B], -1: padding
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)  # [B]
        self.slots = torch.full((size,), -1, dtype=torch.int64, device=device)  # [B], -1: nowhere
        self.context_lens = torch.zeros(size, dtype=torch.int32, device=device)  # [B]
        self.tables = torch.zeros(size, max_blocks, dtype=torch.int32, device=device)  # [B, max_blocks]
        self.num_shared = torch.zeros(1, dtype=torch.int32, device=device)

    @staticmethod
    def num_values(size: int, max_blocks: int) -> int:
        """The most numbers in the packed inputs of `size` rows."""
        return _HEADER + (2 + max_blocks) * size

    def first(self, size: int) -> "DecodeInputs":
        """The inputs of a smaller step, as a view of the same memory."""
        view = object.__new__(DecodeInputs)
        view.size, view.packed, view.num_shared = size, self.packed, self.num_shared
        view.ids, view.rows, view.positions = self.ids[:size], self.rows[:size], self.positions[:size]
        view.slots, view.context_lens = self.slots[:size], self.context_lens[:size]
        view.tables = self.tables[:size]
        return view

    def clear(self) -> None:
        """Have nothing but padding packed."""
        self.packed.zero_()
        self.packed[_HEADER : _HEADER + self.size] = -1

    def pack(self, packed: Packed, rows: IntArray, context_lens: IntArray, tables: IntArray, num_shared: int) -> int:
        """Fill `packed` with the inputs of n rows. `tables` is `[n, num_columns]`. Returns how many numbers are
        used."""
        num_rows, num_columns = tables.shape
        packed[:_HEADER] = num_columns, num_shared
        start = _HEADER + 2 * self.size
        fields = packed[_HEADER:start].reshape(2, self.size)
        fields[:, num_rows:] = [[-1], [0]]
        fields[:, :num_rows] = rows, context_lens
        return _pack_tables(packed, start, tables)

    def unpack(self, last_token: Tensor, block_size: int) -> None:
        """Spread out what was copied into `packed`; `last_token` `[max_rows]` int64 is what rows drew last."""
        _unpack_decoding[(self.size,)](
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
            COLUMNS=_COLUMNS,
        )


class MixedInputs:
    """The inputs of up to `num_rows` rows with up to `num_tokens` tokens, the decoding rows first.

    Up to `num_rows` tokens are drawn. `unpack` sets `ids`, `positions` and `slots` `[T]`, and for each token to draw
    its row, -1 for padding, and the place in the batch whose logits it is drawn from, `[N]`; all are int64.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    sample_rows: Tensor
    sample_places: Tensor

    def __init__(self, num_tokens: int, num_rows: int, max_blocks: int, device: torch.device) -> None:
        self.num_tokens, self.num_rows = num_tokens, num_rows
        self.packed = torch.zeros(self.num_values(num_tokens, num_rows, max_blocks), dtype=torch.int32, device=device)
        self.tables = torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device)
        # In the order of the packed numbers. Fields that kernels take as int32 need no unpacking.
        fields = self.packed[_HEADER : self._tables_start].split([*[num_rows] * 5, num_rows + 1, *[num_tokens] * 4])
        self._sample_rows, self._sample_places, self.sample_positions, self.decode_lens, self.prefill_lens = fields[:5]
        self.query_starts = fields[5]  # [N + 1]
        self._ids, self._token_rows, self._positions, self._slots = fields[6:]  # [T]

    @property
    def _tables_start(self) -> int:
        return _HEADER + 6 * self.num_rows + 1 + 4 * self.num_tokens

    @staticmethod
    def num_values(num_tokens: int, num_rows: int, max_blocks: int) -> int:
        """The most numbers in the packed inputs."""
        return _HEADER + (6 + max_blocks) * num_rows + 1 + 4 * num_tokens

    def clear(self) -> None:
        """Have nothing but padding packed."""
        self.packed.zero_()
        self._sample_rows.fill_(-1)
        self._slots.fill_(-1)

    def pack(
        self,
        packed: Packed,
        *,
        ids: IntArray,  # [t], -1: the token that the row drew last
        token_rows: IntArray,  # [t]
        positions: IntArray,  # [t]
        slots: IntArray,  # [t]
        sample_rows: IntArray,  # [s]
        sample_places: IntArray,  # [s]
        sample_positions: IntArray,  # [s]
        query_lens: IntArray,  # [n]
        context_lens: IntArray,  # [n]
        tables: IntArray,  # [n, num_columns]
        num_decoding: int,
    ) -> int:
        """Fill `packed`. Returns how many numbers are used."""
        num_rows, num_columns = tables.shape
        packed[:_HEADER] = num_columns, 0
        middle = _HEADER + 6 * self.num_rows + 1
        by_row = packed[_HEADER : middle - 1 - self.num_rows].reshape(5, self.num_rows)
        num_samples = len(sample_rows)
        by_row[:3, num_samples:] = [[-1], [0], [0]]
        by_row[:3, :num_samples] = sample_rows, sample_places, sample_positions
        by_row[3:] = 0
        ends = np.cumsum(query_lens)
        by_row[3, :num_decoding] = context_lens[:num_decoding]
        by_row[4, num_decoding:num_rows] = context_lens[num_decoding:]
        starts = packed[middle - 1 - self.num_rows : middle]
        starts[0] = 0
        starts[1 : num_rows + 1] = ends
        starts[num_rows + 1 :] = ends[-1]
        by_token = packed[middle : self._tables_start].reshape(4, self.num_tokens)
        by_token[:, len(ids) :] = [[0], [0], [0], [-1]]
        by_token[:, : len(ids)] = ids, token_rows, positions, slots
        return _pack_tables(packed, self._tables_start, tables)

    def unpack(self, last_token: Tensor) -> None:
        """Spread out what was copied into `packed`; `last_token` `[max_rows]` int64 is what rows drew last."""
        _unpack_tables[(self.num_rows,)](
            self.packed, self.tables, self.tables.stride(0), self._tables_start, COLUMNS=_COLUMNS
        )
        self.sample_rows, self.sample_places = self._sample_rows.long(), self._sample_places.long()
        self.positions, self.slots = self._positions.long(), self._slots.long()
        self.ids = torch.where(self._ids < 0, last_token[self._token_rows.long()], self._ids.long())


def _pack_tables(packed: Packed, start: int, tables: IntArray) -> int:
    end: int = start + tables.size
    packed[start:end].reshape(tables.shape)[:] = tables
    return end


@triton.jit
def _spread(source, target, num_columns, COLUMNS: tl.constexpr):
    """Copy a row's table."""
    for first in range(0, num_columns, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = columns < num_columns
        tl.store(target + columns, tl.load(source + columns, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["size", "table_stride"])  # otherwise every graph would compile its own kernel
def _unpack_decoding(
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
    """Program i: row i of `size`."""
    index = tl.program_id(0)
    num_columns = tl.load(packed)
    if index == 0:
        tl.store(num_shared, tl.load(packed + 1))
    row = tl.load(packed + 2 + index).to(tl.int64)
    context_len = tl.load(packed + 2 + size + index)
    tl.store(ids + index, tl.load(last_token + tl.maximum(row, 0)))
    tl.store(rows + index, row)
    tl.store(context_lens + index, context_len)
    position = tl.maximum(context_len - 1, 0)
    tl.store(positions + index, position.to(tl.int64))
    own = packed + 2 + 2 * size + index * num_columns
    block = tl.load(own + position // BLOCK_SIZE, mask=row >= 0, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(slots + index, tl.where(row >= 0, slot, -1))
    if row >= 0:
        _spread(own, tables + index * table_stride, num_columns, COLUMNS)


@triton.jit(do_not_specialize=["start", "table_stride"])
def _unpack_tables(packed, tables, table_stride, start, COLUMNS: tl.constexpr):
    """Program i: the table of row i. Tables of padding rows keep old contents, which are not read."""
    index = tl.program_id(0)
    num_columns = tl.load(packed)
    _spread(packed + start + index * num_columns, tables + index * table_stride, num_columns, COLUMNS)
