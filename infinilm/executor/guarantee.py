"""What an engine promises of its results: that they do not depend on what else it computes, nor on how."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infinilm.cache.specs import LatentSpec, StateSpec
from infinilm.config import Config
from infinilm.executor.executor import Executor

if TYPE_CHECKING:
    from torch import nn

    from infinilm.layers.formats import DenseWeight
    from infinilm.models import ModelConfig

MAX_LISTED = 4
ROW_COUNTS = {"cpu": (1, 3, 5, 17, 24, 70, 130), "cuda": (1, 2, 5, 8, 16, 17, 24, 32, 33, 65, 130, 256)}
"""By kind of device: numbers of rows whose products are compared with those of three times the last."""
ORDERED_ATTENTION = {"cpu": "native", "cuda": "triton"}
"""By kind of device: the backend whose sums have an order of their own."""
LARGE_MATRIX, MAX_LARGE_ROWS = 32_000_000, 17
"""From so many elements on, only so many rows are compared on a CPU, so that a start is not delayed."""


@dataclass(frozen=True, slots=True)
class Guarantee:
    """Whether equal requests get equal bits alone and in company, in any chunks, on a cold and a warm cache."""

    reasons: tuple[str, ...] = ()
    """Why they may not; none: they do."""

    @property
    def holds(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return "yes" if self.holds else f"no, because {'; '.join(self.reasons)}"


def find_guarantee(config: Config, model_config: "ModelConfig", executor: Executor, *, is_ordered: bool) -> Guarantee:
    """What holds for a loaded model, whose sums may have one order. Products of matrices are tried on its device."""
    info = executor.info
    num_ranks = info.num_ranks // info.num_stages
    reasons = known_reasons(model_config, info.device, info.attention, num_ranks, is_native=info.is_native)
    if config.kv_cache_dtype == "fp8" and info.device.startswith("cuda"):
        reasons.append("on a GPU results with a cache of 8-bit floats were seen to differ in their last bits")
    is_ordered = is_ordered or bool(config.deterministic)
    if not is_ordered and (reasons or not info.device.startswith("cpu")):
        return Guarantee(("deterministic=True is not set", *reasons))
    if failing := executor.failing_products():
        listed = ", ".join(failing[:MAX_LISTED]) + (", …" if len(failing) > MAX_LISTED else "")
        reasons.append(f"on this device a row's bits depend on the number of rows in products with {listed}")
    return Guarantee(tuple(reasons))


def known_reasons(
    model_config: "ModelConfig", device: str, attention: str, num_ranks: int, *, is_native: bool
) -> list[str]:
    """Why nothing can be promised for a model on a device, with an attention backend and so many ranks a layer.

    `is_native` says whether the native library computes all layers.
    """
    if is_native:
        return []
    kind = device.partition(":")[0]
    specs = model_config.cache_specs()
    reasons = []
    if kind not in ("cpu", "cuda"):
        reasons.append(f"on {kind} torch's own kernels compute, and their orders of summation are not known")
    if num_ranks > 2:
        reasons.append("the order in which more than two ranks' results are added depends on the number of rows")
    if any(isinstance(spec, StateSpec) for spec in specs):
        reasons.append("recurrent layers compute a prompt in chunks, and single tokens in another order")
    if any(isinstance(spec, LatentSpec) for spec in specs):
        reasons.append("latent attention sums in an order that may depend on the chunk")
    elif kind in ORDERED_ATTENTION and attention != ORDERED_ATTENTION[kind]:
        reasons.append(f"attention by {attention} sums in an order that depends on the chunk")
    return reasons


def failing_products(model: "nn.Module") -> list[str]:
    """The shapes of dense matrices with which a row's product depends on its place or on the other rows.

    Those of a CPU are multiplied piece by piece from here on if that helps.
    """
    from infinilm.layers.formats import DenseWeight
    from infinilm.layers.moe import Experts

    failing: list[str] = []
    tried: dict[Any, DenseWeight] = {}
    for matrix in (module for module in model.modules() if isinstance(module, DenseWeight)):
        key = (matrix.in_features, matrix.out_features, matrix.weight.shape, matrix.weight.dtype)
        if key in tried:
            matrix.is_piecewise = tried[key].is_piecewise
            continue
        tried[key] = matrix
        if _is_invariant(matrix):
            continue
        matrix.is_piecewise = not matrix.weight.is_cuda
        if not matrix.is_piecewise or not _is_invariant(matrix):
            failing.append(f"{matrix.in_features} x {matrix.out_features}")
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    if any(weight.is_cuda for module in experts for weight in module.parameters()):
        failing.append("experts, which were not tried")
    return failing


def _is_invariant(matrix: "DenseWeight") -> bool:
    """Whether a row's product is the same for all numbers of rows that are tried, and in any place."""
    import torch

    num_columns, num_rows = matrix.in_features, matrix.out_features
    counts = ROW_COUNTS[matrix.weight.device.type]
    is_large = not matrix.weight.is_cuda and num_columns * num_rows >= LARGE_MATRIX
    with torch.inference_mode():
        x = torch.randn(counts[-1], num_columns, generator=torch.Generator().manual_seed(0)).to(matrix.weight)
        expected = matrix.multiply(x[:MAX_LARGE_ROWS] if is_large else torch.cat((x, x, x)))
        if is_large:
            counts = tuple(count for count in counts if count < MAX_LARGE_ROWS)
        elif any(not part.equal(expected[: len(x)]) for part in expected.view(-1, len(x), num_rows)):
            return False
        return all(matrix.multiply(x[:count]).equal(expected[:count]) for count in counts)
