"""KV caches: pools of blocks of tokens, shared by all requests."""

import math
import mmap
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from infinilm.cache.host import ALIGNMENT, make_state_ends, map_memory, memory_shapes
from infinilm.cache.specs import (
    CacheGroup,
    CacheSpec,
    StateSpec,
    bytes_per_block,
    group_layers,
    resolve_layers,
)
from infinilm.errors import EngineError, InvalidValueError
from infinilm.kernels import native
from infinilm.kernels.fp8_cache import DTYPE as FP8
from infinilm.kernels.fp8_cache import as_bytes, store_quantized
from infinilm.kernels.nonfinite import mark_nonfinite

__all__ = ["Cache", "CacheMemory", "PagedKVCache", "StaticKVCache", "bytes_per_block"]


class CacheMemory:
    """Memory on one device, which successive caches may reuse."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._bytes = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._mapping: mmap.mmap | None = None

    @property
    def num_bytes(self) -> int:
        """The size, which is that of the largest cache so far."""
        return len(self._bytes)

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """`[num_bytes]` uint8, all 0. No earlier cache may still be in use: its memory is reused if it suffices.

        On a CPU it takes no physical memory before it is touched.
        """
        if num_bytes <= len(self._bytes):
            self._clear()
        else:
            # Free the old memory before allocating the new.
            self._bytes, self._mapping = self._bytes[:0].clone(), None
            try:
                self._allocate(num_bytes)
            except (OSError, torch.OutOfMemoryError) as error:
                raise EngineError(
                    f"{self.device} has no {num_bytes / 2**30:.2f} GiB for a KV cache: {error}; ask for a smaller one"
                ) from error
        return self._bytes[:num_bytes]

    def _allocate(self, num_bytes: int) -> None:
        if self.device.type != "cpu":
            self._bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
            return
        self._mapping = map_memory(num_bytes)
        self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def _clear(self) -> None:
        if sys.platform == "linux" and self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED)  # frees the pages; they are zeros when they are touched again
        else:
            with torch.inference_mode():  # the only mode that may write to memory made in any mode
                self._bytes.zero_()


class Cache:
    """Keys and values of all layers, in blocks of `block_size` tokens; a token's key and value lie side by side.

    Layers with equal specs form a group, with its own number of blocks and its own block tables. Token j of a request
    lies in the block that the group's table names at `j // block_size`, at `j % block_size` in it.

    A subclass defines `update`, which decides what is kept of new keys and values, and what attention sees.
    """

    only_stores: ClassVar[bool] = False
    """Whether `update` only calls `store`, so that a kernel may replace it."""

    def __init_subclass__(cls) -> None:
        if "update" in cls.__dict__ and "only_stores" not in cls.__dict__:
            cls.only_stores = False

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        num_blocks: int | Sequence[int],
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        memory: CacheMemory | None = None,
        held: range | None = None,
    ) -> None:
        """`specs` has one entry per layer, `num_blocks` one per group, or one number for all groups. Only the layers
        `held` have memory; None: all.

        The `memory` of an earlier cache is reused if it is on the same device; the earlier cache is then unusable.
        """
        self.groups = group_layers(specs, held)
        self.num_blocks = [num_blocks] * len(self.groups) if isinstance(num_blocks, int) else list(num_blocks)
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.memory = memory if memory is not None and memory.device == self.device else CacheMemory(self.device)
        self.tensors = self._allocate()
        """By group: keys and values `[layers of the group, blocks, block_size, 2, kv_heads, head_dim]`, and for 8-bit
        floats scales `[layers, blocks, kv_heads, block_size, 2]`; latent vectors, which are keys and values at once,
        `[layers, blocks, block_size, 1, 1, dim]`; or the tensors of states, `[layers, blocks, …]`."""
        places = {layer: (g, i) for g, group in enumerate(self.groups) for i, layer in enumerate(group.layers)}
        owners = resolve_layers(specs)
        by_layer = {layer: places[owners[layer]] for layer in held or range(len(specs))}
        self.group_of = {layer: group for layer, (group, _) in by_layer.items()}
        """By layer held: the index of its group."""
        self.layers: dict[int, Tensor] = {}
        """The keys and values of each attention layer held, `[blocks, block_size, 2, kv_heads, head_dim]`."""
        self.scales: dict[int, Tensor] = {}
        """If they are 8-bit floats: the scales of each attention layer held, see `kernels/fp8_cache.py`."""
        self.states: dict[int, list[Tensor]] = {}
        """The state's tensors of each recurrent layer held, `[blocks + 1, …]` each."""
        self.state_ends = make_state_ends(self.groups, self.num_blocks)
        """By group of recurrent layers: the tokens of its text that each block's state has seen, on the host."""
        for layer, (group, index) in by_layer.items():
            own = [tensor[index] for tensor in self.tensors[group]]
            if isinstance(self.groups[group].spec, StateSpec):
                self.states[layer] = own
            else:
                self.layers[layer] = own[0]
                if len(own) > 1:
                    self.scales[layer] = own[1]

    def _allocate(self) -> list[list[Tensor]]:
        """The tensors of all groups, in one piece of memory."""
        shapes = memory_shapes(self.groups, self.num_blocks, self.block_size, self.dtype)
        for shape in (shape for own in shapes for shape in own):
            if min(shape[1:]) < 1:  # a rank may hold no layer of a group
                raise InvalidValueError(
                    f"a KV cache of shape {list(shape)} holds nothing; every size must be 1 or more"
                )
        kinds = [_tensor_dtypes(group, self.dtype) for group in self.groups]
        sizes = [
            [math.prod(shape) * kind.itemsize for shape, kind in zip(*own, strict=True)]
            for own in zip(shapes, kinds, strict=True)
        ]
        aligned = [-(-size // ALIGNMENT) * ALIGNMENT for own in sizes for size in own]
        # The memory must be zeroed: masked values are still multiplied by 0, and 0 * NaN is NaN.
        parts = iter(torch.split(self.memory.zeros(sum(aligned)), aligned))
        return [
            [next(parts)[:size].view(kind).view(shape) for size, kind, shape in zip(*own, strict=True)]
            for own in zip(sizes, kinds, shapes, strict=True)
        ]

    @cached_property
    def native(self) -> Any:
        """The cache of the layers held, in the form that the native library's decoder takes."""
        library: Any = native.load()
        kept = [
            [*native.arrays_of(*self.states[layer]), self.state_ends[group]]
            if layer in self.states
            else native.arrays_of(as_bytes(self.layers[layer]))[0]
            for layer, group in self.group_of.items()
        ]
        return library.Cache(kept, native.arrays_of(*self.scales.values()), self.block_size)

    def native_place(self, layer: int) -> int:
        """The index in `native` of a layer held."""
        return list(self.group_of).index(layer)

    def update(self, layer_idx: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> Tensor:
        """Add the keys and values `[T, kv_heads, head_dim]` of new tokens, rotated already, to a layer.

        Token i belongs in `slot_mapping[i]` `[T]`, which is block * block_size + offset; negative: nowhere. Returns the
        keys and values that the layer attends to, in the shape of `layers[layer_idx]`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define update; store writes into the slots")

    def store(self, layer_idx: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> Tensor:
        """Write keys and values into their slots; for `update`. Returns the layer's keys and values."""
        layer = self.layers[layer_idx]
        is_written = slot_mapping >= 0
        new, slots = torch.stack((key, value), dim=1)[is_written], slot_mapping[is_written]
        if layer_idx in self.scales:
            store_quantized(mark_nonfinite(new), layer, self.scales[layer_idx], slots)
        else:
            layer.flatten(0, 1).index_copy_(0, slots, mark_nonfinite(new.to(layer.dtype)))
        return layer

    def __getitem__(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, `[blocks, kv_heads, block_size, head_dim]` each, as views."""
        keys, values = self.layers[layer_idx].transpose(1, 3).unbind(2)
        return keys, values

    def __len__(self) -> int:
        return len(self.layers)


class PagedKVCache(Cache):
    """Blocks that any request may use: the cache of `PagedKVCacheConfig`."""

    only_stores = True

    def update(self, layer_idx: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> Tensor:
        """See `Cache`."""
        return self.store(layer_idx, key, value, slot_mapping)


class StaticKVCache(PagedKVCache):
    """Rows that own equal runs of blocks: the cache of `StaticKVCacheConfig`."""

    def __init__(
        self, specs: Sequence[CacheSpec], num_blocks: int, block_size: int, *, max_batch_size: int = 1, **options: Any
    ) -> None:
        super().__init__(specs, num_blocks, block_size, **options)
        self.max_batch_size = max_batch_size

    def __getitem__(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, `[batch, kv_heads, tokens of a row, head_dim]` each, as views."""
        layer = self.layers[layer_idx]
        keys, values = layer.reshape(self.max_batch_size, -1, *layer.shape[2:]).transpose(1, 3).unbind(2)
        return keys, values


def _tensor_dtypes(group: CacheGroup, dtype: torch.dtype) -> list[torch.dtype]:
    if isinstance(group.spec, StateSpec):
        return [torch.float32] * len(group.spec.shapes)
    return [dtype, torch.bfloat16] if dtype == FP8 else [dtype]
