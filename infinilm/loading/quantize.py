"""Converts matrices from and to GGUF's block formats.

A quantised row is a run of blocks, each a few small integers with one or two float16 scales.

Decoding gives the same bits as the `gguf` package: products and sums are rounded separately, never fused, so results do
not depend on the machine. Every decoder takes `blocks` (uint8 `[n, block_bytes]`) and returns float32
`[n, block_elements]`, or the same numbers in another shape. Decoding needs no torch.

Matrices can also be quantised while they are read: to `Q8_0`, 32 numbers as 8-bit multiples of a scale, or `Q4_1`, 32
numbers as 4-bit steps from a minimum.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from infinilm.distributed.grouped import SCALE_TYPES, GroupedFormat
from infinilm.errors import InvalidValueError
from infinilm.loading.gguf import GGMLType

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

PLAIN_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types without blocks, with torch's names."""


def dequantize(raw: Bytes, ggml_type: GGMLType, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Decode `raw` (whole blocks in row order, any shape) into an array of `shape`: float32, or float16 if stored so.

    Temporaries take about as much memory as the result, so pass large tensors in slices.
    """
    num_blocks, rest = divmod(prod(shape), ggml_type.block_elements)
    if rest or raw.size != num_blocks * ggml_type.block_bytes:
        raise InvalidValueError(
            f"{raw.size} bytes are not a {ggml_type.name} tensor of shape {list(shape)}, which has "
            f"{ggml_type.block_bytes} bytes for every {ggml_type.block_elements} elements"
        )
    blocks = np.ascontiguousarray(raw).reshape(num_blocks, ggml_type.block_bytes)
    if ggml_type.name == "BF16":
        return widen_bfloat16(blocks.view("<u2")).reshape(shape)
    if ggml_type.name in PLAIN_TYPES:
        return blocks.view(PLAIN_TYPES[ggml_type.name]).reshape(shape)
    with np.errstate(invalid="ignore", over="ignore"):  # damaged scales may be NaN
        return _DECODERS[ggml_type.name](blocks).reshape(shape)


def widen_bfloat16(bits: npt.NDArray[np.uint16]) -> Floats:
    """The float32 numbers with these upper 16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _float16(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte `start` of every block, as float32 `[n, 1]`."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _halves(quants: Bytes) -> Bytes:
    """Split bytes `[..., m]` into `[..., 2, m]`: all low four bits, then all high four bits."""
    return np.stack((quants & 0x0F, quants >> 4), axis=-2)


def _low_bits(blocks: Bytes, start: int) -> Bytes:
    """The 32 four-bit numbers in the last 16 bytes of each block, `[n, 32]`."""
    return _halves(blocks[:, start:]).reshape(len(blocks), 32)


def _fifth_bits(high: Bytes) -> Bytes:
    """Spread 4 bytes `[n, 4]` into 32 values 0 or 16 `[n, 32]`; bit i of the 32 belongs to element i."""
    bits: Bytes = np.unpackbits(high.copy(), axis=1, bitorder="little")
    return bits << np.uint8(4)


def _q4_0(blocks: Bytes) -> Floats:
    """Scale f16, 16 bytes of quants; value = scale · (q − 8)."""
    return (_low_bits(blocks, 2).astype(np.float32) - 8) * _float16(blocks, 0)


def _q4_1(blocks: Bytes) -> Floats:
    """Scale f16, minimum f16, 16 bytes of quants; value = scale · q + minimum."""
    return _low_bits(blocks, 4) * _float16(blocks, 0) + _float16(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    """Scale f16, 4 bytes of fifth bits, 16 bytes of low bits; value = scale · (q − 16)."""
    quants = _low_bits(blocks, 6) | _fifth_bits(blocks[:, 2:6])
    return (quants.astype(np.float32) - 16) * _float16(blocks, 0)


def _q5_1(blocks: Bytes) -> Floats:
    """Scale f16, minimum f16, 4 bytes of fifth bits, 16 bytes of low bits; value = scale · q + minimum."""
    quants = _low_bits(blocks, 8) | _fifth_bits(blocks[:, 4:8])
    return quants * _float16(blocks, 0) + _float16(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    """Scale f16, 32 signed bytes; value = scale · q."""
    return blocks[:, 2:].view(np.int8) * _float16(blocks, 0)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and minimums of a Q4_K or Q5_K block's 8 groups of 32, float32 `[n, 8, 1]` each.

    A block begins with a float16 scale and a float16 minimum scale. The next 12 bytes hold 8 + 8 six-bit numbers: bytes
    0–3 the first four scales and, in their top two bits, the upper bits of the last four; bytes 4–7 the same for the
    minimums; bytes 8–11 the lower four bits of the last four scales and minimums.
    """
    scales, minimums, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((scales & 0x3F, (low & 0x0F) | ((scales >> 2) & 0x30)), axis=1)
    minimums = np.concatenate((minimums & 0x3F, (low >> 4) | ((minimums >> 2) & 0x30)), axis=1)
    return (scales * _float16(blocks, 0))[..., None], (minimums * _float16(blocks, 2))[..., None]


def _q4_k(blocks: Bytes) -> Floats:
    """16 bytes of scales, 4 × 32 bytes of quants; value = scale · q − minimum, by groups of 32."""
    scales, minimums = _k_scales(blocks)
    quants = _halves(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return quants * scales - minimums


def _q5_k(blocks: Bytes) -> Floats:
    """16 bytes of scales, 32 bytes of fifth bits (bit g for group g), 4 × 32 bytes of low bits."""
    scales, minimums = _k_scales(blocks)
    groups = np.arange(8, dtype=np.uint8)[:, None]
    fifth_bits = ((blocks[:, None, 16:48] >> groups) & 1) << 4
    quants = _halves(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | fifth_bits
    return quants * scales - minimums


def _q6_k(blocks: Bytes) -> Floats:
    """2 × 64 bytes of low bits, 2 × 32 bytes of upper bits, 16 signed scales, scale f16.

    value = scale · group scale · (q − 32), by groups of 16.
    """
    low = _halves(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 128)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    upper = (((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4).reshape(-1, 2, 128)
    quants = (low | upper).astype(np.float32).reshape(-1, 16, 16) - 32
    scales = (blocks[:, 192:208].view(np.int8) * _float16(blocks, 208))[..., None]
    return quants * scales


_DOUBLED_FLOATS4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)


def _mxfp4(blocks: Bytes) -> Floats:
    """An exponent of 2 plus 127, 16 bytes of 4-bit floats (E2M1); value = 2^exponent · float."""
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return _DOUBLED_FLOATS4[_low_bits(blocks, 1)] * scales


_DECODERS: dict[str, Callable[[Bytes], Floats]] = {
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
PackedRows = tuple[Any, Any]
"""Rows in blocks, uint8 `[n, bytes of a row]`, and their indices in the part that is read, int64 `[n]`. These are
arrays, or tensors if the blocks are for a GPU."""

_SLICE_ELEMENTS = 2**18  # elements quantised at a time: few enough for the CPU's caches
_FIT_ROUNDS = 4
LARGEST_FP8 = 448.0


class _Reader(Protocol):
    def read_floats(self, name: str, starts: Sequence[int] | None, shape: Sequence[int]) -> Floats: ...


def quantize_rows(
    reader: _Reader, name: str, format: str, starts: Sequence[int], shape: Sequence[int], *, granule: int = 1
) -> Iterator[PackedRows]:
    """Read a part of a matrix, see `Checkpoint.read_packed`, a multiple of `granule` rows at a time."""
    num_rows, num_columns = shape
    step = max(1, _SLICE_ELEMENTS // (num_columns * granule)) * granule
    for offset in range(0, num_rows, step):
        places = np.arange(offset, min(offset + step, num_rows))
        values = reader.read_floats(name, (starts[0] + offset, starts[1]), (len(places), num_columns))
        yield quantize(values, format), places


def quantize(values: Floats, format: str) -> Any:
    """Quantise float32 rows `[n, columns]` to a `GroupedFormat` or to GGML blocks: uint8 `[n, bytes of a row]`.

    The result is a tensor for a `GroupedFormat`, which is for a GPU, else an array.
    """
    if (grouped := GroupedFormat.parse(format)) is not None:
        return _to_groups(values, grouped)
    if format not in QUANTIZERS:
        raise InvalidValueError(f"format={format!r} can't be made of floats; use one of {', '.join(QUANTIZERS)}")
    num_rows, num_columns = values.shape
    if num_columns % BLOCK:
        raise InvalidValueError(f"rows of {num_columns} numbers are not whole blocks of {BLOCK}")
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # NaN and infinity end up in the scale
        return QUANTIZERS[format](values.reshape(-1, BLOCK)).reshape(num_rows, -1)


def _to_groups(values: Floats, format: GroupedFormat) -> Any:
    """Quantise to codes without zeros. A group's largest magnitude gets a code of the largest magnitude."""
    import torch

    if format.has_zeros:
        raise InvalidValueError(f"format={format.name!r} can't be made of floats; use one without zeros")
    num_rows = len(values)
    x = values.reshape(-1, format.group or values.shape[1])
    if format.bits == 4:
        codes, scale = (torch.from_numpy(each) for each in _to_int4(x, np.dtype(SCALE_TYPES[format.scale_type])))
    else:
        wide = torch.from_numpy(x)
        scale = (wide.abs().amax(1, keepdim=True) / LARGEST_FP8).to(format.scale_dtype)
        floats = scale.float()
        inverse = torch.where(floats == 0, 0.0, 1 / floats)
        codes = (wide * inverse).clamp_(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
    return format.pack(codes.view(values.shape), scale.view(num_rows, -1), None)


def _to_int4(x: Floats, scale_dtype: npt.DTypeLike) -> tuple[Bytes, npt.NDArray[Any]]:
    """Quantise groups `[n, m]` to uint8 codes from 0 to 15, where 8 stands for 0, and scales `[n, 1]`.

    The number with the largest magnitude has the code 0, because there are more codes below 8 than above. The scale may
    therefore be negative.
    """
    largest = np.take_along_axis(x, np.abs(x).argmax(1, keepdims=True), axis=1)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # NaN and infinity end up in the scale
        scale = (largest / np.float32(-8)).astype(scale_dtype)
        codes = np.clip(np.rint(x * _inverse(scale)) + 8, 0, 15).astype(np.uint8)
    return codes, scale


def _to_q4_0(x: Floats) -> Bytes:
    """Blocks `[n, 32]` as scale f16 and 16 bytes of quants; value = scale · (q - 8)."""
    quants, scale = _to_int4(x, np.float16)
    return np.concatenate((scale.view(np.uint8), quants[:, : BLOCK // 2] | (quants[:, BLOCK // 2 :] << 4)), axis=1)


def _to_q8_0(x: Floats) -> Bytes:
    """Blocks `[n, 32]` as scale f16 and 32 signed bytes; value = scale · q."""
    scale = (np.abs(x).max(1, keepdims=True) / np.float32(127)).astype(np.float16)
    quants = np.clip(np.rint(x * _inverse(scale)), -127, 127).astype(np.int8)
    return np.concatenate((scale.view(np.uint8), quants.view(np.uint8)), axis=1)


def _to_q4_1(x: Floats) -> Bytes:
    """Blocks `[n, 32]` as scale f16, minimum f16 and 16 bytes of quants; value = scale · q + minimum.

    Numbers are rounded to the nearest of 16 steps between a block's minimum and maximum. Then, `_FIT_ROUNDS` times,
    scale and minimum are fitted to the quants by least squares, and numbers are rounded again. The best result is kept.
    """
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    scale, minimum = ((high - low) / np.float32(15)).astype(np.float16), low.astype(np.float16)
    quants = _steps(x, scale, minimum)
    error = _error(x, quants, scale, minimum)
    for _ in range(_FIT_ROUNDS):
        new_scale, new_minimum = _fit(x, quants)
        new_quants = _steps(x, new_scale, new_minimum)
        new_error = _error(x, new_quants, new_scale, new_minimum)
        is_better = new_error < error
        scale, minimum = np.where(is_better, new_scale, scale), np.where(is_better, new_minimum, minimum)
        quants, error = np.where(is_better, new_quants, quants), np.where(is_better, new_error, error)
    nibbles = quants.astype(np.uint8)
    packed = nibbles[:, : BLOCK // 2] | (nibbles[:, BLOCK // 2 :] << 4)
    return np.concatenate((scale.view(np.uint8), minimum.view(np.uint8), packed), axis=1)


Halves = npt.NDArray[np.float16]


def _steps(x: Floats, scale: Halves, minimum: Halves) -> Floats:
    """The nearest steps, 0 to 15, as floats `[n, 32]`."""
    steps: Floats = np.clip(np.rint((x - minimum) * _inverse(scale)), 0, 15)
    return steps


def _fit(x: Floats, quants: Floats) -> tuple[Halves, Halves]:
    """The scale and minimum, float16 `[n, 1]`, with which `quants` are closest to `x`."""
    mean, quant_mean = x.mean(1, keepdims=True), quants.mean(1, keepdims=True)
    centred = quants - quant_mean
    variance = np.square(centred).sum(1, keepdims=True)
    scale = ((x - mean) * centred).sum(1, keepdims=True) / np.maximum(variance, 0.5)  # 0 if all are in one step
    return scale.astype(np.float16), (mean - scale * quant_mean).astype(np.float16)


def _error(x: Floats, quants: Floats, scale: Halves, minimum: Halves) -> Floats:
    errors: Floats = np.square(quants * scale + minimum - x).sum(1, keepdims=True)
    return errors


def _inverse(scale: Halves) -> Floats:
    """1 / scale in float32; 0 for a scale of 0."""
    wide = scale.astype(np.float32)
    return np.where(wide == 0, np.float32(0), 1 / wide)


QUANTIZERS: dict[str, Callable[[Floats], Bytes]] = {"Q8_0": _to_q8_0, "Q4_1": _to_q4_1, "Q4_0": _to_q4_0}
