"""The names of the parts of layers in checkpoints. This module needs no torch."""

from typing import NamedTuple


class LayerNorms(NamedTuple):
    """The names of a layer's norms in a checkpoint; None: there is no such norm."""

    before_tokens: str | None = "input_layernorm"
    after_tokens: str | None = None
    before_channels: str | None = "post_attention_layernorm"
    after_channels: str | None = None


PRE_NORMS = LayerNorms()
"""Llama's norms: one before each mixer."""


ACTIVATION_NAMES = ("silu", "gelu", "gelu_pytorch_tanh")
"""The activation functions of MLPs, by Hugging Face's names."""
NATIVE_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
"""The activation functions that the native library has."""


class ExpertNames(NamedTuple):
    """The names of the parts of a sparse layer in a checkpoint."""

    prefix: str = "mlp."
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router_bias: str = "e_score_correction_bias"
    shared: str = "shared_experts"
    has_biases: bool = False
    """Whether an expert's gate, up and down have biases."""
