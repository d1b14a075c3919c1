"""The text part of multimodal checkpoints: it computes what transformers computes, and pictures are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import EXPERTS, GEMMA4, LINEAR, SIZES, reference_logits
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from infinilm import LLM, SamplingParams
from infinilm.errors import CheckpointError, InvalidValueError
from infinilm.models import ModelConfig

TOKENS = list(range(3, 60))
SCORED = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "head_dim": 16,
}


def make_multimodal(kind: str) -> PreTrainedModel:
    text: dict[str, Any] = SIZES | {"head_dim": 16}
    torch.manual_seed(0)
    if kind == "gemma3":
        vision = {name: value for name, value in VISION.items() if name != "head_dim"}
        config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
        model: PreTrainedModel = transformers.Gemma3ForConditionalGeneration(config)
    elif kind == "gemma4":
        text |= {**GEMMA4, "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0}
        vision = {name: value for name, value in VISION.items() if name != "image_size"}
        config = transformers.Gemma4Config(text_config=text, vision_config=vision | {"num_key_value_heads": 2})
        model = transformers.Gemma4ForConditionalGeneration(config)
    elif kind == "qwen3_5_moe":
        text |= {**EXPERTS, **LINEAR, "layer_types": ["linear_attention", "full_attention"]}
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 1, 0]}
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
        config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)
        model = transformers.Qwen3_5MoeForConditionalGeneration(config)
    else:
        config = transformers.Mistral3Config(
            text_config=text | {"model_type": kind}, vision_config=VISION, tie_word_embeddings=False
        )
        model = transformers.Mistral3ForConditionalGeneration(config)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.mul_(5)  # so that logits tell tokens apart
    return model.eval()


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "mistral", "ministral3", "qwen3_5_moe"])
def test_the_text_part_computes_what_transformers_computes(kind: str, prefix: str, tmp_path: Path) -> None:
    """Under the names of older and of newer files."""
    reference = make_multimodal(kind)
    reference.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    if prefix != "language_model.model.":
        weights = {name.replace("language_model.model.", prefix): value for name, value in load_file(file).items()}
        save_file({name.replace("language_model.lm_head", "lm_head"): value for name, value in weights.items()}, file)
    scores = reference_logits(reference, TOKENS).log_softmax(-1)
    with LLM(tmp_path, device="cpu", num_kvcache_blocks=16, dtype="float32") as llm:
        [output] = llm.generate([TOKENS], SCORED, use_tqdm=False)
    assert output.prompt_logprobs is not None
    found = torch.tensor([entry.logprob for entry in output.prompt_logprobs if entry is not None])
    torch.testing.assert_close(
        found, scores[torch.arange(len(TOKENS) - 1), torch.tensor(TOKENS[1:])], atol=1e-4, rtol=0
    )
    assert ModelConfig.from_pretrained(tmp_path).num_hidden_layers == SIZES["num_hidden_layers"]


def test_a_part_that_is_no_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="text_config=3 must be the configuration of a model"):
        ModelConfig.from_dict({"model_type": "gemma3", "text_config": 3})
    unknown = {"model_type": "mllama", "text_config": {"model_type": "mllama_text_model"}}
    with pytest.raises(CheckpointError, match="model_type='mllama_text_model'"):
        ModelConfig.from_dict(unknown)


def test_models_that_see_later_tokens_are_refused(tmp_path: Path) -> None:
    config = {"model_type": "gemma3_text", "use_bidirectional_attention": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="use_bidirectional_attention=True is not supported"):
        ModelConfig.from_pretrained(tmp_path)
    with pytest.raises(InvalidValueError, match="use_bidirectional_attention=True"):
        ModelConfig.from_dict(config)
