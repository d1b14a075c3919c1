"""What checkpoints call the parts of layers. No torch here."""

from typing import NamedTuple


class LayerNorms(NamedTuple):
    """A layer's norms, by their names in a checkpoint; None where there is no norm."""

    before_tokens: str | None = "input_layernorm"
    after_tokens: str | None = None
    before_channels: str | None = "post_attention_layernorm"
    after_channels: str | None = None


PRE_NORMS = LayerNorms()
"""Llama's: one before each mixer."""


ACTIVATION_NAMES = ("silu", "gelu", "gelu_pytorch_tanh")
"""The activation functions of MLPs, by Hugging Face's names."""
NATIVE_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
"""Those that the native library has, too."""


class ExpertNames(NamedTuple):
    """What a checkpoint calls the parts of a sparse layer."""

    prefix: str = "mlp."
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router_bias: str = "e_score_correction_bias"
    shared: str = "shared_experts"
    has_biases: bool = False
    """Whether gate, up and down of an expert add biases."""
