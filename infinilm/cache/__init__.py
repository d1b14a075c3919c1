"""The KV cache: its configuration, its layout in memory and its tensors."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from infinilm.cache.config import CacheConfig, PagedKVCacheConfig, StaticKVCacheConfig
from infinilm.cache.layout import CacheLayout, CacheLimits, consecutive_tables, layout_of, register_cache

if TYPE_CHECKING:
    from infinilm.cache.dynamic import DynamicCache
    from infinilm.cache.paged import Cache, PagedKVCache, StaticKVCache

PagedCacheConfig = PagedKVCacheConfig
StaticCacheConfig = StaticKVCacheConfig
"""Other names for the same classes."""

# They need torch, which settings do not.
_FILES = {
    "Cache": "infinilm.cache.paged",
    "DynamicCache": "infinilm.cache.dynamic",
    "PagedKVCache": "infinilm.cache.paged",
    "StaticKVCache": "infinilm.cache.paged",
}

__all__ = [
    "Cache",
    "CacheConfig",
    "CacheLayout",
    "CacheLimits",
    "DynamicCache",
    "PagedCacheConfig",
    "PagedKVCache",
    "PagedKVCacheConfig",
    "StaticCacheConfig",
    "StaticKVCache",
    "StaticKVCacheConfig",
    "consecutive_tables",
    "layout_of",
    "register_cache",
]


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(import_module(_FILES[name]), name)
    raise AttributeError(f"module 'infinilm.cache' has no attribute {name!r}")
