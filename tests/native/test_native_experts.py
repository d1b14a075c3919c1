"""Mixtures of packed experts against torch; and that a row's result depends on nothing but the row."""

from typing import Any

import pytest
import torch
from native.test_native_matrix import make_matrix
from torch import Tensor

from infinilm.kernels.experts_torch import choose_experts_torch, mix_experts_torch
from infinilm.kernels.routing import GELU, ClampedGate, Gate, Routing, native_gate

HIDDEN, INNER, NUM_EXPERTS, TOP_K = 64, 96, 6, 3


@pytest.fixture
def experts(native: Any) -> tuple[Any, Tensor, Tensor]:
    """Experts of different formats, and their weights as floats."""
    linears: tuple[list[Any], list[Any]] = ([], [])
    gate_up, down = [], []
    for expert in range(NUM_EXPERTS):
        format = ("Q8_0", "Q4_1", "Q5_0")[expert % 3]
        gate, gate_values = make_matrix(native, format, INNER, HIDDEN)
        up, up_values = make_matrix(native, "Q8_0", INNER, HIDDEN)
        last, down_values = make_matrix(native, format, HIDDEN, INNER)
        linears[0].append(native.Linear([gate, up], None))
        linears[1].append(native.Linear([last], None))
        gate_up.append(torch.cat((gate_values, up_values)))
        down.append(down_values)
    return native.Experts(*linears), torch.stack(gate_up).float(), torch.stack(down).float()


def make_rows(num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, NUM_EXPERTS, generator=generator)
    return torch.randn(num_rows, HIDDEN, generator=generator), *choose_experts_torch(
        logits, Routing(NUM_EXPERTS, TOP_K, renormalizes=True)
    )


@pytest.mark.parametrize("num_rows", [0, 1, 5, 150])
def test_sums_equal_torch(experts: tuple[Any, Tensor, Tensor], num_rows: int) -> None:
    packed, gate_up, down = experts
    x, ids, weights = make_rows(num_rows)
    expected, out = mix_experts_torch(x, ids, weights, gate_up, down), torch.full_like(x, torch.nan)
    packed.mix(x, ids, weights, out, False)
    # Activations are rounded to 1 / 65,024 of the largest of their block, twice.
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-4 * float(down.abs().max() + 1))
    added = torch.ones_like(x)
    packed.mix(x, ids, weights, added, True)
    torch.testing.assert_close(added, out + 1, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gate", [GELU, ClampedGate(1.702, 2.0)])
def test_gates_and_biases(native: Any, gate: Gate) -> None:
    """For a clamped gate torch has lines of gate and up that alternate."""
    linears: tuple[list[Any], list[Any]] = ([], [])
    gate_ups, downs = [], []
    first, last = torch.randn(NUM_EXPERTS, 2 * INNER), torch.randn(NUM_EXPERTS, HIDDEN)
    for expert in range(NUM_EXPERTS):
        gate_up, values = make_matrix(native, "Q5_0", 2 * INNER, HIDDEN)
        down, down_values = make_matrix(native, "Q8_0", HIDDEN, INNER)
        linears[0].append(native.Linear([gate_up], first[expert]))
        linears[1].append(native.Linear([down], last[expert]))
        gate_ups.append(values.float())
        downs.append(down_values.float())
    x, ids, weights = make_rows(9)
    gate_up_values = torch.stack(gate_ups)
    if isinstance(gate, ClampedGate):
        halves = gate_up_values.chunk(2, dim=1), first.chunk(2, dim=1)
        gate_up_values, first = (torch.stack(both, dim=2).flatten(1, 2) for both in halves)
    options: dict[str, Any] = {"biases": (first, last), "gate": gate}
    expected = mix_experts_torch(x, ids, weights, gate_up_values, torch.stack(downs), **options)
    out = torch.empty_like(x)
    native.Experts(*linears, **native_gate(gate)).mix(x, ids, weights, out, False)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-4 * float(torch.stack(downs).abs().max() + 1))


