"""The kernels' tokens are the CPU sampler's, for any mix of settings, dtype and size of vocabulary."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from draw_cases import (
    assert_first_of_equals,
    assert_nonfinite_rows_are_reported,
    assert_same_tokens,
    draw_by_twin,
    random_logits,
    settings_of,
    starts_of,
)

from infinilm.errors import InvalidValueError
from infinilm.kernels.sampling import draw
from infinilm.sampling import Sampler
from infinilm.sampling.truncation import Limits, Scale, find_cutoffs, sorted_descending
from infinilm.sampling_params import RowStart, SamplingParams

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_GPU else "cpu")
INF = math.inf


def at_scale(on_gpu: int, interpreted: int) -> int:
    return on_gpu if IS_GPU else interpreted


def draw_on_device(
    logits: torch.Tensor, starts: Sequence[RowStart], positions: Sequence[int], rows: Sequence[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels' tokens and soundness, on the host."""
    chosen = range(len(logits)) if rows is None else rows
    places = torch.tensor([list(chosen), list(positions)], device=DEVICE)
    token_ids, is_finite = draw(logits.to(DEVICE), settings_of(starts, logits.shape[1]).to(DEVICE), *places)
    return token_ids.cpu(), is_finite.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 300, 1024, 5003])
def test_untruncated_rows_draw_what_the_cpu_draws(vocab_size, dtype):
    rng = random.Random(vocab_size)
    num_rows = at_scale(4000, 7)
    temperatures = [0.0, 1e-300, 1e-3, 0.1, 0.6, 1.0, 1.0, 2.0, 100.0]
    params = [SamplingParams(temperature=rng.choice(temperatures)) for _ in range(num_rows)]
    assert_same_tokens(draw_on_device, random_logits(rng, num_rows, vocab_size, dtype), params, seed=vocab_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [300, 5003])
def test_any_mix_of_rows_draws_what_the_cpu_draws(vocab_size, dtype):
    rng = random.Random(vocab_size)
    num_rows = at_scale(4000, 6)
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.01, 0.6, 1.0, 1.0, 3.0]),
            top_k=rng.choice([-1, -1, 1, 2, 6, 40, 290, 4000]),
            top_p=rng.choice([1.0, 1.0, 0.1, 0.9, 0.999]),
            min_p=rng.choice([0.0, 0.0, 0.02, 0.5]),
        )
        for _ in range(num_rows)
    ]
    assert_same_tokens(draw_on_device, random_logits(rng, num_rows, vocab_size, dtype), params, seed=1)


@pytest.mark.skipif(not IS_GPU, reason="too large for Triton's interpreter")
@pytest.mark.parametrize("vocab_size", [151_936, 128_256, 262_208, 50_257])
def test_whole_vocabularies(vocab_size):
    rng = random.Random(vocab_size)
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.6, 0.6, 1.0]),
            top_k=rng.choice([-1, -1, 20, 1000]),
            top_p=rng.choice([1.0, 1.0, 0.95]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
        )
        for _ in range(256)
    ]
    assert_same_tokens(draw_on_device, random_logits(rng, 256, vocab_size, torch.bfloat16), params, seed=2)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (1000, 1.0, 0.0),
        (2, 1.0, 0.0),
        (9, 1.0, 0.0),
        (10, 0.8, 0.0),
        (None, 0.5, 0.0),
        (None, 0.9999, 0.0),
        (None, 1.0, 0.1),
        (900, 0.9, 0.01),
    ],
)
@pytest.mark.parametrize("step", [None, 0.5])
def test_cutoffs_keep_what_sorting_keeps(top_k, top_p, min_p, step):
    """With ties, too: from rounding the logits to a step."""
    num_rows, vocab_size, temperature = at_scale(500, 1), 2051, 0.9
    logits = random_logits(random.Random(3), num_rows, vocab_size, torch.float32)
    if step is not None:
        logits = (logits / step).round() * step

    def column(value, dtype):
        return torch.full((num_rows, 1), value, dtype=dtype)

    limits = Limits(
        None if top_k is None else column(top_k, torch.int64),
        column(top_p, torch.float64),
        column(math.log(min_p) if min_p else -INF, torch.float32),
    )
    scale = Scale.of(logits, column(temperature, torch.float32))
    expected, _ = find_cutoffs(sorted_descending(logits), vocab_size, scale, limits, None)

    params = SamplingParams(temperature=temperature, top_k=-1 if top_k is None else top_k, top_p=top_p, min_p=min_p)
    settings = settings_of([RowStart(0, params, 0, (), ())], vocab_size).to(DEVICE)
    places = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)
    found = torch.empty(num_rows, device=DEVICE)
    draw(logits.to(DEVICE), settings, places, places, found)
    counts = logits >= scale.row_max - 40 * temperature  # the others can't be drawn anyway
    assert torch.equal((logits >= found.cpu()[:, None]) & counts, (logits >= expected) & counts)


