"""Model configurations, the model families, and models without an engine."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from infinilm.models.config import ModelConfig
from infinilm.models.dense import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from infinilm.models.registry import InfinilmModelFactory, create_model, register_model

if TYPE_CHECKING:
    from infinilm.models.auto import AutoConfig
    from infinilm.models.base import InfinilmModel
    from infinilm.models.causal_lm import CausalLM
    from infinilm.models.decoder import Decoder
    from infinilm.models.llama import AutoLlamaModel, LlamaForCausalLM

__all__ = [
    "AutoConfig",
    "AutoLlamaModel",
    "CausalLM",
    "Decoder",
    "InfinilmModel",
    "InfinilmModelFactory",
    "LlamaConfig",
    "LlamaForCausalLM",
    "MistralConfig",
    "ModelConfig",
    "Qwen2Config",
    "Qwen3Config",
    "create_model",
    "register_model",
]

# Imported at first use: these files need torch; configurations do not.
_FILES = {
    "AutoConfig": "auto",
    "AutoLlamaModel": "llama",
    "CausalLM": "causal_lm",
    "Decoder": "decoder",
    "InfinilmModel": "base",
    "LlamaForCausalLM": "llama",
}


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(import_module(f"infinilm.models.{_FILES[name]}"), name)
    raise AttributeError(f"module 'infinilm.models' has no attribute {name!r}")
