"""Model configurations, the model families, and models without an engine."""

from infinilm.models.auto import AutoConfig
from infinilm.models.base import InfinilmModel
from infinilm.models.config import ModelConfig
from infinilm.models.decoder import Decoder
from infinilm.models.dense import CausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from infinilm.models.llama import AutoLlamaModel, LlamaForCausalLM
from infinilm.models.registry import InfinilmModelFactory, create_model, register_model

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
