import pytest
import torch

from infinilm.kernels.cast import to_float32, to_float32_torch
from infinilm.kernels.row_summary import MAX_TOP, top_logprobs
from infinilm.sampling import logprobs
from infinilm.sampling.logprobs import logprobs_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("vocab_size", [7, 100, 8192, 16_448])
@pytest.mark.parametrize("num_top", [0, 1, 5, MAX_TOP])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_pass_finds_what_log_softmax_finds(vocab_size: int, num_top: int, dtype: torch.dtype) -> None:
    num_top = min(num_top, vocab_size)
    generator = torch.Generator().manual_seed(vocab_size + num_top)
    logits = (torch.randn(5, vocab_size, generator=generator) * 6).to(dtype)
    logits[1] = 2.0  # ties
    logits[2, 1:] = -torch.inf
    logits[3, ::2] = -torch.inf
    targets = torch.tensor([vocab_size - 1, 3, 0, 1, 5])
    expected = logprobs_of(logits.float(), targets, num_top)
    ids, values, _ = (part.cpu() for part in top_logprobs(logits.to(DEVICE), targets.to(DEVICE), num_top))
    torch.testing.assert_close(values, expected.values, rtol=1e-6, atol=2e-6)
    assert torch.equal(ids[:, :2], expected.ids[:, :2])
    # Of equal logits the first come first.
    order = logits.float().sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(ids[:, 2:], order[:, :num_top])


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = torch.randn(9, 9000, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    targets = torch.arange(9, device=DEVICE)
    whole = top_logprobs(logits, targets, 3)
    for row in range(9):
        alone = top_logprobs(logits[row : row + 1], targets[row : row + 1], 3)
        assert all(torch.equal(part[0], of_all[row]) for part, of_all in zip(alone, whole, strict=True))


@pytest.mark.parametrize("vocab_size", [160, 9000, 151_936] if DEVICE == "cuda" else [160])
def test_bits_depend_neither_on_the_type_nor_on_the_place_of_logits(vocab_size: int) -> None:
    """A graph leaves bfloat16 logits, a step without a graph float32, and rows that ask may be anywhere."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(40, vocab_size, generator=generator) * 3).to(DEVICE, torch.bfloat16)
    targets = torch.randint(vocab_size, (40,), generator=generator).to(DEVICE)
    expected = top_logprobs(logits, targets, 5)
    apart = torch.empty(40, vocab_size + 1, dtype=torch.bfloat16, device=DEVICE)[:, :vocab_size].copy_(logits)
    for other in (logits.float(), apart, apart.float()):
        for found, wanted in zip(top_logprobs(other, targets, 5), expected, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("count", [5, MAX_TOP + 1])
def test_more_tokens_than_the_kernel_finds_have_the_same_log_probabilities(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour that asks for more of them changes no bit of those that a row asks for."""
    monkeypatch.setattr(logprobs, "has_kernels", lambda _device: True)
    logits = torch.randn(3, 2000, generator=torch.Generator().manual_seed(4)).bfloat16().to(DEVICE)  # with ties
    logits[0, :3] = torch.tensor([-torch.inf, 0.0, -0.0])
    targets = torch.tensor([5, 6, 7], device=DEVICE)
    few, more = logprobs_of(logits, targets, count), logprobs_of(logits, targets, 100)
    assert torch.equal(few.ids, more.ids[:, : 2 + count])
    assert torch.equal(few.values, more.values[:, : 1 + count])


def test_nan_is_seen() -> None:
    logits = torch.zeros(2, 9000, device=DEVICE)
    logits[0, 8999] = torch.nan
    _, values, _ = top_logprobs(logits, torch.tensor([1, 1], device=DEVICE), 0)
    assert values.isnan().flatten().tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_cast_as_torch_casts_them(dtype: torch.dtype) -> None:
    values = torch.randn(3, 10_000, generator=torch.Generator().manual_seed(2)).to(dtype)
    values[1, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    part = values.to(DEVICE)[:, :9001]  # rows are not next to each other
    torch.testing.assert_close(to_float32(part), to_float32_torch(part), rtol=0, atol=0, equal_nan=True)
