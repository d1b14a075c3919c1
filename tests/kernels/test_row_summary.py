import pytest
import torch

from infinilm.kernels.cast import to_float32, to_float32_torch
from infinilm.sampling.logprobs import _logprobs_by_kernel, logprobs_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("vocab_size", [7, 100, 8192, 16_448])
@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_pass_finds_what_log_softmax_finds(vocab_size: int, num_top: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size + num_top)
    logits = (torch.randn(5, vocab_size, generator=generator) * 6).to(dtype)
    logits[1] = 2.0  # ties
    logits[2, 1:] = -torch.inf
    logits[3, ::2] = -torch.inf
    targets = torch.tensor([vocab_size - 1, 3, 0, 1, 5])
    expected = logprobs_of(logits.float(), targets, num_top)
    found = _logprobs_by_kernel(logits.to(DEVICE), targets.to(DEVICE), num_top)
    torch.testing.assert_close(found.logprobs.cpu(), expected.logprobs, rtol=1e-6, atol=2e-6)
    assert torch.equal(found.ranks.cpu(), expected.ranks)
    torch.testing.assert_close(found.top_logprobs.cpu(), expected.top_logprobs, rtol=1e-6, atol=2e-6)
    is_unique = expected.top_logprobs.diff(dim=1).abs().gt(1e-4).all(dim=1)
    is_unique[1] = False  # any of its tokens may be called the first
    assert torch.equal(found.top_ids.cpu()[is_unique], expected.top_ids[is_unique])


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = torch.randn(9, 9000, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    targets = torch.arange(9, device=DEVICE)
    whole = _logprobs_by_kernel(logits, targets, 3)
    for row in range(9):
        alone = _logprobs_by_kernel(logits[row : row + 1], targets[row : row + 1], 3)
        assert torch.equal(alone.logprobs[0], whole.logprobs[row])
        assert torch.equal(alone.top_logprobs[0], whole.top_logprobs[row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_cast_as_torch_casts_them(dtype: torch.dtype) -> None:
    values = torch.randn(3, 10_000, generator=torch.Generator().manual_seed(2)).to(dtype)
    values[1, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    part = values.to(DEVICE)[:, :9001]  # rows are not next to each other
    torch.testing.assert_close(to_float32(part), to_float32_torch(part), rtol=0, atol=0, equal_nan=True)
