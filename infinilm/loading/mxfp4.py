"""Experts stored in MXFP4, as in GPT-OSS: 4-bit floats with a scale for every 32. Needs torch only to read tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from infinilm.distributed.grouped import MXFP4
from infinilm.errors import CheckpointError
from infinilm.loading.checkpoint import locate_part
from infinilm.loading.quantize import Bytes, Floats, PackedRows, quantize_rows
from infinilm.loading.quantized_checkpoint import CodedCheckpoint

if TYPE_CHECKING:
    from torch import Tensor

    from infinilm.loading.safetensors_checkpoint import SafetensorsCheckpoint

GROUP = 32
"""Numbers that share a scale. Two are in a byte, the first in its lower half."""
NATIVE_FORMAT = "Q5_0"
"""The smallest of the native library's formats that holds all 4-bit floats, as multiples of half their scale."""
PACKED_FORMATS = (MXFP4, NATIVE_FORMAT)
"""The formats that `pack` makes."""
_HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)
"""Twice the float of each code."""
_BIAS = 128
"""The bias of exponents, for multiples of a half."""
_LEAST, _MOST = _BIAS - 24, _BIAS + 15
"""The range of exponents that float16 can hold."""
_NO_NUMBER = 255
"""The exponent that stands for NaN."""
_BLOCKS, _SCALES = "_blocks", "_scales"
_LINES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The matrices with alternating lines in a stored tensor, by the tensor's name."""


class _Lines(NamedTuple):
    """One expert's matrix: every `step`-th line of its blocks from `first` on."""

    source: str
    expert: int
    first: int
    step: int
    shape: tuple[int, int]


