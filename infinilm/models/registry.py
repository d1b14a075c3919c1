"""Which code runs which architecture."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from infinilm.errors import InvalidValueError
from infinilm.models.architectures import ARCHITECTURES, Architecture
from infinilm.models.base import InfinilmModel
from infinilm.models.config import LlamaConfig
from infinilm.models.decoder import CausalLM

ModelBuilder = Callable[..., InfinilmModel]
"""Called as `builder(config, max_len=…, dtype=…, device=…)`; gives a model with empty weights."""

_BUILDERS: dict[str, ModelBuilder] = dict.fromkeys(ARCHITECTURES, CausalLM)


def register_model(
    model_type: str,
    class_name: str,
    *,
    defaults: Mapping[str, Any] | None = None,
    builder: ModelBuilder = CausalLM,
) -> None:
    """Add an architecture, so that checkpoints of it can be loaded.

    `model_type` and `class_name` are what its config.json says in `model_type` and `architectures`; `defaults` are
    the settings of `LlamaConfig` in which it differs from Llama (`{"qk_norm": True}`, say). The decoder serves it
    unless a `builder` is given.
    """
    if model_type in ARCHITECTURES:
        raise InvalidValueError(f"model_type={model_type!r} is registered already; choose another name")
    windows = {"use_sliding_window": False, "max_window_layers": 0}
    ARCHITECTURES[model_type] = Architecture(class_name, {**windows, **(defaults or {})})
    _BUILDERS[model_type] = builder


def create_model(
    config: LlamaConfig, *, max_len: int | None = None, dtype: torch.dtype, device: torch.device | str
) -> InfinilmModel:
    """Build the model that a configuration describes, with empty weights, for texts of up to `max_len` tokens."""
    config.validate()
    return _BUILDERS[config.model_type](config, max_len=max_len, dtype=dtype, device=device)
