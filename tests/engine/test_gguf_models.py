"""Models of every architecture written as GGUF files compute what transformers computes."""

import re
from pathlib import Path

import pytest
import torch
from checkpoints import make_reference, reference_logits, save
from gguf import GGUFWriter
from transformers import PreTrainedModel

from infinilm import LLM, SamplingParams

TOKENS = list(range(3, 60))
SCORED = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Hugging Face's names of modules and GGUF's."""


def gguf_name(name: str) -> str:
    layer, module, kind = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)", name).groups()
    return f"{'' if layer is None else f'blk.{layer}.'}{NAMES[module]}.{kind}"


def write_gguf(model: PreTrainedModel, path: Path, architecture: str) -> Path:
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor
        if architecture == "llama" and re.search(r"[qk]_proj", name):  # pairs of rotated rows stand side by side
            halves = tensor.unflatten(0, (-1, 2, head_dim // 2))
            values = halves.transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(gguf_name(name), values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def prompt_logprobs(model: Path) -> torch.Tensor:
    with LLM(model, device="cpu", num_kvcache_blocks=16, dtype="float32") as llm:
        [output] = llm.generate([TOKENS], SCORED, use_tqdm=False)
    assert output.prompt_logprobs is not None
    return torch.tensor([entry.logprob for entry in output.prompt_logprobs if entry is not None])


def expected_logprobs(reference: PreTrainedModel) -> torch.Tensor:
    scores = reference_logits(reference, TOKENS).log_softmax(-1)
    return scores[torch.arange(len(TOKENS) - 1), torch.tensor(TOKENS[1:])]


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("llama-bias", "llama"), ("mistral-full", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")],
)
def test_gguf_models_compute_what_transformers_computes(kind: str, architecture: str, tmp_path: Path) -> None:
    reference = make_reference(kind)
    path = write_gguf(reference, tmp_path / "model.gguf", architecture)
    torch.testing.assert_close(prompt_logprobs(path), expected_logprobs(reference), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["mistral-full", "qwen2", "qwen3"])
def test_biases_a_family_does_not_have_are_ignored_in_the_config(kind: str, tmp_path: Path) -> None:
    """As in transformers: Mistral has no biases, Qwen2 has those of q, k and v, Qwen3 has none in its MLP."""
    flags = {"mlp_bias": True} if kind == "qwen3" else {"mlp_bias": True, "attention_bias": True}
    reference = make_reference(kind, **flags)
    directory = save(reference, tmp_path)
    assert '"mlp_bias": true' in (directory / "config.json").read_text()
    torch.testing.assert_close(prompt_logprobs(directory), expected_logprobs(reference), atol=1e-4, rtol=0)
