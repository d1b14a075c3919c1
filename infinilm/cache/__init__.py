"""The KV cache: how it is configured, what that means in memory, and the tensors behind it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from infinilm.cache.config import CacheConfig, PagedKVCacheConfig, StaticKVCacheConfig
from infinilm.cache.layout import CacheLayout, CacheLimits, consecutive_tables, layout_of, register_cache

if TYPE_CHECKING:
    from infinilm.cache.dynamic import DynamicCache

PagedCacheConfig = PagedKVCacheConfig
StaticCacheConfig = StaticKVCacheConfig
"""Other names for the same classes."""

__all__ = [
    "CacheConfig",
    "CacheLayout",
    "CacheLimits",
    "DynamicCache",
    "PagedCacheConfig",
    "PagedKVCacheConfig",
    "StaticCacheConfig",
    "StaticKVCacheConfig",
    "consecutive_tables",
    "layout_of",
    "register_cache",
]


def __getattr__(name: str) -> Any:
    if name == "DynamicCache":  # needs torch, which settings do not
        return import_module("infinilm.cache.dynamic").DynamicCache
    raise AttributeError(f"module 'infinilm.cache' has no attribute {name!r}")
