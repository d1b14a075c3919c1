"""The KV cache: how it is configured, and the tensors behind it."""

from infinilm.cache.config import CacheConfig, PagedKVCacheConfig

PagedCacheConfig = PagedKVCacheConfig
"""Another name for the same class."""

__all__ = ["CacheConfig", "PagedCacheConfig", "PagedKVCacheConfig"]