def test_unknown_gates_are_refused(native: Any) -> None:
    linear = native.Linear([make_matrix(native, "Q8_0", 64, 32)[0]], None)
    down = native.Linear([make_matrix(native, "Q8_0", 32, 32)[0]], None)
    for gate in ({"activation": "relu"}, {"activation": "clamped", "alpha": 1.0}):
        with pytest.raises(
            ValueError, match=f"activation='{gate['activation']}' must be silu or gelu_pytorch_tanh, or"
        ):
            native.Experts([linear], [down], **gate)


def test_a_row_depends_on_nothing_else(native: Any, experts: tuple[Any, Tensor, Tensor]) -> None:
    x, ids, weights = make_rows(70)
    together = torch.empty_like(x)
    experts[0].mix(x, ids, weights, together, False)
    for threads in (1, 3):
        native.set_num_threads(threads)
        for first, count in ((0, 1), (3, 2), (11, 7), (0, 70)):
            own = slice(first, first + count)
            out = torch.empty(count, HIDDEN)
            experts[0].mix(x[own], ids[own], weights[own], out, False)
            assert out.equal(together[own])


@pytest.mark.parametrize("count", [4, 60, 64, 130])
def test_scores(native: Any, count: int) -> None:
    x, weight = torch.randn(9, 200), torch.randn(200, count)
    out, alone = torch.empty(9, count), torch.empty(1, count)
    native.score(x, weight, out)
    torch.testing.assert_close(out, x @ weight, rtol=1e-4, atol=1e-4)
    native.score(x[4:5], weight, alone)
    assert alone.equal(out[4:5])


def test_what_does_not_fit_is_refused(native: Any, experts: tuple[Any, Tensor, Tensor]) -> None:
    x, ids, weights = make_rows(4)
    out = torch.empty_like(x)
    with pytest.raises(ValueError, match=r"x and out must be \[T, 64\]"):
        experts[0].mix(x[:, :32].contiguous(), ids, weights, out, False)
    with pytest.raises(ValueError, match=r"ids and weights must be \[T, k\]"):
        experts[0].mix(x, ids[:3], weights, out, False)
    for bad in (NUM_EXPERTS, -1):
        ids[2, 1] = bad
        with pytest.raises(ValueError, match="there is no such expert"):
            experts[0].mix(x, ids, weights, out, False)
    first, second = (native.Linear([make_matrix(native, "Q8_0", rows, 64)[0]], None) for rows in (64, 128))
    with pytest.raises(ValueError, match="do not fit together"):
        native.Experts([first], [second])
    with pytest.raises(ValueError, match="an expert has two linear layers"):
        native.Experts([first], [])
    with pytest.raises(ValueError, match=r"x must be \[T, in\]"):
        native.score(x, torch.empty(63, 4), torch.empty(4, 4))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"router": torch.zeros(HIDDEN, 5)}, r"router must be \[hidden, experts\]"),
        ({"correction": torch.zeros(5)}, "correction must have 6 numbers"),
        ({"num_groups": 4}, "groups of experts"),
        ({"num_groups": 3, "top_k": 3}, "top_k must be"),
        ({"group_best": 7}, "groups of experts"),
        ({"top_k": 0}, "top_k must be"),
    ],
)
def test_routing_that_does_not_fit_is_refused(
    native: Any, experts: tuple[Any, Tensor, Tensor], wrong: dict[str, Any], match: str
) -> None:
    routing = Routing(NUM_EXPERTS, TOP_K, renormalizes=True)._asdict()
    del routing["num_experts"]
    router: dict[str, Any] = {"router": torch.zeros(HIDDEN, NUM_EXPERTS), "router_bias": None, "correction": None}
    native.SparseMLP(experts=experts[0], shared=None, **router, **routing)
    with pytest.raises(ValueError, match=match):
        native.SparseMLP(experts=experts[0], shared=None, **{**router, **routing, **wrong})
