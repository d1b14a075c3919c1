"""The activation of an MLP."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from infinilm.kernels.early_launch import launches_early, let_next_start, wait_for_inputs

# Outputs per program: two loads of 16 bytes per thread for the gate and two for the up.
_BLOCK = 2048
_WARPS = 4


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `gate_up` `[T, 2n]`, gates first: `[T, n]`, contiguous.

    Computed in float32, with the silu rounded to the input's type before it is multiplied.
    """
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    early = launches_early(gate_up.device)
    _silu_mul_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
        gate_up, out, size, gate_up.stride(0), BLOCK=_BLOCK, EARLY=early, num_warps=_WARPS, launch_pdl=early
    )
    return out


def silu_mul_torch(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@triton.jit
def _silu_mul_kernel(gate_up, out, size, stride, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Program (row, block): `BLOCK` outputs of a row."""
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * stride + size + columns, mask=inside, other=0.0)
    tl.store(out + row * size + columns, gated(gate, up), mask=inside)


@triton.jit
def add_bias(sums, bias):
    """`sums + bias` in float32, rounded once more than the sums.

    The compiler would turn a plain addition to a product of a single tile into a product that starts with the bias, and
    matrix instructions round differently.
    """
    return tl.fma(sums, 1.0, bias)


@triton.jit
def gated(gate, up, IS_GELU: tl.constexpr = False):
    """`silu(gate) * up`, or with GELU's tanh form, rounded as torch does: after each of the two operations."""
    wide = gate.to(tl.float32)
    power = wide
    if IS_GELU:
        power = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)  # 2 sqrt(2 / pi)
    activated = (wide / (1.0 + tl.exp(-power))).to(gate.dtype)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
