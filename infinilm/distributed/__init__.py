"""Tensor parallelism over several devices."""

from infinilm.distributed.config import DistConfig

__all__ = ["DistConfig"]
