"""InfiniCore's rule: worked examples, a plain reference, and what is refused."""

import math
import random
from typing import Any, cast

import numpy as np
import pytest
import torch
from narrow import present

from infinilm.errors import EngineError, InvalidTypeError, InvalidValueError
from infinilm.sampling import check_uniform, draw_uniform

NOTHING = -math.inf


def draw(logits, *, temperature=1.0, top_k=0, top_p=1.0, random_val=0.5):
    """The tokens drawn from one row of logits, or from several."""
    rows = torch.atleast_2d(torch.as_tensor(logits, dtype=torch.float32))
    samples = draw_uniform(rows, **check_uniform(len(rows), temperature, top_k, top_p, random_val))
    assert samples.token_ids.dtype == torch.int64
    assert samples.is_finite.tolist() == [True] * len(rows)
    return samples.token_ids.tolist()


def draw_one(logits, **settings):
    (token_id,) = draw(logits, **settings)
    return token_id


def below(value):
    return float(np.nextafter(np.float32(value), np.float32(0)))


def above(value):
    return float(np.nextafter(np.float32(value), np.float32(1)))


# Four equal logits: c is 1, 2, 3, 4 exactly, and the order is that of the indices.
EQUAL = [0.0] * 4
EDGES = [
    (above(0.0), 0),
    (below(0.25), 0),
    (0.25, 0),
    (above(0.25), 1),
    (below(0.5), 1),
    (0.5, 1),
    (above(0.5), 2),
    (0.75, 2),
    (above(0.75), 3),
    (0.999999, 3),
    (math.nextafter(1, 0), 3),
]


@pytest.mark.parametrize(("random_val", "token_id"), EDGES)
def test_the_first_sum_that_reaches_the_goal_decides(random_val, token_id):
    assert draw_one(EQUAL, random_val=random_val) == token_id


@pytest.mark.parametrize(("random_val", "token_id"), EDGES)
def test_at_a_high_temperature_weights_are_equal_and_the_order_is_that_of_the_logits(random_val, token_id):
    order = [2, 0, 3, 1]
    for temperature in (1e30, 1e300):
        assert draw_one([5.0, -7.0, 9.0, 1.0], temperature=temperature, random_val=random_val) == order[token_id]


CUTS = [
    # top_k = 2 binds: goals are random_val * 2.
    ({"top_k": 2, "random_val": 0.5}, 0),
    ({"top_k": 2, "random_val": above(0.5)}, 1),
    ({"top_k": 2, "random_val": 0.999999}, 1),
    # top_p = 0.5 of 4 binds: goals are random_val * 2 again.
    ({"top_p": 0.5, "random_val": 0.5}, 0),
    ({"top_p": 0.5, "random_val": above(0.5)}, 1),
    ({"top_p": 0.5, "random_val": 0.999999}, 1),
    # top_p is of the whole, min(3, 0.5 * 4), and not of what top_k leaves, 0.5 * 3: 1.2 is over 1, 0.9 is not.
    ({"top_k": 3, "top_p": 0.5, "random_val": 0.6}, 1),
    # top_k binds before top_p: min(2, 3) = 2.
    ({"top_k": 2, "top_p": 0.75, "random_val": 0.9}, 1),
    # top_p binds before top_k: min(3, 1) = 1.
    ({"top_k": 3, "top_p": 0.25, "random_val": 0.999999}, 0),
    # top_p between two sums: 0.625 * 4 = 2.5, of which the share above 2 falls to the third.
    ({"top_p": 0.625, "random_val": 0.8}, 1),
    ({"top_p": 0.625, "random_val": above(0.8)}, 2),
    # a top_k of the vocabulary or more, of 0 or less: no limit.
    *[({"top_k": top_k, "random_val": 0.999999}, 3) for top_k in (4, 5, 10**15, 2**63 - 1, 0, -1, -50)],
    *[({"top_k": top_k, "top_p": 0.5, "random_val": 0.999999}, 1) for top_k in (4, 5, 0, -1)],
]


@pytest.mark.parametrize(("settings", "token_id"), CUTS)
def test_top_k_and_top_p(settings, token_id):
    assert draw_one(EQUAL, **settings) == token_id
    # The same at the end of a large vocabulary, in reverse order, with nothing in between.
    logits = torch.full((9600,), NOTHING)
    logits[-4:] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    if settings.get("top_k", 0) < 4:
        assert draw_one(logits, temperature=1e30, **settings) == 9599 - token_id


@pytest.mark.parametrize("vocab_size", [5, 640, 9600])
@pytest.mark.parametrize("greedy", [{"temperature": 0.0}, {"top_p": 0.0}, {"random_val": 0.0}, {"top_k": 1}])
def test_greedy_takes_the_first_maximum(vocab_size, greedy):
    logits = torch.zeros(vocab_size)
    logits[[3, 4]] = 2.0
    settings = {"temperature": 50.0, "random_val": 0.999} | greedy
    assert draw_one(logits, **settings) == 3


