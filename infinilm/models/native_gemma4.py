"""Gemma 4 in the native library: the parts that Llama does not have. This module needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from infinilm.kernels.routing import GELU, native_gate
from infinilm.models.gemma4 import Gemma4Config

if TYPE_CHECKING:
    from infinilm.models.native_model import LayerBuilder

Floats = npt.NDArray[np.float32]

_EMBEDDING, _PROJECTION = "model.embed_tokens_per_layer.weight", "per_layer_model_projection"
_NORM = "model.per_layer_projection_norm"


def gemma4_shapes(config: Gemma4Config) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights that other families do not have, by their names in a checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {}
    hidden, width = config.hidden_size, config.hidden_size_per_layer_input
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes[f"{prefix}layer_scalar"] = (1,)
        if config.enable_moe_block:
            shapes |= _expert_shapes(config, prefix)
        if width:
            shapes[f"{prefix}per_layer_input_gate.weight"] = (width, hidden)
            shapes[f"{prefix}per_layer_projection.weight"] = (hidden, width)
            shapes[f"{prefix}post_per_layer_input_norm.weight"] = (hidden,)
    if width:
        all_layers = config.num_hidden_layers * width
        shapes[_EMBEDDING] = (config.vocab_size_per_layer_input, all_layers)
        shapes[f"model.{_PROJECTION}.weight"] = (all_layers, hidden)
        shapes[f"{_NORM}.weight"] = (width,)
    return shapes


def _expert_shapes(config: Gemma4Config, prefix: str) -> dict[str, tuple[int, ...]]:
    hidden, count, size = config.hidden_size, config.num_experts or 0, config.moe_intermediate_size or 0
    norms = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
    matrices = {"gate_proj": (size, hidden), "up_proj": (size, hidden), "down_proj": (hidden, size)}
    return {
        **{f"{prefix}{name}.weight": (hidden,) for name in norms},
        f"{prefix}router.proj.weight": (count, hidden),
        f"{prefix}router.scale": (hidden,),
        f"{prefix}router.per_expert_scale": (count,),
        **{
            f"{prefix}experts.{expert}.{name}.weight": shape
            for expert in range(count)
            for name, shape in matrices.items()
        },
    }


def build_gemma4_layer(builder: LayerBuilder, config: Gemma4Config, layer: int) -> Any:
    """Build the library's layer."""
    prefix, eps = f"model.layers.{layer}.", config.rms_norm_eps
    channels = builder.mlp(f"{prefix}mlp.", config.activation)
    norms = {place: name and builder.norm(prefix + name) for place, name in config.norms._asdict().items()}
    if config.enable_moe_block:
        before = [norms["before_channels"], builder.norm(f"{prefix}pre_feedforward_layernorm_2")]
        after = [builder.norm(f"{prefix}post_feedforward_layernorm_{index}") for index in (1, 2)]
        mixers = [channels, _build_experts(builder, config, prefix)]
        channels = builder.library.MixerSum(mixers, before=before, after=after, eps=eps)
        norms["before_channels"] = None
    own_input = None
    if config.hidden_size_per_layer_input:
        own_input = builder.library.OwnInput(
            gate=builder.linear(prefix, "per_layer_input_gate"),
            projection=builder.linear(prefix, "per_layer_projection"),
            norm=builder.norm(f"{prefix}post_per_layer_input_norm"),
            eps=eps,
            activation=config.activation,
        )
    numbers = {"eps": eps, "residual_scale": config.residual_scale}
    scale = float(builder.weights[f"{prefix}layer_scalar"][0])
    return builder.library.Layer(
        builder.attention(layer), channels, **norms, **numbers, own_input=own_input, scale=scale
    )


def _build_experts(builder: LayerBuilder, config: Gemma4Config, prefix: str) -> Any:
    own = [f"{prefix}experts.{expert}." for expert in range(config.num_experts or 0)]
    gate_ups = [builder.linear(each, "gate_proj", "up_proj") for each in own]
    downs = [builder.linear(each, "down_proj") for each in own]
    weights = builder.weights
    routing = {name: value for name, value in config.routing._asdict().items() if name != "num_experts"}
    return builder.library.SparseMLP(
        experts=builder.library.Experts(gate_ups, downs, **native_gate(GELU)),
        router=np.ascontiguousarray(weights[f"{prefix}router.proj.weight"].T),
        router_bias=None,
        correction=None,
        router_norm=weights[f"{prefix}router.scale"] * np.float32(config.hidden_size**-0.5),
        factors=np.ascontiguousarray(weights[f"{prefix}router.per_expert_scale"]),
        shared=None,
        **routing,
    )


class LayerInputs:
    """The layers' own inputs, computed from the tokens and their embeddings."""

    def __init__(self, builder: LayerBuilder, config: Gemma4Config) -> None:
        self._config, self._embedding = config, builder.weights[_EMBEDDING]
        self._projection, self._norm = builder.linear("model.", _PROJECTION), builder.norm(_NORM)

    def __call__(self, token_ids: npt.NDArray[np.int64], hidden: Floats) -> Floats:
        """`[T, layers, width]` for tokens `[T]` with embeddings `[T, hidden]`. Rows do not depend on each other."""
        config, width = self._config, self._config.hidden_size_per_layer_input
        known, seen = np.empty((2, len(hidden), config.num_hidden_layers * width), dtype=np.float32)
        self._embedding.dequantize(np.ascontiguousarray(token_ids), known)
        self._projection.multiply(np.ascontiguousarray(hidden), seen, False)
        seen *= np.float32(config.hidden_size**-0.5)
        by_layer = seen.reshape(len(hidden), -1, width)
        squares = np.square(by_layer).mean(axis=-1, keepdims=True)
        by_layer *= 1 / np.sqrt(squares + np.float32(config.rms_norm_eps))
        by_layer *= cast(Floats, self._norm)
        known *= np.float32(width**0.5)
        by_layer += known.reshape(by_layer.shape)
        by_layer *= np.float32(2**-0.5)
        return by_layer
