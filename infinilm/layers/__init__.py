"""The layers that models are made of, whole or shared out over ranks."""

from infinilm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from infinilm.layers.linear import (
    ColumnParallelLinear,
    GateUpParallelLinear,
    Linear,
    QKVParallelLinear,
    RowParallelLinear,
)
from infinilm.layers.norm import RMSNorm
from infinilm.layers.rotary import RotaryEmbedding, apply_rotary

__all__ = [
    "ColumnParallelLinear",
    "GateUpParallelLinear",
    "Linear",
    "ParallelLMHead",
    "QKVParallelLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "apply_rotary",
]
