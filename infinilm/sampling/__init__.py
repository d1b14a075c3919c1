"""From logits to tokens.

The order of the rules, for each row on its own:

1. The model's raw logits. Log-probabilities, if asked for, are taken here (`logprobs`).
2. `logit_bias`, then `repetition_penalty` (tokens of prompt and answer), then `frequency_penalty` and
   `presence_penalty` (tokens of the answer), then stop ids become −inf until `min_tokens`, then the
   request's `logits_processors` in their order (`logits_processors`). Last, what the grammar of
   `structured` forbids becomes −inf (`masks`).
3. A greedy row takes the greatest logit, the first of equals, and is done.
4. `temperature`, then a cut-off: `top_k`, then `top_p` of what `top_k` left, then `min_p` (`truncation`).
5. The draw among what is left, keyed by seed and position (`noise`).

Truncation is by value: a row has one cut-off, and a token stays if its logit is not below it. Tokens that
tie with the last one kept stay too, so the order of equal tokens never matters.

Steps 3 to 5 are `draw`, with faster twins for GPUs (`infinilm.kernels.sampling`) and for CPUs (`native/sampling.cpp`).

Rows do not influence each other. If a faster way serves only some rows, each row's own values decide whether it is
used. Sums that decide something are sums of integers, which are the same in any order and grouping.

`InferEngine.Input` brings its own uniform number and asks for InfiniCore's rule instead, so that results match
InfiniLM's: `check_uniform`, then `draw_uniform` (`uniform`). It draws straight from the raw logits by temperature,
`top_k` and `top_p`; there, equal logits do have an order, that of their indices.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from infinilm.sampling.logprobs import Logprobs, logprobs_of
from infinilm.sampling.sampler import SampledToken, Sampler, Samples

if TYPE_CHECKING:
    from infinilm.sampling.uniform import UniformValues, check_uniform, draw_uniform

__all__ = [
    "Logprobs",
    "SampledToken",
    "Sampler",
    "Samples",
    "UniformValues",
    "check_uniform",
    "draw_uniform",
    "logprobs_of",
]


def __getattr__(name: str) -> Any:  # imports what needs torch on first use
    if name in ("UniformValues", "check_uniform", "draw_uniform"):
        return getattr(import_module("infinilm.sampling.uniform"), name)
    raise AttributeError(f"module 'infinilm.sampling' has no attribute {name!r}")
