"""Quantises float matrices while they are read, to GGUF's blocks.

A block is 32 numbers of a row. `Q8_0` stores them as 8-bit multiples of a scale, `Q4_1` as 4-bit steps from a minimum.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from infinilm.errors import InvalidValueError

BLOCK = 32
PackedRows = tuple[Tensor, Tensor]
"""Rows in GGML blocks, uint8 `[n, bytes of a row]`, and their indices in the part they belong to, int64 `[n]`."""

# Matrices are quantised in slices of about this many numbers, few enough for the caches.
_SLICE_ELEMENTS = 2**18
_FIT_ROUNDS = 4


class _Reader(Protocol):
    def read_into(self, name: str, target: Tensor, starts: Sequence[int] | None = None) -> None: ...


def quantize_rows(
    reader: _Reader, name: str, format: str, starts: Sequence[int], shape: Sequence[int], *, granule: int = 1
) -> Iterator[PackedRows]:
    """Read a part of a matrix, see `Checkpoint.read_packed`, a multiple of `granule` rows at a time."""
    num_rows, num_columns = shape
    step = max(1, _SLICE_ELEMENTS // (num_columns * granule)) * granule
    for offset in range(0, num_rows, step):
        places = torch.arange(offset, min(offset + step, num_rows))
        values = torch.empty(len(places), num_columns)
        reader.read_into(name, values, (starts[0] + offset, starts[1]))
        yield quantize(values, format), places


def quantize(values: Tensor, format: str) -> Tensor:
    """Rows `[n, columns]` float32 in GGML blocks of `format`: uint8 `[n, bytes of a row]`."""
    if format not in QUANTIZERS:
        raise InvalidValueError(f"format={format!r} can't be made of floats; use one of {', '.join(QUANTIZERS)}")
    num_rows, num_columns = values.shape
    if num_columns % BLOCK:
        raise InvalidValueError(f"rows of {num_columns} numbers are not whole blocks of {BLOCK}")
    return QUANTIZERS[format](values.reshape(-1, BLOCK)).view(num_rows, -1)


def _q8_0(x: Tensor) -> Tensor:
    """Blocks `[n, 32]` as scale f16 and 32 signed bytes; value = scale · q."""
    scale = (x.abs().amax(1, keepdim=True) / 127).half()
    quants = (x * _inverse(scale)).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat((scale.view(torch.uint8), quants.view(torch.uint8)), dim=1)


def _q4_1(x: Tensor) -> Tensor:
    """Blocks `[n, 32]` as scale f16, minimum f16 and 16 bytes of quants; value = scale · q + minimum.

    Numbers are rounded to the nearest of 16 steps between a block's least and greatest. Then scale and minimum are
    fitted to the quants by least squares and numbers rounded again, `_FIT_ROUNDS` times. The best result is kept.
    """
    low, high = x.aminmax(dim=1, keepdim=True)
    scale, minimum = ((high - low) / 15).half(), low.half()
    quants = _steps(x, scale, minimum)
    error = _error(x, quants, scale, minimum)
    for _ in range(_FIT_ROUNDS):
        new_scale, new_minimum = _fit(x, quants)
        new_quants = _steps(x, new_scale, new_minimum)
        new_error = _error(x, new_quants, new_scale, new_minimum)
        is_better = new_error < error
        scale, minimum = torch.where(is_better, new_scale, scale), torch.where(is_better, new_minimum, minimum)
        quants, error = torch.where(is_better, new_quants, quants), torch.where(is_better, new_error, error)
    nibbles = quants.to(torch.uint8)
    packed = nibbles[:, : BLOCK // 2] | (nibbles[:, BLOCK // 2 :] << 4)
    return torch.cat((scale.view(torch.uint8), minimum.view(torch.uint8), packed), dim=1)


def _steps(x: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """The nearest steps, 0 to 15, as floats `[n, 32]`."""
    return ((x - minimum) * _inverse(scale)).round_().clamp_(0, 15)


def _fit(x: Tensor, quants: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and minimum, float16 `[n, 1]`, with which `quants` come nearest to `x`."""
    mean, quant_mean = x.mean(1, keepdim=True), quants.mean(1, keepdim=True)
    centred = quants - quant_mean
    variance = centred.square().sum(1, keepdim=True)
    scale = ((x - mean) * centred).sum(1, keepdim=True) / variance.clamp_(min=0.5)  # 0 if all are in one step
    return scale.half(), (mean - scale * quant_mean).half()


def _error(x: Tensor, quants: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return (quants * scale + minimum - x).square_().sum(1, keepdim=True)


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale in float32; 0 for a scale of 0."""
    wide = scale.float()
    return torch.where(wide == 0, 0.0, 1 / wide)


QUANTIZERS: dict[str, Callable[[Tensor], Tensor]] = {"Q8_0": _q8_0, "Q4_1": _q4_1}
