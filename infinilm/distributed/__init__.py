"""Tensor parallelism over several devices."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from infinilm.distributed.config import DistConfig

if TYPE_CHECKING:
    from infinilm.distributed.group import CommunicationGroup, RankInfo

__all__ = ["CommunicationGroup", "DistConfig", "RankInfo"]


def __getattr__(name: str) -> Any:
    # They need torch, which settings do not.
    if name in ("CommunicationGroup", "RankInfo"):
        return getattr(import_module("infinilm.distributed.group"), name)
    raise AttributeError(f"module 'infinilm.distributed' has no attribute {name!r}")
