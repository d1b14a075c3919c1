"""Gated delta nets in the native library: their weights, and how a layer is built. This module needs no torch."""

from typing import Any, TypeGuard

import numpy as np

from infinilm.models.config import ModelConfig
from infinilm.models.hybrid import Qwen35Config

MAX_KEY_DIM, MAX_CONV_WIDTH = 256, 8


def is_recurrent(config: ModelConfig, layer: int) -> TypeGuard[Qwen35Config]:
    """Whether the token mixer of a layer is a gated delta net."""
    return isinstance(config, Qwen35Config) and config.is_recurrent(layer)


def why_no_delta_net(config: ModelConfig) -> str | None:
    """Why the native library can't compute a model's delta nets, as a part of an error's text; None if it can."""
    if not isinstance(config, Qwen35Config):
        return None
    limits = {"linear_key_head_dim": MAX_KEY_DIM, "linear_conv_kernel_dim": MAX_CONV_WIDTH}
    large = [name for name, limit in limits.items() if getattr(config, name) > limit]
    return f"models with {large[0]}={getattr(config, large[0])}, above {limits[large[0]]}," if large else None


def delta_net_shapes(config: Qwen35Config, prefix: str) -> dict[str, tuple[int, ...]]:
    """The shapes of a delta net's weights, by their names in a checkpoint; `prefix` is the layer's."""
    own, hidden, heads = f"{prefix}linear_attn.", config.hidden_size, config.linear_num_value_heads
    keys, values = config.linear_num_key_heads * config.linear_key_head_dim, heads * config.linear_value_head_dim
    rows = {"q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads}
    shapes: dict[str, tuple[int, ...]] = {f"{own}in_proj_{name}.weight": (rows[name], hidden) for name in rows}
    shapes[f"{own}out_proj.weight"] = (hidden, values)
    shapes |= {f"{own}conv1d_{name}.weight": (rows[name], 1, config.linear_conv_kernel_dim) for name in "qkv"}
    return shapes | {
        f"{own}dt_bias": (heads,),
        f"{own}A_log": (heads,),
        f"{own}norm.weight": (config.linear_value_head_dim,),
    }


def build_delta_net(builder: Any, config: Qwen35Config, layer: int) -> Any:
    """Build the library's mixer of a layer; `builder` is a `LayerBuilder`."""
    own, weights = f"model.layers.{layer}.linear_attn.", builder.weights
    conv = np.concatenate([weights[f"{own}conv1d_{name}.weight"][:, 0] for name in "qkv"])
    heads = builder.library.DeltaHeads(
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        conv=np.ascontiguousarray(conv.T),
        decay=-np.exp(weights[f"{own}A_log"]),
        dt_bias=weights[f"{own}dt_bias"],
        norm=weights[f"{own}norm.weight"],
        eps=config.rms_norm_eps,
    )
    into = builder.linear(own, *(f"in_proj_{name}" for name in "qkvzba"))
    return builder.library.DeltaNet(in_=into, out=builder.linear(own, "out_proj"), heads=heads)
