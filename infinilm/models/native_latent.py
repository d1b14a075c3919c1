"""Latent attention in the native library: its weights, and how a layer is built. This module needs no torch."""

from typing import Any

from infinilm.models.config import ModelConfig
from infinilm.models.latent import DeepseekV3Config

MAX_DIM = 1024
EXPANSION = "self_attn.kv_b_proj.weight"
"""The name of the expansion, without the layer's prefix. It stays dense, because the mixer splits it."""


def why_no_latents(config: ModelConfig) -> str | None:
    """Why the native library can't compute a model's latent attention, as a part of an error's text; None if it can."""
    if isinstance(config, DeepseekV3Config) and config.max_head_dim > MAX_DIM:
        return f"models with kv_lora_rank + qk_rope_head_dim = {config.max_head_dim}, above {MAX_DIM},"
    return None


def latent_shapes(config: DeepseekV3Config, prefix: str) -> dict[str, tuple[int, ...]]:
    """The shapes of latent attention's weights, by their names in a checkpoint; `prefix` is the layer's."""
    own, hidden, heads = f"{prefix}self_attn.", config.hidden_size, config.num_attention_heads
    rank, queries = config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    made = {
        "kv_a_proj_with_mqa": (rank + config.qk_rope_head_dim, hidden),
        "o_proj": (hidden, heads * config.v_head_dim),
    }
    shapes: dict[str, tuple[int, ...]] = {f"{own}kv_a_layernorm.weight": (rank,)}
    if config.q_lora_rank is None:
        shapes[f"{own}q_proj.weight"] = (queries, hidden)
    else:
        made["q_a_proj"] = (config.q_lora_rank, hidden)
        shapes[f"{own}q_a_layernorm.weight"] = (config.q_lora_rank,)
        shapes[f"{own}q_b_proj.weight"] = (queries, config.q_lora_rank)
    shapes |= {f"{own}{name}.weight": shape for name, shape in made.items()}
    if config.attention_bias:
        shapes |= {f"{own}{name}.bias": shape[:1] for name, shape in made.items()}
    return shapes | {f"{prefix}{EXPANSION}": (heads * (config.qk_nope_head_dim + config.v_head_dim), rank)}


def build_latents(builder: Any, config: DeepseekV3Config, layer: int) -> Any:
    """Build the library's mixer of a layer; `builder` is a `LayerBuilder`."""
    own, rotary, has_rank = f"model.layers.{layer}.self_attn.", builder.rotaries[layer], config.q_lora_rank is not None
    heads = builder.library.LatentHeads(
        count=config.num_attention_heads,
        rank=config.kv_lora_rank,
        plain_dim=config.qk_nope_head_dim,
        value_dim=config.v_head_dim,
        rotary=rotary.table,
        is_interleaved=rotary.is_interleaved,
        expansion=builder.weights[f"model.layers.{layer}.{EXPANSION}"],
        norm=builder.norm(f"{own}kv_a_layernorm"),
        eps=config.latent_eps,
        scale=config.attention_scale,
    )
    return builder.library.LatentAttention(
        latents=builder.linear(own, *(("q_a_proj",) if has_rank else ()), "kv_a_proj_with_mqa"),
        query=builder.linear(own, "q_b_proj" if has_rank else "q_proj"),
        out=builder.linear(own, "o_proj"),
        heads=heads,
        query_norm=builder.norm(f"{own}q_a_layernorm"),
    )
