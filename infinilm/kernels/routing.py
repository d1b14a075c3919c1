"""How experts are chosen, and their activations. This module does not import torch."""

from typing import Any, Literal, NamedTuple


class Routing(NamedTuple):
    """How a router's logits choose experts."""

    num_experts: int
    top_k: int
    """The number of experts per token."""
    renormalizes: bool
    """Whether the scores of the chosen experts are divided by their sum."""
    is_sigmoid: bool = False
    """Whether scores are the logits' sigmoids, each by itself, instead of their softmax."""
    num_groups: int = 1
    """Experts are divided into this many groups of equal size, in order."""
    top_groups: int = 1
    """A token's experts are from this many groups: those whose `group_best` best, 1 or 2, have the largest sum."""
    group_best: int = 2
    scale: float = 1.0
    """The final factor of the weights."""


class ClampedGate(NamedTuple):
    """GPT-OSS's gate: `(up + 1) * gate * sigmoid(alpha * gate)`, both limited; lines of gate and up alternate."""

    alpha: float
    limit: float


GELU: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
Gate = ClampedGate | Literal["gelu_pytorch_tanh"] | None
"""How gate and up are combined. None: `silu(gate) * up`; GELU: the same with GELU. For both, gates come first."""


def native_gate(gate: Gate) -> dict[str, Any]:
    """The arguments of the native library's `Experts` for a gate. There gates always come first."""
    if isinstance(gate, ClampedGate):
        return {"activation": "clamped", **gate._asdict()}
    return {"activation": gate or "silu"}
