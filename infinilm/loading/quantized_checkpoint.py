"""A checkpoint with matrices that are quantised for GPUs, presented as dense or packed matrices."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from infinilm.distributed.grouped import GroupedFormat
from infinilm.errors import CheckpointError
from infinilm.loading.checkpoint import locate_part
from infinilm.loading.quantize import Floats, Ints, PackedRows, quantize_rows
from infinilm.loading.quantized_config import read_schemes
from infinilm.loading.quantized_layouts import FP8_TYPE, Fp8Matrix, Int4Matrix, Piece, QuantizedMatrix
from infinilm.loading.safetensors_checkpoint import SafetensorsCheckpoint
from infinilm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_ACTIVATION_PARTS = (".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point")
"""Scales of activations. They are not used: activations stay in the model's dtype."""
_CACHE_PARTS = (".q_scale", ".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale")
"""Scales of a KV cache. They are not used: the cache has its own type."""
_SLICE_ELEMENTS = 2**21


class CodedCheckpoint:
    """See `Checkpoint`. Some matrices are stored as codes and scales; `_matrices` holds these by name."""

    _matrices: Mapping[str, Any]

    def __init__(self, stored: SafetensorsCheckpoint) -> None:
        self._stored = stored
        self.path, self.config, self.generation_config = stored.path, stored.config, stored.generation_config
        self.num_bytes = stored.num_bytes

    def read(self, name: str) -> "Tensor":
        if name not in self._matrices:
            return self._stored.read(name)
        import torch

        return torch.from_numpy(self.read_floats(name))

    def read_floats(self, name: str, starts: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Floats:
        raise NotImplementedError

    def input_order(self, name: str) -> Ints | None:  # noqa: ARG002
        return None

    def tokenizer(self) -> Tokenizer | None:
        return self._stored.tokenizer()

    def close(self) -> None:
        self._stored.close()


class QuantizedCheckpoint(CodedCheckpoint):
    """A checkpoint of FP8 or INT4 matrices. A matrix is named `layer.weight`, whatever its tensors are named."""

    _matrices: Mapping[str, QuantizedMatrix]

    def __init__(self, stored: SafetensorsCheckpoint) -> None:
        super().__init__(stored)
        try:
            self._matrices = _find_matrices(stored)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from error
        parts = {part: name for name, matrix in self._matrices.items() for part in matrix.parts}
        self._names: dict[str, None] = {}  # the names of all tensors, in the order of the file
        unused = []
        for name in stored.shapes():
            if name in parts:
                self._names.setdefault(parts[name])
            elif name.endswith((*_ACTIVATION_PARTS, *_CACHE_PARTS)):
                unused.append(name)
            else:
                self._names.setdefault(name)
        if unused:
            logger.info(
                "%s: activations and the cache are not quantised, so %d scales of theirs are not used: %s, …",
                self.path,
                len(unused),
                unused[0],
            )

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        stored = self._stored.shapes()
        return {name: self._matrices[name].shape if name in self._matrices else stored[name] for name in self._names}

    def formats(self) -> Mapping[str, str]:
        stored = self._stored.formats()
        return {name: self._matrices[name].kind if name in self._matrices else stored[name] for name in self._names}

    def packed_format(self, name: str, *, is_native: bool) -> str | None:
        if name not in self._matrices:
            return None
        if is_native:
            return self._matrices[name].native_format()
        format = self._matrices[name].device_format()
        return None if format is None else format.name

    def input_order(self, name: str) -> Ints | None:
        return self._matrices[name].input_order() if name in self._matrices else None

    def check_values(self) -> None:
        try:
            for index, matrix in enumerate(self._matrices.values()):
                matrix.check_values()
                if index == 0:
                    matrix.check_version()
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from error

    def read_into(self, name: str, target: "Tensor", starts: Sequence[int] | None = None) -> None:
        if name not in self._matrices:
            self._stored.read_into(name, target, starts)
            return
        import torch

        first, column = locate_part(self.path, name, self._matrices[name].shape, target.shape, starts)
        for offset, piece in self._pieces(name, (first, column), target.shape):
            values = torch.from_numpy(piece.values())
            target[offset : offset + len(values)].copy_(values)

    def read_floats(self, name: str, starts: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Floats:
        if name not in self._matrices:
            return self._stored.read_floats(name, starts, shape)
        out = np.empty(self._matrices[name].shape if shape is None else tuple(shape), dtype=np.float32)
        starts = locate_part(self.path, name, self._matrices[name].shape, out.shape, starts)
        for offset, piece in self._pieces(name, starts, out.shape):
            values = piece.values()
            out[offset : offset + len(values)] = values
        return out

    def _pieces(self, name: str, starts: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[int, Piece]]:
        """Yield a part of a matrix, some rows at a time, with the index of their first row."""
        num_rows, num_columns = shape
        if not num_columns:
            return
        step = max(8, _SLICE_ELEMENTS // num_columns // 8 * 8)  # eight outputs may share an int32
        for offset in range(0, num_rows, step):
            rows = (starts[0] + offset, min(step, num_rows - offset))
            yield offset, self._matrices[name].read(rows, (starts[1], num_columns))

    def read_packed(self, name: str, format: str, starts: Sequence[int], shape: Sequence[int]) -> Iterator[PackedRows]:
        grouped = GroupedFormat.parse(format)
        if name not in self._matrices or format != self.packed_format(name, is_native=grouped is None):
            yield from quantize_rows(self, name, format, starts, shape)
            return
        starts = locate_part(self.path, name, self._matrices[name].shape, shape, starts)
        order = slice(None) if grouped is None or not grouped.order else self.input_order(name)
        for offset, piece in self._pieces(name, starts, shape):
            places = np.arange(offset, offset + len(piece.codes))
            if grouped is None:
                yield piece.to_blocks(format), places
            else:
                codes, scales = _as_tensor(piece.codes[:, order]), _as_tensor(piece.scales)
                zeros = None if piece.zeros is None else _as_tensor(piece.zeros)
                yield grouped.pack(codes, scales, zeros), places


def _as_tensor(array: Any) -> "Tensor":
    """A tensor of writable memory. torch warns about read-only memory, such as a mapped file's."""
    import torch

    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _find_matrices(stored: SafetensorsCheckpoint) -> dict[str, QuantizedMatrix]:
    """The quantised matrices, by the names that they would have as dense ones."""
    schemes = read_schemes(stored.config)
    formats = stored.formats()
    found: dict[str, QuantizedMatrix] = {}
    for name, format in formats.items():
        if format == FP8_TYPE and name.endswith(".weight"):
            found[name] = Fp8Matrix(name, stored, schemes.fp8)
        elif schemes.int4 is not None and name.endswith(schemes.int4.codes):
            layer = name.removesuffix(schemes.int4.codes)
            if f"{layer}.weight" in formats:
                raise CheckpointError(f"{name!r} and '{layer}.weight' are the same matrix")
            found[f"{layer}.weight"] = Int4Matrix(layer, stored, schemes.int4)
    return found
