"""A KV cache that grows with its text."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from infinilm.cache.layout import consecutive_tables
from infinilm.cache.paged import PagedKVCache
from infinilm.cache.specs import CacheSpec
from infinilm.errors import InvalidValueError

IntArray = npt.NDArray[np.int64]
BLOCK_SIZE = 16
"""Tokens per block; capacity is counted in blocks."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a model keeps of each token, and where."""

    specs: tuple[CacheSpec, ...]  # by layer
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        kinds = ", ".join(map(str, dict.fromkeys(self.specs)))
        return f"num_layers={len(self.specs)}, {kinds}, dtype={self.dtype}, device={self.device}"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the next tokens of each row go, in the terms of a batch of N rows with T new tokens in all."""

    slot_mapping: IntArray  # [T], block * block_size + offset
    block_tables: IntArray  # [N, blocks]
    query_lens: IntArray  # [N], new tokens
    context_lens: IntArray  # [N], cached and new tokens


class DynamicCache:
    """Keys and values of rows of one length, which become longer together.

    Inside is a paged cache of which each row owns a run of blocks; when they are full, they are copied into one
    with twice as many. It is empty at first and takes its shape from the model that uses it.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything, and give the memory back."""
        self._shape: KVShape | None = None
        self._pool: PagedKVCache | None = None
        self._num_rows = 0
        self._num_tokens = 0

    @property
    def batch_size(self) -> int:
        """The number of rows; 0 while it is empty."""
        return self._num_rows if self._num_tokens else 0

    def get_seq_length(self) -> int:
        """The number of tokens in each row."""
        return self._num_tokens

    def place(self, shape: KVShape, batch_size: int, num_new: int) -> tuple[Placement, PagedKVCache]:
        """Make room for the next `num_new` tokens of each row: where they go, and the cache to put them in.

        They count only after `advance`, so that a computation that fails leaves everything as it was.
        """
        if (shape, batch_size) != (self._shape, self._num_rows):
            if self._num_tokens:
                raise InvalidValueError(
                    f"the cache holds {self._num_rows} rows of {self._shape}, but the model brings {batch_size} rows "
                    f"of {shape}; use a new DynamicCache, or reset this one"
                )
            self.reset()
        num_tokens = self._num_tokens + num_new
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        pool = self._with_room(shape, batch_size, num_blocks)
        tables = consecutive_tables(batch_size, pool.num_blocks[0] // batch_size)
        places = np.arange(self._num_tokens, num_tokens)
        slots = tables[:, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
        placement = Placement(
            slot_mapping=slots.reshape(-1),
            block_tables=tables[:, :num_blocks],
            query_lens=np.full(batch_size, num_new, dtype=np.int64),
            context_lens=np.full(batch_size, num_tokens, dtype=np.int64),
        )
        return placement, pool

    def advance(self, num_new: int) -> None:
        """Count tokens that were placed and have been computed."""
        self._num_tokens += num_new

    def _with_room(self, shape: KVShape, num_rows: int, num_blocks: int) -> PagedKVCache:
        """The paged cache, after growing it if its rows have fewer than `num_blocks` blocks."""
        old = self._pool
        old_num_blocks = 0 if old is None else old.num_blocks[0] // num_rows
        if old is not None and num_blocks <= old_num_blocks:
            return old
        new = PagedKVCache(
            shape.specs,
            num_rows * max(num_blocks, 2 * old_num_blocks),
            BLOCK_SIZE,
            dtype=shape.dtype,
            device=shape.device,
        )
        if old is not None:
            for source, target in zip(old.tensors, new.tensors, strict=True):  # [layers, rows * blocks, …]
                by_row = (len(source), num_rows, -1, *source.shape[2:])
                target.view(by_row)[:, :, :old_num_blocks] = source.view(by_row)
        self._pool, self._shape, self._num_rows = new, shape, num_rows
        return new
