from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from infinilm.kernels.activation import silu_mul
from infinilm.kernels.gemv import gemv_torch
from infinilm.kernels.norm import rms_norm
from infinilm.kernels.ordered_product import Tile, keep_order, max_rows, ordered_product

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
needs_cuda = pytest.mark.skipif(not ON_GPU, reason="needs a GPU: bits are those of its tensor cores")
EPS = 1e-5
# [out, in]: one that fits nothing, one whose norm is fused, and on a GPU those of Qwen3-0.6B and Llama-3.1-8B.
SHAPES = [(38, 100), (48, 1100)]
QWEN3 = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)]
LLAMA = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
MANY_ROWS = [2, 3, 5, 8, 16, 17, 24, 32, 33, 40, 64, 100, 128, 200, 256, 511, 1024]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def _kept_order() -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    keep_order()
    yield
    torch.backends.cuda.preferred_blas_library(before)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True


@pytest.mark.parametrize("rows", [0, 1, 3, 17, 32, 70])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_parity(dtype: torch.dtype, shape: tuple[int, int], rows: int) -> None:
    out_size, in_size = shape
    x, weight = random(rows, in_size, dtype=dtype), random(*shape, dtype=dtype, scale=in_size**-0.5)
    norm = (random(in_size, dtype=dtype), EPS)
    bias, residual = random(out_size, dtype=dtype), random(rows, out_size, dtype=dtype)
    if ON_GPU:
        torch.cuda.synchronize()
    tile = None if ON_GPU else Tile(64, 64, 4, 2)
    for options in ({}, {"bias": bias}, {"residual": residual}, {"norm": norm}, {"norm": norm, "is_gated": True}):
        expected = gemv_torch(x, weight, **options)
        actual = ordered_product(x, weight, **options, tile=tile)
        torch.testing.assert_close(actual, expected, rtol=2e-3, atol=4e-3)


@needs_cuda
@pytest.mark.usefixtures("_kept_order")
@pytest.mark.parametrize("shape", [*QWEN3[:4], *LLAMA, (960, 576)], ids=str)
def test_same_bits_for_every_number_of_rows(shape: tuple[int, int]) -> None:
    out_size, in_size = shape
    x, weight = random(1024, in_size), random(*shape, scale=in_size**-0.5)
    bias, residual, norm = random(out_size), random(1024, out_size), (random(in_size), EPS)
    torch.cuda.synchronize()
    normed = rms_norm(x, *norm)
    plain = torch.mm(x, weight.t())
    added = residual + plain
    biased = torch.addmm(bias, x, weight.t())
    after_norm = torch.mm(normed, weight.t())
    wrong = []
    for rows in (rows for rows in MANY_ROWS if rows > max_rows(*shape, torch.bfloat16)):
        for name, actual, expected in (
            ("mm", torch.mm(x[:rows], weight.t()), plain),
            ("bias", torch.addmm(bias, x[:rows], weight.t()), biased),
        ):
            wrong += [] if torch.equal(actual, expected[:rows]) else [(name, rows)]
    for rows in (1, 2, 16, 32, 33, 100, 127):
        if rows > max_rows(*shape, torch.bfloat16):
            break
        some = x[:rows]
        for name, options, expected in (
            ("ordered", {}, plain),
            ("ordered, residual", {"residual": residual[:rows]}, added),
            ("ordered, bias", {"bias": bias}, biased),
            ("ordered, norm", {"norm": norm}, after_norm),
            ("ordered, gated", {"norm": norm, "is_gated": True}, silu_mul(after_norm)),
        ):
            actual = ordered_product(some, weight, **options)
            wrong += [] if torch.equal(actual, expected[:rows]) else [(name, rows)]
    assert not wrong
