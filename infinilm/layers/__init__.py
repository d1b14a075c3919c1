"""The layers that models are made of, whole or shared out over ranks."""

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
