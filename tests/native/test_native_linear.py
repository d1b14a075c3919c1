"""Products with packed weights against the torch twin; and that a row's result depends on nothing but the row."""

from typing import Any

import pytest
import torch
from native.test_native_matrix import make_matrix
from packing import FORMATS

from infinilm.kernels.packed import packed_linear

ROWS = [1, 2, 3, 5, 8, 9, 16, 17, 64, 200]


@pytest.fixture(params=[16, 8])
def bits(request: pytest.FixtureRequest) -> int:
    """Of activations."""
    return int(request.param)


def assert_close(
    ours: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, bits: int = 16
) -> None:
    """Ours adds up in float32, group by group, the twin in float64: they differ by the rounding of what is added."""
    added = x.double().abs() @ weight.double().abs().T + 1e-30
    assert ((ours - packed_linear(x, weight, bias, activation_bits=bits)).abs() / added).max() < 1e-6


def activations(rows: int, columns: int) -> torch.Tensor:
    """Random numbers with a few large ones, a group of zeros, and rows of very different size."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 3, rows).unsqueeze(1)
    x[:, 5] *= 50
    x[:, 32:64] = 0
    return x


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("out_features", "columns"), [(1, 256), (16, 512), (37, 768)])
def test_products_equal_the_twin(native: Any, format: str, out_features: int, columns: int, bits: int) -> None:
    matrix, weight = make_matrix(native, format, out_features, columns, bits=bits)
    linear = native.Linear([matrix], None)
    for rows in ROWS:
        x, out = activations(rows, columns), torch.full((rows, out_features), torch.nan)
        linear.multiply(x, out, False)
        assert_close(out, x, weight, bits=bits)


@pytest.mark.parametrize("columns", [32, 288, 608, 672])
def test_columns_need_not_fill_a_block(native: Any, columns: int, bits: int) -> None:
    matrix, weight = make_matrix(native, "Q5_0", 90, columns, bits=bits)
    for rows in (3, 40, 60):
        x, out = torch.randn(rows, columns), torch.ones(rows, 90)
        native.Linear([matrix], None).multiply(x, out, True)
        assert_close(out - 1, x, weight, bits=bits)


def test_matrices_of_different_formats_lie_side_by_side(native: Any) -> None:
    pairs = [make_matrix(native, format, rows, 256) for format, rows in (("Q4_K", 40), ("Q8_0", 7), ("Q6_K", 16))]
    bias = torch.randn(63)
    linear = native.Linear([matrix for matrix, _ in pairs], bias)
    assert (linear.in_features, linear.out_features) == (256, 63)
    x, out = torch.randn(5, 256), torch.ones(5, 63)
    linear.multiply(x, out, True)
    assert_close(out - 1, x, torch.cat([weight for _, weight in pairs]), bias)


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_depends_on_nothing_else(native: Any, format: str, bits: int) -> None:
    matrix, _ = make_matrix(native, format, 200, 512, bits=bits)
    linear = native.Linear([matrix], None)
    x, together = torch.randn(210, 512), torch.empty(210, 200)
    x[::5, 70] *= 50  # an outlier, which 8 bits keep a second byte for
    x[1::7, 400] *= 50
    linear.multiply(x, together, False)
    for first, count in ((0, 1), (3, 2), (11, 7), (64, 6), (190, 20)):
        out = torch.empty(count, 200)
        linear.multiply(x[first : first + count], out, False)
        assert torch.equal(out, together[first : first + count])
    for threads in (1, 3, 7):
        native.set_num_threads(threads)
        out = torch.empty(210, 200)
        linear.multiply(x, out, False)
        assert torch.equal(out, together)


@pytest.mark.parametrize("format", FORMATS)
def test_results_are_nearly_those_of_floats(native: Any, format: str) -> None:
    matrix, weight = make_matrix(native, format, 50, 512)
    x, out = torch.randn(9, 512), torch.empty(9, 50)
    native.Linear([matrix], None).multiply(x, out, False)
    exact = x.double() @ weight.double().T
    assert (out - exact).norm() < 5e-5 * exact.norm()


def test_outliers_cost_the_rest_of_a_group_little(native: Any) -> None:
    """Beside a number a thousand times as large, 8 bits alone would leave zeros."""
    matrix, weight = make_matrix(native, "Q8_0", 50, 512, bits=8)
    x, out = torch.randn(9, 512), torch.empty(9, 50)
    x[:, 40] = 1000
    native.Linear([matrix], None).multiply(x, out, False)
    x[:, 40] = 0
    outlier = torch.zeros(9, 512)
    outlier[:, 40] = 1000
    rest = out - outlier.double() @ weight.double().T
    exact = x.double() @ weight.double().T
    assert (rest - exact).norm() < 1e-2 * exact.norm()


def test_extreme_numbers_do_no_harm(native: Any, bits: int) -> None:
    matrix, weight = make_matrix(native, "Q8_0", 16, 64, bits=bits)
    linear, out = native.Linear([matrix], None), torch.empty(3, 16)
    x = torch.full((3, 64), 1e-42)  # below the normal range
    x[1], x[2] = 1e37, torch.inf
    linear.multiply(x, out, False)
    assert out[0].abs().max() < 1e-38
    assert_close(out[1:2], x[1:2], weight, bits=bits)
    assert not out[2].isfinite().any()


@pytest.mark.parametrize("rows", [3, 60])
def test_what_is_no_number_shows_in_its_row_alone(native: Any, rows: int, bits: int) -> None:
    matrix, _ = make_matrix(native, "Q4_1", 16, 512, bits=bits)
    linear, x = native.Linear([matrix], None), torch.randn(rows, 512)
    sound, out = torch.empty(rows, 16), torch.empty(rows, 16)
    linear.multiply(x, sound, False)
    for column in (0, 21, 255, 300, 511):
        broken = x.clone()
        broken[1, column] = torch.nan
        linear.multiply(broken, out, False)
        assert not out[1].isfinite().any()
        assert torch.equal(out[0], sound[0])
        assert torch.equal(out[2:], sound[2:])


def test_rows_of_many_tasks(native: Any, bits: int) -> None:
    """More rows than a task has, in numbers that do not divide evenly."""
    matrix, weight = make_matrix(native, "Q4_K", 40, 256, bits=bits)
    linear = native.Linear([matrix], None)
    for rows in (265, 529, 1000):
        x, out = torch.randn(rows, 256), torch.full((rows, 40), torch.nan)
        linear.multiply(x, out, False)
        assert_close(out, x, weight, bits=bits)


def test_what_does_not_fit_is_refused(native: Any) -> None:
    matrix, _ = make_matrix(native, "Q4_0", 16, 64)
    other, _ = make_matrix(native, "Q4_0", 16, 96)
    with pytest.raises(ValueError, match="as many columns"):
        native.Linear([matrix, other], None)
    short, _ = make_matrix(native, "Q4_0", 16, 64, bits=8)
    assert (matrix.activation_bits, short.activation_bits) == (16, 8)
    with pytest.raises(ValueError, match="the same activation_bits"):
        native.Linear([matrix, short], None)
    with pytest.raises(ValueError, match="activation_bits=4 must be 8 or 16"):
        native.Matrix("Q4_0", 16, 64, 4)
    with pytest.raises(ValueError, match="needs a matrix"):
        native.Linear([], None)
    with pytest.raises(ValueError, match="bias must have 16 numbers"):
        native.Linear([matrix], torch.zeros(17))
    linear = native.Linear([matrix], None)
    with pytest.raises(ValueError, match=r"x must be \[T, 64\] and out \[T, 16\]"):
        linear.multiply(torch.zeros(2, 64), torch.zeros(3, 16), False)
    with pytest.raises(TypeError):
        linear.multiply(torch.zeros(2, 64, dtype=torch.float64), torch.zeros(2, 16), False)
    with pytest.raises(TypeError):
        linear.multiply(torch.zeros(64, 2).t(), torch.zeros(2, 16), False)
    with pytest.raises(ValueError, match="count=0 must be 1 to 1024"):
        native.set_num_threads(0)
    with pytest.raises(ValueError, match="instruction set 'sse9': this machine has"):
        native.use_instruction_set("sse9")
