"""Which code runs which architecture."""

from collections.abc import Callable

import torch

from infinilm.errors import InvalidValueError
from infinilm.models.architectures import ARCHITECTURES
from infinilm.models.base import InfinilmModel
from infinilm.models.config import LlamaConfig
from infinilm.models.decoder import CausalLM

ModelBuilder = Callable[..., InfinilmModel]
"""Called as `builder(config, max_len=…, dtype=…, device=…)`; gives a model with empty weights."""

_BUILDERS: dict[str, ModelBuilder] = dict.fromkeys(ARCHITECTURES, CausalLM)


def create_model(
    config: LlamaConfig, *, max_len: int | None = None, dtype: torch.dtype, device: torch.device | str
) -> InfinilmModel:
    """Build the model that a configuration describes, with empty weights, for texts of up to `max_len` tokens."""
    builder = _BUILDERS.get(config.model_type)
    if builder is None:
        raise InvalidValueError(
            f"model_type={config.model_type!r} is unknown; known are {', '.join(_BUILDERS)}. "
            "Others are added with register_model"
        )
    return builder(config, max_len=max_len, dtype=dtype, device=device)
