"""A Hugging Face directory: `config.json` and weights in one or several safetensors files."""

import json
import math
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from infinilm.errors import CheckpointError
from infinilm.loading.checkpoint import locate_part
from infinilm.loading.quantize import Floats, Ints, PackedRows, quantize_rows, widen_bfloat16
from infinilm.loading.quantized_config import MXFP4, find_method, read_schemes
from infinilm.text.hf_tokenizer import read_json
from infinilm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
PICKLE_REFUSED = (
    "pickled weights are refused, because unpickling can run any code the file contains; "
    "convert them to safetensors where you trust their origin"
)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# torch's names of the types, and the bytes of a number.
_CODED_TYPES = {"U8": ("uint8", 1), "I32": ("int32", 4), "I64": ("int64", 8), "F8_E4M3": ("float8_e4m3fn", 1)}
_FLOAT_TYPES = {"F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
_TYPES = _FLOAT_TYPES | _CODED_TYPES
_BITS = {"BF16": "uint16", "F8_E4M3": "uint8"}
# Keys of auto_map for code that the model needs; a tokenizer's own code is ignored.
_MODEL_CODE = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")
# Families with published checkpoints that contain code, although it is not needed.
_FAMILIES_WITH_CODE = frozenset({"deepseek_v2", "deepseek_v3", "phi3"})


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """The offset in the file."""


class SafetensorsCheckpoint:
    """A directory of safetensors; see `Checkpoint` for the attributes and methods."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.config = _read_config(self.path)
        self.generation_config = read_json(self.path / "generation_config.json")
        index = _read_index(self.path)
        files = _weight_files(self.path, index)
        self._tensors = _read_headers(files)
        _check_index(index, self._tensors, self.path)
        self.num_bytes = sum(_num_data_bytes(file) for file in files)
        self.quant_method = find_method(self.config)
        self._shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._formats = {name: tensor.dtype for name, tensor in self._tensors.items()}
        self._readers = threading.local()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def formats(self) -> Mapping[str, str]:
        return self._formats

    def packed_format(self, name: str, *, is_native: bool) -> str | None:  # noqa: ARG002
        return None

    def check_values(self) -> None:
        """There is nothing to check."""

    def read(self, name: str) -> "Tensor":
        import torch

        tensor = self._tensor(name)
        target = torch.empty(tensor.shape, dtype=getattr(torch, _TYPES[tensor.dtype][0]))
        self.read_into(name, target)
        return target

    def read_into(self, name: str, target: "Tensor", starts: Sequence[int] | None = None) -> None:
        tensor = self._tensor(name)
        starts = locate_part(tensor.file, name, tensor.shape, target.shape, starts)
        if not target.numel():
            return
        if not hasattr(self._readers, "reader"):
            self._readers.reader = _Reader(max_mapped_bytes=min(max(self.num_bytes // 128, 2**21), 2**26))
        self._readers.reader.read(name, tensor, target, starts)

    def read_floats(self, name: str, starts: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Floats:
        part = self.read_array(name, starts, shape)
        return widen_bfloat16(part) if self._formats[name] == "BF16" else np.array(part, dtype=np.float32)

    def read_array(
        self, name: str, starts: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> npt.NDArray[Any]:
        """Like `read_floats`, but in the stored type. Types that NumPy lacks are returned as unsigned integers."""
        tensor = self._tensor(name)
        shape = tensor.shape if shape is None else tuple(shape)
        starts = locate_part(tensor.file, name, tensor.shape, shape, starts)
        kind = np.dtype(_BITS.get(tensor.dtype, _TYPES[tensor.dtype][0])).newbyteorder("<")
        if not math.prod(shape):
            return np.empty(shape, dtype=kind)
        try:
            stored = np.memmap(tensor.file, kind, "r", tensor.offset, tensor.shape)
        except OSError as error:
            raise CheckpointError(f"{tensor.file}: {name!r} cannot be read: {error}") from error
        return np.asarray(stored[tuple(slice(at, at + count) for at, count in zip(starts, shape, strict=True))])

    def read_packed(self, name: str, format: str, starts: Sequence[int], shape: Sequence[int]) -> Iterator[PackedRows]:
        return quantize_rows(self, name, format, starts, shape)

    def input_order(self, name: str) -> Ints | None:  # noqa: ARG002
        return None

    def tokenizer(self) -> Tokenizer | None:
        return Tokenizer.from_directory(self.path)

    def close(self) -> None:
        self._readers = threading.local()

    def _tensor(self, name: str) -> _StoredTensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}")
        tensor = self._tensors[name]
        if tensor.dtype not in _FLOAT_TYPES and not (self.quant_method and tensor.dtype in _CODED_TYPES):
            raise CheckpointError(
                f"{tensor.file}: {name!r} has type {tensor.dtype}; supported are {', '.join(_FLOAT_TYPES)}"
            )
        return tensor


class _Reader:
    """Reads from one mapped file at a time, for one thread.

    Pages that were read count as resident memory until the file is unmapped, so the file is mapped again after every
    `max_mapped_bytes`.
    """

    def __init__(self, max_mapped_bytes: int) -> None:
        self._max_mapped_bytes = max_mapped_bytes
        self._file: Path | None = None
        self._handle: Any = None
        self._num_bytes_read = 0

    def read(self, name: str, tensor: _StoredTensor, target: "Tensor", starts: tuple[int, ...]) -> None:
        try:
            if not tensor.shape:
                target.copy_(self._open(tensor.file, 0).get_tensor(name))
                return
            columns = tuple(
                slice(start, start + length) for start, length in zip(starts[1:], target.shape[1:], strict=True)
            )
            # Count whole rows: their pages are read even if only some columns are needed.
            row_bytes = math.prod(tensor.shape[1:]) * _TYPES[tensor.dtype][1]
            step = max(1, self._max_mapped_bytes // row_bytes)
            for offset in range(0, len(target), step):
                part = target[offset : offset + step]
                stored = self._open(tensor.file, len(part) * row_bytes).get_slice(name)
                first = starts[0] + offset
                part.copy_(stored[(slice(first, first + len(part)), *columns)])
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{tensor.file}: {name!r} cannot be read: {error}") from error

    def _open(self, file: Path, num_bytes: int) -> Any:
        if file != self._file or self._num_bytes_read + num_bytes > self._max_mapped_bytes:
            self._handle = None
            self._file, self._handle, self._num_bytes_read = file, safe_open(file, "pt"), 0
        self._num_bytes_read += num_bytes
        return self._handle


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{directory}: there is no config.json; is it the directory of a model?")
    config = read_json(file)
    code = config.get("auto_map") or {}
    is_needed = config.get("model_type") not in _FAMILIES_WITH_CODE
    if not isinstance(code, dict) or (is_needed and any(name in code for name in _MODEL_CODE)):
        raise CheckpointError(
            f"{file}: auto_map asks to run code that came with the model ({code!r}); code from a model "
            "directory is never run. If the architecture is one of the supported ones, delete auto_map"
        )
    if find_method(config) not in (None, MXFP4):
        try:
            read_schemes(config)
        except CheckpointError as error:
            raise CheckpointError(f"{file}: {error}") from error
    return config


def count_stored(directory: Path) -> Counter[str]:
    """The number of weights of each type in a directory, whether or not the type is supported."""
    stored: Counter[str] = Counter()
    for tensor in _read_headers(_weight_files(directory, _read_index(directory))).values():
        stored[tensor.dtype] += math.prod(tensor.shape)
    return stored


def _read_index(directory: Path) -> dict[str, str]:
    """The file of each tensor, if the directory has an index. Files must be in the same directory."""
    file = directory / _INDEX
    if not file.is_file():
        return {}
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file}: weight_map must map tensor names to files, it is {weight_map!r:.80}")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or {"/", "\\"} & set(shard):
            raise CheckpointError(
                f"{file}: the file of {name!r} must be a .safetensors file in the same directory, it is {shard!r}"
            )
    return weight_map


def _weight_files(directory: Path, index: dict[str, str]) -> list[Path]:
    if index:
        files = [directory / shard for shard in sorted(set(index.values()))]
        if missing := [file.name for file in files if not file.is_file()]:
            raise CheckpointError(
                f"{directory}: {len(missing)} of the {len(files)} files that {_INDEX} lists are missing: "
                f"{', '.join(missing)}"
            )
        return files
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    if files := sorted(directory.glob("*.safetensors")):
        return files
    if pickled := sorted(file.name for file in directory.iterdir() if file.suffix in PICKLE_SUFFIXES):
        raise CheckpointError(f"{directory}: has only {', '.join(pickled)}; {PICKLE_REFUSED}")
    raise CheckpointError(f"{directory}: there are no weights, no *.safetensors file")


def _read_headers(files: list[Path]) -> dict[str, _StoredTensor]:
    tensors: dict[str, _StoredTensor] = {}
    for file in files:
        try:
            with safe_open(file, "np") as handle:
                offsets = _read_offsets(file)
                for name in handle.offset_keys():
                    if name in tensors:
                        raise CheckpointError(f"{file}: {name!r} is also in {tensors[name].file.name}")
                    stored = handle.get_slice(name)
                    shape = tuple(stored.get_shape())
                    tensors[name] = _StoredTensor(file, stored.get_dtype(), shape, offsets[name])
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(
                f"{file}: not a valid safetensors file, it is truncated or damaged: {error}"
            ) from error
    return tensors


def _read_offsets(file: Path) -> dict[str, int]:
    """The start of each tensor in a file with a valid header."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    return {name: 8 + size + each["data_offsets"][0] for name, each in header.items() if name != "__metadata__"}


def _check_index(index: dict[str, str], tensors: dict[str, _StoredTensor], directory: Path) -> None:
    if absent := [name for name, shard in index.items() if name not in tensors or tensors[name].file.name != shard]:
        listed = ", ".join(f"{name} ({index[name]})" for name in absent[:20])
        raise CheckpointError(
            f"{directory / _INDEX}: {len(absent)} tensors are not in the files it names: {listed}"
            + (f" and {len(absent) - 20} more" if len(absent) > 20 else "")
        )


def _num_data_bytes(file: Path) -> int:
    """The size of a safetensors file without its header. The header's length is in the first 8 bytes."""
    with file.open("rb") as opened:
        return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")
