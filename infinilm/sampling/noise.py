"""The draw: an exponential race whose noise is a hash of (seed, position, token id).

Each token gets a uniform 32-bit hash h, made an exponential variate e = −log(1 − (h + ½) / 2³²). The token with
the greatest `scaled logit − log e` wins; its distribution is exactly the softmax of the scaled logits.
Since the noise of a token depends on nothing else, a request draws the same whatever shares its batch,
and whichever tokens truncation has left out.

Seed and position become a 64-bit key on the host: output number `position` of the SplitMix64 generator
whose state starts at the scrambled seed. Key and token id then go through the finaliser of MurmurHash3
(shift, multiply, shift, multiply, shift), one half of the key entering before each multiplication. Its first
shift is linear over exclusive-or, so it is done beforehand, on the parts. All of it is 32-bit integer
arithmetic that wraps around, and every device computes the same hash.
"""

import numpy as np
import numpy.typing as npt
import torch

from infinilm.sampling.leading import first_max

MASK64 = 2**64 - 1
GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's step
MULTIPLIERS = (0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32)  # MurmurHash3's, as signed 32-bit integers

HASH_SCALE = 2.0**-32 * (1 - 2.0**-24)
"""The greatest float32 below 2⁻³²: hashes that round up to 2³² must not reach 1, where log(0) waits."""

ELEMENTS_PER_PASS = 2**18
"""On a CPU, a pass over more than this leaves the cache between one operation and the next."""


def scramble(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser: a bijection of 64-bit integers in which every bit affects every other."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def scrambled_seed(seed: int) -> int:
    """The generator's starting state for any integer seed, of which the low 64 bits count."""
    return int(scramble(np.array([seed & MASK64], dtype=np.uint64))[0])


def draw_keys(
    scrambled_seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.int32]:
    """The keys [n, 2] of the draws at `positions` [n] under `scrambled_seeds` [n]."""
    keys = scramble(scrambled_seeds + (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN_GAMMA)
    halves = np.stack([keys >> np.uint64(32), keys & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32)
    return halves.view(np.int32)


def token_parts(vocab_size: int, device: torch.device) -> torch.Tensor:
    """What a token id contributes to its hashes, [vocab] int32; made once."""
    parts = torch.arange(vocab_size, dtype=torch.int32, device=device)
    for multiplier, shift in zip(MULTIPLIERS, (13, 16), strict=True):
        parts = _xor_shifted(parts * multiplier, shift)
    return parts


def token_hashes(parts: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The uniform hashes, [n, m] int32 bit patterns, of tokens with `parts` [m] or [n, m] under `keys` [n, 2]."""
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


def _log_exponentials(hashes: torch.Tensor) -> torch.Tensor:
    """log e of the exponential variates that `hashes` stand for, float32."""
    uniform = hashes.view(torch.uint32).to(torch.float32).add_(0.5)
    return uniform.mul_(-HASH_SCALE).log1p_().neg_().log_()


def race(
    scaled_logits: torch.Tensor, parts: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one column per row of `scaled_logits` [n, m]; −inf never wins.

    `parts` is [m] or [n, m], `keys` is [n, 2]. Returns the winners' scores and columns, both [n]. A score is
    not finite if and only if the row holds NaN or +inf or nothing but −inf.
    """
    num_rows, width = scaled_logits.shape
    on_cpu = scaled_logits.device.type == "cpu"
    rows_per_pass = max(1, ELEMENTS_PER_PASS // width) if on_cpu else num_rows
    if num_rows > rows_per_pass:
        parts = parts.expand(num_rows, width)
        passes = zip(*(tensor.split(rows_per_pass) for tensor in (scaled_logits, parts, keys)), strict=True)
        scores, columns = zip(*(race(*tensors) for tensors in passes), strict=True)
        return torch.cat(scores), torch.cat(columns)
    noise = _log_exponentials(token_hashes(parts, keys))
    return first_max(torch.sub(scaled_logits, noise, out=noise))
