"""Reads parts of quantised matrices in the layouts of different tools. This module needs no torch."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from infinilm.distributed.grouped import GROUP_STEP, SCALE_TYPES, GroupedFormat
from infinilm.errors import CheckpointError
from infinilm.loading.quantize import Bytes, Floats, Ints
from infinilm.loading.quantized_config import WHOLE_ROW, Fp8Scheme, Int4Scheme

FP8_TYPE = "F8_E4M3"
MIDDLE = 8
"""The code that stands for 0 if a matrix has no zeros."""
_PER_WORD = 8
_BLOCK = 32  # columns of a GGML block; in the native library groups of 8-bit floats have a multiple of it
Span = tuple[int, int]
"""The start and the number of rows or columns."""


class Tensors(Protocol):
    """The part of a checkpoint's interface that this module needs."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    def formats(self) -> Mapping[str, str]: ...
    def read_floats(self, name: str, starts: Any = None, shape: Any = None) -> Floats: ...
    def read_array(self, name: str, starts: Any = None, shape: Any = None) -> npt.NDArray[Any]: ...


def _float8_values() -> Floats:
    """The values of e4m3's 256 codes."""
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    values = np.where(exponents == 0, np.ldexp(mantissas / 8, -6), np.ldexp(1 + mantissas / 8, exponents - 7))
    values[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)


