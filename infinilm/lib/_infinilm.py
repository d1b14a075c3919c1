"""The names of InfiniLM's extension module, for code that imports them from it."""

from importlib import import_module
from typing import Any

_HOMES = {
    "CacheConfig": "infinilm.cache",
    "DistConfig": "infinilm.distributed",
    "HookRegistry": "infinilm.debug",
    "InferEngine": "infinilm.lowlevel.infer_engine",
    "LlamaConfig": "infinilm.models",
    "LlamaForCausalLM": "infinilm.models",
    "PagedKVCacheConfig": "infinilm.cache",
    "StaticKVCacheConfig": "infinilm.cache",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_HOMES)}")


def __dir__() -> list[str]:
    return list(_HOMES)
