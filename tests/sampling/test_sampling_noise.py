"""The draws: the documented hash, the right frequencies, and no visible dependence."""

import math

import numpy as np
import pytest
import torch
from sampling.sampling_helpers import CPU, draw_many

from infinilm.sampling import Sampler
from infinilm.sampling.noise import draw_keys, log_exponentials, token_hashes, token_parts
from infinilm.sampling.settings import scrambled_seed
from infinilm.sampling_params import RowStart, SamplingParams

NUM_DRAWS = 20_000
PROBABILITIES = torch.tensor([0.3, 0.25, 0.15, 0.1, 0.08, 0.06, 0.04, 0.02])


def chi_square_limit(degrees: int) -> float:
    """Exceeded by chance about once in 30,000 times (Wilson and Hilferty's approximation at 4 sigma)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 4 * math.sqrt(spread)) ** 3


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return ((counts - expected) ** 2 / expected).sum().item()


def assert_independent(first: torch.Tensor, second: torch.Tensor) -> None:
    size = len(PROBABILITIES)
    counts = torch.bincount(first * size + second, minlength=size * size)
    expected = torch.outer(PROBABILITIES, PROBABILITIES).flatten() * len(first)
    assert chi_square(counts, expected) < chi_square_limit(size * size - 1)


def reference_hash(seed: int, position: int, token_id: int) -> int:
    """The hash as `noise` documents it, in Python's integers."""

    def scramble(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    def mix(value: int, upper: int, lower: int) -> int:
        value = (value ^ upper) * 0x85EBCA6B % 2**32 ^ lower
        value = (value ^ value >> 13) * 0xC2B2AE35 % 2**32
        return value ^ value >> 16

    key = scramble((scramble(seed % 2**64) + (position + 1) * 0x9E3779B97F4A7C15) % 2**64)
    return mix(mix(token_id, 0, 0), key >> 32, key % 2**32)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, -(2**63), 2**63 + 5, 2**64 - 1])
def test_hash_is_the_documented_one(seed):
    positions = [0, 1, 2, 4095, 2**31, 2**40]
    seeds = np.full(len(positions), scrambled_seed(seed), dtype=np.uint64)
    keys = torch.from_numpy(draw_keys(seeds, np.array(positions)))
    hashes = token_hashes(token_parts(70_000, CPU), keys).view(torch.uint32)
    for i, position in enumerate(positions):
        for token_id in (0, 1, 2, 255, 49_151, 65_535, 65_536, 69_999):
            assert int(hashes[i, token_id]) == reference_hash(seed, position, token_id)


def test_hashes_of_a_vocabulary_look_uniform():
    """Every bit is balanced, and flipping one bit of seed or position flips about half of the bits."""
    parts = token_parts(50_000, CPU)

    def hashes(seed: int, position: int) -> torch.Tensor:
        keys = draw_keys(np.array([scrambled_seed(seed)], dtype=np.uint64), np.array([position]))
        return token_hashes(parts, torch.from_numpy(keys))[0].to(torch.int64) & 0xFFFFFFFF

    def bits(values: torch.Tensor) -> torch.Tensor:
        return (values.unsqueeze(1) >> torch.arange(32)) & 1  # [50000, 32]

    base = hashes(7, 100)
    tolerance = 5 * 0.5 / math.sqrt(50_000)
    for difference in (base, base ^ hashes(6, 100), base ^ hashes(7, 101), base ^ base.roll(1)):
        assert (bits(difference).double().mean(dim=0) - 0.5).abs().max() < tolerance
    assert len(base.unique()) > 49_990


def test_frequencies_match_the_distribution():
    tokens = draw_many(PROBABILITIES.log(), NUM_DRAWS)
    counts = torch.bincount(tokens, minlength=len(PROBABILITIES))
    assert chi_square(counts, PROBABILITIES * NUM_DRAWS) < chi_square_limit(len(PROBABILITIES) - 1)


def test_frequencies_match_after_temperature_and_truncation():
    tokens = draw_many(PROBABILITIES.log(), NUM_DRAWS, temperature=0.5, top_k=6, top_p=0.98, seed=11)
    expected = PROBABILITIES**2
    expected[5:] = 0  # the first five hold 0.98 of the six, the first four 0.95
    counts = torch.bincount(tokens, minlength=len(PROBABILITIES))
    assert counts[5:].sum() == 0
    expected = expected[:5] / expected.sum() * NUM_DRAWS
    assert chi_square(counts[:5], expected) < chi_square_limit(4)


