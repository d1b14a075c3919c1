import pytest
import torch
import triton
from torch import Tensor

from infinilm.errors import InvalidValueError
from infinilm.kernels.gemv import (
    MAX_ROWS,
    Tile,
    choose_tile,
    gemv,
    gemv_torch,
)

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5
ROWS = [1, 2, 8, 9, 16] if ON_GPU else [1, 8, 9]
# [out, in]: one that fits nothing, SmolLM2's, one that takes several steps.
SHAPES = [(37, 100), (960, 576), (48, 5000)]
# The matrices of Qwen3-0.6B and Llama-3.1-8B besides.
QWEN3 = [(4096, 1024), (1024, 2048), (1024, 3072), (151936, 1024)]
LLAMA = [(6144, 4096), (4096, 14336)]
CASES = [(shape, dtype) for shape in SHAPES for dtype in DTYPES if ON_GPU or shape == (37, 100) or dtype == torch.half]
CASES += [(shape, torch.bfloat16) for shape in [*QWEN3, *LLAMA, (576, 1536), (49152, 576)]] if ON_GPU else []


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def matrix(out_size: int, in_size: int, dtype: torch.dtype) -> Tensor:
    """Random weights that make outputs of about 1 from inputs of about 1."""
    return random(out_size, in_size, dtype=dtype, scale=in_size**-0.5)