def test_greedy_rows_take_the_first_of_equals():
    assert_first_of_equals(draw_on_device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_whose_greatest_logit_is_not_finite_are_not_sound(dtype):
    assert_nonfinite_rows_are_reported(draw_on_device, dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("magnitude", [1e30, -1e30, 3e38])
def test_logits_whose_scores_overflow(magnitude):
    """Nothing can be ruled out without a look, and the result is right nevertheless."""
    logits = random_logits(random.Random(0), 3, 3000, torch.float32) / 100 + 1
    params = [SamplingParams(temperature=t) for t in (1e-300, 1e-10, 100.0)]
    assert_same_tokens(draw_on_device, logits * (magnitude / logits.abs().amax()), params, seed=4)


def test_a_row_draws_the_same_in_any_batch():
    """At other places, beside other rows and padding, and with several rows to a program."""
    rng = random.Random(6)
    logits = random_logits(rng, 3, 2051, torch.bfloat16)
    params = [SamplingParams(), SamplingParams(temperature=0.5, top_k=30, top_p=0.9), SamplingParams(temperature=0.0)]
    starts = starts_of(params, rng)
    alone = [draw_on_device(logits[i : i + 1], starts, [70 + i], [i])[0].item() for i in range(3)]
    size = 67
    places = [66, 5, 33]
    batch = torch.full((size, 2051), math.nan, dtype=torch.bfloat16)
    rows, positions = [-1] * size, [0] * size
    for i, place in enumerate(places):
        batch[place], rows[place], positions[place] = logits[i], i, 70 + i
    token_ids, is_finite = draw_on_device(batch, starts, positions, rows)
    assert token_ids[places].tolist() == alone
    assert is_finite[places].all()


def test_positions_and_rows_of_32_bits_will_do():
    logits = random_logits(random.Random(1), 4, 300, torch.float32).to(DEVICE)
    settings = settings_of(starts_of([SamplingParams()] * 4, random.Random(1)), 300).to(DEVICE)
    places = torch.tensor([[0, 1, 2, 3], [0, 9, 31, 2**31 - 1]], device=DEVICE)
    wide, _ = draw(logits, settings, *places)
    narrow, _ = draw(logits, settings, *places.to(torch.int32))
    assert torch.equal(wide, narrow)


def test_settings_follow_the_rows():
    """Rows that start after the first upload, in a place taken over, and beyond what there was room for."""
    logits = torch.tensor([[-0.5, 0.0, -0.1]])
    sampler = Sampler(3, DEVICE, max_rows=2)

    def draws(row: int) -> set[int]:
        sampler.upload()
        places = [torch.full((12,), row, device=DEVICE), torch.arange(12, device=DEVICE)]
        return set(sampler.sample_rows(logits.repeat(12, 1).to(DEVICE), *places)[0].tolist())

    sampler.start_row(RowStart(0, SamplingParams(temperature=0.0), 1, (), ()))
    assert draws(0) == {1}
    sampler.start_row(RowStart(1, SamplingParams(top_k=2), 1, (), ()))
    assert draws(1) == {1, 2}
    sampler.end_row(0)
    sampler.start_row(RowStart(0, SamplingParams(), 1, (), ()))
    assert draws(0) == {0, 1, 2}
    sampler.start_row(RowStart(5, SamplingParams(temperature=0.0), 1, (), ()))
    assert draws(5) == {1}
    assert draws(1) == {1, 2}


def test_who_needs_the_host():
    sampler = Sampler(8, DEVICE)
    params = [
        SamplingParams(temperature=0.3, top_k=3, top_p=0.5, min_p=0.1),
        SamplingParams(logprobs=0),
        SamplingParams(logit_bias={1: 2.0}),
        SamplingParams(logits_processors=(lambda _, logits: logits,)),
        SamplingParams(min_tokens=2),
    ]
    starts = [RowStart(row, settings, 0, (2,), ()) for row, settings in enumerate(params)]
    for start in starts:
        sampler.start_row(start)
    assert [row in sampler._special for row in range(5)] == [False, True, True, True, True]
    assert [start.samples_on_host for start in starts] == [False, True, True, True, True]


def test_no_rows_and_bad_strides():
    settings = torch.zeros(1, 5, dtype=torch.int64, device=DEVICE)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    token_ids, is_finite = draw(torch.empty(0, 9, device=DEVICE), settings, none, none)
    assert (token_ids.shape, is_finite.shape) == ((0,), (0,))
    with pytest.raises(InvalidValueError, match="contiguous"):
        draw(torch.zeros(9, 2, device=DEVICE).t(), settings, none, none)


@pytest.mark.skipif(not IS_GPU, reason="a CUDA graph")
def test_one_graph_serves_any_rows():
    rng = random.Random(9)
    vocab_size, num_rows = 5003, 64
    sampler = Sampler(vocab_size, DEVICE, max_rows=128)
    logits = torch.empty(num_rows, vocab_size, dtype=torch.bfloat16, device=DEVICE)
    rows = torch.full((num_rows,), -1, device=DEVICE)
    positions = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)
    sampler.sample_rows(logits, rows, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_ids, is_finite = sampler.sample_rows(logits, rows, positions)
    mixes: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_k": 50, "top_p": 0.9}]
    for first, settings in zip((0, 64, 0), mixes, strict=True):
        starts = starts_of([SamplingParams(**settings)] * num_rows, rng)
        for start in starts:
            sampler.end_row(start.row + first)
            sampler.start_row(RowStart(start.row + first, start.params, start.seed, (), ()))
        sampler.upload()
        values = random_logits(rng, num_rows, vocab_size, torch.bfloat16)
        logits.copy_(values)
        rows.copy_(torch.arange(num_rows) + first)
        positions.copy_(torch.arange(num_rows) * 3)
        graph.replay()
        assert is_finite.all()
        assert token_ids.tolist() == draw_by_twin(values, starts, range(0, num_rows * 3, 3)).tolist()