@pytest.mark.parametrize("settings", [{}, {"min_p": 0.001}])
def test_frequencies_match_over_a_wide_vocabulary(settings):
    """Both ways of drawing: from the whole row and, truncated, with more tokens left than there are leaders."""
    probabilities = torch.softmax(torch.linspace(0, -3, 300), dim=-1)
    tokens = draw_many(probabilities.log(), NUM_DRAWS, seed=5, **settings)
    counts = torch.bincount(tokens, minlength=300)
    assert chi_square(counts, probabilities * NUM_DRAWS) < chi_square_limit(299)


def test_rare_tokens_are_drawn_at_their_rate():
    """Many unlikely tokens beside a few likely ones: small variates must be finely resolved."""
    logits = torch.zeros(2048)
    logits[:8] += math.log(50.0)
    tokens = draw_many(logits, 5000, seed=3)
    buckets = torch.bincount(torch.where(tokens < 8, tokens, 8 + (tokens - 8) // 255), minlength=16)
    weights = torch.tensor([50.0] * 8 + [255.0] * 8)
    assert chi_square(buckets, weights / weights.sum() * 5000) < chi_square_limit(15)


def test_neighbouring_positions_are_independent():
    tokens = draw_many(PROBABILITIES.log(), 2 * NUM_DRAWS, seed=1)
    assert_independent(tokens[::2], tokens[1::2])


@pytest.mark.parametrize("offset", [0, 1])
def test_neighbouring_seeds_are_independent(offset):
    first = draw_many(PROBABILITIES.log(), NUM_DRAWS + 1, seed=41)
    second = draw_many(PROBABILITIES.log(), NUM_DRAWS + 1, seed=42)
    assert_independent(first[offset:NUM_DRAWS], second[: NUM_DRAWS - offset])


def test_seeds_at_one_position_follow_the_distribution():
    """The first token of requests seeded 0, 1, 2, … is as random as any other."""
    sampler = Sampler(8, CPU)
    for seed in range(4000):
        sampler.start_row(RowStart(seed, SamplingParams(), seed, (), []))
    tokens = sampler.sample(PROBABILITIES.log().repeat(4000, 1), range(4000), [17] * 4000).token_ids
    counts = torch.bincount(tokens, minlength=8)
    assert chi_square(counts, PROBABILITIES * 4000) < chi_square_limit(7)


def test_truncation_only_removes_contestants():
    """Whenever the untruncated winner is among the kept tokens, it wins the truncated draw too."""
    logits = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 2
    free = draw_many(logits, 3000, seed=9)
    truncated = draw_many(logits, 3000, seed=9, top_k=40)
    top = set(logits.topk(40).indices.tolist())
    agreed = [a == b for a, b in zip(free.tolist(), truncated.tolist(), strict=True) if a in top]
    assert len(agreed) > 500
    assert all(agreed)


@pytest.mark.parametrize(("seed", "same"), [(-1, 2**64 - 1), (-(2**63), 2**63), (5, 5 + 2**64)])
def test_seeds_count_modulo_2_to_the_64(seed, same):
    logits = torch.zeros(64)
    assert torch.equal(draw_many(logits, 50, seed=seed), draw_many(logits, 50, seed=same))
    assert not torch.equal(draw_many(logits, 50, seed=seed), draw_many(logits, 50, seed=seed + 1))


def test_every_hash_gives_a_finite_variate():
    """The extremes too: a token that is alone must win with any hash."""
    hashes = torch.tensor([0, 1, 1000, 2**31 - 1, -(2**31), -1000, -129, -2, -1], dtype=torch.int32)
    found = log_exponentials(hashes.clone())
    uniform = (hashes.to(torch.float64) % 2**32 + 0.5) / 2**32
    expected = torch.log(-torch.log1p(-uniform))
    assert found.isfinite().all()
    assert torch.allclose(found[:5].double(), expected[:5], rtol=1e-5)
    assert torch.allclose(found[5:].double(), expected[5:], atol=0.35)  # coarse where a token can hardly win


def test_a_single_possible_token_is_always_drawn():
    logits = torch.full((8,), -math.inf)
    logits[5] = -1e30
    assert set(draw_many(logits, 2000).tolist()) == {5}
