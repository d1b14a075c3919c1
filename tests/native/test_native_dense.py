"""Products with matrices of floats against torch; and that a row's result depends on nothing but the row."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from infinilm.kernels.native import arrays_of

# Outputs: whole tiles, some vectors, less than one; inputs: several runs, a part of one, an odd number.
SHAPES = [(576, 192), (130, 100), (7, 5), (48, 1)]
ROW_COUNTS = [1, 2, 5, 6, 7, 23, 24, 25, 200]
TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]


@dataclass
class Matrix:
    """Of so many inputs and outputs."""

    stored: Tensor
    values: Tensor  # float64 [in, out]
    is_table: bool = False
    scales: Tensor | None = None

    @classmethod
    def make(
        cls, shape: tuple[int, int], dtype: torch.dtype, *, is_table: bool = False, num_groups: int = 1
    ) -> "Matrix":
        generator = torch.Generator().manual_seed(shape[0])
        stored = torch.randn(*shape, generator=generator).to(dtype)
        values, scales = stored.double(), None
        if dtype == torch.float8_e4m3fn:
            scales = torch.rand(num_groups, shape[1], generator=generator) + 0.5
            values *= scales.double().repeat_interleave(shape[0] // num_groups, 0)
            stored = stored.view(torch.uint8)
        return cls(stored.t().contiguous() if is_table else stored, values, is_table, scales)

    def product(self, native: Any, x: Tensor) -> Tensor:
        out = torch.full((len(x), self.values.shape[1]), torch.nan)
        native.multiply_dense(*arrays_of(x.contiguous(), self.stored, out), self.is_table, *arrays_of(self.scales))
        return out


def matrices(shape: tuple[int, int]) -> list[Matrix]:
    """Of all types, scales and layouts that a shape can have."""
    found = [Matrix.make(shape, dtype) for dtype in TYPES]
    found += [Matrix.make(shape, dtype, is_table=True) for dtype in TYPES[:-1]]
    found += [Matrix.make(shape, TYPES[-1], num_groups=count) for count in (2, 3, 18) if shape[0] % (32 * count) == 0]
    return found


def make_rows(num_inputs: int) -> Tensor:
    return torch.randn(max(ROW_COUNTS), num_inputs, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", SHAPES)
def test_products_equal_torch(native: Any, shape: tuple[int, int]) -> None:
    x = make_rows(shape[0])
    for matrix in matrices(shape):
        expected = x.double() @ matrix.values
        for num_rows in ROW_COUNTS:
            product = matrix.product(native, x[:num_rows])
            torch.testing.assert_close(product.double(), expected[:num_rows], rtol=1e-5, atol=1e-4)
        assert matrix.product(native, x[:0]).shape == (0, shape[1])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_does_not_depend_on_others_or_threads(native: Any, shape: tuple[int, int]) -> None:
    x = make_rows(shape[0])
    before = native.num_threads()
    for matrix in matrices(shape):
        together = matrix.product(native, x)
        for num_rows in ROW_COUNTS:
            first = max(ROW_COUNTS) - num_rows
            assert matrix.product(native, x[first:]).equal(together[first:]), num_rows
        try:
            for num_threads in (1, 3):
                native.set_num_threads(num_threads)
                for num_rows in (1, 24, max(ROW_COUNTS)):
                    assert matrix.product(native, x[:num_rows]).equal(together[:num_rows])
        finally:
            native.set_num_threads(before)


@pytest.mark.parametrize("is_table", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_types_of_16_bits_have_the_bits_of_their_values_in_float32(
    native: Any, dtype: torch.dtype, is_table: bool
) -> None:
    matrix = Matrix.make((130, 100), dtype, is_table=is_table)
    wide = Matrix(matrix.stored.float(), matrix.values, is_table)
    x = make_rows(130)
    for num_rows in ROW_COUNTS:
        assert matrix.product(native, x[:num_rows]).equal(wide.product(native, x[:num_rows]))


def test_all_8_bit_floats(native: Any) -> None:
    """But for NaN, which codes 127 and 255 are."""
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    matrix = Matrix(codes.unsqueeze(0), torch.empty(1, len(codes)), scales=torch.ones(1, len(codes)))
    product = matrix.product(native, torch.ones(1, 1))
    assert product[0].equal(codes.view(torch.float8_e4m3fn).float())


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
    x, weight, out = torch.ones(2, 32), torch.ones(32, 4), torch.ones(2, 4)
    for wrong in (torch.ones(2, 3), torch.ones(1, 4)):
        with pytest.raises(ValueError, match=r"out \[T, out\]"):
            native.multiply_dense(x, weight, wrong)
    with pytest.raises(ValueError, match=r"weight \[in, out\]"):
        native.multiply_dense(x, weight, out, True)
    for wrong in (torch.ones(4, 32).t(), torch.ones(32)):
        with pytest.raises(ValueError, match=r"\[in, out\], of numbers in a row"):
            native.multiply_dense(x, wrong, out)
    with pytest.raises(ValueError, match="floats must be float32"):
        native.multiply_dense(x, weight.double(), out)
    codes = torch.zeros(32, 4, dtype=torch.uint8)
    for matrix, scales in ((codes, None), (weight, torch.ones(1, 4))):
        with pytest.raises(ValueError, match="8-bit floats, and no other types"):
            native.multiply_dense(x, matrix, out, False, scales)
    for scales in (torch.ones(1, 3), torch.ones(0, 4), torch.ones(1, 4).double()):
        with pytest.raises(ValueError, match=r"scales must be float32 \[groups, out\]"):
            native.multiply_dense(x, codes, out, False, scales)
    for scales in (torch.ones(2, 4), torch.ones(3, 4)):
        with pytest.raises(ValueError, match="a group of scales must be a multiple of 32 inputs or all"):
            native.multiply_dense(x, codes, out, False, scales)
    with pytest.raises(ValueError, match="a table has no scales"):
        native.multiply_dense(torch.ones(2, 4), codes, torch.ones(2, 32), True, torch.ones(1, 4))


@pytest.mark.parametrize("dtype", TYPES)
def test_layers_of_matrices_where_they_lie(native: Any, dtype: torch.dtype) -> None:
    """Two neighbours, and one of another memory, side by side."""
    both, third = Matrix.make((64, 100), dtype), Matrix.make((64, 37), dtype)
    parts = [
        native.float_matrix(*arrays_of(both.stored[:, part], None if both.scales is None else both.scales[:, part]))
        for part in (slice(0, 70), slice(70, 100))
    ]
    bias, x = torch.randn(137), make_rows(64)
    linear = native.Linear([*parts, native.float_matrix(*arrays_of(third.stored, third.scales))], *arrays_of(bias))
    assert (linear.in_features, linear.out_features) == (64, 137)
    for num_rows in (1, 7, 200):
        own = x[:num_rows]
        expected = torch.cat((both.product(native, own), third.product(native, own)), dim=1) + bias
        out = torch.full((num_rows, 137), torch.nan)
        linear.multiply(*arrays_of(own, out), False)
        assert out.equal(expected)
        out = start = torch.randn(num_rows, 137)
        linear.multiply(*arrays_of(own, out := start.clone()), True)
        assert out.equal(start + expected)


def test_matrices_of_floats_that_do_not_fit_are_refused(native: Any) -> None:
    with pytest.raises(ValueError, match="a multiple of 16 inputs"):
        native.float_matrix(torch.ones(24, 4))
    with pytest.raises(ValueError, match="numbers in a row"):
        native.float_matrix(torch.ones(32, 8)[:, ::2])
    matrix = native.float_matrix(torch.ones(32, 8))
    assert (matrix.rows, matrix.columns, matrix.num_bytes, matrix.format) == (8, 32, 0, "floats")
    with pytest.raises(ValueError, match="looked up where they are"):
        matrix.dequantize(torch.zeros(1, dtype=torch.int64), torch.ones(1, 32))
    with pytest.raises(ValueError, match="must have the same activation_bits"):
        native.Linear([matrix, native.Matrix("Q8_0", 8, 32)], None)
