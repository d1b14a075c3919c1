"""Settings that users pass in, beyond what engines are built with elsewhere."""

import pytest

from infinilm import Config
from infinilm.cache import CacheConfig, PagedCacheConfig, PagedKVCacheConfig
from infinilm.config import PRESETS
from infinilm.distributed import DistConfig
from infinilm.errors import InvalidTypeError, InvalidValueError


def test_defaults_are_the_documented_ones() -> None:
    config = Config()
    assert (config.max_num_batched_tokens, config.max_num_seqs, config.kvcache_block_size) == (16384, 512, 16)
    assert (config.gpu_memory_utilization, config.seed, config.enable_prefix_caching) == (0.9, 0, True)
    assert (config.model, config.max_model_len, config.num_kvcache_blocks, config.distributed) == (None,) * 4
    assert config.deterministic is None
    assert Config(kvcache_block_size=256).kvcache_block_size == 256


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_configs_that_can_be_changed(name: str) -> None:
    assert Config.preset(name, seed=7) == Config(**{**PRESETS[name], "seed": 7})


def test_dist_config() -> None:
    assert repr(DistConfig()) == str(DistConfig()) == "DistConfig(tp_device_ids=[0])"
    assert DistConfig(4) == DistConfig(tp_size=4) == DistConfig(tp_device_ids=[0, 1, 2, 3])
    config = DistConfig(tp_device_ids=[0, 2])
    config.tp_device_ids = [1, 3, 5]
    assert config.tp_size == 3
    for bad in ([], [0, 0], [-1]):
        with pytest.raises(InvalidValueError, match="tp_device_ids"):
            config.tp_device_ids = bad
    assert config.tp_device_ids == [1, 3, 5]
    with pytest.raises(InvalidValueError, match="both given"):
        DistConfig(2, [0, 1])
    with pytest.raises(InvalidTypeError, match="tp_size='2'"):
        DistConfig("2")  # type: ignore[arg-type]


def test_paged_cache_config() -> None:
    assert PagedKVCacheConfig() == PagedCacheConfig(None, 16)
    assert PagedKVCacheConfig(8, 32, dtype="float16").dtype == "float16"
    with pytest.raises(NotImplementedError, match="abstract"):
        CacheConfig()
    for bad, message in (
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"block_size": 20}, "block_size=20"),
        ({"num_blocks": 1, "max_kv_memory_bytes": 1}, "both given"),
        ({"dtype": "int8"}, "dtype='int8'"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            PagedKVCacheConfig(**bad)
    with pytest.raises(AttributeError):
        PagedKVCacheConfig().num_blocks = 3  # type: ignore[misc]
