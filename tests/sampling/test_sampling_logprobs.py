"""Log-probabilities, ranks and most likely tokens against `torch.log_softmax`."""

import pytest
import torch
from sampling.sampling_helpers import CPU

from infinilm.outputs import TokenLogprobs
from infinilm.sampling import Sampler, logprobs_of
from infinilm.sampling_params import RowStart, SamplingParams


@pytest.mark.parametrize("vocab_size", [50, 4096])
@pytest.mark.parametrize("num_top", [0, 1, 7, 50])
def test_values_ranks_and_top_tokens(vocab_size, num_top):
    generator = torch.Generator().manual_seed(vocab_size + num_top)
    logits = torch.randn(12, vocab_size, generator=generator) * 4
    targets = torch.randint(vocab_size, (12,), generator=generator)
    targets[0] = logits[0].argmax()
    entries = logprobs_of(logits, targets, num_top).to_host()
    assert len(entries) == 12
    assert entries[0].rank == 1
    for row, target, entry in zip(logits, targets.tolist(), entries, strict=True):
        expected = torch.log_softmax(row.double(), dim=-1)
        order = row.argsort(descending=True).tolist()
        assert entry.token_id == target
        assert entry.logprob == pytest.approx(expected[target].item(), abs=5e-6)
        assert entry.rank == order.index(target) + 1
        assert list(entry.top) == order[:num_top]
        assert list(entry.top.values()) == pytest.approx(expected[order[:num_top]].tolist(), abs=5e-6)


def test_more_top_tokens_than_there_are():
    (entry,) = logprobs_of(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([0]), 1000).to_host()
    assert list(entry.top) == [1, 2, 0]
    assert torch.tensor(list(entry.top.values())).exp().sum().item() == pytest.approx(1.0, abs=1e-6)


def test_equal_tokens_share_the_better_rank():
    entries = logprobs_of(torch.tensor([[1.0, 3.0, 3.0, 2.0]] * 4), torch.arange(4), 0).to_host()
    assert [entry.rank for entry in entries] == [4, 1, 1, 3]


def test_the_ranks_see_what_logprobs_round_together():
    """At −1e6 the spacing of float32 hides the difference that the logits still show."""
    logits = torch.tensor([[1e6, 0.25, 0.5]])
    (entry,) = logprobs_of(logits, torch.tensor([1]), 3).to_host()
    assert entry.rank == 3
    assert list(entry.top) == [0, 2, 1]


def test_tokens_that_cannot_occur():
    (entry,) = logprobs_of(torch.tensor([[0.0, -torch.inf]]), torch.tensor([1]), 2).to_host()
    assert entry == TokenLogprobs(1, -torch.inf, 2, {0: 0.0, 1: -torch.inf})


def test_each_row_gets_what_it_asked_for():
    sampler = Sampler(40, CPU)
    asked = [None, 0, 3, None, 100]
    for row, num_top in enumerate(asked):
        sampler.start_row(RowStart(row, SamplingParams(logprobs=num_top, top_k=5), row, (), [1]))
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    expected = torch.log_softmax(logits, dim=-1)
    for i, drawn in enumerate(sampler.sample(logits.clone(), range(5), [1] * 5).to_host()):
        num_top = asked[i]
        if num_top is None:
            assert drawn.logprobs is None
            continue
        assert drawn.logprobs is not None
        assert drawn.logprobs.token_id == drawn.token_id
        assert drawn.logprobs.logprob == pytest.approx(expected[i, drawn.token_id].item(), abs=1e-6)
        assert drawn.logprobs.rank <= 5
        assert len(drawn.logprobs.top) == min(num_top, 40)


def test_no_row_asks():
    sampler = Sampler(4, CPU)
    sampler.start_row(RowStart(0, SamplingParams(), 0, (), [1]))
    assert sampler.sample(torch.zeros(1, 4), [0], [1]).logprobs is None
