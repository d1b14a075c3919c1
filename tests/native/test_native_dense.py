"""Products of float32 matrices against torch; and that a row's result depends on nothing but the row."""

from typing import Any

import pytest
import torch
from torch import Tensor

# Outputs: whole tiles, some vectors, less than one; inputs: several runs, a part of one, an odd number.
SHAPES = [(576, 192), (130, 100), (7, 5), (48, 1)]
ROW_COUNTS = [1, 2, 5, 6, 7, 23, 24, 25, 200]


def make_product(num_rows: int, num_inputs: int, num_outputs: int, *, is_table: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_inputs)
    x = torch.randn(num_rows, num_inputs, generator=generator)
    weight = torch.randn(num_inputs, num_outputs, generator=generator)
    return x, weight.t().contiguous() if is_table else weight


def multiply(native: Any, x: Tensor, weight: Tensor, *, is_table: bool, start: float = 0.0) -> Tensor:
    out = torch.full((len(x), weight.shape[0 if is_table else 1]), start)
    native.multiply_dense(x.contiguous(), weight, out, True, is_table)
    return out


@pytest.mark.parametrize("is_table", [False, True])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
def test_products_equal_torch(native: Any, num_inputs: int, num_outputs: int, is_table: bool) -> None:
    x, weight = make_product(max(ROW_COUNTS), num_inputs, num_outputs, is_table=is_table)
    expected = x.double() @ (weight.t() if is_table else weight).double()
    for num_rows in ROW_COUNTS:
        product = multiply(native, x[:num_rows], weight, is_table=is_table, start=2.0)
        torch.testing.assert_close(product.double(), expected[:num_rows] + 2, rtol=1e-5, atol=1e-4)
    product = torch.full((len(x), num_outputs), torch.nan)
    native.multiply_dense(x, weight, product, False, is_table)
    torch.testing.assert_close(product.double(), expected, rtol=1e-5, atol=1e-4)
    assert multiply(native, x[:0], weight, is_table=is_table).shape == (0, num_outputs)


@pytest.mark.parametrize("is_table", [False, True])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
def test_a_row_does_not_depend_on_others_or_threads(
    native: Any, num_inputs: int, num_outputs: int, is_table: bool
) -> None:
    x, weight = make_product(max(ROW_COUNTS), num_inputs, num_outputs, is_table=is_table)
    together = multiply(native, x, weight, is_table=is_table)
    for num_rows in ROW_COUNTS:
        first = max(ROW_COUNTS) - num_rows
        assert multiply(native, x[first:], weight, is_table=is_table).equal(together[first:]), num_rows
    before = native.num_threads()
    try:
        for num_threads in (1, 3):
            native.set_num_threads(num_threads)
            for num_rows in (1, 24, max(ROW_COUNTS)):
                assert multiply(native, x[:num_rows], weight, is_table=is_table).equal(together[:num_rows])
    finally:
        native.set_num_threads(before)


@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_activations(native: Any, name: str) -> None:
    """Of rows that lie apart. Numbers have the same bits wherever they lie in a row."""
    x, out = torch.randn(9, 70) * 8, torch.empty(9, 35)
    native.activate(x[:, 35:], out, name)
    expected = torch.nn.functional.silu(x) if name == "silu" else torch.nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(out, expected[:, 35:], rtol=1e-5, atol=1e-5)
    alone = torch.empty(1, 1)
    for column in (0, 34):
        native.activate(x[3:4, 35 + column : 36 + column], alone, name)
        assert alone[0, 0] == out[3, column]
    with pytest.raises(ValueError, match="contiguous but for T"):
        native.activate(x[:, ::2], out, name)
    with pytest.raises(ValueError, match="activation='relu'"):
        native.activate(x, torch.empty_like(x), "relu")


def test_shapes_that_do_not_fit_are_refused(native: Any) -> None:
    x, weight = torch.ones(2, 3), torch.ones(3, 4)
    for wrong in (torch.ones(2, 3), torch.ones(1, 4)):
        with pytest.raises(ValueError, match=r"out \[T, out\]"):
            native.multiply_dense(x, weight, wrong, False)
    with pytest.raises(ValueError, match=r"weight \[in, out\]"):
        native.multiply_dense(x, weight, torch.ones(2, 4), False, True)
    with pytest.raises(TypeError):
        native.multiply_dense(x, weight.double(), torch.ones(2, 4), False)
