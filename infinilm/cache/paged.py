"""The paged KV cache: a pool of blocks of tokens, shared by all requests."""

import math
import mmap

import torch

from infinilm.errors import InvalidValueError


class PagedKVCache:
    """Keys and values of all layers, in blocks of `block_size` tokens; a token's key and value lie side by side.

    Token j of a request lies in the block its table names at `j // block_size`, at `j % block_size` in it.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (num_layers, num_blocks, block_size, 2, num_kv_heads, head_dim)
        if min(shape) < 1:
            raise InvalidValueError(f"a KV cache of shape {list(shape)} holds nothing; every size must be 1 or more")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        # Zeros, not empty: what attention masks out is still multiplied by 0, and 0 * NaN is NaN.
        self._layers = _zeros(shape, dtype, self.device).unbind(0)

    def layer(self, index: int) -> torch.Tensor:
        """One layer's keys and values, `[blocks, block_size, 2, kv_heads, head_dim]`."""
        return self._layers[index]

    @staticmethod
    def bytes_per_block(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """What one block takes over all layers, keys and values together."""
        return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed memory that on a CPU costs nothing before it is touched, and then comes in large pages."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
