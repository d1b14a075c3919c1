"""The KV cache in the host's memory, as arrays. No torch here."""

import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.cache.specs import CacheSpec, group_layers, resolve_layers, tensor_shapes
from infinilm.errors import EngineError
from infinilm.kernels.native import load_library

ALIGNMENT = 256
"""Bytes; tensors of any type may begin at a multiple of it."""


def map_memory(num_bytes: int) -> mmap.mmap:
    """Memory of zeros. It costs nothing before it is touched."""
    private: int = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    return mmap.mmap(-1, num_bytes, flags=private) if private else mmap.mmap(-1, num_bytes)


class HostCache:
    """Keys and values of attention layers, laid out in memory as `infinilm.cache.Cache` has them."""

    def __init__(
        self, specs: Sequence[CacheSpec], num_blocks: int | Sequence[int], block_size: int, dtype: npt.DTypeLike
    ) -> None:
        """`specs` has one entry per layer, `num_blocks` one per group, or one number for all groups."""
        self.groups = group_layers(specs)
        self.num_blocks = [num_blocks] * len(self.groups) if isinstance(num_blocks, int) else list(num_blocks)
        self.block_size, self.dtype = block_size, np.dtype(dtype)
        shapes = [
            tensor_shapes(group, count, block_size, self.dtype)[0]
            for group, count in zip(self.groups, self.num_blocks, strict=True)
        ]
        sizes = [math.prod(shape) * self.dtype.itemsize for shape in shapes]
        aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        try:
            self.memory = map_memory(sum(aligned))
        except OSError as error:
            raise EngineError(
                f"there is no {sum(aligned) / 2**30:.2f} GiB for a KV cache: {error}; ask for a smaller one"
            ) from error
        layers: dict[int, npt.NDArray[Any]] = {}
        group_of: dict[int, int] = {}
        start = 0
        for index, (group, shape, size) in enumerate(zip(self.groups, shapes, aligned, strict=True)):
            own = np.frombuffer(self.memory, self.dtype, math.prod(shape), start).reshape(shape)
            layers |= dict(zip(group.layers, own, strict=True))
            group_of |= dict.fromkeys(group.layers, index)
            start += size
        owners = resolve_layers(specs)
        self.layers = [layers[owner] for owner in owners]
        """The keys and values of each layer, `[blocks, block_size, 2, kv_heads, head_dim]`."""
        self.group_of = [group_of[owner] for owner in owners]
        """By layer: the index of its group."""
        self.native = load_library().Cache(self.layers)

    @property
    def num_bytes(self) -> int:
        return len(self.memory)
