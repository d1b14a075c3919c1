"""Weights in the kernels' layout: what comes out is what went in, and what does not fit is refused."""

from typing import Any

import pytest
import torch
from packing import FORMATS, make_blocks

SHAPES = [(1, 256), (16, 512), (37, 768), (100, 256)]


def make_matrix(
    native: Any, format: str, rows: int, columns: int, seed: int = 0, *, bits: int = 16
) -> tuple[Any, torch.Tensor]:
    """A loaded matrix and its values, as the native library has them."""
    blocks, _ = make_blocks(format, rows, columns, seed)
    matrix = native.Matrix(format, rows, columns, bits)
    matrix.load(blocks, torch.arange(rows))
    values = torch.empty(rows, columns)
    matrix.dequantize(torch.arange(rows), values)
    return matrix, values


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_rows_come_back(native: Any, format: str, rows: int, columns: int) -> None:
    blocks, expected = make_blocks(format, rows, columns)
    matrix = native.Matrix(format, rows, columns)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    for part in order.chunk(3):  # any order, in pieces
        matrix.load(blocks[part].contiguous(), part)
    values = torch.empty(rows, columns)
    matrix.dequantize(torch.arange(rows), values)
    if format.endswith("_K"):  # scales and minimums of groups are rounded to float16
        scale = expected.abs().amax(dim=1, keepdim=True)
        assert ((values - expected).abs() <= 2**-10 * scale).all()
    else:
        assert torch.equal(values, expected)
    picked = torch.tensor([rows - 1, 0])
    some = torch.empty(2, columns)
    matrix.dequantize(picked, some)
    assert torch.equal(some, values[picked])


def test_a_row_can_be_replaced(native: Any) -> None:
    matrix, before = make_matrix(native, "Q5_1", 20, 64)
    blocks, expected = make_blocks("Q5_1", 20, 64, seed=5)
    matrix.load(blocks[3:4], torch.tensor([3]))
    values = torch.empty(20, 64)
    matrix.dequantize(torch.arange(20), values)
    assert torch.equal(values[3], expected[3])
    assert torch.equal(values[4:], before[4:])


@pytest.mark.parametrize("format", FORMATS)
def test_it_takes_little_more_than_the_file(native: Any, format: str) -> None:
    blocks, _ = make_blocks(format, 64, 768)
    assert native.Matrix(format, 64, 768).num_bytes <= 1.12 * blocks.numel()


def test_what_does_not_fit_is_refused(native: Any) -> None:
    with pytest.raises(ValueError, match="format 'Q3_K' is unknown; known are Q4_0"):
        native.Matrix("Q3_K", 1, 256)
    with pytest.raises(ValueError, match=r"Q4_K can't hold \[4, 288\]: columns must be a multiple of 256"):
        native.Matrix("Q4_K", 4, 288)
    with pytest.raises(ValueError, match=r"can't hold \[0, 32\]"):
        native.Matrix("Q8_0", 0, 32)
    matrix = native.Matrix("Q8_0", 4, 32)
    blocks = torch.zeros(2, 34, dtype=torch.uint8)
    with pytest.raises(ValueError, match="a row lies outside of the matrix"):
        matrix.load(blocks, torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="a row lies outside of the matrix"):
        matrix.dequantize(torch.tensor([-1]), torch.empty(1, 32))
    with pytest.raises(ValueError, match=r"blocks must be \[rows, 34\]"):
        matrix.load(blocks, torch.tensor([0]))
    with pytest.raises(ValueError, match=r"out must be \[rows, 32\]"):
        matrix.dequantize(torch.tensor([1]), torch.empty(1, 64))
    with pytest.raises(TypeError):
        matrix.load(blocks.int(), torch.tensor([0, 1]))
