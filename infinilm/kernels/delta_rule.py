"""The gated delta rule: linear attention whose memory is a matrix per head, decayed and corrected by every token.

With the state S `[key_dim, value_dim]`, a token with query q, key k, value v, decay g ≤ 0 and rate β computes

    S ← exp(g) S;   S ← S + k ⊗ β (v − kᵀ S);   output = qᵀ S

Everything is float32. Queries and keys have length 1; queries are scaled by key_dim^-½.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PromptRows:
    """N requests of a step, on the device, for the kernels of `delta_prompts`."""

    query_starts: Tensor  # [N + 1] int64, each request's first token in the batch, and the last one's end
    context_lens: Tensor  # [N] int64, tokens of the text; 0: the request is left out
    tables: Tensor  # [N, max_new] int64, target blocks of states, from the first new token's block on; negative: none
    sources: Tensor  # [N] int64, the block with the state that a text continues from, if it has tokens already
    block_size: int


def normalize(heads: Tensor) -> Tensor:
    """Vectors of length 1, float32, of `heads` `[…, dim]`."""
    wide = heads.float()
    return wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt_()


def delta_rule_step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each of n texts.

    `query`, `key` `[n, heads, key_dim]`, `value` `[n, heads, value_dim]`, `decay`, `rate` `[n, heads]`, `state`
    `[n, heads, key_dim, value_dim]`. Returns the outputs, like `value`, and the new states.
    """
    state = state * decay.exp()[..., None, None]
    known = torch.einsum("nhk,nhkv->nhv", key, state)
    state = torch.addcmul(state, key.unsqueeze(-1), ((value - known) * rate.unsqueeze(-1)).unsqueeze(-2))
    return torch.einsum("nhk,nhkv->nhv", query, state), state


def delta_rule_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    states: Tensor,
    order: Sequence[tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Several texts in chunks. Each chunk takes a few products of matrices.

    `query`, `key` `[chunks, heads, tokens, key_dim]`, `value` `[chunks, heads, tokens, value_dim]`, `decay`, `rate`
    `[chunks, heads, tokens]`, `states` `[n, heads, key_dim, value_dim]`, which are overwritten. Each item of `order`
    can be computed at once: some of the n texts, and the next chunk of each. A token whose decay and rate are 0 changes
    nothing. Returns the outputs, like `value`, and the states after each chunk.

    Within a chunk, token i corrects the state's value for its key after the corrections of all earlier tokens. That is
    a triangular system, which is solved for all tokens at once: without the initial state of the chunk (`added`), and
    for the factor of that state, whose product with it is subtracted (`removed`).
    """
    total = decay.cumsum(-1)
    num_tokens = decay.shape[-1]
    is_later = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=decay.device).triu(1)
    # From token j to token i; 0 for tokens that i does not see.
    faded = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill_(is_later, -torch.inf).exp_()
    rated_key = key * rate.unsqueeze(-1)
    system = torch.matmul(rated_key, key.transpose(-1, -2)).mul_(faded)
    sides = torch.cat((value * rate.unsqueeze(-1), rated_key * total.exp().unsqueeze(-1)), dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    added, removed = torch.split(solved, [value.shape[-1], key.shape[-1]], dim=-1)
    seen = torch.matmul(query, key.transpose(-1, -2)).mul_(faded)
    query = query * total.exp().unsqueeze(-1)
    last = total[..., -1:]
    key = key * (last - total).exp_().unsqueeze(-1)
    outputs = torch.empty_like(value)
    after = value.new_empty((len(value), *states.shape[1:]))
    for texts, chunks in order:
        state = states[texts]
        change = added[chunks] - torch.matmul(removed[chunks], state)
        outputs[chunks] = torch.matmul(query[chunks], state) + torch.matmul(seen[chunks], change)
        state = state * last[chunks].exp().unsqueeze(-1) + torch.matmul(key[chunks].transpose(-1, -2), change)
        states[texts] = after[chunks] = state
    return outputs, after


def causal_conv(inputs: Tensor, places: Tensor, weight: Tensor) -> Tensor:
    """Each channel convolved with its own `weight` `[channels, width]`: `[n, channels]` float32.

    Output i uses the rows `places[i]` of `inputs` `[m, channels]` float32. `places` is `[n, width]`, oldest first.
    """
    output = inputs[places[:, 0]] * weight[:, 0]
    for tap in range(1, weight.shape[1]):
        output.addcmul_(inputs[places[:, tap]], weight[:, tap])
    return output
