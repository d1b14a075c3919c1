"""Converts matrices from and to GGUF's block formats.

A quantised row is a run of blocks, each a few small integers with one or two float16 scales.

Decoding equals the `gguf` package bit for bit: products and sums are rounded separately, never fused, so results do not
depend on the machine. Every decoder takes `blocks` (uint8 `[n, block_bytes]`) and fills `out` (float32
`[n, block_elements]`).

Matrices can also be quantised while they are read: to `Q8_0`, 32 numbers as 8-bit multiples of a scale, or `Q4_1`, 32
numbers as 4-bit steps from a minimum.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

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


def _float16(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of every block, as float32 `[n, 1]`."""
    return blocks[:, start : start + 2].clone().view(torch.float16).float()


def _halves(quants: Tensor) -> Tensor:
    """Split bytes `[..., m]` into `[..., 2, m]`: all low four bits, then all high four bits."""
    return torch.stack((quants & 0x0F, quants >> 4), dim=-2)


def _fifth_bits(high: Tensor) -> Tensor:
    """Spread 4 bytes `[n, 4]` into 32 values 0 or 16 `[n, 32]`; bit i of the 32 belongs to element i."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (((high.unsqueeze(-1) >> shifts) & 1) << 4).flatten(1)


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    """Scale f16, 16 bytes of quants; value = scale · (q − 8)."""
    quants = _halves(blocks[:, 2:]).flatten(1)
    torch.mul(quants.to(torch.int8).sub_(8), _float16(blocks, 0), out=out)


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    """Scale f16, minimum f16, 16 bytes of quants; value = scale · q + minimum."""
    quants = _halves(blocks[:, 4:]).flatten(1)
    torch.mul(quants, _float16(blocks, 0), out=out).add_(_float16(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    """Scale f16, 4 bytes of fifth bits, 16 bytes of low bits; value = scale · (q − 16)."""
    quants = _halves(blocks[:, 6:]).flatten(1) | _fifth_bits(blocks[:, 2:6])
    torch.mul(quants.to(torch.int8).sub_(16), _float16(blocks, 0), out=out)


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    """Scale f16, minimum f16, 4 bytes of fifth bits, 16 bytes of low bits; value = scale · q + minimum."""
    quants = _halves(blocks[:, 8:]).flatten(1) | _fifth_bits(blocks[:, 4:8])
    torch.mul(quants, _float16(blocks, 0), out=out).add_(_float16(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    """Scale f16, 32 signed bytes; value = scale · q."""
    torch.mul(blocks[:, 2:].view(torch.int8), _float16(blocks, 0), out=out)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of a Q4_K or Q5_K block's 8 groups of 32, float32 `[n, 8, 1]` each.

    A block opens with a float16 scale and a float16 minimum scale, then 12 bytes hold 8 + 8 numbers of
    six bits: bytes 0–3 the first four scales and, in their top two bits, the upper bits of the last four;
    bytes 4–7 likewise for the minimums; bytes 8–11 the lower four bits of the last four of both.
    """
    scales, minimums, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((scales & 0x3F, (low & 0x0F) | ((scales >> 2) & 0x30)), dim=1)
    minimums = torch.cat((minimums & 0x3F, (low >> 4) | ((minimums >> 2) & 0x30)), dim=1)
    return (scales * _float16(blocks, 0)).unsqueeze(-1), (minimums * _float16(blocks, 2)).unsqueeze(-1)


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    """16 bytes of scales, 4 × 32 bytes of quants; value = scale · q − minimum, by groups of 32."""
    scales, minimums = _k_scales(blocks)
    quants = _halves(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1, 2)
    torch.mul(quants, scales, out=out.view(-1, 8, 32)).sub_(minimums)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    """16 bytes of scales, 32 bytes of fifth bits (bit g for group g), 4 × 32 bytes of low bits."""
    scales, minimums = _k_scales(blocks)
    groups = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
    fifth_bits = ((blocks[:, None, 16:48] >> groups) & 1) << 4
    quants = _halves(blocks[:, 48:].reshape(-1, 4, 32)).flatten(1, 2) | fifth_bits
    torch.mul(quants, scales, out=out.view(-1, 8, 32)).sub_(minimums)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    """2 × 64 bytes of low bits, 2 × 32 bytes of upper bits, 16 signed scales, scale f16.

    value = scale · group scale · (q − 32), by groups of 16.
    """
    low = _halves(blocks[:, :128].reshape(-1, 2, 64)).flatten(2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(-1)
    upper = (((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4).flatten(2)
    quants = (low | upper).to(torch.int8).sub_(32).view(-1, 16, 16)
    scales = (blocks[:, 192:208].view(torch.int8) * _float16(blocks, 208)).unsqueeze(-1)
    torch.mul(quants, scales, out=out.view(-1, 16, 16))


_DOUBLED_FLOATS4 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float32)


def _mxfp4(blocks: Tensor, out: Tensor) -> None:
    """An exponent of 2 plus 127, 16 bytes of 4-bit floats (E2M1); value = 2^exponent · float."""
    scales = torch.exp2(blocks[:, :1].float() - 128)
    torch.mul(_DOUBLED_FLOATS4[_halves(blocks[:, 1:]).flatten(1).int()], scales, out=out)


_DECODERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}


BLOCK = 32
PackedRows = tuple[Tensor, Tensor]
"""Rows in GGML blocks, uint8 `[n, bytes of a row]`, and their indices in the part they belong to, int64 `[n]`."""

_SLICE_ELEMENTS = 2**18  # quantised at a time: few enough for the caches
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


QUANTIZERS: dict[str, Callable[[Tensor], Tensor]] = {"Q8_0": _to_q8_0, "Q4_1": _to_q4_1}
