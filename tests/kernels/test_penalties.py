import pytest
import torch

from infinilm.kernels.penalties import IN_PROMPT, penalize_torch
from infinilm.kernels.penalties_kernel import penalize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("vocab_size", [1, 100, 4096, 5003])
@pytest.mark.parametrize("num_rows", [1, 6])
def test_penalties_equal_their_twin_bit_for_bit(num_rows: int, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(num_rows + vocab_size)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 5
    logits[0, 0] = -torch.inf
    num_slots = num_rows + 2
    counts = torch.randint(0, 4, (num_slots, vocab_size), generator=generator, dtype=torch.int32)
    counts += IN_PROMPT * torch.randint(0, 2, counts.shape, generator=generator, dtype=torch.int32)
    counts[:, ::3] = 0
    penalties = torch.rand(num_slots, 3, generator=generator) + 0.5
    places = torch.randperm(num_rows, generator=generator)[: max(1, num_rows - 2)]
    slots = torch.randperm(num_slots, generator=generator)[: len(places)]
    before, expected = logits.clone(), logits.clone()
    penalize_torch(expected, places, slots, counts, penalties)
    arguments = [tensor.to(DEVICE) for tensor in (logits, places, slots, counts, penalties)]
    penalize(*arguments)
    assert torch.equal(arguments[0].cpu(), expected)
    assert (expected[places] != before[places]).any() or vocab_size == 1
