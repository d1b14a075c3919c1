"""Text generation for models and engines: `GenerationMixin.generate` and its results."""

from infinilm.generation.arrays import infini_to_numpy
from infinilm.generation.mixin import GenerationMixin, GenerationStep, NextTokens
from infinilm.generation.output import GenerationOutput, GenerationTimings, Streamer

__all__ = [
    "GenerationMixin",
    "GenerationOutput",
    "GenerationStep",
    "GenerationTimings",
    "NextTokens",
    "Streamer",
    "infini_to_numpy",
]
