"""The names of Hugging Face's and InfiniLM's Llama module. They serve every architecture the decoder knows."""

from infinilm.models.config import LlamaConfig
from infinilm.models.llama.causal_lm import AutoLlamaModel, LlamaForCausalLM, LlamaOutput

__all__ = ["AutoLlamaModel", "LlamaConfig", "LlamaForCausalLM", "LlamaOutput"]
