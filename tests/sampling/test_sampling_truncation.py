"""Cut-offs against transformers, and the quick way against the thorough one."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from infinilm.sampling.truncation import (
    Limits,
    Scale,
    block_topk,
    find_cutoffs,
    first_max,
    sorted_descending,
    total_weights,
)


def random_logits(num_rows: int, vocab_size: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def limits_of(num_rows: int, top_k: int | None, top_p: float | None, min_p: float | None) -> Limits:
    def column(value, dtype):
        return None if value is None else torch.full((num_rows, 1), value, dtype=dtype)

    return Limits(
        column(top_k, torch.int64),
        column(top_p, torch.float64),
        column(None if min_p is None else math.log(min_p), torch.float32),
    )


def cutoffs_of(
    logits: torch.Tensor, temperature: float, limits: Limits, num_leaders: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """By sorting everything, or from the leaders alone."""
    vocab_size = logits.shape[1]
    scale = Scale.of(logits, torch.full((len(logits), 1), temperature))
    if num_leaders is None:
        return find_cutoffs(sorted_descending(logits), vocab_size, scale, limits, None)
    leaders, _ = block_topk(logits, num_leaders)
    return find_cutoffs(leaders, vocab_size, scale, limits, total_weights(logits, scale))


@pytest.mark.parametrize("top_k", [None, 2, 50, 700])
@pytest.mark.parametrize("top_p", [None, 0.1, 0.9, 0.999])
@pytest.mark.parametrize("min_p", [None, 0.02, 0.6])
@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_same_tokens_as_transformers(top_k, top_p, min_p, temperature):
    logits = random_logits(6, 1500, seed=1)
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k is not None:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p is not None:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p is not None:
        expected = MinPLogitsWarper(min_p)(None, expected)
    cutoffs, is_enough = cutoffs_of(logits, temperature, limits_of(6, top_k, top_p, min_p))
    assert is_enough.all()
    assert torch.equal(logits >= cutoffs, expected.isfinite())


@given(
    seed=st.integers(0, 2**32),
    step=st.sampled_from([None, 0.25, 1.0]),
    num_leaders=st.integers(1, 64),
    temperature=st.sampled_from([0.01, 0.7, 1.0, 3.0, 100.0]),
    top_k=st.none() | st.integers(2, 250),
    top_p=st.none() | st.floats(0.001, 0.9999),
    min_p=st.none() | st.floats(0.001, 1.0),
)
@settings(max_examples=200, deadline=None)
def test_leaders_that_suffice_tell_the_same_cutoffs(*, seed, step, num_leaders, temperature, top_k, top_p, min_p):
    """Ties (from rounding to a step) included: what the leaders claim to know must be exactly right."""
    logits = random_logits(3, 256, seed)
    if step is not None:
        logits = (logits / step).round() * step
    limits = limits_of(3, top_k, top_p, min_p)
    exact, _ = cutoffs_of(logits, temperature, limits)
    quick, is_enough = cutoffs_of(logits, temperature, limits, num_leaders)
    assert torch.equal(quick[is_enough], exact[is_enough])
    kept = (logits >= exact).sum(dim=-1)
    assert (kept[is_enough] <= num_leaders).all()
    assert (kept >= 1).all()


def test_leaders_usually_suffice():
    logits = random_logits(4, 4096, seed=2)
    _, is_enough = cutoffs_of(logits, 0.5, limits_of(4, None, 0.9, None), num_leaders=256)
    assert is_enough.tolist() == [True] * 4
    _, is_enough = cutoffs_of(logits, 50.0, limits_of(4, None, 0.9, None), num_leaders=256)
    assert is_enough.tolist() == [False] * 4


@pytest.mark.parametrize("vocab_size", [1, 31, 64, 100, 1000, 4096, 20000])
def test_leading_and_first_max(vocab_size):
    logits = (random_logits(5, vocab_size, seed=vocab_size) * 50).round()
    for count in {0, 1, min(3, vocab_size), min(40, vocab_size), vocab_size}:
        values, indices = block_topk(logits, count)
        assert torch.equal(values, logits.sort(dim=-1, descending=True).values[:, :count])
        assert torch.equal(logits.gather(1, indices), values)
        assert all(len(set(row)) == count for row in indices.tolist())
    best, index = first_max(logits)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert index.tolist() == expected
    assert torch.equal(best, logits.amax(dim=-1))
