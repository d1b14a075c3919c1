"""Keys and values as 8-bit floats (e4m3), with a scale for each head of each token.

A scale is the smallest power of 2 for which no code of the head exceeds 448, the largest 8-bit float. It is computed
when the token is stored, from that head alone, so the stored numbers do not depend on other tokens, requests or steps.
A power of 2 changes exponents only. So a code times its scale is exact in the type of the computation, and a product
has the same bits whether codes are scaled before it or its result after it. So kernels that scale scores and weights
agree with kernels that read decoded keys and values.

Scales are bfloat16, `[blocks, kv_heads, block_size, 2]` beside the codes `[blocks, block_size, 2, kv_heads, head_dim]`:
a token's two scales are adjacent, and so are those of a block for one head. If `nonfinite.py` makes a key NaN, its
scale is NaN and its codes are 0.
"""

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn

# From this capability on there are instructions that convert 8-bit floats.
_LEAST_CAPABILITY = (8, 9)
# The least biased exponent of a scale. With it codes times scales are normal numbers, or exact in float16.
LEAST_EXPONENT = 10
LEAST_EXPONENT_FLOAT16 = 112
# Larger numbers would be rounded up to float16's infinity.
FLOAT16_LIMIT = 61440.0


def why_not(device: torch.device) -> str | None:
    """Why the device can't keep such a cache; None if it can."""
    if device.type not in ("cpu", "cuda"):
        return f"8-bit floats are known to work on a CPU and on NVIDIA GPUs, not on {device}"
    if device.type == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < _LEAST_CAPABILITY:
            return f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and 8.9 is needed"
    return None


def quantize_kv(new: Tensor) -> tuple[Tensor, Tensor]:
    """The codes and scales, `[T, 2, kv_heads, head_dim]` and `[T, 2, kv_heads]`, of new keys and values."""
    largest = new.abs().amax(-1).float()
    least = LEAST_EXPONENT
    numbers = new.float()
    if new.dtype == torch.float16:
        least = LEAST_EXPONENT_FLOAT16
        numbers = numbers.clamp(-FLOAT16_LIMIT, FLOAT16_LIMIT)
    # One more if the mantissa is above 1.75, the mantissa of 448.
    exponent = (((largest.view(torch.int32) + 0x1FFFFF) >> 23) - 8).clamp(min=least)
    is_finite = largest < torch.inf
    inverse = ((254 - exponent) << 23).view(torch.float32)
    codes = (numbers * inverse.unsqueeze(-1)).masked_fill(~is_finite.unsqueeze(-1), 0.0)
    scales = (exponent << 23).view(torch.float32).masked_fill(~is_finite, torch.nan)
    return codes.to(DTYPE), scales.to(torch.bfloat16)


def store_quantized(new: Tensor, cache: Tensor, scales: Tensor, slots: Tensor) -> None:
    """Write keys and values `[T, 2, kv_heads, head_dim]`, marked by `mark_nonfinite`, into their slots."""
    codes, new_scales = quantize_kv(new)
    block_size = cache.shape[1]
    cache.view(torch.uint8).flatten(0, 1).index_copy_(0, slots, codes.view(torch.uint8))
    scales[slots // block_size, :, slots % block_size] = new_scales.transpose(1, 2)


def as_bytes(cache: Tensor) -> Tensor:
    """A layer's codes as bytes, as the native library takes them. Other types are returned unchanged."""
    return cache.view(torch.uint8) if cache.dtype == DTYPE else cache


def as_pairs(cache: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's codes as int16, two in each, and its scales as int32, a key's and a value's: as kernels read them."""
    return cache.view(torch.int16), scales.view(torch.int32)


def decoded_cache(cache: Tensor, scales: Tensor | None) -> Tensor:
    """A layer's keys and values `[blocks, block_size, 2, kv_heads, head_dim]`, float32 if they have scales."""
    if scales is None:
        return cache
    return cache.float() * scales.permute(0, 2, 3, 1).unsqueeze(-1).float()


def read_quantized(cache: Tensor, scales: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """The keys and values in some slots `[...]`, `[..., 2, kv_heads, head_dim]`."""
    blocks, offsets = slots // cache.shape[1], slots % cache.shape[1]
    codes = cache.view(torch.uint8)[blocks, offsets].view(DTYPE)
    own = scales[blocks, :, offsets].transpose(-1, -2)  # [..., 2, kv_heads]
    return codes.to(dtype) * own.unsqueeze(-1).to(dtype)
