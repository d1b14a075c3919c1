"""Rows whose tokens a grammar decides about, among rows that are free."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from sampling.sampling_helpers import CPU, Recorder

from infinilm.sampling import Sampler
from infinilm.sampling_params import RowStart, SamplingParams
from infinilm.structured.matcher import token_mask

VOCAB_SIZE = 75
GREEDY = SamplingParams(temperature=0.0)


class Countdown:
    """A grammar: each token is the one below the last, beginning with `first`; after 0 only the stop ids may come."""

    def __init__(self, first: int) -> None:
        self.next = first
        self.seen: list[int] = []
        self.stop_ids: Sequence[int] = ()

    def matcher(self, output_ids: Sequence[int], stop_ids: Sequence[int], min_tokens: int) -> "Countdown":
        matcher = Countdown(self.next)
        matcher.stop_ids = stop_ids
        for token_id in output_ids:
            matcher.advance(token_id)
        return matcher

    def advance(self, token_id: int) -> None:
        self.seen.append(token_id)
        self.next -= 1

    def fill(self, mask: "np.ndarray") -> None:
        if self.next < -1:
            raise ValueError("nothing comes after the end")
        mask[:] = token_mask(self.stop_ids if self.next < 0 else [self.next], VOCAB_SIZE)


def sampler_with_rows(*starts: RowStart) -> Sampler:
    sampler = Sampler(VOCAB_SIZE, CPU)
    for start in starts:
        sampler.start_row(start)
    return sampler


def draw(sampler: Sampler, rows: list[int], position: int = 5) -> list:
    logits = torch.linspace(0, 1, VOCAB_SIZE).repeat(len(rows), 1)
    return sampler.sample(logits, rows, [position] * len(rows)).to_host()


def test_masked_rows_draw_what_is_allowed_and_others_what_they_like():
    sampler = sampler_with_rows(
        RowStart(0, GREEDY, 0, (), [1]),
        RowStart(1, GREEDY, 0, (70,), [1], [], Countdown(3)),
        RowStart(2, GREEDY, 0, (), [1]),
        RowStart(3, SamplingParams(), 0, (71,), [1], [64, 63], Countdown(64)),
    )
    assert 1 in sampler._special
    assert not sampler._special & {0, 2}
    drawn = [[token.token_id for token in draw(sampler, [0, 1, 2, 3])] for _ in range(3)]
    assert drawn == [[74, 3, 74, 62], [74, 2, 74, 61], [74, 1, 74, 60]]
    assert [token.token_id for token in draw(sampler, [1, 3])] == [0, 59]
    assert [token.token_id for token in draw(sampler, [0, 3])] == [74, 58]
    assert [token.token_id for token in draw(sampler, [0])] == [74]
    assert [token.token_id for token in draw(sampler, [1])] == [70]
    assert [token.token_id for token in draw(sampler, [3])] == [57]


def test_what_goes_wrong_in_a_grammar_stays_in_its_row():
    sampler = sampler_with_rows(
        RowStart(0, GREEDY, 0, (), [1]),
        RowStart(1, GREEDY, 0, (70,), [1], [], Countdown(-2)),
        RowStart(2, GREEDY, 0, (70,), [1], [], Countdown(9)),
    )
    free, failed, fine = draw(sampler, [0, 1, 2])
    assert str(failed.error) == "nothing comes after the end"
    assert (free.token_id, free.error) == (74, None)
    assert (fine.token_id, fine.error) == (9, None)
    assert [token.token_id for token in draw(sampler, [0, 2])] == [74, 8]


def test_a_row_that_ends_takes_its_grammar_with_it():
    sampler = sampler_with_rows(RowStart(0, GREEDY, 0, (70,), [1], [], Countdown(9)))
    draw(sampler, [0])
    sampler.end_row(0)
    sampler.start_row(RowStart(0, GREEDY, 0, (), [1]))
    assert draw(sampler, [0])[0].token_id == 74
    sampler.end_row(0)
    sampler.start_row(RowStart(0, GREEDY, 0, (70,), [1], [], Countdown(5)))
    assert [draw(sampler, [0])[0].token_id for _ in range(2)] == [5, 4]


def test_a_failing_processor_does_not_cost_others_their_tokens():
    def fails(_, logits):
        raise ZeroDivisionError

    sampler = sampler_with_rows(
        RowStart(0, SamplingParams(logits_processors=[fails]), 0, (70,), [1], [], Countdown(9)),
        RowStart(1, GREEDY, 0, (70,), [1], [], Countdown(6)),
    )
    assert draw(sampler, [1])[0].token_id == 6
    assert isinstance(draw(sampler, [0])[0].error, ZeroDivisionError)
    assert draw(sampler, [1])[0].token_id == 5


@pytest.mark.parametrize("logprobs", [None, 2])
def test_the_grammar_has_the_last_word_and_logprobs_do_not_hear_it(logprobs):
    recorder = Recorder()
    params = SamplingParams(logits_processors=[recorder], logit_bias={74: 100.0}, logprobs=logprobs, min_tokens=3)
    sampler = sampler_with_rows(RowStart(0, params, 0, (70,), [1], [], Countdown(0)))
    (drawn,) = draw(sampler, [0])
    assert drawn.token_id == 0
    assert torch.isfinite(recorder.seen[0][1]).all()
    if logprobs is not None:
        assert list(drawn.logprobs.top) == [74, 73]
        assert drawn.logprobs.rank == 75
    assert draw(sampler, [0])[0].token_id == 70


class Broken(Countdown):
    """A grammar that can't be followed."""

    def matcher(self, output_ids: Sequence[int], stop_ids: Sequence[int], min_tokens: int) -> Countdown:
        raise ValueError("no matcher")


def test_a_row_that_could_not_start_leaves_no_rule_behind() -> None:
    """Neither the mask of a row with a bad bias, nor the bias of a row with a bad grammar, hold for the next row."""
    logits = torch.arange(VOCAB_SIZE, dtype=torch.float32).unsqueeze(0)
    for params, grammar in (
        (SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), Countdown(3)),
        (SamplingParams(logit_bias={7: 100.0}, frequency_penalty=1.0), Broken(3)),
    ):
        sampler = Sampler(VOCAB_SIZE, CPU)
        with pytest.raises(ValueError, match=r"logit_bias names token|no matcher"):
            sampler.start_row(RowStart(0, params, 0, (), [1], (), grammar))
        sampler.start_row(RowStart(0, GREEDY, 0, (), [1]))
        assert 0 not in sampler._special
        assert sampler.sample(logits.clone(), [0], [1]).token_ids.tolist() == [VOCAB_SIZE - 1]
