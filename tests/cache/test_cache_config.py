"""Cache configurations, and the memory that one cache leaves to the next."""

import pytest
import torch

from infinilm.cache import CacheConfig, PagedKVCacheConfig, StaticCacheConfig, StaticKVCacheConfig
from infinilm.cache.paged import CacheMemory, PagedKVCache
from infinilm.cache.specs import AttentionSpec
from infinilm.errors import InvalidTypeError, InvalidValueError

SPECS = [AttentionSpec(2, 8)] * 2


def test_static_cache_config_is_a_value() -> None:
    assert StaticCacheConfig is StaticKVCacheConfig
    config = StaticKVCacheConfig()
    assert (config.max_batch_size, config.max_cache_len) == (1, 0)
    assert StaticKVCacheConfig(4, 100) == StaticKVCacheConfig(max_batch_size=4, max_cache_len=100)
    assert StaticKVCacheConfig(4) != StaticKVCacheConfig(5)
    assert len({StaticKVCacheConfig(4), StaticKVCacheConfig(4), PagedKVCacheConfig(4)}) == 2
    assert isinstance(config, CacheConfig)
    with pytest.raises(AttributeError):
        config.max_batch_size = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"max_batch_size": 0}, InvalidValueError, "max_batch_size=0"),
        ({"max_batch_size": 2.0}, InvalidTypeError, r"max_batch_size=2\.0 must be an integer"),
        ({"max_cache_len": -1}, InvalidValueError, "max_cache_len=-1"),
        ({"max_cache_len": True}, InvalidTypeError, "max_cache_len=True"),
    ],
)
def test_bad_static_configs_are_refused(bad: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        StaticKVCacheConfig(**bad)


def test_the_abstract_config_names_those_to_build() -> None:
    with pytest.raises(NotImplementedError, match="StaticKVCacheConfig or PagedKVCacheConfig"):
        CacheConfig()


def make_cache(num_blocks: int, dtype: torch.dtype = torch.float32, memory: CacheMemory | None = None) -> PagedKVCache:
    return PagedKVCache(SPECS, num_blocks, 16, dtype=dtype, device="cpu", memory=memory)


@pytest.mark.parametrize(
    ("num_blocks", "dtype"), [(8, torch.float32), (3, torch.float32), (16, torch.bfloat16), (1, torch.float16)]
)
def test_memory_that_is_large_enough_is_used_again_and_reads_zero(num_blocks: int, dtype: torch.dtype) -> None:
    first = make_cache(8)
    for layer in range(2):
        first.layers[layer].fill_(float("nan"))
    address = first.layers[0].data_ptr()
    second = make_cache(num_blocks, dtype, first.memory)
    assert second.memory is first.memory
    assert second.layers[0].data_ptr() == address
    assert second.layers[1].shape == (num_blocks, 16, 2, 2, 8)
    assert second.layers[1].dtype == dtype
    assert not second.layers[0].any()
    assert not second.layers[1].any()


def test_layers_of_a_cache_in_used_memory_do_not_overlap() -> None:
    cache = make_cache(5, torch.bfloat16, make_cache(8).memory)
    cache.layers[0].fill_(1)
    assert not cache.layers[1].any()
    cache.layers[1].fill_(2)
    assert cache.layers[0].float().sum() == cache.layers[0].numel()


def test_memory_that_is_too_small_is_replaced() -> None:
    first = make_cache(8)
    first.layers[0].fill_(3)
    second = make_cache(9, memory=first.memory)
    second.layers[1].fill_(7)
    assert first.layers[0].data_ptr() != second.layers[0].data_ptr()
    assert (first.layers[0] == 3).all()
    assert not second.layers[0].any()
    # What is large enough now is what the larger cache left.
    assert make_cache(9, memory=second.memory).layers[0].data_ptr() == second.layers[0].data_ptr()


def test_memory_of_another_device_is_left_alone() -> None:
    first = make_cache(4)
    first.layers[0].fill_(3)
    other = PagedKVCache(SPECS, 4, 16, dtype=torch.float32, device="meta", memory=first.memory)
    assert other.layers[0].is_meta
    assert (first.layers[0] == 3).all()


@pytest.mark.parametrize("platform", ["linux", "other"])
def test_memory_is_cleared_on_every_system_and_whatever_the_mode(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    with torch.inference_mode():
        first = make_cache(4)
        first.layers[0].fill_(3)
    second = make_cache(3, memory=first.memory)
    assert second.layers[0].data_ptr() == first.layers[0].data_ptr()
    assert not second.layers[0].any()
