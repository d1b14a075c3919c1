"""What an engine promises of its results: that they do not depend on what else it computes, nor on how."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from infinilm.cache.specs import LatentSpec, StateSpec
from infinilm.executor.executor import Executor

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from infinilm.layers.formats import DenseWeight, TiledWeight
    from infinilm.layers.moe import SparseMLP
    from infinilm.models import ModelConfig

logger = logging.getLogger(__name__)

MAX_LISTED = 4
ROW_COUNTS = {"cpu": (1, 3, 5, 17, 24, 70, 130), "cuda": (1, 2, 5, 8, 16, 17, 24, 32, 33, 65, 130, 256)}
"""By kind of device: numbers of rows whose products are compared with those of three times the last."""
ORDERED_ATTENTION = {"cpu": "native", "cuda": "triton"}
"""By kind of device: the backend whose sums have an order of their own."""
LARGE_MATRIX, MAX_LARGE_ROWS = 32_000_000, 17
"""From so many elements on, only so many rows are compared on a CPU, so that a start is not delayed."""
MAX_EXPERT_ROWS = 8192
"""Experts are tried with so many rows at most."""


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


def find_guarantee(model_config: "ModelConfig", executor: Executor, *, is_ordered: bool) -> Guarantee:
    """What holds for a loaded model, whose sums may have one order. Its products are tried on all ranks."""
    guarantee = _find(model_config, executor, is_ordered=is_ordered)
    level = logging.INFO if is_ordered and not guarantee.holds else logging.DEBUG
    logger.log(level, "deterministic: %s", guarantee)
    return guarantee


def _find(model_config: "ModelConfig", executor: Executor, *, is_ordered: bool) -> Guarantee:
    info = executor.info
    num_ranks = info.num_ranks // info.num_stages
    how = {"is_native": info.is_native, "is_ordered": is_ordered}
    reasons = known_reasons(model_config, info.device, info.attention, num_ranks, **how)
    if not is_ordered and (reasons or not info.device.startswith("cpu")):
        return Guarantee(("deterministic=True is not set", *reasons))
    if failing := executor.check_products():
        listed = ", ".join(failing[:MAX_LISTED]) + (", …" if len(failing) > MAX_LISTED else "")
        reasons.append(f"on this device a row's bits depend on the number of rows in products with {listed}")
    return Guarantee(tuple(reasons))


def known_reasons(
    model_config: "ModelConfig", device: str, attention: str, num_ranks: int, *, is_native: bool, is_ordered: bool
) -> list[str]:
    """Why nothing can be promised for a model on a device, with an attention backend and so many ranks a layer.

    `is_native` says whether the native library computes all layers, `is_ordered` whether sums are added in one order.
    """
    if is_native:
        return []
    kind = device.partition(":")[0]
    specs = model_config.cache_specs()
    reasons = []
    if kind not in ("cpu", "cuda"):
        reasons.append(f"on {kind} torch's own kernels compute, and their orders of summation are not known")
    if num_ranks > 2 and not is_ordered:
        reasons.append("without deterministic=True the order of a sum over more than two ranks depends on its size")
    if kind == "cuda" and any(isinstance(spec, StateSpec) for spec in specs):
        reasons.append("recurrent layers compute a prompt in chunks, and single tokens in another order")
    if kind == "cuda" and any(isinstance(spec, LatentSpec) for spec in specs):
        reasons.append("latent attention sums in an order that may depend on the chunk")
    elif kind in ORDERED_ATTENTION and attention != ORDERED_ATTENTION[kind]:
        reasons.append(f"attention by {attention} sums in an order that depends on the chunk")
    return reasons


def check_products(model: "nn.Module", max_step_tokens: int | None = None) -> list[str]:
    """Find the products with which a row's result depends on its place or on the other rows.

    Dense matrices on a CPU are multiplied piece by piece from here on if that helps. Those with which nothing helps are
    returned. The native library's products there have an order of their own, and are not tried.
    """
    from infinilm.layers.formats import DenseWeight, TiledWeight
    from infinilm.layers.linear import Linear
    from infinilm.layers.moe import SparseMLP

    biases: dict[Any, Tensor | None] = {
        module.matrix: module.bias for module in model.modules() if isinstance(module, Linear)
    }
    failing: list[str] = []
    tried: dict[Any, Any] = {}
    for module in model.modules():
        if not isinstance(module, (DenseWeight, TiledWeight, SparseMLP)):
            continue
        bias, parameters = biases.get(module), list(module.parameters())
        key = (type(module), *((each.shape, each.dtype) for each in parameters), bias is None)
        is_new = key not in tried
        first = tried.setdefault(key, module)
        if isinstance(module, DenseWeight):
            if is_new and not _is_invariant_in_pieces(module, bias):
                failing.append(f"{module.in_features} x {module.out_features}")
            module.is_piecewise = first.is_piecewise
        elif is_new and parameters[0].is_cuda:
            if isinstance(module, SparseMLP):
                trial, name = _Trial.of_experts(module, max_step_tokens), f"{module.routing.num_experts} experts"
            else:
                trial, name = _Trial.of_matrix(module, bias), f"{module.in_features} x {module.out_features}"
            if not trial.passes():
                failing.append(name)
    return failing


def _is_invariant_in_pieces(matrix: "DenseWeight", bias: "Tensor | None") -> bool:
    """Whether a product is invariant, on a CPU if need be piece by piece."""
    trial = _Trial.of_matrix(matrix, bias)
    if trial.passes():
        return True
    matrix.is_piecewise = not matrix.weight.is_cuda
    return matrix.is_piecewise and trial.passes()


@dataclass(frozen=True, slots=True)
class _Trial:
    """A product, and the numbers of rows with which it is tried."""

    multiply: "Callable[[Tensor], Tensor]"
    num_inputs: int
    device: "torch.device"
    dtype: "torch.dtype"
    counts: tuple[int, ...]
    num_copies: int = 3
    """How often the rows of the largest count are in the product that the others are compared with."""

    @classmethod
    def of_matrix(cls, matrix: "DenseWeight | TiledWeight", bias: "Tensor | None") -> "_Trial":
        device = next(matrix.parameters()).device
        counts, num_copies = ROW_COUNTS[device.type], 3
        if device.type == "cpu" and matrix.in_features * matrix.out_features >= LARGE_MATRIX:
            counts, num_copies = (*(count for count in counts if count < MAX_LARGE_ROWS), MAX_LARGE_ROWS), 1
        multiply = partial(matrix.multiply, bias=bias)
        return cls(multiply, matrix.in_features, device, matrix.dtype, counts, num_copies)

    @classmethod
    def of_experts(cls, module: "SparseMLP", max_step_tokens: int | None) -> "_Trial":
        """With the numbers of rows from which experts have other tiles, too."""
        import torch

        from infinilm.kernels.experts import TILES

        num_experts, top_k = module.routing.num_experts, module.routing.top_k
        device = next(module.parameters()).device
        max_rows = min(max_step_tokens or MAX_EXPERT_ROWS, MAX_EXPERT_ROWS)
        scores = torch.rand(max_rows, num_experts, generator=torch.Generator().manual_seed(1))
        weights, ids = (each.to(device) for each in scores.topk(top_k))
        from_tiles = (least * num_experts // top_k + 1 for least in TILES)
        counts = sorted(count for count in {*ROW_COUNTS["cuda"], *from_tiles} if count <= max_rows)

        def multiply(x: "Tensor") -> "Tensor":
            # Of this rank alone: the others are not asked for their share of the sum.
            return module.experts.matrix.mix(x, ids[: len(x)].int(), weights[: len(x)], None)

        return cls(multiply, module.hidden_size, device, module.dtype, tuple(counts), num_copies=1)

    def passes(self) -> bool:
        """Whether a row's result is the same for all numbers of rows, and in any place."""
        import torch

        with torch.inference_mode():
            x = torch.randn(self.counts[-1], self.num_inputs, generator=torch.Generator().manual_seed(0))
            x = x.to(self.device, self.dtype)
            expected = self.multiply(torch.cat([x] * self.num_copies))
            if any(not part.equal(expected[: len(x)]) for part in expected.view(self.num_copies, len(x), -1)):
                return False
            return all(self.multiply(x[:count]).equal(expected[:count]) for count in self.counts)