def settled(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, written for good: kernels that are launched early read weights at once."""
    if ON_GPU:
        torch.cuda.synchronize()
    return tensors


def tile_for(rows: int, out_size: int, in_size: int, dtype: torch.dtype, num_matrices: int = 1) -> Tile | None:
    """None, the default, on a GPU. The interpreter is slow per program, not per output, so it gets few programs."""
    if ON_GPU:
        return None
    tile = choose_tile(rows, out_size, in_size, dtype.itemsize, num_matrices)
    return tile._replace(block_out=triton.next_power_of_2(triton.cdiv(out_size, 3)))


def assert_alike(actual: Tensor, expected: Tensor) -> None:
    """Mostly within a step of the type, never off by many: a normed or activated number may round either way.

    In float32 the sums are not exact, either. The interpreter cuts bfloat16 off, so that normed inputs are too small.
    """
    step = torch.finfo(actual.dtype).eps
    if actual.dtype == torch.float32 or (actual.dtype == torch.bfloat16 and not ON_GPU):
        step *= 8
    torch.testing.assert_close(actual, expected, rtol=4 * step, atol=4 * step)
    difference = torch.linalg.vector_norm((actual - expected).float())
    assert difference <= step * torch.linalg.vector_norm(expected.float())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_gemv(shape: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    x, weight, bias, residual = settled(
        random(rows, shape[1], dtype=dtype),
        matrix(*shape, dtype),
        random(shape[0], dtype=dtype),
        random(rows, shape[0], dtype=dtype),
    )
    tile = tile_for(rows, *shape, dtype)
    assert_alike(gemv(x, weight, tile=tile), gemv_torch(x, weight))
    out = gemv(x, weight, bias=bias, residual=residual, tile=tile)
    assert out.shape == (rows, shape[0])
    assert out.is_contiguous()
    assert_alike(out, gemv_torch(x, weight, bias=bias, residual=residual))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_norm_gemv(shape: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    x, norm_weight, weight, bias = settled(
        random(rows, shape[1], dtype=dtype, scale=3),
        random(shape[1], dtype=dtype),
        matrix(*shape, dtype),
        random(shape[0], dtype=dtype),
    )
    tile = tile_for(rows, *shape, dtype)
    assert_alike(gemv(x, weight, norm=(norm_weight, EPS), tile=tile), gemv_torch(x, weight, norm=(norm_weight, EPS)))
    expected = gemv_torch(x, weight, norm=(norm_weight, EPS), bias=bias)
    assert_alike(gemv(x, weight, norm=(norm_weight, EPS), bias=bias, tile=tile), expected)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*(((30, 100), dtype) for dtype in DTYPES), ((1536, 576), torch.half), ((30, 5000), torch.half)]
    + ([((3072, 1024), torch.bfloat16), ((14336, 4096), torch.bfloat16)] if ON_GPU else []),
    ids=str,
)
def test_norm_gemv_silu(shape: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    x, norm_weight, weight = settled(
        random(rows, shape[1], dtype=dtype), random(shape[1], dtype=dtype), matrix(2 * shape[0], shape[1], dtype)
    )
    out = gemv(x, weight, norm=(norm_weight, EPS), is_gated=True, tile=tile_for(rows, *shape, dtype, num_matrices=2))
    assert out.shape == (rows, shape[0])
    assert_alike(out, gemv_torch(x, weight, norm=(norm_weight, EPS), is_gated=True))


@pytest.mark.parametrize(
    ("rows", "tile"),
    [
        *((rows, None) for rows in (1, 3, 10)),
        *(
            (1, tile)
            for tile in (Tile(16, 128, 4), Tile(32, 1024, 8), Tile(8, 256, 2), Tile(16, 128, 4, padded_rows=8))
        ),
        *((5, tile) for tile in (Tile(16, 128, 4, padded_rows=8), Tile(32, 1024, 8, padded_rows=16))),
    ],
    ids=str,
)
def test_any_tile_gives_the_same(rows: int, tile: Tile | None) -> None:
    x, norm_weight, weight = settled(
        random(rows, 576, dtype=torch.float16), random(576, dtype=torch.float16), matrix(18, 576, torch.float16)
    )
    assert_alike(gemv(x, weight, tile=tile), gemv_torch(x, weight))
    silu = gemv(x, weight, norm=(norm_weight, EPS), is_gated=True, tile=tile)
    assert_alike(silu, gemv_torch(x, weight, norm=(norm_weight, EPS), is_gated=True))


@pytest.mark.parametrize("rows", [1, 4])
def test_operands_may_be_strided(rows: int) -> None:
    wide, weights, residual = settled(
        random(rows, 1000, dtype=torch.float16), matrix(6, 700, torch.float16), random(rows, 99, dtype=torch.float16)
    )
    weight = weights[:, 20:320]
    for x in (wide[:, 50:350], wide[:, 100:400], wide[:, :900:3]):
        expected = gemv_torch(x, weight, residual=residual[:, 20:26])
        assert_alike(gemv(x, weight, residual=residual[:, 20:26]), expected)


@pytest.mark.parametrize("rows", [1, 5])
def test_the_residual_may_be_wider_than_what_is_added(rows: int) -> None:
    """It is added before the only rounding, and is itself left alone."""
    x = torch.full((rows, 64), 2.0**-6, dtype=torch.float16, device=DEVICE)
    weight = torch.full((4, 64), 2.0**-11, dtype=torch.float16, device=DEVICE)
    residual = torch.full((rows, 4), 1 - 2.0**-12, dtype=torch.float32, device=DEVICE)
    settled(x, weight, residual)
    # 2 ** -11 + 1 - 2 ** -12 rounds to 1; rounded to float16 before, the residual would be 1 and the sum 1 + 2 ** -10.
    out = gemv(x, weight, residual=residual)
    assert torch.equal(out, torch.ones_like(out))
    assert torch.equal(residual, torch.full_like(residual, 1 - 2.0**-12))


def test_no_rows_and_too_many() -> None:
    weight = matrix(8, 16, torch.float16)
    assert gemv(torch.empty(0, 16, dtype=torch.float16, device=DEVICE), weight).shape == (0, 8)
    with pytest.raises(InvalidValueError, match=f"x has {MAX_ROWS + 1} rows"):
        gemv(torch.empty(MAX_ROWS + 1, 16, dtype=torch.float16, device=DEVICE), weight)
    with pytest.raises(InvalidValueError, match="multiply more than 1 with"):
        gemv(torch.empty(2, 16, dtype=torch.float16, device=DEVICE), weight, tile=Tile(4, 16, 4))


@pytest.mark.skipif(
    not ON_GPU, reason="the interpreter's products are numpy's, whose order of adding depends on shapes"
)
@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 2048), (1024, 3072)], ids=str)
def test_a_row_does_not_depend_on_the_others(shape: tuple[int, int]) -> None:
    x, norm_weight, weight = settled(
        random(MAX_ROWS, shape[1], dtype=torch.bfloat16),
        random(shape[1], dtype=torch.bfloat16),
        matrix(*shape, torch.bfloat16),
    )
    whole = gemv(x, weight, norm=(norm_weight, EPS))
    silu = gemv(x, weight, norm=(norm_weight, EPS), is_gated=True)
    for rows in range(2, MAX_ROWS):
        assert torch.equal(gemv(x[:rows], weight, norm=(norm_weight, EPS)), whole[:rows])
        assert torch.equal(gemv(x[:rows], weight, norm=(norm_weight, EPS), is_gated=True), silu[:rows])


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("num_matrices", [1, 2])
@pytest.mark.parametrize("shape", [(1, 1), (1024, 2048), (151936, 1024), (4096, 14336), (576, 1536)], ids=str)
def test_tiles_keep_to_what_a_thread_can_have_under_way(
    shape: tuple[int, int], num_matrices: int, itemsize: int
) -> None:
    for rows, loads in ((1, 8), (2, 16)):
        tile = choose_tile(rows, *shape, itemsize, num_matrices)
        num_bytes = tile.block_out * num_matrices * tile.block_in * itemsize
        assert num_bytes <= loads * 16 * 32 * tile.num_warps
        assert tile.padded_rows >= rows
