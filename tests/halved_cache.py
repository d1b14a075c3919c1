"""A cache strategy of one's own, in a module that other ranks can import."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from infinilm.cache import Cache, PagedKVCacheConfig


class HalvedCache(Cache):
    """Keeps values times a factor, so that results can tell whether it was used."""

    def __init__(self, *sizes: Any, factor: float = 0.5, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.factor = factor

    def update(self, layer_idx: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> Tensor:
        return self.store(layer_idx, key, value * self.factor, slot_mapping)


@dataclass(frozen=True)
class HalvedCacheConfig(PagedKVCacheConfig):
    """A strategy of one's own."""

    factor: float = 0.5

    def cache_class(self) -> type[Cache]:
        return HalvedCache

    def cache_settings(self) -> dict[str, Any]:
        return {"factor": self.factor}