_FLOAT8 = _float8_values()


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a matrix: `value = scale * (code - zero)`. Scale and zero are those of the column's group."""

    codes: Bytes
    """`[rows, columns]`: codes of 8-bit floats, or integers from 0 to 15."""
    scales: Floats
    """`[rows, groups]`."""
    zeros: Bytes | None
    """uint8 `[rows, groups]`; None: `MIDDLE`, or 0 for floats."""
    groups: Ints
    """The group of each column, `[columns]`."""
    is_float: bool = False

    def values(self) -> Floats:
        """The matrix's values, float32 `[rows, columns]`."""
        codes = _FLOAT8[self.codes] if self.is_float else self.codes.astype(np.float32)
        if self.zeros is not None:
            codes -= self.zeros[:, self.groups]
        elif not self.is_float:
            codes -= MIDDLE
        codes *= self.scales[:, self.groups]
        return codes

    def to_blocks(self, format: str) -> Bytes:
        """Rows as blocks of `Q4_0` or `Q5_0`, which hold 4-bit codes exactly: uint8 `[rows, bytes of a row]`."""
        scales = self.scales[:, self.groups[::_BLOCK], None].astype(np.float16)  # [rows, blocks, 1]
        codes = self.codes
        if format == "Q5_0":
            zeros = np.uint8(MIDDLE) if self.zeros is None else self.zeros[:, self.groups]
            codes = codes + np.uint8(16) - zeros  # 1 to 31, where 16 stands for 0
        codes = codes.reshape(len(codes), -1, _BLOCK)
        low = codes & 0x0F
        parts = [scales.view(np.uint8), low[..., : _BLOCK // 2] | (low[..., _BLOCK // 2 :] << 4)]
        if format == "Q5_0":
            parts.insert(1, np.packbits(codes >> 4, axis=-1, bitorder="little"))
        return np.concatenate(parts, axis=2).reshape(len(codes), -1)


class QuantizedMatrix(ABC):
    """A matrix `[rows, columns]` and the stored tensors that it consists of."""

    kind: str
    shape: tuple[int, int]
    parts: tuple[str, ...]
    """The names of its tensors."""

    @abstractmethod
    def read(self, rows: Span, columns: Span) -> Piece: ...

    @abstractmethod
    def check_values(self) -> None:
        """Refuse invalid scales and indices. Their shapes and types are checked earlier."""

    def check_version(self) -> None:
        """Refuse a wrong version of GPTQ, with which all zeros are off by one. All matrices have the same version."""
        return

    @abstractmethod
    def device_format(self) -> GroupedFormat | None:
        """The format in which a GPU can keep the matrix; None if there is none."""

    def native_format(self) -> str | None:
        """The format in which the native library keeps exactly the same values; None if there is none."""
        return None

    def input_order(self) -> Ints | None:
        """The order of columns `[columns]` in the `device_format`; None: the stored order."""
        return None


class Fp8Matrix(QuantizedMatrix):
    kind = "FP8"

    def __init__(self, name: str, tensors: Tensors, scheme: Fp8Scheme | None) -> None:
        self._name, self._tensors = name, tensors
        shapes = tensors.shapes()
        if scheme is None or len(shapes[name]) != 2:
            reason = (
                "it must be a matrix" if scheme is not None else "the quantization_config describes no FP8 matrices"
            )
            raise CheckpointError(f"{name!r} is {FP8_TYPE} {list(shapes[name])}: {reason}")
        self.shape = num_rows, num_columns = shapes[name][0], shapes[name][1]
        scales = [name + end for end in scheme.scale_names if name + end in shapes]
        if not scales:
            expected = " or ".join(repr(name + end) for end in scheme.scale_names)
            raise CheckpointError(f"{name!r}, {FP8_TYPE} {list(self.shape)}, has no scales: there is no {expected}")
        self._scales = scales[0]
        found = shapes[self._scales]
        known = {(num_rows, 1): (1, num_columns), (num_rows,): (1, num_columns)} if scheme.whole else {}
        known |= dict.fromkeys(((), (1,), (1, 1)), self.shape) if scheme.whole else {}
        if scheme.block is not None:
            known[-(-num_rows // scheme.block[0]), -(-num_columns // scheme.block[1])] = scheme.block
        if found not in known:
            kinds = [f"{list(shape)}" for shape in known]
            raise CheckpointError(
                f"{self._scales!r} has shape {list(found)}; for {name!r} of shape {list(self.shape)} it must be "
                f"{' or '.join(kinds)}"
            )
        self._block, self._rounds_inputs = known[found], scheme.rounds_inputs
        self.parts = (name, self._scales)
        _check_types(tensors, self._scales, SCALE_TYPES)

    def read(self, rows: Span, columns: Span) -> Piece:
        codes = self._tensors.read_array(self._name, (rows[0], columns[0]), (rows[1], columns[1]))
        height, width = self._block
        grid = -(-self.shape[0] // height), -(-self.shape[1] // width)
        scales = self._tensors.read_floats(self._scales).reshape(grid)
        lines = np.arange(rows[0], rows[0] + rows[1]) // height
        first, groups = _groups_of(columns, width)
        return Piece(codes, scales[lines, first : first + int(groups[-1]) + 1], None, groups, is_float=True)

    def check_values(self) -> None:
        _check_scales(self._tensors, self._scales, is_signed=False)

    def device_format(self) -> GroupedFormat | None:
        width = self._block[1]
        if width < self.shape[1] and (self.shape[1] % width or width % GROUP_STEP):
            return None  # kernels need whole groups
        group = None if width >= self.shape[1] else width
        rounds_inputs = group is None and self._rounds_inputs
        return GroupedFormat(8, group, self._tensors.formats()[self._scales], rounds_inputs=rounds_inputs)

    def native_format(self) -> str | None:
        format = self.device_format()
        return None if format is None or (format.group or 0) % _BLOCK else format.name


class Int4Matrix(QuantizedMatrix):
    kind = "INT4"

    def __init__(self, layer: str, tensors: Tensors, scheme: Int4Scheme) -> None:
        self._tensors, self._scheme = tensors, scheme
        shapes = tensors.shapes()
        self._codes, self._scales, self._zeros, self._index = (
            layer + end for end in (scheme.codes, scheme.scales, scheme.zeros, scheme.index)
        )
        if self._scales not in shapes:
            raise CheckpointError(
                f"{self._codes!r} {list(shapes[self._codes])} has no scales: there is no {self._scales!r}"
            )
        scales = shapes[self._scales]
        if len(scales) != 2 or len(shapes[self._codes]) != 2:
            raise CheckpointError(
                f"{self._codes!r} {list(shapes[self._codes])} and {self._scales!r} {list(scales)} must be matrices"
            )
        num_rows, num_groups = scales[::-1] if scheme.is_input_first else scales
        packed = shapes[self._codes][::-1] if scheme.is_input_first else shapes[self._codes]
        num_columns = packed[1] * (_PER_WORD if scheme.packs_inputs else 1)
        self.shape = num_rows, num_columns
        self._has_zeros, self._has_index = self._zeros in shapes, self._index in shapes
        sizes = {size if size != WHOLE_ROW else num_columns for size in scheme.group_sizes}
        fitting = [size for size in sizes if size * num_groups == num_columns]
        if not fitting:
            counts = [str(num_columns // size) for size in sorted(sizes) if num_columns % size == 0]
            raise CheckpointError(
                f"{self._scales!r} has shape {list(scales)}, {num_groups} groups; for {num_columns} inputs in groups "
                f"of {' or '.join(map(str, sorted(sizes)))} there must be {' or '.join(counts) or 'a whole number'}"
            )
        self._group, self._num_groups = fitting[0], num_groups
        optional = [(self._zeros, self._has_zeros), (self._index, self._has_index)]
        self.parts = (self._codes, self._scales, *(name for name, is_there in optional if is_there))
        self._shape = f"{layer}.weight_shape"
        self.parts += (self._shape,) if self._shape in shapes else ()
        self._check(shapes)

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse missing tensors and wrong shapes or types. Reads only headers."""
        for name, is_needed, is_there in (
            (self._zeros, self._scheme.needs_zeros, self._has_zeros),
            (self._index, self._scheme.needs_index, self._has_index),
        ):
            if is_needed and not is_there:
                raise CheckpointError(f"there is no {name!r}, which the quantization_config says {self._codes!r} has")
        num_rows, num_columns = self.shape
        words = (num_rows, num_columns // 8) if self._scheme.packs_inputs else (num_rows // 8, num_columns)
        zeros = (-(-num_rows // _PER_WORD), self._num_groups)
        if self._scheme.is_input_first:
            words, zeros = words[::-1], zeros[::-1]
        expected: dict[str, tuple[int, ...]] = {self._codes: words}
        if self._has_zeros:
            expected[self._zeros] = zeros
        if self._has_index:
            expected[self._index] = (num_columns,)
        if self._shape in self.parts:
            expected[self._shape] = (2,)
        for name, shape in expected.items():
            if shapes[name] != shape:
                raise CheckpointError(
                    f"{name!r} has shape {list(shapes[name])}; for a matrix of {num_rows} outputs and {num_columns} "
                    f"inputs in groups of {self._group} it must be {list(shape)}"
                )
            _check_types(self._tensors, name, ("I32", "I64") if name in (self._index, self._shape) else ("I32",))
        _check_types(self._tensors, self._scales, SCALE_TYPES)
        if self._group % _PER_WORD or num_columns % _PER_WORD:
            raise CheckpointError(
                f"{self._codes!r}: {num_columns} inputs in groups of {self._group} are not whole int32s"
            )

    def check_values(self) -> None:
        _check_scales(self._tensors, self._scales, is_signed=True)  # AutoRound's scales may be negative
        _ = self._groups  # reading the groups checks them
        if self._shape in self.parts:
            stored = self._tensors.read_array(self._shape).tolist()
            if stored != list(self.shape):
                raise CheckpointError(
                    f"{self._shape!r} says {stored}, and {self._codes!r} holds a matrix of shape {list(self.shape)}"
                )

    def check_version(self) -> None:
        if not self._scheme.is_symmetric or not self._has_zeros:
            return
        zeros = self._read_zeros((0, self.shape[0]), (0, self._num_groups))
        first = int(zeros[0, 0])
        if first in (MIDDLE - 1, MIDDLE + 1) and (zeros == first).all():
            raise CheckpointError(
                f"{self._zeros!r}: all zero points are {first}, and with sym=True they must be {MIDDLE}; "
                "quantization_config.checkpoint_format should be 'gptq' if they are stored less one, else 'gptq_v2'"
            )

    @cached_property
    def _groups(self) -> Ints | None:
        """The group of each input; None if groups are consecutive inputs, in order."""
        if not self._has_index:
            return None
        groups = self._tensors.read_array(self._index).astype(np.int64)
        if int(groups.min()) < 0 or int(groups.max()) >= self._num_groups:
            raise CheckpointError(
                f"{self._index!r} has groups from {int(groups.min())} to {int(groups.max())}, and there are "
                f"{self._num_groups}, from 0 on"
            )
        in_order = np.arange(self.shape[1]) // self._group
        return None if np.array_equal(groups, in_order) else groups

    def read(self, rows: Span, columns: Span) -> Piece:
        codes = self._read_codes(self._codes, rows, columns, packs_inputs=self._scheme.packs_inputs)
        if self._groups is None:
            first, groups = _groups_of(columns, self._group)
            span = (first, int(groups[-1]) + 1)
        else:
            groups, span = self._groups[columns[0] : columns[0] + columns[1]], (0, self._num_groups)
        scales = self._read_part(self._scales, rows, span)
        zeros = None
        if self._has_zeros:
            zeros = self._read_zeros(rows, span)
        return Piece(codes, scales, zeros, groups)

    def _read_zeros(self, rows: Span, groups: Span) -> Bytes:
        codes = self._read_codes(self._zeros, rows, groups, packs_inputs=False)
        return (codes + np.uint8(self._scheme.zero_shift)) & np.uint8(0x0F)

    def _read_part(self, name: str, rows: Span, columns: Span) -> npt.NDArray[Any]:
        """A part of a tensor as `[rows, columns]`, whatever its stored layout: int32 codes, or scales as float32."""
        spans = (columns, rows) if self._scheme.is_input_first else (rows, columns)
        read = self._tensors.read_array if self._tensors.formats()[name] == "I32" else self._tensors.read_floats
        part = read(name, tuple(start for start, _ in spans), tuple(length for _, length in spans))
        return part.T if self._scheme.is_input_first else part

    def _read_codes(self, name: str, rows: Span, columns: Span, *, packs_inputs: bool) -> Bytes:
        """Unpack 4-bit codes to uint8 `[rows, columns]`."""
        start, length = columns if packs_inputs else rows
        first = start // _PER_WORD
        words = (first, -(-(start + length) // _PER_WORD) - first)
        packed = self._read_part(name, rows if packs_inputs else words, words if packs_inputs else columns)
        shifts = np.empty(_PER_WORD, dtype=np.int32)
        shifts[list(self._scheme.order)] = np.arange(0, 32, 4, dtype=np.int32)
        dim = 2 if packs_inputs else 1
        codes = np.expand_dims(packed, dim) >> (shifts if packs_inputs else shifts[:, None])
        begin = start - first * _PER_WORD
        size = (len(packed), -1) if packs_inputs else (-1, packed.shape[1])
        whole = (codes & 0x0F).astype(np.uint8).reshape(size)
        return whole[:, begin : begin + length] if packs_inputs else whole[begin : begin + length]

    def device_format(self) -> GroupedFormat | None:
        order = self.input_order()
        if self._groups is not None and order is None:
            return None
        group = None if self._group == self.shape[1] else self._group
        digest = "" if order is None else xxh3_64(order.tobytes()).hexdigest()
        return GroupedFormat(4, group, self._tensors.formats()[self._scales], self._has_zeros, order=digest)

    def input_order(self) -> Ints | None:
        """Columns ordered by group. None also if groups differ in size."""
        if self._groups is None or (np.bincount(self._groups, minlength=self._num_groups) != self._group).any():
            return None
        return self._groups.argsort(kind="stable")

    def native_format(self) -> str | None:
        return self._native_format

    @cached_property
    def _native_format(self) -> str | None:
        if self._groups is not None or self.shape[1] % _BLOCK or self._group % _BLOCK:
            return None
        if self._tensors.formats()[self._scales] != "F16":
            scales = self._tensors.read_floats(self._scales)
            with np.errstate(over="ignore"):
                is_exact = np.array_equal(scales.astype(np.float16).astype(np.float32), scales)
            if not is_exact:
                return None
        if not self._has_zeros:
            return "Q4_0"
        zeros = self._read_zeros((0, self.shape[0]), (0, self._num_groups))
        return "Q4_0" if (zeros == MIDDLE).all() else "Q5_0"


def _groups_of(columns: Span, size: int) -> tuple[int, Ints]:
    """The first group of these columns, and each column's group, counted from the first one."""
    first = columns[0] // size
    return first, np.arange(columns[0], columns[0] + columns[1]) // size - first


def _check_types(tensors: Tensors, name: str, known: object) -> None:
    found, names = tensors.formats()[name], list(known)  # type: ignore[call-overload]
    if found not in names:
        raise CheckpointError(f"{name!r} has type {found}; it must be {' or '.join(names)}")


def _check_scales(tensors: Tensors, name: str, *, is_signed: bool) -> None:
    scales = tensors.read_floats(name)
    is_wrong = ~np.isfinite(scales) if is_signed else ~np.isfinite(scales) | (scales < 0)
    if not scales.any():
        is_wrong = scales == 0
    if is_wrong.any():
        place = np.argwhere(is_wrong)[0].tolist()
        kind = "zero" if not scales.any() else "NaN or infinite" if is_signed else "NaN, infinite or negative"
        raise CheckpointError(
            f"{name!r} of shape {list(scales.shape)}: {int(is_wrong.sum())} of {scales.size} scales are {kind}, the "
            f"first at {place}: {float(scales[tuple(place)])}; the file is damaged"
        )
