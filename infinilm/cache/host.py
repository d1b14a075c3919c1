"""The KV cache in the host's memory, as arrays. Needs no torch."""

import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.cache.specs import CacheGroup, CacheSpec, StateSpec, group_layers, resolve_layers, tensor_shapes
from infinilm.errors import EngineError
from infinilm.kernels.native import load_library

ALIGNMENT = 256
"""Bytes; tensors of any type may begin at a multiple of it."""


def map_memory(num_bytes: int) -> mmap.mmap:
    """Memory of zeros. It takes no physical memory before it is touched."""
    private: int = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    return mmap.mmap(-1, num_bytes, flags=private) if private else mmap.mmap(-1, num_bytes)


class HostCache:
    """The KV cache of all layers, with the memory layout of `infinilm.cache.Cache`."""

    def __init__(
        self, specs: Sequence[CacheSpec], num_blocks: int | Sequence[int], block_size: int, dtype: npt.DTypeLike
    ) -> None:
        """`specs` has one entry per layer, `num_blocks` one per group, or one number for all groups."""
        self.groups = group_layers(specs)
        self.num_blocks = [num_blocks] * len(self.groups) if isinstance(num_blocks, int) else list(num_blocks)
        self.block_size, self.dtype = block_size, np.dtype(dtype)
        shapes = memory_shapes(self.groups, self.num_blocks, block_size, self.dtype)
        kinds = [np.dtype(np.float32) if isinstance(group.spec, StateSpec) else self.dtype for group in self.groups]
        num_bytes = sum(
            _aligned(math.prod(shape) * kind.itemsize) for own, kind in zip(shapes, kinds, strict=True) for shape in own
        )
        try:
            self.memory = map_memory(num_bytes)
        except OSError as error:
            raise EngineError(
                f"there is no {num_bytes / 2**30:.2f} GiB for a KV cache: {error}; ask for a smaller one"
            ) from error
        self.state_ends = make_state_ends(self.groups, self.num_blocks)
        """By group of recurrent layers: the tokens of its text that each block's state has seen."""
        layers: dict[int, Any] = {}
        group_of: dict[int, int] = {}
        start = 0
        for index, (group, own, kind) in enumerate(zip(self.groups, shapes, kinds, strict=True)):
            arrays = []
            for shape in own:
                arrays.append(np.frombuffer(self.memory, kind, math.prod(shape), start).reshape(shape))
                start += _aligned(arrays[-1].nbytes)
            for place, layer in enumerate(group.layers):
                kept = [array[place] for array in arrays]
                layers[layer] = [*kept, self.state_ends[index]] if index in self.state_ends else kept[0]
            group_of |= dict.fromkeys(group.layers, index)
        owners = resolve_layers(specs)
        self.group_of = [group_of[owner] for owner in owners]
        """By layer: the index of its group."""
        self.native = load_library().Cache([layers[owner] for owner in owners], block_size=block_size)

    @property
    def num_bytes(self) -> int:
        return len(self.memory)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def memory_shapes(
    groups: Sequence[CacheGroup], num_blocks: Sequence[int], block_size: int, dtype: Any
) -> list[list[tuple[int, ...]]]:
    """By group: the shapes of its tensors.

    A group of states has one extra block for states that are not kept, such as those of a graph's padding.
    """
    return [
        tensor_shapes(group, count + isinstance(group.spec, StateSpec), block_size, dtype)
        for group, count in zip(groups, num_blocks, strict=True)
    ]


def make_state_ends(groups: Sequence[CacheGroup], num_blocks: Sequence[int]) -> dict[int, npt.NDArray[np.int64]]:
    """By group of recurrent layers: how many tokens each block's state has seen, at first 0."""
    return {
        index: np.zeros(count, dtype=np.int64)
        for index, (group, count) in enumerate(zip(groups, num_blocks, strict=True))
        if isinstance(group.spec, StateSpec)
    }
