"""A tiny model whose pipeline stages sleep in proportion to the tokens of a step, so that they overlap on few cores."""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from infinilm.attention import ForwardBatch
from infinilm.models import CausalLM, LlamaConfig, register_model
from infinilm.models.auto import outline_model

TOKEN_MS = "INFINILM_BENCH_TOKEN_MS"
"""The environment variable with the time that each stage takes for a token."""


class SleepingModel(CausalLM):
    """A Llama that sleeps in every stage."""

    def forward(self, batch: ForwardBatch, *args: Any) -> Tensor:
        time.sleep(float(os.environ[TOKEN_MS]) / 1000 * len(batch.input_ids))
        return super().forward(batch, *args)


register_model("sleeping", "SleepingForCausalLM", builder=SleepingModel)


def save_sleeping(directory: Path, num_layers: int) -> None:
    """Save a checkpoint of the model, with random weights."""
    config = LlamaConfig(
        model_type="sleeping",
        vocab_size=300,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    shapes = {name: shard.full_shape for name, shard in outline_model(config, torch.float32).weight_targets().items()}
    save_file({name: torch.randn(shape) / 8 for name, shape in shapes.items()}, directory / "model.safetensors")
    settings = {**config.to_dict(), "architectures": ["SleepingForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(settings))
