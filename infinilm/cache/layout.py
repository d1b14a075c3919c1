"""Turns a cache configuration into a number of blocks, and rules for which request gets which.

Every cache is a pool of blocks. Kinds of caches differ in how many blocks they have, and in which blocks a request
without a block table gets. A new kind needs its own `CacheConfig` and a function that turns it into a `CacheLayout`;
`register_cache` registers both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from infinilm.cache.config import (
    BLOCK_SIZE_STEP,
    FP8,
    CacheConfig,
    PagedKVCacheConfig,
    StaticKVCacheConfig,
    check_block_size,
)
from infinilm.checks import check_integer
from infinilm.errors import InvalidTypeError, InvalidValueError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """The limits that a cache has to fit into."""

    max_len: int
    """The longest text that the model can take, in tokens."""
    token_bytes: Callable[[str | None], int]
    """Bytes of one token's keys and values in that dtype (None: the model's), over all layers, on one rank."""
    budget_bytes: int
    """Memory that the cache may take, on each rank."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """A pool of `num_blocks` blocks of `block_size` tokens, and the rules by which requests use it."""

    num_blocks: int
    block_size: int
    tables: "Callable[[int], npt.NDArray[np.int64]]"
    """`tables(n)`, `[n, blocks of each]`: the blocks of n requests without block tables, -1 for none."""
    dtype: str | None = None
    """None: the model's."""
    max_batch_size: int | None = None
    """Requests in one input. None: any number."""
    max_cache_len: int | None = None
    """Tokens of one request. None: as many as its blocks hold."""
    takes_tables: bool = True
    """Whether requests may have their own block tables and slot mappings."""

    def __post_init__(self) -> None:
        check_integer("num_blocks", self.num_blocks, low=1)
        check_block_size("block_size", self.block_size)


CacheStrategy = Callable[[Any, CacheLimits], CacheLayout]
"""Called as `strategy(config, limits)` with a config of the class that it is registered for."""


def consecutive_tables(num_requests: int, blocks_each: int) -> "npt.NDArray[np.int64]":
    """Block tables `[num_requests, blocks_each]` in which each request's blocks follow those of the one before."""
    import numpy as np  # only here: this module is imported with the settings, which need no arrays

    return np.arange(num_requests * blocks_each).reshape(num_requests, blocks_each)


def _static(config: StaticKVCacheConfig, limits: CacheLimits) -> CacheLayout:
    """Row i has the i-th run of blocks."""
    if config.max_cache_len > limits.max_len:
        raise InvalidValueError(
            f"max_cache_len={config.max_cache_len} is more than the {limits.max_len} tokens that the model takes; "
            f"use {limits.max_len} or less, or 0 for all of them"
        )
    max_cache_len = config.max_cache_len or limits.max_len
    blocks_each = -(-max_cache_len // BLOCK_SIZE_STEP)
    return CacheLayout(
        config.max_batch_size * blocks_each,
        BLOCK_SIZE_STEP,
        partial(consecutive_tables, blocks_each=blocks_each),
        max_batch_size=config.max_batch_size,
        max_cache_len=max_cache_len,
        takes_tables=False,
    )


def _paged(config: PagedKVCacheConfig, limits: CacheLimits) -> CacheLayout:
    """As many blocks as were asked for, or as fit. Requests without tables get equal shares."""
    num_blocks, dtype = config.num_blocks, None if config.dtype is None else str(config.dtype)
    dtype = "float8_e4m3fn" if dtype == FP8 else dtype
    if num_blocks is None:
        block_bytes = config.block_size * limits.token_bytes(dtype)
        available = config.max_kv_memory_bytes or limits.budget_bytes
        num_blocks = available // block_bytes
        if num_blocks < 1:
            source = "max_kv_memory_bytes is" if config.max_kv_memory_bytes else "the memory free for the cache is"
            raise InvalidValueError(
                f"{source} {_size(available)}, but one block of {config.block_size} tokens takes {_size(block_bytes)}; "
                "allow more memory, or use a smaller block_size or dtype"
            )
    longest = -(-limits.max_len // config.block_size)
    return CacheLayout(num_blocks, config.block_size, partial(_even_tables, num_blocks, longest), dtype)


def _even_tables(num_blocks: int, longest: int, num_requests: int) -> "npt.NDArray[np.int64]":
    """An equal share of the pool for each request, but no more than the `longest` text needs.

    So request i has the same blocks for any number of requests, as long as the pool has enough for all.
    """
    blocks_each = min(num_blocks // num_requests, longest)
    if blocks_each < 1:
        raise InvalidValueError(
            f"{num_requests} requests without block_tables can't share a cache of {num_blocks} blocks; "
            "give block_tables, fewer requests, or the cache more blocks"
        )
    return consecutive_tables(num_requests, blocks_each)


_STRATEGIES: dict[type[CacheConfig], CacheStrategy] = {StaticKVCacheConfig: _static, PagedKVCacheConfig: _paged}


def register_cache(config_class: type[CacheConfig], strategy: CacheStrategy) -> None:
    """Add a kind of cache. Engines with a `config_class`, or a subclass, use the layout that `strategy` returns."""
    if not (isinstance(config_class, type) and issubclass(config_class, CacheConfig)):
        raise InvalidTypeError(f"config_class={config_class!r} must be a subclass of CacheConfig")
    if config_class in _STRATEGIES:
        raise InvalidValueError(f"{config_class.__name__} is registered already; make a class of your own")
    _STRATEGIES[config_class] = strategy


def layout_of(config: CacheConfig, limits: CacheLimits) -> CacheLayout:
    """The layout of the cache. A cache that can't fit is refused here, before memory is allocated for it."""
    strategy = next((_STRATEGIES[kind] for kind in type(config).__mro__ if kind in _STRATEGIES), None)
    if strategy is None:
        known = ", ".join(each.__name__ for each in _STRATEGIES)
        raise InvalidTypeError(
            f"cache_config={config!r} is no known kind of cache; use one of {known}, or register_cache its class"
        )
    layout = strategy(config, limits)
    needed = layout.num_blocks * layout.block_size * limits.token_bytes(layout.dtype)
    if needed > limits.budget_bytes:
        raise InvalidValueError(
            f"{config!r} needs {_size(needed)} of memory, but {_size(limits.budget_bytes)} are free for it; "
            "ask for a smaller cache, use a smaller dtype, or end other processes"
        )
    return layout


def _size(num_bytes: int) -> str:
    gib = num_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 0.01 else f"{gib:.2g} GiB ({num_bytes} bytes)"
