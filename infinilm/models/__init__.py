"""Descriptions of models, and the models."""

from infinilm.models.base import InfinilmModel
from infinilm.models.config import LlamaConfig
from infinilm.models.decoder import CausalLM
from infinilm.models.registry import create_model, register_model

__all__ = ["CausalLM", "InfinilmModel", "LlamaConfig", "create_model", "register_model"]
