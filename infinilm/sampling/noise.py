"""The draw: a Gumbel argmax whose noise is a hash of (seed, position, token id).

Each token gets a uniform 32-bit hash h, made an exponential variate e = −log(1 − (h + ½) / 2³²). The token
with the greatest `scaled logit − log e` wins: a draw from the softmax of the scaled logits. The noise of a
token depends on nothing else, so a request draws the same in any batch, no matter which other tokens
truncation has removed.

Seed and position become a 64-bit key on the host: output number `position` of the SplitMix64 generator
whose state starts at the scrambled seed. Token id and key then go through MurmurHash3's finaliser without its
first shift: a token's part is `mix(id, 0, 0)`, made once, and its hash `mix(part, upper half, lower half)` with

    mix(h, a, b):  h = (h ^ a) · 85ebca6b;  h ^= b;  h ^= h >> 13;  h = h · c2b2ae35;  h ^= h >> 16

All of it is 32-bit integer arithmetic that wraps around, so every device computes the same hash.
"""

import numpy as np
import numpy.typing as npt
import torch

from infinilm.sampling.settings import scramble
from infinilm.sampling.truncation import Scale, first_max, row_passes

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's step
MULTIPLIERS = (0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32)  # MurmurHash3's, as signed 32-bit integers

HASH_SCALE = 2.0**-32 * (1 - 2.0**-24)
"""The greatest float32 below 2⁻³²: hashes that round up to 2³² must not give 1, and then log(0)."""


def draw_keys(scrambled_seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """The keys [n, 2] of the draws at `positions` [n] under `scrambled_seeds` [n]."""
    keys = scramble(scrambled_seeds + (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN_GAMMA)
    halves = np.stack([keys >> np.uint64(32), keys & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32)
    return halves.view(np.int32)


def token_parts(vocab_size: int, device: torch.device) -> torch.Tensor:
    """A token id's contribution to its hashes, [vocab] int32."""
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
    return token_hashes(token_ids, torch.zeros(1, 2, dtype=torch.int32, device=device)).squeeze(0)


def token_hashes(parts: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The uniform hashes, [n, m] int32 bit patterns, of tokens with `parts` [m] or [n, m] and `keys` [n, 2]."""
    hashes = parts ^ keys[:, :1]
    hashes.mul_(MULTIPLIERS[0])
    hashes.bitwise_xor_(keys[:, 1:])
    hashes = _xor_shifted(hashes, 13)
    hashes.mul_(MULTIPLIERS[1])
    return _xor_shifted(hashes, 16)


def _xor_shifted(values: torch.Tensor, shift: int) -> torch.Tensor:
    """`values ^ (values >> shift)` in place, the shift filling with zeros."""
    shifted = values >> shift
    shifted.bitwise_and_(2 ** (32 - shift) - 1)
    return values.bitwise_xor_(shifted)


def log_exponentials(hashes: torch.Tensor) -> torch.Tensor:
    """log e of the exponential variates given by `hashes`, float32."""
    uniform = hashes.view(torch.uint32).to(torch.float32).add_(0.5)
    return uniform.mul_(-HASH_SCALE).log1p_().neg_().log_()


def gumbel_argmax(
    logits: torch.Tensor, scale: Scale, cutoffs: torch.Tensor | None, parts: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one column per row of `logits` [n, m], from those not below `cutoffs` [n, 1].

    `parts` is [m] or [n, m], `keys` is [n, 2]. Returns the winners' scores and columns, both [n]. A score is
    not finite if and only if the row's greatest logit is not.
    """
    scores, columns = [], []
    for rows in row_passes(logits):
        noise = log_exponentials(token_hashes(parts if parts.dim() == 1 else parts[rows], keys[rows]))
        contest = scale.select(rows).apply(logits[rows]).sub_(noise)
        if cutoffs is not None:
            contest.masked_fill_(logits[rows] < cutoffs[rows], -torch.inf)
        best, column = first_max(contest)
        scores.append(best)
        columns.append(column)
    return torch.cat(scores), torch.cat(columns)
