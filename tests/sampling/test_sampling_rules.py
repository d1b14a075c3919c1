"""Each sampling parameter, and their order, against tables worked out by hand."""

import math

import pytest
import torch
from sampling.sampling_helpers import Recorder, can_draw, draw_many, draw_one, edited, sampler_with
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from infinilm.sampling_params import SamplingParams

INF = math.inf

# Probabilities 0.5, 0.25, 0.125, 0.0625, 0.0625 at temperature 1.
HALVES = [math.log(p) for p in (0.5, 0.25, 0.125, 0.0625, 0.0625)]


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.0, "top_p": 0.1}])
@pytest.mark.parametrize(
    ("logits", "token"),
    [
        ([0.1, 0.3, 0.2], 1),
        ([1.0, 2.0, 2.0, 2.0], 1),
        ([-5.0, -5.0], 0),
        ([-INF, -3.0, -INF], 1),
        ([0.0] * 40 + [7.0] * 60, 40),  # ties across blocks
        ([0.0] * 63 + [7.0], 63),
    ],
)
def test_greedy_takes_the_first_greatest(settings, logits, token):
    assert draw_one(logits, **settings).token_id == token


@pytest.mark.parametrize(
    ("logits", "settings", "kept"),
    [
        (HALVES, {}, {0, 1, 2, 3, 4}),
        (HALVES, {"top_k": -1}, {0, 1, 2, 3, 4}),
        (HALVES, {"top_k": 0}, {0, 1, 2, 3, 4}),
        (HALVES, {"top_k": 2}, {0, 1}),
        (HALVES, {"top_k": 3}, {0, 1, 2}),
        (HALVES, {"top_k": 4}, {0, 1, 2, 3, 4}),  # 3 and 4 tie
        (HALVES, {"top_k": 99}, {0, 1, 2, 3, 4}),
        (HALVES, {"top_p": 1.0}, {0, 1, 2, 3, 4}),
        (HALVES, {"top_p": 0.49}, {0}),
        (HALVES, {"top_p": 0.51}, {0, 1}),
        (HALVES, {"top_p": 0.74}, {0, 1}),
        (HALVES, {"top_p": 0.76}, {0, 1, 2}),
        (HALVES, {"top_p": 0.88}, {0, 1, 2, 3, 4}),  # 3 crosses, 4 ties with it
        (HALVES, {"top_p": 1e-9}, {0}),
        ([0.0, 0.0, 0.0, 0.0], {"top_p": 0.5}, {0, 1, 2, 3}),
        ([0.0, 0.0, -40.0, -40.0], {"top_p": 0.9999}, {0, 1}),
        (HALVES, {"min_p": 0.49}, {0, 1}),
        (HALVES, {"min_p": 0.51}, {0}),
        (HALVES, {"min_p": 0.24}, {0, 1, 2}),
        (HALVES, {"min_p": 0.12}, {0, 1, 2, 3, 4}),
        ([1.0, 3.0, 3.0, 2.9], {"min_p": 1.0}, {1, 2}),
        # top-p counts only what top-k left: 0.5 and 0.25 become 2/3 and 1/3.
        (HALVES, {"top_k": 2, "top_p": 0.66}, {0}),
        (HALVES, {"top_k": 2, "top_p": 0.67}, {0, 1}),
        (HALVES, {"top_k": 3, "top_p": 0.99, "min_p": 0.3}, {0, 1}),
        (HALVES, {"top_k": 3, "top_p": 0.5, "min_p": 0.01}, {0}),
        # Temperature comes first: at 0.5 the probabilities go as 64 : 16 : 4 : 1 : 1.
        (HALVES, {"temperature": 0.5, "top_p": 0.74}, {0}),
        (HALVES, {"temperature": 0.5, "top_p": 0.75}, {0, 1}),
        (HALVES, {"temperature": 0.5, "min_p": 0.24}, {0, 1}),
        (HALVES, {"temperature": 0.5, "min_p": 0.26}, {0}),
        (HALVES, {"temperature": 1e-4}, {0}),
        (HALVES, {"temperature": 1e-40}, {0}),
        ([2.0, 1.0, 2.0], {"temperature": 1e-300}, {0, 2}),
        ([-INF, 0.0, -INF, 0.5], {}, {1, 3}),
        ([-INF, 0.0, -INF, 0.5], {"top_p": 0.99}, {1, 3}),
    ],
)
def test_kept_tokens(logits, settings, kept):
    assert can_draw(logits, **settings) == kept


def test_temperature_flattens():
    """Doubling the temperature turns odds of 4 into odds of 2."""
    tokens = draw_many([math.log(4.0), 0.0], 20000, temperature=2.0)
    assert (tokens == 0).float().mean().item() == pytest.approx(2 / 3, abs=0.015)


def test_bias_is_added():
    assert edited([1.0, 2.0, 3.0], logit_bias={0: 0.5, 2: -4.0}).tolist() == [1.5, 2.0, -1.0]


def test_bias_of_100_forces_and_forbids():
    logits = [0.0, 5.0, 10.0, 4.0]
    assert can_draw(logits, count=1, logit_bias={3: 100.0}) == {3}
    sampler = sampler_with(4, SamplingParams(logit_bias={2: -100.0, 1: -100}))
    drawn = {sampler.sample(torch.tensor([logits]), [0], [position]).token_ids.item() for position in range(400)}
    assert drawn == {0, 3}


