"""The guarantee that a request's results depend neither on other requests nor on how they are computed."""

import logging
from dataclasses import dataclass

from infinilm.executor.executor import Executor

logger = logging.getLogger(__name__)

MAX_LISTED = 4
ORDERED_ATTENTION = {"cpu": "native", "cuda": "triton"}
"""By kind of device: the attention backend whose order of summation is fixed."""


@dataclass(frozen=True, slots=True)
class Guarantee:
    """Whether equal requests get equal bits, alone or with others, in any chunks, with a cold or a warm cache."""

    reasons: tuple[str, ...] = ()
    """Why they may not. Empty: the guarantee holds."""

    @property
    def holds(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return "yes" if self.holds else f"no, because {'; '.join(self.reasons)}"


def find_guarantee(executor: Executor, *, is_ordered: bool) -> Guarantee:
    """The guarantee for a loaded model. Tries its layers on all ranks. `is_ordered`: sums are added in one order."""
    guarantee = _find(executor, is_ordered=is_ordered)
    level = logging.INFO if is_ordered and not guarantee.holds else logging.DEBUG
    logger.log(level, "deterministic: %s", guarantee)
    return guarantee


def _find(executor: Executor, *, is_ordered: bool) -> Guarantee:
    info = executor.info
    num_ranks = info.num_ranks // info.num_stages
    how = {"is_native": info.is_native, "is_ordered": is_ordered}
    reasons = known_reasons(info.device, info.attention, num_ranks, **how)
    if not is_ordered and (reasons or not info.device.startswith("cpu")):
        return Guarantee(("deterministic=True is not set", *reasons))
    if failing := executor.check_layers():
        listed = ", ".join(failing[:MAX_LISTED]) + (", …" if len(failing) > MAX_LISTED else "")
        reasons.append(f"on this device a token's bits depend on what is computed beside it in {listed}")
    return Guarantee(tuple(reasons))


def known_reasons(device: str, attention: str, num_ranks: int, *, is_native: bool, is_ordered: bool) -> list[str]:
    """Known reasons against a guarantee for a device, an attention backend and a number of ranks per layer.

    `is_native` says whether the native library computes all layers, `is_ordered` whether sums are added in one order.
    """
    if is_native:
        return []
    kind = device.partition(":")[0]
    reasons = []
    if kind not in ("cpu", "cuda"):
        reasons.append(f"on {kind} torch's own kernels compute, and their orders of summation are not known")
    if num_ranks > 2 and not is_ordered:
        reasons.append("without deterministic=True the order of a sum over more than two ranks depends on its size")
    if kind in ORDERED_ATTENTION and attention != ORDERED_ATTENTION[kind]:
        reasons.append(f"attention by {attention} sums in an order that depends on the chunk")
    return reasons
