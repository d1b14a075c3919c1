import pytest
import torch
from torch import Tensor

from infinilm.kernels.norm import rms_norm, rms_norm_torch
from infinilm.layers.norm import RMSNorm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5
# Rows on their own, padded ones, several to a program, none, and more than the widest program's threads hold at once.
SHAPES = [(1, 1024), (3, 576), (11, 128), (2, 100), (0, 256), (2, 8192)]
SHAPES += [(512, 1024), (300, 4096), (4097, 128)] if DEVICE == "cuda" else []
CASES = [(shape, dtype) for shape in SHAPES for dtype in DTYPES if DEVICE == "cuda" or dtype == torch.half]
CASES += [((3, 576), torch.float32), ((11, 128), torch.bfloat16)]


def assert_alike(actual: Tensor, expected: Tensor) -> None:
    # Two steps of the type: one for each rounding. The interpreter cuts bfloat16 off instead of rounding it. In
    # float32 the sum of squares is not exact, either.
    steps = 2 if actual.dtype == torch.float16 or (DEVICE == "cuda" and actual.dtype == torch.bfloat16) else 4
    step = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=steps * step, atol=step / 8)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    numbers = torch.randn(shape, dtype=torch.float32, device=DEVICE).to(dtype)
    if DEVICE == "cuda":
        torch.cuda.synchronize()  # kernels that are launched early read weights at once
    return numbers


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype) * 3, random(shape[1], dtype=dtype)
    assert_alike(rms_norm(x, weight, EPS), rms_norm_torch(x, weight, EPS))


def test_rows_may_be_strided() -> None:
    x, weight = random(4, 3 * 320, dtype=torch.float16), random(320, dtype=torch.float16)
    for part in (x[:, 320:640], x[:, ::3]):
        assert_alike(rms_norm(part, weight, EPS), rms_norm_torch(part, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_the_layers_norm(dtype: torch.dtype) -> None:
    layer = RMSNorm(576, EPS, dtype=dtype, device=DEVICE)
    layer.weight.copy_(random(576, dtype=dtype))
    x = random(5, 576, dtype=dtype)
    assert_alike(rms_norm(x, layer.weight, EPS), layer(x))
    assert_alike(rms_norm_torch(x, layer.weight, EPS), layer(x))


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = random(9, 128, dtype=torch.float16), random(128, dtype=torch.float16)
    whole = rms_norm(x, weight, EPS)
    assert all(torch.equal(rms_norm(x[i : i + 1], weight, EPS)[0], whole[i]) for i in range(9))