class Mxfp4Checkpoint(CodedCheckpoint):
    """A checkpoint with tensors `name_blocks` and `name_scales`, presented as matrices.

    Blocks are uint8 `[experts, out, in / 32, 16]`. Scales are uint8 `[experts, out, in / 32]`: exponents of 2 plus 127.
    Each expert's gate, up and down appear as separate matrices.
    """

    def __init__(self, stored: SafetensorsCheckpoint) -> None:
        super().__init__(stored)
        shapes = stored.shapes()
        self._sources = {name.removesuffix(_BLOCKS) for name in shapes if name.endswith(_BLOCKS)}
        self._matrices: dict[str, _Lines] = {}
        for source in self._sources:
            self._matrices |= self._find_matrices(source, shapes)

    def _find_matrices(self, source: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, _Lines]:
        blocks = source + _BLOCKS
        shape, scales = shapes[blocks], shapes.get(source + _SCALES)
        kinds = {self._stored.formats().get(source + end) for end in (_BLOCKS, _SCALES)}
        prefix, _, part = source.rpartition(".")
        names = _LINES.get(part, ())
        if len(shape) != 4 or shape[3] != GROUP // 2 or scales != shape[:3] or kinds != {"U8"} or not names:
            raise CheckpointError(
                f"{self.path}: {blocks!r} of shape {list(shape)}, with scales of {scales and list(scales)}, can't be "
                "MXFP4: it must be U8 [experts, out, in / 32, 16], and the scales the same but for the last; the types "
                f"are {', '.join(sorted(map(str, kinds)))}"
            )
        size = shape[1] // len(names), shape[2] * GROUP
        return {
            f"{prefix}.{expert}.{name}.weight": _Lines(source, expert, first, len(names), size)
            for expert in range(shape[0])
            for first, name in enumerate(names)
        }

    def _is_plain(self, name: str) -> bool:
        return name.removesuffix(_BLOCKS).removesuffix(_SCALES) not in self._sources

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        plain = {name: shape for name, shape in self._stored.shapes().items() if self._is_plain(name)}
        return plain | {name: lines.shape for name, lines in self._matrices.items()}

    def formats(self) -> Mapping[str, str]:
        plain = {name: format for name, format in self._stored.formats().items() if self._is_plain(name)}
        return plain | dict.fromkeys(self._matrices, MXFP4)

    def packed_format(self, name: str, *, is_native: bool) -> str | None:
        if name not in self._matrices:
            return None
        return NATIVE_FORMAT if is_native else MXFP4

    def check_values(self) -> None:
        """There is nothing to check."""

    def read_into(self, name: str, target: Tensor, starts: Sequence[int] | None = None) -> None:
        if name not in self._matrices:
            self._stored.read_into(name, target, starts)
            return
        import torch

        target.copy_(torch.from_numpy(self.read_floats(name, starts, tuple(target.shape))))

    def read_floats(self, name: str, starts: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Floats:
        if name not in self._matrices:
            return self._stored.read_floats(name, starts, shape)
        own = self._matrices[name].shape
        shape = own if shape is None else tuple(shape)
        starts = locate_part(self.path, name, own, shape, starts)
        codes, exponents = self._read(name, starts, shape)
        begin = starts[1] % GROUP
        return decode(codes, exponents)[:, begin : begin + shape[1]]

    def _read(self, name: str, starts: Sequence[int], shape: Sequence[int]) -> tuple[Bytes, Bytes]:
        """The codes `[rows, groups, 32]` and exponents `[rows, groups]` that contain a part."""
        lines = self._matrices[name]
        first = starts[1] // GROUP
        num_groups = -(-(starts[1] + shape[1]) // GROUP) - first
        place = (lines.expert, lines.first + lines.step * starts[0], first)
        size = (1, lines.step * (shape[0] - 1) + 1, num_groups)
        blocks = self._stored.read_array(lines.source + _BLOCKS, (*place, 0), (*size, GROUP // 2))[0, :: lines.step]
        exponents = self._stored.read_array(lines.source + _SCALES, place, size)[0, :: lines.step]
        check_exponents(exponents, f"{self.path}: {lines.source + _SCALES!r} of expert {lines.expert}")
        return unpack_codes(blocks), exponents

    def read_packed(self, name: str, format: str, starts: Sequence[int], shape: Sequence[int]) -> Iterator[PackedRows]:
        """See `Checkpoint`."""
        if name not in self._matrices:
            yield from self._stored.read_packed(name, format, starts, shape)
            return
        if format not in PACKED_FORMATS:
            yield from quantize_rows(self, name, format, starts, shape)
            return
        starts = locate_part(self.path, name, self._matrices[name].shape, shape, starts)
        if starts[1] % GROUP or shape[1] % GROUP:
            raise CheckpointError(
                f"{self.path}: columns of {name!r} from {starts[1]} on are no whole groups of {GROUP}"
            )
        codes, exponents = self._read(name, starts, shape)
        yield pack(codes, exponents, format, f"{self.path}: {name!r}"), np.arange(shape[0])


def unpack_codes(blocks: Bytes) -> Bytes:
    """Unpack blocks `[rows, groups, 16]` into codes `[rows, groups, 32]`."""
    return np.stack((blocks & 0x0F, blocks >> 4), axis=-1).reshape(*blocks.shape[:2], GROUP)


def decode(codes: Bytes, exponents: Bytes) -> Floats:
    """Decode codes `[rows, groups, 32]` and exponents `[rows, groups]` into floats `[rows, groups * 32]`."""
    scales = exponents[..., None].astype(np.int32) - _BIAS
    return np.ldexp(_HALVES[codes].astype(np.float32), scales).reshape(len(codes), -1)


def take_apart(blocks: Bytes) -> tuple[Bytes, Bytes]:
    """Split GGML's blocks `[rows, groups, 17]` into codes and exponents, see `decode`."""
    pairs = blocks[..., 1:]
    return np.concatenate((pairs & 0x0F, pairs >> 4), axis=-1), blocks[..., 0]


def check_exponents(exponents: Bytes, source: str) -> None:
    """Refuse NaN exponents; `source` names the exponents in the error."""
    if (exponents == _NO_NUMBER).any():
        raise CheckpointError(f"{source} has {_NO_NUMBER}, which stands for no number; the file is damaged")


def pack(codes: Bytes, exponents: Bytes, format: str, source: str) -> Bytes:
    """Pack codes and exponents (see `decode`) into rows of one of `PACKED_FORMATS`, uint8 `[rows, bytes]`.

    In MXFP4 a row consists of its codes, uint8 `[in / 2]`, and its exponents, uint8 `[in / 32]`.
    """
    if format == NATIVE_FORMAT:
        return repack(codes, exponents, source)
    pairs = (codes[..., ::2] | (codes[..., 1::2] << 4)).reshape(len(codes), -1)
    return np.concatenate((pairs, exponents), axis=1)


def repack(codes: Bytes, exponents: Bytes, source: str) -> Bytes:
    """Pack the same numbers in GGML's Q5_0, uint8 `[rows, groups * 22]`; `source` names them in errors.

    Scales are powers of 2 as float16. Numbers that would need a smaller scale than float16 has are rounded to multiples
    of 2**-24.
    """
    halves = _HALVES[codes]
    is_used = halves.any(axis=-1)
    if (exponents[is_used] > _MOST).any():
        raise CheckpointError(
            f"{source}: has numbers of {2.0 ** (_MOST - 126):.0f} or more, which the native library has no format for; "
            "use quantization='none'"
        )
    bounded = np.clip(exponents, _LEAST, _MOST).astype(np.int32)
    if (exponents < _LEAST).any():
        below = np.ldexp(halves.astype(np.float32), (exponents - bounded)[..., None])
        halves = np.rint(below).astype(np.int8)
    quants = (halves + 16).view(np.uint8)
    scales = np.ldexp(np.float32(1), bounded - _BIAS).astype(np.float16)[..., None].view(np.uint8)
    fifth = np.packbits(quants >> 4, axis=-1, bitorder="little")
    low = quants & 0x0F
    blocks = np.concatenate((scales, fifth, low[..., : GROUP // 2] | (low[..., GROUP // 2 :] << 4)), axis=-1)
    return blocks.reshape(len(codes), -1)
