"""Tokens drawn by the native library are those that torch draws, on every instruction set."""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from draw_cases import (
    assert_first_of_equals,
    assert_nonfinite_rows_are_reported,
    assert_same_tokens,
    random_logits,
    settings_of,
    starts_of,
)
from torch import Tensor

from infinilm.sampling_params import RowStart, SamplingParams


def draw(
    native: Any, logits: Tensor, starts: Sequence[RowStart], positions: Sequence[int], rows: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    token_ids, are_finite = torch.full((len(logits),), -7), torch.zeros(len(logits), dtype=torch.bool)
    chosen = torch.arange(len(logits)) if rows is None else torch.tensor(rows)
    settings = settings_of(starts, logits.shape[1])
    native.draw(logits, settings, chosen, torch.tensor(positions), token_ids, are_finite)
    return token_ids, are_finite


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 300, 5003])
def test_untruncated_rows(native: Any, vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    temperatures = [0.0, 1e-300, 1e-3, 0.1, 0.6, 1.0, 1.0, 2.0, 100.0]
    params = [SamplingParams(temperature=rng.choice(temperatures)) for _ in range(300)]
    assert_same_tokens(partial(draw, native), random_logits(rng, 300, vocab_size), params)


@pytest.mark.parametrize("is_rounded", [False, True], ids=["", "with equals"])
@pytest.mark.parametrize("vocab_size", [300, 5003])
def test_any_mix_of_rows(native: Any, vocab_size: int, is_rounded: bool) -> None:
    rng = random.Random(vocab_size)
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.01, 0.6, 1.0, 1.0, 3.0]),
            top_k=rng.choice([-1, -1, 1, 2, 6, 40, 290, 4000]),
            top_p=rng.choice([1.0, 1.0, 0.1, 0.9, 0.999]),
            min_p=rng.choice([0.0, 0.0, 0.02, 0.5]),
        )
        for _ in range(300)
    ]
    logits = random_logits(rng, 300, vocab_size)
    assert_same_tokens(partial(draw, native), (logits * 2).round() / 2 if is_rounded else logits, params)


def test_a_whole_vocabulary(native: Any) -> None:
    params = [SamplingParams(temperature=0.7, top_p=top_p, top_k=top_k) for top_p in (0.9, 1.0) for top_k in (-1, 50)]
    assert_same_tokens(partial(draw, native), random_logits(random.Random(3), 4, 151_936), params)


def test_greedy_rows_take_the_first_of_equals(native: Any) -> None:
    assert_first_of_equals(partial(draw, native))


def test_rows_whose_greatest_logit_is_not_finite_are_not_sound(native: Any) -> None:
    assert_nonfinite_rows_are_reported(partial(draw, native))


@pytest.mark.parametrize("magnitude", [1e30, -1e30, 3e38])
def test_logits_whose_scores_overflow(native: Any, magnitude: float) -> None:
    """Nothing can be ruled out without a look, and the result is right nevertheless."""
    logits = random_logits(random.Random(0), 3, 3000) / 100 + 1
    params = [SamplingParams(temperature=t) for t in (1e-300, 1e-10, 100.0)]
    assert_same_tokens(partial(draw, native), logits * (magnitude / logits.abs().amax()), params)


def test_a_row_draws_the_same_in_any_batch_on_any_number_of_threads(native: Any) -> None:
    rng = random.Random(6)
    logits = random_logits(rng, 3, 2051)
    params = [SamplingParams(), SamplingParams(temperature=0.5, top_k=30, top_p=0.9), SamplingParams(temperature=0.0)]
    starts = starts_of(params, rng)
    alone = [draw(native, logits[i : i + 1], starts, [70 + i], [i])[0].item() for i in range(3)]
    rows = [rng.randrange(3) for _ in range(67)]
    for threads in (1, 3):
        native.set_num_threads(threads)
        token_ids, _ = draw(native, logits[rows], starts, [70 + row for row in rows], rows)
        assert token_ids.tolist() == [alone[row] for row in rows]


def test_what_does_not_fit_is_refused(native: Any) -> None:
    starts = starts_of([SamplingParams()] * 2, random.Random(0))
    with pytest.raises(ValueError, match="a row has no settings"):
        draw(native, torch.zeros(1, 9), starts, [0], [99])
    with pytest.raises(ValueError, match="a row has no settings"):
        draw(native, torch.zeros(1, 9), starts, [0], [-1])
    with pytest.raises(ValueError, match="for each row of logits"):
        draw(native, torch.zeros(2, 9), starts, [0], [0, 1])
    with pytest.raises(ValueError, match=r"\[n, vocab\]"):
        draw(native, torch.zeros(2, 0), starts, [0, 0])
    with pytest.raises(TypeError):
        draw(native, torch.zeros(9, 2).t(), starts, [0, 0])
