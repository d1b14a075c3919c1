import pytest
import torch

from infinilm.kernels.activation import silu_mul, silu_mul_torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 3072), (2, 2048), (5, 37), (0, 64)]
SHAPES += [(512, 3072), (1000, 14336)] if DEVICE == "cuda" else []


def assert_alike(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # Two roundings, and an exponential that is right to a few steps of float32. The interpreter cuts bfloat16 off.
    steps = 4 if actual.dtype != torch.float16 else 2
    step = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=steps * step, atol=step / 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(shape[0], 2 * shape[1], device=DEVICE) * 2).to(dtype)
    out = silu_mul(gate_up)
    assert out.shape == shape
    assert out.is_contiguous()
    assert_alike(out, silu_mul_torch(gate_up))


def test_gates_far_from_zero_are_open_or_shut() -> None:
    gate = torch.tensor([-80.0, -20.0, 0.0, 20.0, 80.0])
    gate_up = torch.cat((gate, torch.full((5,), 3.0)))[None].to(DEVICE, torch.float16)
    torch.testing.assert_close(silu_mul(gate_up)[0].cpu(), torch.tensor([0, 0, 0, 60, 240.0]).half(), rtol=0, atol=1e-3)


def test_rows_may_be_strided() -> None:
    torch.manual_seed(0)
    wide = torch.randn(4, 600, device=DEVICE).half()
    for part in (wide[:, 100:300], wide[:, ::3]):
        assert_alike(silu_mul(part), silu_mul_torch(part))
