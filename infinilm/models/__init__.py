"""Descriptions of models, and the models."""

from infinilm.models.auto import AutoConfig
from infinilm.models.base import InfinilmModel
from infinilm.models.config import LlamaConfig
from infinilm.models.decoder import CausalLM
from infinilm.models.llama import AutoLlamaModel, LlamaForCausalLM
from infinilm.models.registry import create_model, register_model

__all__ = [
    "AutoConfig",
    "AutoLlamaModel",
    "CausalLM",
    "InfinilmModel",
    "LlamaConfig",
    "LlamaForCausalLM",
    "create_model",
    "register_model",
]