def test_values_too_small_for_float32_draw_the_first_maximum():
    assert draw_one([0.0, 3.0, 3.0, 1.0], random_val=1e-60) == 1
    assert draw_one([0.0, 3.0, 3.0, 1.0], top_p=1e-60, random_val=0.9) == 1
    # A temperature of nearly nothing is not 0: of equal maxima any can come.
    assert draw_one([0.0, 3.0, 3.0, 1.0], temperature=1e-60, random_val=0.5) == 1
    assert draw_one([0.0, 3.0, 3.0, 1.0], temperature=1e-60, random_val=above(0.5)) == 2


def test_equal_logits_come_in_the_order_of_their_indices():
    # By halves: 4 and 6 weigh 1 each, 0, 2, 3 and 5 weigh 1/2 each (1/2 lies in the float32 of exp(-log 2)), 1 none.
    half = -math.log(2)
    logits = [half, NOTHING, half, half, 0.0, half, 0.0]
    middles = [0.5, 1.5, 2.25, 2.75, 3.25, 3.75]
    assert [draw_one(logits, random_val=middle / 4) for middle in middles] == [4, 6, 0, 2, 3, 5]


def test_minus_zero_is_equal_to_zero():
    assert [draw_one([-0.0, 0.0, -0.0, 0.0], random_val=val) for val in (0.2, 0.4, 0.6, 0.8)] == [0, 1, 2, 3]


def test_temperature_flattens():
    # exp(-2 / T) is 0.135 at T = 1, 0.368 at T = 2 and 0.018 at T = 0.5: the first token's shares are
    # 0.881, 0.731 and 0.982.
    logits = [-2.0, 0.0]
    assert [draw_one(logits, random_val=val) for val in (0.87, 0.89)] == [1, 0]
    assert [draw_one(logits, temperature=2.0, random_val=val) for val in (0.72, 0.74)] == [1, 0]
    assert [draw_one(logits, temperature=0.5, random_val=val) for val in (0.97, 0.99)] == [1, 0]


def test_each_row_has_its_own_values():
    logits = [
        [0.0, 0.0, 0.0, 0.0],
        [1.0, 9.0, 2.0, 8.0],
        [0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 5.0, 5.0],
        [4.0, 3.0, 2.0, 1.0],
    ]
    tokens = draw(
        logits,
        temperature=[1.0, 0.0, 1.0, 1.0, 1e30],
        top_k=torch.tensor([0, 0, 2, 1, -1]),
        top_p=np.array([0.5, 1.0, 1.0, 1.0, 0.75], dtype=np.float32),
        random_val=(0.9, 0.9, 0.9, 0.9, 0.99),
    )
    assert tokens == [1, 1, 1, 2, 2]


def test_a_vocabulary_of_one():
    assert draw([[3.0], [-9.0]], top_k=[0, 5], random_val=[0.3, 0.9]) == [0, 0]


def plain_reference(logits, temperature, top_k, top_p, random_val, *, nudge):
    """The rule in plain Python, with a goal that is a little off."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0 or top_p == 0 or random_val == 0 or top_k == 1:
        return order[0]
    sums, total = [], 0.0
    for i in order:
        total += math.exp((logits[i] - logits[order[0]]) / temperature)
        sums.append(total)
    limit = sums[top_k - 1] if 0 < top_k <= len(logits) else total
    goal = random_val * min(limit, top_p * total) * nudge
    return next((token for token, reached in zip(order, sums, strict=True) if reached >= goal), order[-1])


def random_rows(rng, num_rows, vocab_size):
    """Logits, peaked and flat, many with ties; and values for each row."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(rng.randrange(2**32)))
    for row in logits:
        row.mul_(rng.choice([0.3, 2.0, 6.0]))
        if rng.random() < 0.5:
            row.mul_(2).round_()
    values = {
        "temperature": [rng.choice([0.0, 0.3, 1.0, 1.0, 2.5]) for _ in range(num_rows)],
        "top_k": [rng.choice([-1, 0, 1, 2, 7, 50, 50, 300, 10**6]) for _ in range(num_rows)],
        "top_p": [rng.choice([0.0, 0.1, 0.7, 0.95, 1.0, 1.0]) for _ in range(num_rows)],
        "random_val": [rng.choice([0.0, rng.random(), rng.random(), rng.random()]) for _ in range(num_rows)],
    }
    return logits, values


