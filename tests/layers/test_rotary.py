"""The angles against transformers' own, in variants that no tiny model's logits would tell apart."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig as ReferenceConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from infinilm.layers.rotary_embedding import RotaryEmbedding, apply_rotary
from infinilm.layers.rotary_tables import inverse_frequencies
from infinilm.models import LlamaConfig

HEAD_DIM, MAX_POSITIONS, LENGTH = 32, 400, 400
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 50}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 50,
}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 50,
    "short_factor": [1.0 + 0.1 * i for i in range(HEAD_DIM // 2)],
    "long_factor": [1.0 + 0.7 * i for i in range(HEAD_DIM // 2)],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic, not longer than trained": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": YARN,
    "yarn, ramp not rounded": {**YARN, "truncate": False},
    "yarn, own betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, attention factor given": {**YARN, "attention_factor": 0.7},
    "yarn, mscale": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5},
    "yarn, no stretch": {**YARN, "factor": 1.0},
    "llama3": LLAMA3,
    "longrope": LONGROPE,
    "longrope, factor given": {**LONGROPE, "factor": 3.0},
    "longrope, attention factor given": {**LONGROPE, "attention_factor": 1.3},
}


def make_config(rope: dict[str, Any]) -> LlamaConfig:
    sizes = {"hidden_size": 2 * HEAD_DIM, "num_attention_heads": 2, "max_position_embeddings": MAX_POSITIONS}
    config = LlamaConfig(**sizes, rope_parameters={"rope_theta": 10000.0, **rope})
    config.validate()
    return config


def make_rotary(rope: dict[str, Any], max_len: int = LENGTH, dtype: torch.dtype = torch.float32) -> RotaryEmbedding:
    parameters = make_config(rope).rope_parameters
    return RotaryEmbedding(
        HEAD_DIM, parameters, max_len=max_len, max_position_embeddings=MAX_POSITIONS, dtype=dtype, device="cpu"
    )


def reference_turn(rope: dict[str, Any], x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turn `x` `[T, heads, head_dim]` as transformers does."""
    config = ReferenceConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_theta": 10000.0, **rope},
    )
    cos, sin = (part[0].unsqueeze(1) for part in LlamaRotaryEmbedding(config)(x, positions.unsqueeze(0)))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@pytest.mark.parametrize("name", VARIANTS)
def test_heads_are_turned_as_transformers_turns_them(name: str) -> None:
    rope, positions = VARIANTS[name], torch.arange(LENGTH)
    x = torch.randn(LENGTH, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    ours = torch.empty_like(x)
    apply_rotary(x, *make_rotary(rope)(positions), out=ours)
    torch.testing.assert_close(ours, reference_turn(rope, x, positions), atol=1e-4, rtol=0)


def test_longrope_takes_the_short_factors_if_no_text_can_be_longer() -> None:
    positions = torch.arange(50)
    x = torch.randn(50, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    ours = torch.empty_like(x)
    apply_rotary(x, *make_rotary(LONGROPE, max_len=50)(positions), out=ours)
    torch.testing.assert_close(ours, reference_turn(LONGROPE, x, positions), atol=1e-4, rtol=0)


def test_divisors_given_one_by_one_are_llama3s() -> None:
    """GGUF files carry what llama3 computes as one number per pair."""
    plain = inverse_frequencies(HEAD_DIM, make_config({"rope_type": "default"}).rope_parameters, LENGTH, MAX_POSITIONS)
    llama3 = inverse_frequencies(HEAD_DIM, make_config(LLAMA3).rope_parameters, LENGTH, MAX_POSITIONS)
    divisors = (plain / llama3).tolist()
    factors = {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}
    torch.testing.assert_close(make_rotary(factors).table, make_rotary(LLAMA3).table, atol=1e-5, rtol=0)
    assert not torch.allclose(make_rotary(factors).table, make_rotary({"rope_type": "default"}).table, atol=1e-2)


def test_positions_may_come_in_any_order_and_turning_in_place_is_the_same() -> None:
    rotary, positions = make_rotary({"rope_type": "default"}), torch.tensor([7, 0, 399, 7])
    x = torch.randn(4, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    expected = reference_turn({"rope_type": "default"}, x, positions)
    apply_rotary(x, *rotary(positions), out=x)
    torch.testing.assert_close(x, expected, atol=1e-5, rtol=0)
