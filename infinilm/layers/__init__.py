"""The layers that models consist of, whole or sharded over ranks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinilm.layers.attention import Attention
    from infinilm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
    from infinilm.layers.linear import (
        ColumnParallelLinear,
        GateUpParallelLinear,
        Linear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from infinilm.layers.mixer import ForwardContext, Mixer
    from infinilm.layers.mlp import MLP
    from infinilm.layers.norm import RMSNorm
    from infinilm.layers.rotary_embedding import RotaryEmbedding, apply_rotary

__all__ = [
    "MLP",
    "Attention",
    "ColumnParallelLinear",
    "ForwardContext",
    "GateUpParallelLinear",
    "Linear",
    "Mixer",
    "ParallelLMHead",
    "QKVParallelLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "apply_rotary",
]

# Imported at first use: these files need torch; `names.py` and `rotary_tables.py` do not.
_FILES = {
    "Attention": "attention",
    "ParallelLMHead": "embedding",
    "VocabParallelEmbedding": "embedding",
    "ColumnParallelLinear": "linear",
    "GateUpParallelLinear": "linear",
    "Linear": "linear",
    "QKVParallelLinear": "linear",
    "RowParallelLinear": "linear",
    "ForwardContext": "mixer",
    "Mixer": "mixer",
    "MLP": "mlp",
    "RMSNorm": "norm",
    "RotaryEmbedding": "rotary_embedding",
    "apply_rotary": "rotary_embedding",
}


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(import_module(f"infinilm.layers.{_FILES[name]}"), name)
    raise AttributeError(f"module 'infinilm.layers' has no attribute {name!r}")