@pytest.mark.parametrize("vocab_size", [3, 45, 640, 9600])
def test_random_rows_draw_what_the_plain_rule_says(vocab_size):
    rng = random.Random(vocab_size)
    logits, values = random_rows(rng, 60, vocab_size)
    tokens = draw(logits, **values)
    num_sure = 0
    for row, token_id, *of_row in zip(logits.tolist(), tokens, *values.values(), strict=True):
        # On the very border, rounding decides: either neighbour will do.
        expected = {plain_reference(row, *of_row, nudge=nudge) for nudge in (1 - 1e-5, 1, 1 + 1e-5)}
        assert token_id in expected
        num_sure += len(expected) == 1
    assert num_sure >= 50


@pytest.mark.parametrize("vocab_size", [45, 9600])
def test_rows_do_not_influence_each_other(vocab_size):
    logits, values = random_rows(random.Random(7), 40, vocab_size)
    before = logits.clone()
    together = draw(logits, **values)
    alone = [draw_one(logits[i], **{name: of_rows[i] for name, of_rows in values.items()}) for i in range(len(logits))]
    assert together == alone
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [[0.0, math.nan, 1.0, 2.0], [0.0, math.inf, 1.0, 2.0], [NOTHING] * 4, [math.nan] * 4])
@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.0}])
@pytest.mark.parametrize("vocab_size", [4, 9600])
def test_logits_that_are_not_finite_fail_their_row_only(bad, settings, vocab_size):
    logits = torch.full((3, vocab_size), NOTHING)
    logits[:, :4] = torch.tensor([[0.0, 0.0, 8.0, 8.0], bad, [0.0, 0.0, 8.0, 8.0]])
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "random_val": 0.3} | settings
    first, failed, last = draw_uniform(logits, **check_uniform(3, **values)).to_host()
    assert (first.token_id, first.error) == (2, None)
    assert (last.token_id, last.error) == (2, None)
    assert 0 <= failed.token_id < vocab_size
    with pytest.raises(EngineError, match="NaN"):
        raise present(failed.error)


FINE: dict[str, Any] = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "random_val": 0.1}


def test_values_are_brought_to_one_per_request():
    values = check_uniform(
        2,
        temperature=torch.tensor([0.5, 2.0], dtype=torch.bfloat16),
        top_k=np.array([3, 9], dtype=np.uint8),
        top_p=1,
        random_val=torch.tensor(0.25),
    )
    arrays = cast(dict[str, np.ndarray], values)
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "temperature": [0.5, 2.0],
        "top_k": [3, 9],
        "top_p": [1.0, 1.0],
        "random_val": [0.25, 0.25],
    }
    assert [array.dtype for array in arrays.values()] == [np.float64, np.int64, np.float64, np.float64]


OUT_OF_RANGE = [
    *[
        (name, value)
        for name in ("temperature", "top_p", "random_val")
        for value in (math.nan, math.inf, -math.inf, -0.1)
    ],
    ("top_p", 1.0001),
    ("random_val", 1.0),
    ("random_val", 1),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_values_out_of_range_are_refused_by_name_and_request(name, value):
    with pytest.raises(InvalidValueError, match=rf"{name}={float(value)} of request 0 is out of range; use "):
        check_uniform(2, **(FINE | {name: value}))
    with pytest.raises(InvalidValueError, match=rf"{name}={float(value)} of request 1 is out of range; use "):
        check_uniform(2, **(FINE | {name: torch.tensor([0.5, value], dtype=torch.float64)}))


@pytest.mark.parametrize("value", [50.0, 2.5, math.nan, True, "50", None, [50, 2.5], [50.0, 50.0], 10**30, {}])
def test_top_k_must_be_an_integer(value):
    with pytest.raises(InvalidTypeError, match=r"top_k=.* must be a 64-bit integer"):
        check_uniform(2, **(FINE | {"top_k": value}))


@pytest.mark.parametrize("name", ["temperature", "top_p", "random_val"])
@pytest.mark.parametrize("value", ["0.5", None, False, [0.5, None], [0.5, "a"], 1j])
def test_what_is_no_number_is_refused(name, value):
    with pytest.raises(InvalidTypeError, match=rf"{name}=.* must be a number"):
        check_uniform(2, **(FINE | {name: value}))


@pytest.mark.parametrize("name", list(FINE))
def test_one_value_per_request_or_one_for_all(name):
    with pytest.raises(InvalidValueError, match=rf"{name} has shape \[3\] for 2 requests; give one number or \[2\]"):
        check_uniform(2, **(FINE | {name: [1, 0, 0]}))
    with pytest.raises(InvalidValueError, match=rf"{name} has shape \[1, 2\] for 2 requests"):
        check_uniform(2, **(FINE | {name: np.zeros((1, 2), dtype=np.int64)}))
    with pytest.raises(InvalidTypeError, match=rf"{name}=\[0, \[0\]\] must be one number or one per request"):
        check_uniform(2, **(FINE | {name: [0, [0]]}))
