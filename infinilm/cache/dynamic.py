"""A KV cache that grows with its text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infinilm.cache.layout import consecutive_tables
from infinilm.cache.paged import PagedKVCache
from infinilm.cache.specs import AttentionSpec, CacheSpec
from infinilm.checks import check_integer
from infinilm.errors import InvalidValueError

IntArray = npt.NDArray[np.int64]
BLOCK_SIZE = 16
"""Tokens per block; capacity is counted in blocks."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a model keeps of each token, and on which device."""

    specs: tuple[CacheSpec, ...]  # by layer
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        kinds = ", ".join(map(str, dict.fromkeys(self.specs)))
        return f"num_layers={len(self.specs)}, {kinds}, dtype={self.dtype}, device={self.device}"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the next tokens of each row go, for a batch of N rows with T new tokens in all."""

    slot_mapping: IntArray  # [T], block * block_size + offset
    block_tables: IntArray  # [N, blocks]
    query_lens: IntArray  # [N], new tokens
    context_lens: IntArray  # [N], cached and new tokens


class DynamicCache:
    """Keys and values of rows of equal length, which grow together.

    They are in a paged cache in which each row owns a run of blocks. When the blocks are full, they are copied into a
    paged cache with twice as many. The cache is empty at first and takes its shape from the model that uses it, or from
    `update`.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Remove all tokens and free the memory."""
        self._shape: KVShape | None = None
        self._pool: PagedKVCache | None = None
        self._num_rows = 0
        self._lengths: list[int] = []  # by layer: the tokens in each row

    @property
    def batch_size(self) -> int:
        """The number of rows; 0 while it is empty."""
        return self._num_rows if any(self._lengths) else 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens in each row of a layer."""
        return self._lengths[layer_idx] if layer_idx < len(self._lengths) else 0

    def __len__(self) -> int:
        """The number of layers."""
        return len(self._lengths)

    def __getitem__(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, `[batch, kv_heads, tokens, head_dim]` each, as views of the cache's memory."""
        if self._pool is None or not 0 <= layer_idx < len(self._lengths):
            raise IndexError(f"layer_idx={layer_idx}: the cache has {len(self._lengths)} layers")
        layer = self._pool.layers[layer_idx]
        rows = layer.view(self._num_rows, -1, *layer.shape[2:])[:, : self._lengths[layer_idx]]
        keys, values = rows.transpose(1, 3).unbind(2)
        return keys, values

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self[layer_idx] for layer_idx in range(len(self)))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append the next tokens' keys and values `[batch, kv_heads, new, head_dim]` to a layer.

        Returns all keys and values of the layer, like `cache[layer_idx]`.
        """
        check_integer("layer_idx", layer_idx, low=0)
        if key_states.shape != value_states.shape or key_states.dim() != 4 or not key_states.numel():
            raise InvalidValueError(
                f"key_states of {list(key_states.shape)} and value_states of {list(value_states.shape)} must both be "
                "[batch, kv_heads, new, head_dim]"
            )
        num_rows, num_heads, num_new, head_dim = key_states.shape
        specs = list(self._shape.specs if self._shape is not None and any(self._lengths) else ())
        specs += [AttentionSpec(num_heads, head_dim)] * (layer_idx + 1 - len(specs))
        own = specs[layer_idx]
        if not isinstance(own, AttentionSpec) or (own.num_kv_heads, own.head_dim) != (num_heads, head_dim):
            raise InvalidValueError(f"key_states of {list(key_states.shape)} do not fit layer {layer_idx}, {own}")
        shape = KVShape(tuple(specs), key_states.dtype, key_states.device)
        with torch.inference_mode():  # the only mode that may write to memory made in any mode
            placement, pool = self.place(shape, num_rows, num_new, layer_idx)
            key, value = (states.transpose(1, 2).flatten(0, 1) for states in (key_states, value_states))
            pool.store(layer_idx, key, value, torch.from_numpy(placement.slot_mapping).to(shape.device))
        self.advance(num_new, layer_idx)
        return self[layer_idx]

    def place(
        self, shape: KVShape, batch_size: int, num_new: int, layer_idx: int | None = None
    ) -> tuple[Placement, PagedKVCache]:
        """Make room for the next `num_new` tokens of each row. Returns where they go, and the cache to put them in.

        With a `layer_idx`, this is for that layer only, and `shape` may have more layers than the cache. The tokens
        count only after `advance`, so a computation that fails leaves everything as it was.
        """
        self._check_shape(shape, batch_size, may_grow=layer_idx is not None)
        if layer_idx is None and len(set(self._lengths)) > 1:
            raise InvalidValueError(
                f"the layers of the cache hold {self._lengths} tokens; update all of them alike, or use a new one"
            )
        start = self.get_seq_length(layer_idx or 0)
        num_tokens = start + num_new
        num_blocks = -(-max(num_tokens, *self._lengths, 0) // BLOCK_SIZE)
        pool = self._with_room(shape, batch_size, num_blocks)
        tables = consecutive_tables(batch_size, pool.num_blocks[0] // batch_size)
        places = np.arange(start, num_tokens)
        slots = tables[:, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
        placement = Placement(
            slot_mapping=slots.reshape(-1),
            block_tables=tables[:, : -(-num_tokens // BLOCK_SIZE)],
            query_lens=np.full(batch_size, num_new, dtype=np.int64),
            context_lens=np.full(batch_size, num_tokens, dtype=np.int64),
        )
        return placement, pool

    def advance(self, num_new: int, layer_idx: int | None = None) -> None:
        """Count tokens that were placed and have been computed, in all layers or in one."""
        for layer in range(len(self._lengths)) if layer_idx is None else [layer_idx]:
            self._lengths[layer] += num_new

    def _check_shape(self, shape: KVShape, batch_size: int, *, may_grow: bool) -> None:
        """Refuse a shape that can't keep the cached tokens. An empty cache accepts any shape."""
        old = self._shape
        if old is None or not any(self._lengths):
            if (shape, batch_size) != (old, self._num_rows):
                self.reset()
            return
        new_specs = shape.specs[: len(old.specs)] if may_grow else shape.specs
        is_same = _without_windows(new_specs) == _without_windows(old.specs)
        if not is_same or (shape.dtype, shape.device, batch_size) != (old.dtype, old.device, self._num_rows):
            raise InvalidValueError(
                f"the cache holds {self._num_rows} rows of {old}, but the model brings {batch_size} rows "
                f"of {shape}; use a new DynamicCache, or reset this one"
            )

    def _with_room(self, shape: KVShape, num_rows: int, num_blocks: int) -> PagedKVCache:
        """The paged cache, after growing it if it has fewer layers, or its rows fewer than `num_blocks` blocks."""
        old = self._pool
        old_num_blocks = 0 if old is None else old.num_blocks[0] // num_rows
        if old is not None and shape == self._shape and num_blocks <= old_num_blocks:
            return old
        capacity = num_blocks if num_blocks <= old_num_blocks else max(num_blocks, 2 * old_num_blocks)
        new = PagedKVCache(shape.specs, num_rows * capacity, BLOCK_SIZE, dtype=shape.dtype, device=shape.device)
        if old is not None:
            kept = min(old_num_blocks, capacity)
            for source, target in zip(old.layers.values(), new.layers.values(), strict=False):  # [rows * blocks, …]
                by_row = (num_rows, -1, *source.shape[1:])
                target.view(by_row)[:, :kept] = source.view(by_row)[:, :kept]
        self._pool, self._shape, self._num_rows = new, shape, num_rows
        self._lengths += [0] * (len(shape.specs) - len(self._lengths))
        return new


def _without_windows(specs: Sequence[CacheSpec]) -> list[CacheSpec]:
    """The specs without windows: a growing cache keeps all tokens, even if layers see fewer."""
    return [replace(spec, window=None) if isinstance(spec, AttentionSpec) else spec for spec in specs]
