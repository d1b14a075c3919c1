"""Keys and values into the cache and out of it again, against plain torch."""

import pytest
import torch
from interpreter import DEVICE

from infinilm.kernels.store_kv import gather_kv, gather_kv_torch, store_kv, store_kv_torch

NUM_BLOCKS, BLOCK_SIZE = 6, 16


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 16), (3, 24), (2, 128)])
def test_store_equals_torch(kv_heads: int, head_dim: int, slot_dtype: torch.dtype, dtype: torch.dtype) -> None:
    # As it comes from the projection: keys and values behind two query heads.
    heads = random(5, 2 + 2 * kv_heads, head_dim, dtype=dtype)
    new = heads[:, 2:].view(5, 2, kv_heads, head_dim)
    slots = torch.tensor([17, -1, 0, NUM_BLOCKS * BLOCK_SIZE - 1, 40], dtype=slot_dtype, device=DEVICE)
    cache, expected = (random(NUM_BLOCKS, BLOCK_SIZE, 2, kv_heads, head_dim, dtype=dtype) for _ in range(2))
    store_kv(new, cache, slots)
    store_kv_torch(new, expected, slots)
    torch.testing.assert_close(cache, expected, rtol=0, atol=0)
    torch.testing.assert_close(cache.flatten(0, 1)[17], new[0], rtol=0, atol=0)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), 1e6])
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_a_number_that_is_not_finite_is_kept_as_a_nan_key(part: int, number: float) -> None:
    """Values are always finite: attention multiplies those it must not see by 0. 1e6 is infinite as float16."""
    new = random(3, 2, 3, 24)
    new[1, part, 2, 7] = number
    cache, expected = (torch.zeros(2, BLOCK_SIZE, 2, 3, 24, dtype=torch.float16, device=DEVICE) for _ in range(2))
    slots = torch.tensor([3, 4, 31], device=DEVICE)
    store_kv(new, cache, slots)
    store_kv_torch(new, expected, slots)
    torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)
    assert cache[0, 4, 0, 2].isnan().all()
    assert cache.isnan().sum() == 24
    assert cache[:, :, 1].isfinite().all()
    assert cache[0, 4, 1, 2].eq(0).all() == (part == 1)
    torch.testing.assert_close(cache[0, 4, :, :2], new[1, :, :2].half(), rtol=0, atol=0)


def test_store_converts_to_the_type_of_the_cache() -> None:
    new = random(3, 2, 2, 16)
    cache = torch.zeros(2, BLOCK_SIZE, 2, 2, 16, dtype=torch.float16, device=DEVICE)
    store_kv(new, cache, torch.tensor([3, 4, 31], device=DEVICE))
    torch.testing.assert_close(cache.flatten(0, 1)[[3, 4, 31]], new.half(), rtol=0, atol=0)


def test_store_of_other_strides_and_of_nothing() -> None:
    cache = torch.zeros(2, BLOCK_SIZE, 2, 2, 16, device=DEVICE)
    new = random(3, 2, 16, 2).transpose(2, 3)
    store_kv(new, cache, torch.tensor([3, 4, 31], device=DEVICE))
    torch.testing.assert_close(cache.flatten(0, 1)[[3, 4, 31]], new, rtol=0, atol=0)
    before = cache.clone()
    store_kv(new[:0], cache, torch.tensor([], dtype=torch.int64, device=DEVICE))
    torch.testing.assert_close(cache, before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("context_len", "num_tokens"), [(1, 1), (16, 32), (37, 64), (48, 48), (37, 0)])
def test_gather_equals_torch(context_len: int, num_tokens: int, dtype: torch.dtype) -> None:
    cache = random(NUM_BLOCKS, BLOCK_SIZE, 2, 3, 8, dtype=dtype)
    table = torch.tensor([4, 1, 5, -1], dtype=torch.int32, device=DEVICE)
    cache[5, 5:] = float("nan")  # behind token 37
    if context_len == 48:
        table[2] = 0
    ours = gather_kv(cache, table, context_len=context_len, num_tokens=num_tokens)
    expected = gather_kv_torch(cache, table, context_len=context_len, num_tokens=num_tokens)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    assert ours.shape == (num_tokens, 2, 3, 8)
    assert ours[context_len:].eq(0).all()
    if num_tokens:
        torch.testing.assert_close(ours[0], cache[4, 0], rtol=0, atol=0)
