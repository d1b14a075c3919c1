"""Tiny random checkpoints of every architecture, made by transformers, which is also the reference."""

from pathlib import Path
from typing import Any

import torch
import transformers
from narrow import dense
from transformers import PreTrainedModel

from infinilm.distributed.group import SINGLE, CommunicationGroup
from infinilm.models import CausalLM, LlamaConfig
from infinilm.models.registry import create_model

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "sliding_window": 20,
            "num_hidden_layers": 3,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 3.0,
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.0,
            "attention_bias": True,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}),
}
"""Name → transformers' class prefix and the settings that differ from `SIZES`."""


def make_reference(kind: str, **settings: Any) -> PreTrainedModel:
    """A model of transformers with random weights, large enough that logits are of order 1 and tell tokens apart."""
    prefix, own = ARCHITECTURES[kind]
    text = "Text" if prefix == "Gemma3" else ""
    config = getattr(transformers, f"{prefix}{text}Config")(**{**SIZES, **own, **settings})
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(7)
    model: PreTrainedModel = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_((prefix != "Gemma3") + 0.2 * noise)  # Gemma adds 1 itself
            elif name.endswith("bias"):
                weight.copy_(0.3 * noise)
            else:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
    return model


def save(model: PreTrainedModel, directory: Path) -> Path:
    """Write config.json and safetensors, as transformers does."""
    model.save_pretrained(directory)
    return directory


def load(
    reference: PreTrainedModel,
    *,
    max_len: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    group: CommunicationGroup = SINGLE,
) -> CausalLM:
    """Our model, or the share of a group's rank, with the reference's configuration and weights."""
    config = LlamaConfig.from_dict(reference.config.to_dict())
    model = create_model(config, max_len=max_len, dtype=dtype, device=device, group=group)
    assert isinstance(model, CausalLM)
    state = reference.state_dict()
    for name, shard in model.weight_targets().items():
        dense(shard).tensor.copy_(dense(shard).cut(state[name]))
    return model


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """What transformers computes in one pass: `[tokens, vocab]` float32."""
    return model(torch.tensor([tokens])).logits[0].float()
