"""The size and kind of a KV cache, as plain values. Nothing is allocated here."""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from infinilm.checks import check_choice, check_integer, make_numbers_plain
from infinilm.errors import InvalidValueError

if TYPE_CHECKING:
    import torch

    from infinilm.cache.paged import Cache

BLOCK_SIZE_STEP = 16
DTYPES = ("float32", "float16", "bfloat16")
FP8 = "fp8"
"""Keys and values as 8-bit floats with a scale for each token and head, see `kernels/fp8_cache.py`."""


class CacheConfig:
    """The base of the cache configurations; build one of its subclasses."""

    def __init__(self) -> None:
        raise NotImplementedError("CacheConfig is abstract: build StaticKVCacheConfig or PagedKVCacheConfig")

    def unique_copy(self) -> Self:
        """A copy that shares nothing with this configuration. Engines keep one copy and return others."""
        return deepcopy(self)

    def cache_class(self) -> "type[Cache]":
        """The class of the cache. A custom kind of cache overrides this, and its class defines `Cache.update`."""
        from infinilm.cache.paged import PagedKVCache  # needs torch, which settings do not

        return PagedKVCache

    def cache_settings(self) -> dict[str, Any]:
        """The class's keyword arguments besides sizes, as plain values."""
        return {}


@dataclass(frozen=True)
class StaticKVCacheConfig(CacheConfig):
    """A row of memory for each request of a batch: row i of every input continues row i of the input before."""

    max_batch_size: int = 1
    max_cache_len: int = 0
    """Tokens that each row holds. 0: the model's maximum."""

    def __post_init__(self) -> None:
        make_numbers_plain(self)
        check_integer("max_batch_size", self.max_batch_size, low=1)
        check_integer("max_cache_len", self.max_cache_len, low=0)

    def cache_class(self) -> "type[Cache]":
        """See `CacheConfig`."""
        from infinilm.cache.paged import StaticKVCache

        return StaticKVCache

    def cache_settings(self) -> dict[str, Any]:
        """See `CacheConfig`."""
        return {"max_batch_size": self.max_batch_size}


@dataclass(frozen=True)
class PagedKVCacheConfig(CacheConfig):
    """A pool of blocks of `block_size` tokens, sized by count or bytes, or by free memory if neither is given."""

    num_blocks: int | None = None
    block_size: int = BLOCK_SIZE_STEP
    max_kv_memory_bytes: int | None = field(default=None, kw_only=True)
    """The total over all layers, keys and values together; under tensor parallelism, on each rank."""
    dtype: "str | torch.dtype | None" = field(default=None, kw_only=True)
    """None: the model's. "fp8": 8-bit floats with scales. A `torch.dtype` becomes its name."""

    def __post_init__(self) -> None:
        make_numbers_plain(self)
        check_block_size("block_size", self.block_size)
        if self.num_blocks is not None and self.max_kv_memory_bytes is not None:
            raise InvalidValueError(
                f"num_blocks={self.num_blocks} and max_kv_memory_bytes={self.max_kv_memory_bytes} were both given; "
                "give one of them"
            )
        if self.num_blocks is not None:
            check_integer("num_blocks", self.num_blocks, low=1)
        if self.max_kv_memory_bytes is not None:
            check_integer("max_kv_memory_bytes", self.max_kv_memory_bytes, low=1)
        if self.dtype is not None:
            name = str(self.dtype).removeprefix("torch.")
            object.__setattr__(self, "dtype", FP8 if name == "float8_e4m3fn" else name)
            check_choice("dtype", self.dtype, (*DTYPES, FP8))


def check_block_size(name: str, value: int) -> None:
    """Refuse anything but a positive multiple of 16."""
    check_integer(name, value, low=BLOCK_SIZE_STEP)
    if value % BLOCK_SIZE_STEP:
        raise InvalidValueError(f"{name}={value} must be a multiple of {BLOCK_SIZE_STEP}")
