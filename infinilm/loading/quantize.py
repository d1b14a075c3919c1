"""Converts matrices from and to GGUF's block formats.

Decoding equals the `gguf` package bit for bit: products and sums are rounded separately, never fused, so results do not
depend on the machine. Every decoder takes `blocks` (uint8 `[n, block_bytes]`) and fills `out` (float32
`[n, block_elements]`).

Matrices can also be quantised while they are read: to `Q8_0`, 32 numbers as 8-bit multiples of a scale, `Q4_0`, with 4
bits likewise, `Q4_1`, 32 numbers as 4-bit steps from a minimum, or a `GroupedFormat`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from infinilm.distributed.ggml_blocks import BLOCK_FORMATS
from infinilm.distributed.grouped import GroupedFormat
from infinilm.errors import InvalidValueError
from infinilm.loading.gguf import GGMLType

PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def stored_dtype(ggml_type: GGMLType) -> torch.dtype:
    """The torch type that holds every stored value exactly: float32 for the quantised types."""
    return PLAIN_TYPES.get(ggml_type.name, torch.float32)


def dequantize(raw: Tensor, ggml_type: GGMLType, shape: tuple[int, ...], out: Tensor | None = None) -> Tensor:
    """Decode `raw` (uint8, whole blocks in row order, any shape) into a tensor of `shape` and of `stored_dtype`.

    A given `out` (contiguous, of that type and shape) is filled and returned. Temporaries take about as much memory as
    the result: pass large tensors in slices.
    """
    num_blocks, rest = divmod(torch.Size(shape).numel(), ggml_type.block_elements)
    if rest or raw.numel() != num_blocks * ggml_type.block_bytes:
        raise InvalidValueError(
            f"{raw.numel()} bytes are not a {ggml_type.name} tensor of shape {list(shape)}, which has "
            f"{ggml_type.block_bytes} bytes for every {ggml_type.block_elements} elements"
        )
    dtype = stored_dtype(ggml_type)
    if out is None:
        out = torch.empty(shape, dtype=dtype)
    elif out.dtype != dtype or out.shape != torch.Size(shape) or not out.is_contiguous():
        raise InvalidValueError(f"out must be contiguous, of shape {list(shape)} and of type {dtype}")
    raw = raw.contiguous()
    if ggml_type.name in PLAIN_TYPES:
        return out.copy_(raw.view(-1).view(dtype).view(shape))
    blocks = raw.view(num_blocks, ggml_type.block_bytes)
    _DECODERS[ggml_type.name](blocks, out.view(num_blocks, ggml_type.block_elements))
    return out


_DOUBLED_FLOATS4 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float32)


def _mxfp4(blocks: Tensor, out: Tensor) -> None:
    """An exponent of 2 plus 127, 16 bytes of 4-bit floats (E2M1); value = 2^exponent · float."""
    scales = torch.exp2(blocks[:, :1].float() - 128)
    codes = torch.cat((blocks[:, 1:] & 0x0F, blocks[:, 1:] >> 4), dim=1)
    torch.mul(_DOUBLED_FLOATS4[codes.int()], scales, out=out)


_DECODERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "MXFP4": _mxfp4,
    **{name: format.decode for name, format in BLOCK_FORMATS.items()},
}

BLOCK = 32
PackedRows = tuple[Tensor, Tensor]
"""Rows in GGML blocks, uint8 `[n, bytes of a row]`, and their indices in the part they belong to, int64 `[n]`."""

_SLICE_ELEMENTS = 2**18  # quantised at a time: few enough for the caches
_FIT_ROUNDS = 4
LARGEST_FP8 = 448.0


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
    """Rows `[n, columns]` float32 in a `GroupedFormat`, or in GGML blocks of `format`: uint8 `[n, bytes of a row]`."""
    if (grouped := GroupedFormat.parse(format)) is not None:
        return _to_groups(values, grouped)
    if format not in QUANTIZERS:
        raise InvalidValueError(f"format={format!r} can't be made of floats; use one of {', '.join(QUANTIZERS)}")
    num_rows, num_columns = values.shape
    if num_columns % BLOCK:
        raise InvalidValueError(f"rows of {num_columns} numbers are not whole blocks of {BLOCK}")
    return QUANTIZERS[format](values.reshape(-1, BLOCK)).view(num_rows, -1)


def _to_groups(values: Tensor, format: GroupedFormat) -> Tensor:
    """Codes without zeros. The largest number of a group is a code's largest."""
    if format.has_zeros:
        raise InvalidValueError(f"format={format.name!r} can't be made of floats; use one without zeros")
    num_rows = len(values)
    x = values.reshape(-1, format.group or values.shape[1])
    if format.bits == 4:
        codes, scale = _to_int4(x, format.scale_dtype)
    else:
        scale = (x.abs().amax(1, keepdim=True) / LARGEST_FP8).to(format.scale_dtype)
        codes = (x * _inverse(scale)).clamp_(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
    return format.pack(codes.view(values.shape), scale.view(num_rows, -1), None)


def _to_int4(x: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Groups `[n, m]` as codes uint8 of 0 to 15, of which 8 is 0, and scales `[n, 1]`.

    The largest number, which may make the scale negative, has the code 0: there are more below 8 than above.
    """
    largest = x.gather(1, x.abs().argmax(1, keepdim=True))
    scale = (largest / -8).to(scale_dtype)
    return (x * _inverse(scale)).round_().add_(8).clamp_(0, 15).to(torch.uint8), scale


def _to_q4_0(x: Tensor) -> Tensor:
    """Blocks `[n, 32]` as scale f16 and 16 bytes of quants; value = scale · (q - 8)."""
    quants, scale = _to_int4(x, torch.float16)
    return torch.cat((scale.view(torch.uint8), quants[:, : BLOCK // 2] | (quants[:, BLOCK // 2 :] << 4)), dim=1)


def _to_q8_0(x: Tensor) -> Tensor:
    """Blocks `[n, 32]` as scale f16 and 32 signed bytes; value = scale · q."""
    scale = (x.abs().amax(1, keepdim=True) / 127).half()
    quants = (x * _inverse(scale)).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat((scale.view(torch.uint8), quants.view(torch.uint8)), dim=1)


def _to_q4_1(x: Tensor) -> Tensor:
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


QUANTIZERS: dict[str, Callable[[Tensor], Tensor]] = {"Q8_0": _to_q8_0, "Q4_1": _to_q4_1, "Q4_0": _to_q4_0}
