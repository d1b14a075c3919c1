"""Latent attention of a batch by Triton kernels, with a plan of `triton_backend`."""

import torch
from torch import Tensor

from infinilm.attention.triton_backend import DecodePlan, MixedPlan
from infinilm.kernels.latent_attention import latent_decode, latent_prefill


def attend_latents(
    query: Tensor, turned: Tensor, cache: Tensor, plan: DecodePlan | MixedPlan, *, scale: float
) -> Tensor:
    """Attend `query` `[T, heads, rank]` with its `turned` part `[T, heads, rope]` to each request's context."""
    if isinstance(plan, DecodePlan):
        return latent_decode(query, turned, cache, plan.tables, plan.context_lens, scale=scale)
    output = torch.empty_like(query)
    if plan.decode is not None:  # first: its padding may write to a prompt's place
        tokens, decode = plan.decode_tokens, plan.decode
        output[tokens] = latent_decode(
            query[tokens], turned[tokens], cache, decode.tables, decode.context_lens, scale=scale
        )
    requests = (plan.tables, plan.query_starts, plan.context_lens)
    return latent_prefill(query, turned, cache, *requests, scale=scale, out=output)
