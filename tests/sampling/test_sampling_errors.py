"""What goes wrong in one row stays in that row."""

import math

import pytest
import torch
from sampling.sampling_helpers import CPU, sampler_with

from infinilm.errors import EngineError, InvalidTypeError, InvalidValueError
from infinilm.sampling import Sampler
from infinilm.sampling_params import RowStart, SamplingParams

LOGITS = [0.0, 1.0, 2.0, 3.0]


def raises(_ids, _logits):
    raise ZeroDivisionError("my own mistake")


def spoils_and_raises(_ids, logits):
    logits.fill_(math.nan)
    raise KeyError("late")


FAILING = [
    (raises, ZeroDivisionError, "my own mistake"),
    (spoils_and_raises, KeyError, "late"),
    (lambda _, logits: None, InvalidTypeError, "returned NoneType"),
    (lambda _, logits: logits.tolist(), InvalidTypeError, "returned list"),
    (lambda _, logits: logits.double(), InvalidTypeError, "float64"),
    (lambda _, logits: logits.long(), InvalidTypeError, "int64"),
    (lambda _, logits: logits[:3], InvalidValueError, r"shape \[3\].*\[4\]"),
    (lambda _, logits: logits.unsqueeze(0), InvalidValueError, r"shape \[1, 4\]"),
    (lambda _, logits: logits * math.nan, InvalidValueError, "nan"),
    (lambda _, logits: logits + math.inf, InvalidValueError, "inf"),
    (lambda _, logits: logits - math.inf, InvalidValueError, "leave at least one token"),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("processor", "error_type", "message"), FAILING)
def test_a_failing_processor_fails_its_row_only(processor, error_type, message, temperature):
    sampler = Sampler(4, CPU)
    fine = SamplingParams(temperature=0.0, logits_processors=(lambda _, logits: -logits,))
    sampler.start_row(RowStart(0, SamplingParams(temperature=0.0), 0, (), [1]))
    sampler.start_row(RowStart(1, SamplingParams(temperature=temperature, logits_processors=(processor,)), 0, (), [1]))
    sampler.start_row(RowStart(2, fine, 0, (), [1]))
    first, failed, last = sampler.sample(torch.tensor([LOGITS] * 3), [0, 1, 2], [1, 1, 1]).to_host()
    assert (first.token_id, first.error) == (3, None)
    assert (last.token_id, last.error) == (0, None)
    assert isinstance(failed.error, error_type)
    with pytest.raises(error_type, match=message):
        raise failed.error
    assert 0 <= failed.token_id < 4


@pytest.mark.parametrize("bad", [[0.0, math.nan, 1.0, 2.0], [0.0, math.inf, 1.0, 2.0], [-math.inf] * 4, [math.nan] * 4])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {},
        {"top_k": 2},
        {"top_p": 0.5},
        {"min_p": 0.5},
        {"top_k": 3, "top_p": 0.9, "min_p": 0.1},
        {"repetition_penalty": 1.5, "frequency_penalty": 1.0},
        {"logits_processors": (lambda _, logits: logits / 2,)},
    ],
)
@pytest.mark.parametrize("vocab_size", [4, 640])
def test_logits_that_are_not_finite_fail_their_row_only(bad, settings, vocab_size):
    params = SamplingParams(**settings)
    sampler = Sampler(vocab_size, CPU)
    logits = torch.full((3, vocab_size), -math.inf)
    logits[:, :4] = torch.tensor([LOGITS, bad, LOGITS])
    for row in range(3):
        sampler.start_row(RowStart(row, params, 5, (), [1]))
    before, failed, after = sampler.sample(logits, [0, 1, 2], [1, 1, 1]).to_host()
    assert isinstance(failed.error, EngineError)
    assert "NaN" in str(failed.error)
    assert before.error is None
    assert after.error is None
    assert before.token_id == after.token_id < 4


def test_a_processor_can_neither_keep_nor_spoil_the_rows_state():
    kept = []

    def greedy_for_memory(output_ids, logits):
        kept.append((output_ids, logits))
        output_ids.clear()
        for _, old in kept[:-1]:
            old.fill_(100.0)
        return logits

    params = SamplingParams(temperature=0.0, logits_processors=(greedy_for_memory,))
    sampler = sampler_with(4, params, output=[1, 2])
    logits = torch.tensor([LOGITS])
    for position in (2, 3):
        (drawn,) = sampler.sample(logits, [0], [position]).to_host()
        assert (drawn.token_id, drawn.error) == (3, None)
    assert logits.tolist() == [LOGITS]
    seen = []

    def note(output_ids, logits):
        seen.append(output_ids)
        return logits

    params = SamplingParams(logits_processors=(note,))
    sampler = sampler_with(1, params, output=[0])
    for position in (1, 2):
        sampler.sample(torch.zeros(1, 1), [0], [position])
    assert seen == [[0], [0, 0]]


def test_bias_outside_the_vocabulary_is_refused_and_leaves_the_row_free():
    sampler = Sampler(4, CPU)
    with pytest.raises(InvalidValueError, match=r"logit_bias names token 4.*0 to 3"):
        sampler.start_row(RowStart(0, SamplingParams(logit_bias={1: 1.0, 4: 2.0}), 0, (), [1]))
    sampler.start_row(RowStart(0, SamplingParams(temperature=0.0), 0, (), [1]))
    assert sampler.sample(torch.tensor([LOGITS]), [0], [1]).token_ids.tolist() == [3]


def test_rows_are_started_once_and_sampled_while_started():
    sampler = sampler_with(4, SamplingParams())
    with pytest.raises(EngineError, match="row 0 is taken"):
        sampler.start_row(RowStart(0, SamplingParams(), 0, (), []))
    for row in (1, 500):
        sampler.end_row(row)  # a step that broke may never have started it
        with pytest.raises(EngineError, match="not all started"):
            sampler.sample(torch.tensor([LOGITS]), [row], [0])
    sampler.end_row(0)
    with pytest.raises(EngineError, match="not all started"):
        sampler.sample(torch.tensor([LOGITS]), [0], [0])


@pytest.mark.parametrize("shape", [(1, 3), (2, 4), (4,)])
def test_misshapen_logits_are_refused(shape):
    with pytest.raises(InvalidValueError, match=r"must be \[1, 4\]"):
        sampler_with(4, SamplingParams()).sample(torch.zeros(shape), [0], [0])
