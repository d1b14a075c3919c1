"""The sampler, under the name that it has among layers. `sampling/` describes and implements it."""

from infinilm.sampling import Sampler

__all__ = ["Sampler"]
