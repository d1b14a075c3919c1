"""Two parts of an attention, merged: against plain torch, and against the attention done in one go."""

import pytest
import torch
from interpreter import DEVICE

from infinilm.kernels.merge_attention import merge_attention, merge_attention_torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "heads", "head_dim"), [(1, 1, 16), (33, 3, 24), (64, 2, 128), (0, 2, 16)])
def test_equals_torch(num_tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    parts = torch.randn(2, num_tokens, heads, head_dim, generator=generator).to(DEVICE, dtype)
    sums = (torch.randn(2, heads, num_tokens, generator=generator) * 20).to(DEVICE)
    for target in (dtype, torch.float32):
        ours = merge_attention(parts[0], sums[0], parts[1].half(), sums[1], dtype=target)
        expected = merge_attention_torch(parts[0], sums[0], parts[1].half(), sums[1], dtype=target)
        for got, wanted in zip(ours, expected, strict=True):
            assert got.dtype == wanted.dtype
            torch.testing.assert_close(got, wanted)


def test_merged_parts_equal_the_whole() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = torch.randn(3, 40, 2, 16, generator=generator).to(DEVICE).unbind(0)
    scores = torch.einsum("qhd,khd->hqk", query, key) * 3
    whole = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
    pieces = []
    for keys in (slice(0, 7), slice(7, 40)):
        part = torch.einsum("hqk,khd->qhd", scores[..., keys].softmax(-1), value[keys])
        pieces += [part.contiguous(), scores[..., keys].logsumexp(-1)]
    merged, log_sums = merge_attention(*pieces, dtype=torch.float32)
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(log_sums, scores.logsumexp(-1))
