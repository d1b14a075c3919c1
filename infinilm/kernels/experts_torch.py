"""The choice of experts and their products in plain torch: the twins of `experts`, which run without Triton."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from infinilm.kernels.invariant import gelu_tanh, multiply, pad_rows, sigmoid, silu
from infinilm.kernels.routing import ClampedGate, Gate, Routing


def choose_experts_torch(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `experts.choose_experts`."""
    wide = logits.float()
    scores = sigmoid(wide) if routing.is_sigmoid else wide.softmax(dim=-1)
    ranks = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        groups = ranks.unflatten(1, (routing.num_groups, -1))
        best = groups.topk(routing.group_best, dim=-1).values.sum(dim=-1).topk(routing.top_groups, dim=-1).indices
        is_out = torch.ones_like(groups[..., 0]).scatter_(1, best, 0.0).bool()
        ranks = groups.masked_fill(is_out[..., None], -torch.inf).flatten(1)
    ids = ranks.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if routing.renormalizes:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids.int(), weights * routing.scale


def mix_experts_torch(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    residual: Tensor | None = None,
    *,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    gate: Gate = None,
    is_native: bool = False,
) -> Tensor:
    """See `experts.mix_experts`. Waits for the ids, so that experts that no row chose are not read.

    If `is_native`, the native library multiplies. Then matrices have their inputs first in memory.
    """

    def product(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        return multiply(x, matrix.t(), bias) if is_native else F.linear(x, matrix, bias)

    def compute(expert: int, x: Tensor) -> Tensor:
        first, second = (None if bias is None else bias[expert] for bias in biases)
        own = x if is_native else pad_rows(x)
        return product(gate_torch(product(own, gate_up[expert], first), gate), down[expert], second)[: len(x)]

    return mix_each(x, ids, weights, compute, residual)


def mix_each(
    x: Tensor, ids: Tensor, weights: Tensor, compute: Callable[[int, Tensor], Tensor], residual: Tensor | None
) -> Tensor:
    """The same for any experts: `compute` returns an expert's result for some rows."""
    mixed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        rows, places = (ids == expert).nonzero(as_tuple=True)
        mixed.index_add_(0, rows, compute(expert, x[rows]).float() * weights[rows, places, None])
    mixed = mixed.to(x.dtype)
    return mixed if residual is None else mixed.add_(residual)


def gate_torch(gate_up: Tensor, how: Gate) -> Tensor:
    """Combine gate and up `[n, 2 * inner]` to `[n, inner]`."""
    if not isinstance(how, ClampedGate):
        gate, up = gate_up.chunk(2, dim=-1)
        return (silu(gate) if how is None else gelu_tanh(gate)).mul_(up)
    gate = gate_up[..., ::2].clamp(max=how.limit)
    up = gate_up[..., 1::2].clamp(-how.limit, how.limit)
    return (up + 1) * (gate * sigmoid(gate * how.alpha))
