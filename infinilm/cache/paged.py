"""The paged KV cache: a pool of blocks of tokens, shared by all requests."""

import mmap
import sys

import torch

from infinilm.errors import EngineError, InvalidValueError


class CacheMemory:
    """Memory on one device that one cache after another may use."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._bytes = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._mapping: mmap.mmap | None = None

    @property
    def num_bytes(self) -> int:
        """How much it is; the largest cache decided."""
        return len(self._bytes)

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """`[num_bytes]` uint8, all 0. Whoever had some before must be done with it: it is the same memory if it fits.

        On a CPU it costs nothing before it is touched.
        """
        if num_bytes <= len(self._bytes):
            self._clear()
        else:
            # The old memory goes before the new comes.
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
        if sys.platform == "linux":
            self._mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._mapping = mmap.mmap(-1, num_bytes)
        self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def _clear(self) -> None:
        if sys.platform == "linux" and self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED)  # gives the pages back; zeros come when they are touched again
        else:
            with torch.inference_mode():  # the only mode that may write to memory made in any mode
                self._bytes.zero_()


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
        memory: CacheMemory | None = None,
    ) -> None:
        """Take over the `memory` of an earlier cache, which is then unusable, if it is on the same device."""
        shape = (num_layers, num_blocks, block_size, 2, num_kv_heads, head_dim)
        if min(shape) < 1:
            raise InvalidValueError(f"a KV cache of shape {list(shape)} holds nothing; every size must be 1 or more")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.memory = memory if memory is not None and memory.device == self.device else CacheMemory(self.device)
        num_bytes = num_blocks * self.bytes_per_block(num_layers, block_size, num_kv_heads, head_dim, dtype)
        # Zeros, not rubbish: what attention masks out is still multiplied by 0, and 0 * NaN is NaN.
        self.tensor = self.memory.zeros(num_bytes).view(dtype).view(shape)
        """All layers' keys and values, `[layers, blocks, block_size, 2, kv_heads, head_dim]`."""
        self._layers = self.tensor.unbind(0)

    def layer(self, index: int) -> torch.Tensor:
        """One layer's keys and values, `[blocks, block_size, 2, kv_heads, head_dim]`."""
        return self._layers[index]

    @staticmethod
    def bytes_per_block(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """What one block takes over all layers, keys and values together."""
        return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize
