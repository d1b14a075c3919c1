"""Rows of logits and settings for draws, and the tokens that plain torch draws."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from infinilm.sampling import Sampler
from infinilm.sampling.draw import draw_torch
from infinilm.sampling_params import RowStart, SamplingParams

Draw = Callable[[Tensor, Sequence[RowStart], Sequence[int]], tuple[Tensor, Tensor]]
"""What is tried: from logits, rows 0, 1, … and positions to tokens and soundness."""


def random_logits(rng: random.Random, num_rows: int, vocab_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Flat, peaked and far from zero; in 16 bits most have equals."""
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    spread = torch.tensor([rng.choice([0.1, 1.0, 3.0, 8.0]) for _ in range(num_rows)])
    offset = torch.tensor([rng.choice([0.0, 0.0, 25.0, -40.0]) for _ in range(num_rows)])
    return (logits * spread[:, None] + offset[:, None]).to(dtype)


def starts_of(params: Sequence[SamplingParams], rng: random.Random) -> list[RowStart]:
    """Rows 0, 1, … with these parameters and any seeds."""
    edges = [0, -1, -(2**63), 2**64 - 1]
    seeds = [edges[i] if i < len(edges) else rng.randrange(-(2**63), 2**64) for i in range(len(params))]
    return [RowStart(row, params[row], seeds[row], (), ()) for row in range(len(params))]


def settings_of(starts: Sequence[RowStart], vocab_size: int) -> Tensor:
    """What a sampler with these rows hands to draws."""
    sampler = Sampler(vocab_size, torch.device("cpu"))
    for start in starts:
        sampler.start_row(start)
    return sampler._device_settings


def draw_by_twin(logits: Tensor, starts: Sequence[RowStart], positions: Sequence[int]) -> Tensor:
    """The tokens that torch draws; fails on a row that is not sound."""
    rows = torch.arange(len(starts))
    token_ids, are_finite = draw_torch(logits, settings_of(starts, logits.shape[1]), rows, torch.tensor(positions))
    assert are_finite.all()
    return token_ids


def assert_same_tokens(draw: Draw, logits: Tensor, params: Sequence[SamplingParams], seed: int = 0) -> None:
    """All rows are sound and draw what torch draws."""
    rng = random.Random(seed)
    starts = starts_of(params, rng)
    positions = [2**40, *(rng.randrange(100_000) for _ in params[1:])]
    token_ids, are_finite = draw(logits, starts, positions)
    assert are_finite.all()
    assert token_ids.tolist() == draw_by_twin(logits, starts, positions).tolist()


def assert_first_of_equals(draw: Draw) -> None:
    """Greedy rows take the first of their greatest logits, wherever these lie."""
    logits = torch.zeros(7, 5003)
    places = [[0], [7, 8], [255, 256], [1023, 1024], [900, 2000, 4999], [5002], list(range(5003))]
    for row, tokens in zip(logits, places, strict=True):
        row[tokens] = 2.5
    starts = starts_of([SamplingParams(temperature=0.0)] * 7, random.Random(0))
    assert draw(logits, starts, [3] * 7)[0].tolist() == [tokens[0] for tokens in places]


def assert_nonfinite_rows_are_reported(draw: Draw, dtype: torch.dtype = torch.float32) -> None:
    """Rows whose greatest logit is not finite; the others draw what torch draws."""
    logits = torch.full((8, 1500), -math.inf)
    logits[:, 3:9] = torch.tensor([1.0, 2.0, -math.inf, 0.5, -3.0, 4.0])
    logits[1, 1200] = logits[7, 1499] = math.nan
    logits[2, 5] = -math.nan
    logits[3, 700] = math.inf
    logits[4] = -math.inf
    logits[5, 3:9] = -1e30
    logits = logits.to(dtype)
    mixes: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_k": 3, "top_p": 0.9, "min_p": 0.01}]
    for settings in mixes:
        starts = starts_of([SamplingParams(**settings)] * 8, random.Random(0))
        token_ids, are_finite = draw(logits, starts, [5] * 8)
        assert are_finite.tolist() == [True, False, False, False, False, True, True, False]
        sound = [0, 5, 6]
        alone = [RowStart(i, starts[row].params, starts[row].seed, (), ()) for i, row in enumerate(sound)]
        assert token_ids[sound].tolist() == draw_by_twin(logits[sound], alone, [5] * 3).tolist()
        assert ((token_ids >= 0) & (token_ids < 1500)).all()