@pytest.mark.parametrize(
    ("penalty", "expected"), [(2.0, [1.0, 4.0, -4.0, -2.0, 0.0]), (0.5, [4.0, 4.0, -1.0, -2.0, 0.0])]
)
def test_repetition_penalty_covers_prompt_and_answer(penalty, expected):
    logits = edited([2.0, 4.0, -2.0, -2.0, 0.0], repetition_penalty=penalty, prompt=[0, 0, 4], output=[2])
    assert logits.tolist() == expected


def test_repetition_penalty_equals_transformers():
    logits = torch.randn(501, generator=torch.Generator().manual_seed(3)) * 4
    prompt, output = [5, 7, 7, 300], [9, 5, 500]
    for penalty in (1.3, 0.7, 4.0):
        ours = edited(logits, repetition_penalty=penalty, prompt=prompt, output=output)
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.unsqueeze(0))
        assert torch.equal(ours, theirs[0])


def test_frequency_and_presence_penalties_cover_the_answer_only():
    logits = edited(
        [1.0, 1.0, 1.0, 1.0], frequency_penalty=0.25, presence_penalty=0.5, prompt=[0, 0], output=[1, 2, 2, 2]
    )
    assert logits.tolist() == [1.0, 0.25, -0.25, 1.0]
    assert edited([1.0, 1.0], frequency_penalty=-1.0, output=[1, 1]).tolist() == [1.0, 3.0]
    assert edited([1.0, 1.0], presence_penalty=-1.0, output=[1, 1]).tolist() == [1.0, 2.0]


def test_penalties_follow_the_draws():
    """Greedy, with 0.4 off per occurrence: the counts decide each step."""
    sampler = sampler_with(3, SamplingParams(temperature=0.0, frequency_penalty=0.4), prompt=[0])
    tokens = []
    for position in range(1, 9):
        drawn = sampler.sample(torch.tensor([[1.0, 0.7, 0.1]]), [0], [position])
        tokens.append(drawn.token_ids.item())
    # 1.0|.7|.1  .6|.7  .6|.3  .2|.3  .2|-.1|.1  -.2|-.1|.1  -.2|-.1|-.3  -.2|-.5|-.3
    assert tokens == [0, 1, 0, 1, 0, 2, 1, 0]


def test_repetition_follows_the_draws():
    sampler = sampler_with(3, SamplingParams(temperature=0.0, repetition_penalty=10.0), prompt=[2])
    tokens = [
        sampler.sample(torch.tensor([[1.0, 0.9, 2.0]]), [0], [position]).token_ids.item() for position in range(1, 4)
    ]
    assert tokens == [0, 1, 2]  # then all are penalised alike


def test_order_of_the_edits():
    """Bias first, then repetition (halving 6), then counts, then the block of stop ids."""
    logits = edited(
        [2.0, 1.0, 1.0],
        logit_bias={0: 4.0},
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        min_tokens=3,
        stop_ids=(2,),
        output=[0, 0],
        position=2,
    )
    assert logits.tolist() == [6.0 / 2 - 2 * 0.5 - 0.25, 1.0, -INF]


def test_min_tokens_blocks_all_stop_ids_until_then():
    params = SamplingParams(temperature=0.0, min_tokens=3, max_tokens=10)
    sampler = sampler_with(5, params, stop_ids=(4, 3, 77), prompt=[0] * 6)
    tokens = [
        sampler.sample(torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]]), [0], [position]).token_ids.item()
        for position in range(6, 11)
    ]
    assert tokens == [2, 2, 2, 4, 4]


def test_processors_run_in_order_with_the_answer_so_far():
    recorder = Recorder()

    def forbid_last(output_ids, logits):
        for token_id in output_ids[-1:]:
            logits[token_id] = -INF
        return logits

    params = SamplingParams(temperature=0.0, logits_processors=(forbid_last, recorder))
    sampler = sampler_with(3, params, prompt=[1], output=[2])
    tokens = [
        sampler.sample(torch.tensor([[0.0, 1.0, 2.0]]), [0], [position]).token_ids.item() for position in range(2, 5)
    ]
    assert tokens == [1, 2, 1]
    assert [ids for ids, _ in recorder.seen] == [[2], [2, 1], [2, 1, 2]]
    assert recorder.seen[1][1].tolist() == [0.0, -INF, 2.0]


def test_raw_logits_survive_when_logprobs_are_asked_for():
    """Logprobs speak of the model's own distribution, whatever the edits did."""
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    expected = torch.log_softmax(logits[0], dim=-1)
    sampler = sampler_with(3, SamplingParams(temperature=0.0, logit_bias={2: -50.0}, logprobs=1))
    (drawn,) = sampler.sample(logits, [0], [0]).to_host()
    assert drawn.token_id == 1
    assert drawn.logprobs is not None
    assert drawn.logprobs.logprob == pytest.approx(expected[1].item(), abs=1e-6)
    assert drawn.logprobs.rank == 2
    assert drawn.logprobs.top == pytest.approx({2: expected[2].item()}, abs=1e-6)
