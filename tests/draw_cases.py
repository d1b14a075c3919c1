"""Rows of logits and settings for draws, and the tokens that plain torch draws."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from infinilm.sampling import Sampler
from infinilm.sampling.draw import draw_torch
from infinilm.sampling_params import RowStart, SamplingParams


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
    token_ids, are_sound = draw_torch(logits, settings_of(starts, logits.shape[1]), rows, torch.tensor(positions))
    assert are_sound.all()
    return token_ids
