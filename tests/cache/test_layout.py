"""What cache configurations mean in memory, and adding a kind of cache from outside."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from infinilm.cache import (
    CacheConfig,
    CacheLayout,
    CacheLimits,
    PagedKVCacheConfig,
    StaticKVCacheConfig,
    consecutive_tables,
    layout_of,
    register_cache,
)
from infinilm.cache.layout import _STRATEGIES
from infinilm.errors import InvalidTypeError, InvalidValueError

GIB = 1 << 30
TOKEN_BYTES = {None: 1024, "float32": 1024, "float16": 512}


def limits(budget_bytes: int = GIB, max_len: int = 100) -> CacheLimits:
    return CacheLimits(max_len, TOKEN_BYTES.__getitem__, budget_bytes)


def test_static_rows_own_runs_of_blocks() -> None:
    layout = layout_of(StaticKVCacheConfig(max_batch_size=3, max_cache_len=33), limits())
    assert (layout.num_blocks, layout.block_size, layout.dtype) == (9, 16, None)
    assert (layout.max_batch_size, layout.max_cache_len, layout.takes_tables) == (3, 33, False)
    assert layout.tables(3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert layout.tables(2).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_static_length_of_0_is_the_models_maximum() -> None:
    layout = layout_of(StaticKVCacheConfig(2), limits(max_len=100))
    assert (layout.num_blocks, layout.max_cache_len) == (14, 100)


@pytest.mark.parametrize(
    ("config", "budget_bytes", "num_blocks"),
    [
        (PagedKVCacheConfig(10), GIB, 10),
        (PagedKVCacheConfig(10, 32), 10 * 32 * 1024, 10),
        (PagedKVCacheConfig(max_kv_memory_bytes=5 * 16 * 1024 + 1), GIB, 5),
        (PagedKVCacheConfig(max_kv_memory_bytes=5 * 16 * 1024, dtype="float16"), GIB, 10),
        (PagedKVCacheConfig(max_kv_memory_bytes=5 * 16 * 1024, block_size=80), GIB, 1),
        (PagedKVCacheConfig(), 7 * 16 * 1024 + 5, 7),
        (PagedKVCacheConfig(dtype="float16"), 7 * 16 * 1024, 14),
    ],
)
def test_paged_blocks_by_count_by_bytes_or_by_what_is_free(
    config: PagedKVCacheConfig, budget_bytes: int, num_blocks: int
) -> None:
    layout = layout_of(config, limits(budget_bytes))
    assert (layout.num_blocks, layout.block_size, layout.dtype) == (num_blocks, config.block_size, config.dtype)
    assert (layout.max_batch_size, layout.max_cache_len, layout.takes_tables) == (None, None, True)


def test_paged_requests_without_tables_share_the_pool_evenly() -> None:
    layout = layout_of(PagedKVCacheConfig(7), limits())
    assert layout.tables(3).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert layout.tables(7).tolist() == [[i] for i in range(7)]
    assert layout.tables(3).dtype == np.int64
    with pytest.raises(InvalidValueError, match=r"8 requests without block_tables.*7 blocks; give block_tables"):
        layout.tables(8)


def test_a_large_pool_gives_a_request_the_same_blocks_in_any_company() -> None:
    layout = layout_of(PagedKVCacheConfig(1000), limits(max_len=40))
    assert layout.tables(1).tolist() == [[0, 1, 2]]
    assert layout.tables(3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


@pytest.mark.parametrize(
    ("config", "budget_bytes", "message"),
    [
        (StaticKVCacheConfig(1, 101), GIB, "max_cache_len=101 is more than the 100 tokens.*use 100 or less"),
        (StaticKVCacheConfig(30_000, 100), GIB, r"max_batch_size=30000.*needs 3\.20 GiB.*1\.00 GiB are free.*smaller"),
        (PagedKVCacheConfig(65537), GIB, r"num_blocks=65537.*needs 1\.00 GiB"),
        (PagedKVCacheConfig(max_kv_memory_bytes=3 * GIB), GIB, r"needs 3\.00 GiB of memory, but 1\.00 GiB"),
        (PagedKVCacheConfig(max_kv_memory_bytes=16383), GIB, r"max_kv_memory_bytes is.*16383 bytes.*16384 bytes"),
        (PagedKVCacheConfig(), 16383, r"memory free for the cache is.*16383 bytes.*one block of 16 tokens"),
        (PagedKVCacheConfig(), 0, "memory free for the cache is"),
    ],
)
def test_what_can_not_fit_is_refused(config: CacheConfig, budget_bytes: int, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        layout_of(config, limits(budget_bytes))


@dataclass(frozen=True)
class SharedPrefixConfig(CacheConfig):
    """Rows that begin with the same blocks."""

    max_batch_size: int
    prefix_blocks: int
    own_blocks: int


def shared_prefix(config: SharedPrefixConfig, limits: CacheLimits) -> CacheLayout:
    def tables(num_requests: int) -> np.ndarray:
        prefix = np.tile(np.arange(config.prefix_blocks), (num_requests, 1))
        own = config.prefix_blocks + consecutive_tables(num_requests, config.own_blocks)
        return np.concatenate([prefix, own], axis=1)

    num_blocks = config.prefix_blocks + config.max_batch_size * config.own_blocks
    return CacheLayout(num_blocks, 16, tables, max_batch_size=config.max_batch_size, takes_tables=False)


@pytest.fixture
def registered() -> Iterator[None]:
    register_cache(SharedPrefixConfig, shared_prefix)
    yield
    del _STRATEGIES[SharedPrefixConfig]


@pytest.mark.usefixtures("registered")
def test_a_registered_kind_of_cache_is_laid_out_and_bounded() -> None:
    layout = layout_of(SharedPrefixConfig(3, 2, 1), limits())
    assert layout.num_blocks == 5
    assert layout.tables(3).tolist() == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    with pytest.raises(InvalidValueError, match=r"SharedPrefixConfig\(max_batch_size=3.* are free for it"):
        layout_of(SharedPrefixConfig(3, 2, 1), limits(5 * 16 * 1024 - 1))
    with pytest.raises(InvalidValueError, match="SharedPrefixConfig is registered already"):
        register_cache(SharedPrefixConfig, shared_prefix)


def test_unknown_kinds_and_other_classes_are_refused() -> None:
    with pytest.raises(InvalidTypeError, match=r"SharedPrefixConfig\(.*StaticKVCacheConfig.*register_cache"):
        layout_of(SharedPrefixConfig(3, 2, 1), limits())
    with pytest.raises(InvalidTypeError, match="cache_config='paged'"):
        layout_of("paged", limits())  # type: ignore[arg-type]
    for bad in (int, SharedPrefixConfig(1, 1, 1), None):
        with pytest.raises(InvalidTypeError, match="must be a subclass of CacheConfig"):
            register_cache(bad, shared_prefix)  # type: ignore[arg-type]


def test_a_layout_of_nothing_or_of_odd_blocks_is_refused() -> None:
    tables = partial(consecutive_tables, blocks_each=1)
    with pytest.raises(InvalidValueError, match="num_blocks=0"):
        CacheLayout(0, 16, tables)
    with pytest.raises(InvalidValueError, match="block_size=20"):
        CacheLayout(1, 20, tables)
