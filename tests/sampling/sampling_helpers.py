"""Small ways into the sampler that its tests share."""

from collections.abc import Sequence
from typing import Any

import torch

from infinilm.sampling import SampledToken, Sampler
from infinilm.sampling_params import RowStart, SamplingParams

CPU = torch.device("cpu")


def sampler_with(
    vocab_size: int,
    params: SamplingParams,
    *,
    row: int = 0,
    seed: int = 0,
    stop_ids: tuple[int, ...] = (),
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> Sampler:
    """A sampler with one row started."""
    sampler = Sampler(vocab_size, CPU)
    sampler.start_row(RowStart(row, params, seed, stop_ids, prompt, output))
    return sampler


def draw_one(logits: Sequence[float] | torch.Tensor, *, position: int = 0, **settings: Any) -> SampledToken:
    """Draw one token with the given sampling parameters; fails on a row error."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    sampler = sampler_with(len(logits), SamplingParams(**settings))
    (drawn,) = sampler.sample(logits.clone().unsqueeze(0), [0], [position]).to_host()
    assert drawn.error is None
    return drawn


def draw_many(logits: Sequence[float] | torch.Tensor, count: int, *, seed: int = 0, **settings: Any) -> torch.Tensor:
    """The tokens [count] drawn at positions 0, 1, …, all from the same logits."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    sampler = sampler_with(len(logits), SamplingParams(**settings), seed=seed)
    samples = sampler.sample(logits.repeat(count, 1), [0] * count, range(count))
    assert bool(samples.is_finite.all())
    return samples.token_ids


def can_draw(logits: Sequence[float] | torch.Tensor, count: int = 2000, **settings: Any) -> set[int]:
    """The tokens that come up in many draws."""
    return set(draw_many(logits, count, **settings).tolist())


class Recorder:
    """A logits processor that changes nothing and keeps what it is shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], torch.Tensor]] = []

    def __call__(self, output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        self.seen.append((list(output_ids), logits.clone()))
        return logits


def edited(logits: Sequence[float] | torch.Tensor, *, position: int = 0, **start: Any) -> torch.Tensor:
    """The logits after bias, penalties and `min_tokens`; `start` goes to `sampler_with`, less the parameters."""
    recorder = Recorder()
    row = {name: start.pop(name) for name in ("stop_ids", "prompt", "output") if name in start}
    logits = torch.as_tensor(logits, dtype=torch.float32)
    sampler = sampler_with(len(logits), SamplingParams(logits_processors=(recorder,), **start), **row)
    sampler.sample(logits.clone().unsqueeze(0), [0], [position])
    return recorder.seen[0][1]
