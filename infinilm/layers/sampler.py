"""The sampler as one of the layers. It is implemented in `sampling/`."""

from infinilm.sampling import Sampler

__all__ = ["Sampler"]
