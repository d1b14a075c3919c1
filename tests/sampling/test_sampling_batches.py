"""A row's result depends on the row: not on its batch, its number, or a break in between."""

import gc
import random
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling.sampling_helpers import CPU, Recorder, sampler_with

from infinilm.sampling import SampledToken, Sampler
from infinilm.sampling_params import RowStart, SamplingParams


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    """Any mixture of parameters, each at its default half of the time."""

    def maybe(default, value):
        return default if rng.random() < 0.5 else value

    return SamplingParams(
        temperature=maybe(1.0, rng.choice([0.0, 0.01, 0.6, 1.5, 30.0])),
        top_k=maybe(-1, rng.choice([1, 2, 40, 256, 300, 10**6])),
        top_p=maybe(1.0, rng.choice([0.05, 0.5, 0.9, 0.9999])),
        min_p=maybe(0.0, rng.choice([0.01, 0.5, 1.0])),
        min_tokens=maybe(0, 2),
        repetition_penalty=maybe(1.0, rng.choice([0.8, 1.3])),
        presence_penalty=maybe(0.0, 0.7),
        frequency_penalty=maybe(0.0, rng.choice([-0.3, 0.9])),
        logit_bias=maybe(None, {rng.randrange(vocab_size): 3.0}),
        logprobs=maybe(None, rng.choice([0, 1, 5])),
        logits_processors=maybe((), (lambda _, logits: logits / 2,)),
    )


def random_start(rng: random.Random, row: int, vocab_size: int) -> RowStart:
    return RowStart(
        row=row,
        params=random_params(rng, vocab_size),
        seed=rng.randrange(-(2**63), 2**64),
        stop_ids=(rng.randrange(vocab_size),),
        prompt_token_ids=[rng.randrange(vocab_size) for _ in range(rng.randrange(1, 9))],
        output_token_ids=[rng.randrange(vocab_size) for _ in range(rng.randrange(4))],
    )


def random_logits(rng: random.Random, num_rows: int, vocab_size: int) -> torch.Tensor:
    """Peaked and flat, with ties and without."""
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    for row in logits:
        row.mul_(rng.choice([0.0, 0.3, 2.0, 6.0]))
        if rng.random() < 0.4:
            row.mul_(2).round_()
    return logits


def draw(logits: torch.Tensor, starts: list[RowStart], num_steps: int) -> list[list[SampledToken]]:
    """The tokens of each row over some steps, all rows together."""
    sampler = Sampler(logits.shape[1], CPU)
    for start in starts:
        sampler.start_row(start)
    rows = [start.row for start in starts]
    drawn: list[list[SampledToken]] = [[] for _ in starts]
    for step in range(num_steps):
        positions = [len(s.prompt_token_ids) + len(s.output_token_ids) + step for s in starts]
        for tokens, token in zip(drawn, sampler.sample(logits.clone(), rows, positions).to_host(), strict=True):
            tokens.append(token)
    return drawn


def assert_same(first: list[SampledToken], second: list[SampledToken]) -> None:
    assert [token.token_id for token in first] == [token.token_id for token in second]
    for a, b in zip(first, second, strict=True):
        assert a.error is None
        assert b.error is None
        assert (a.logprobs is None) == (b.logprobs is None)
        if a.logprobs is not None and b.logprobs is not None:
            assert a.logprobs.logprob == pytest.approx(b.logprobs.logprob, abs=1e-6)
            assert a.logprobs.rank == b.logprobs.rank
            assert list(a.logprobs.top.values()) == pytest.approx(list(b.logprobs.top.values()), abs=1e-6)


@given(
    seed=st.integers(0, 2**32),
    num_rows=st.integers(1, 5),
    vocab_size=st.sampled_from([7, 300, 1024, 2051, 16_448]),
)
@settings(max_examples=80, deadline=None)
def test_rows_together_draw_what_they_draw_alone(seed, num_rows, vocab_size):
    rng = random.Random(seed)
    starts = [random_start(rng, row, vocab_size) for row in range(num_rows)]
    logits = random_logits(rng, num_rows, vocab_size)
    together = draw(logits, starts, num_steps=2)
    order = rng.sample(range(num_rows), num_rows)
    shuffled = draw(logits[order], [starts[i] for i in order], num_steps=2)
    for i in range(num_rows):
        alone = draw(logits[i : i + 1], [starts[i]], num_steps=2)[0]
        assert_same(together[i], alone)
        assert_same(shuffled[order.index(i)], alone)


def test_the_row_number_does_not_matter():
    rng = random.Random(8)
    logits = random_logits(rng, 1, 1000)
    for _ in range(10):
        start = random_start(rng, 0, 1000)
        moved = RowStart(
            200,
            start.params,
            start.seed,
            start.stop_ids,
            start.prompt_token_ids,
            start.output_token_ids,
        )
        assert_same(draw(logits, [start], 5)[0], draw(logits, [moved], 5)[0])


@pytest.mark.parametrize("seed", range(12))
def test_resuming_equals_going_on(seed):
    """A row that ends and starts again with its answer draws on as if nothing had happened."""
    rng = random.Random(seed)
    vocab_size, num_steps, break_at = 60, 12, rng.randrange(1, 11)
    params = random_params(rng, vocab_size)
    prompt, stop_ids = [3, 4, 5], (0, 1)
    logits = random_logits(rng, num_steps, vocab_size)

    def run(*, is_broken: bool) -> list[int]:
        sampler = Sampler(vocab_size, CPU)
        sampler.start_row(RowStart(0, params, 77, stop_ids, prompt))
        row = 0
        tokens: list[int] = []
        for step in range(num_steps):
            if is_broken and step == break_at:
                sampler.end_row(row)
                row = 40
                sampler.start_row(RowStart(row, params, 77, stop_ids, prompt, list(tokens)))
            drawn = sampler.sample(logits[step : step + 1].clone(), [row], [len(prompt) + step])
            tokens.append(int(drawn.token_ids.item()))
        return tokens

    assert run(is_broken=True) == run(is_broken=False)


def test_an_ended_row_leaves_nothing_behind():
    sampler = Sampler(4, CPU)
    params = SamplingParams(temperature=0.0, repetition_penalty=5.0, frequency_penalty=2.0, logprobs=2)
    sampler.start_row(RowStart(3, params, 1, (), [2], [2]))
    sampler.end_row(3)
    sampler.start_row(RowStart(3, SamplingParams(temperature=0.0), 1, (), [2]))
    (drawn,) = sampler.sample(torch.tensor([[0.0, 1.0, 1.5, 0.2]]), [3], [1]).to_host()
    assert (drawn.token_id, drawn.logprobs) == (2, None)


def test_an_ended_rows_state_is_freed():
    processor = Recorder()
    sampler = sampler_with(4, SamplingParams(logits_processors=(processor,), repetition_penalty=2.0))
    reference = weakref.ref(processor)
    del processor
    assert reference() is not None
    sampler.end_row(0)
    gc.collect()
    assert reference() is None


def test_no_rows_at_all():
    samples = Sampler(9, CPU).sample(torch.empty(0, 9), [], [])
    assert samples.token_ids.shape == (0,)
    assert samples.to_host() == []
