"""Reads the header of a GGUF file: its metadata and the location of each tensor.

A GGUF file is, from its start (all little-endian)::

    "GGUF" | version u32 | number of tensors u64 | number of metadata pairs u64
    metadata pairs: key string | value type u32 | value
    tensors:        name string | number of dims u32 | dims u64… | type u32 | offset u64
    padding up to a multiple of `general.alignment`
    tensor data; the offsets above count from here

Every number in the header is checked against the size of the file before it is used. A damaged or malicious file
therefore raises a `CheckpointError`: it cannot crash the process or make it allocate more than a small multiple of the
header's size.
"""

import itertools
import math
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from infinilm.errors import CheckpointError
from infinilm.kernels import native

# Real headers, with vocabularies of 260,000 tokens, take some 15 MB.
_MAX_HEADER_BYTES = 64 * 2**20
_MAX_ARRAY_DEPTH = 4
_LARGE_ARRAY = 1024  # items; smaller ones are lists
_MAX_DIMS = 4
_PAGES_AROUND = 2**16  # bytes: Linux also maps the pages around a page that is read
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 2**20

_BOOL, _STRING, _ARRAY = 7, 8, 9
# GGUF value type → NumPy type, which also names the type in messages.
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class GGMLType:
    """A storage type: blocks of `block_elements` numbers in `block_bytes` bytes."""

    name: str
    block_elements: int
    block_bytes: int


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    30: GGMLType("BF16", 1, 2),
    39: GGMLType("MXFP4", 32, 17),
}
"""Supported types, by their number in the file."""

# Unsupported types, named in the error.
_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GGUFTensorInfo:
    name: str
    ggml_type: GGMLType
    shape: tuple[int, ...]  # in torch's order: rows first
    offset: int  # from the start of the file
    num_bytes: int


class GGUFFile:
    """A GGUF file, mapped into memory: `metadata` by key and `tensors` by name, in the header's order.

    Large metadata arrays are NumPy arrays, or `Strings` of the native library.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._map = _map_file(self.path)
        try:
            header = _HeaderReader(self.path, self._map)
            num_tensors, num_pairs = header.counts()
            self.metadata: dict[str, Any] = header.metadata(num_pairs)
            self.tensors: dict[str, GGUFTensorInfo] = header.tensors(num_tensors, self.metadata)
        except BaseException:
            self._map.close()
            raise

    def read_blocks(
        self, tensor: GGUFTensorInfo, starts: Sequence[int], counts: Sequence[int]
    ) -> npt.NDArray[np.uint8]:
        """Copy a part of the tensor: `[*counts, block_bytes]`. The last dimension is counted in blocks."""
        block = tensor.ggml_type
        sizes = (*tensor.shape[:-1], tensor.shape[-1] // block.block_elements)
        if not all(0 <= at < at + count <= size for at, count, size in zip(starts, counts, sizes, strict=True)):
            raise CheckpointError(
                f"{self.path}: {list(counts)} blocks from {list(starts)} on of {tensor.name!r}, which has {list(sizes)}"
            )
        data = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset).reshape(*sizes, block.block_bytes)
        copy = data[tuple(slice(at, at + count) for at, count in zip(starts, counts, strict=True))].copy()
        first = tensor.offset + sum(at * stride for at, stride in zip(starts, data.strides, strict=False))
        span = sum((count - 1) * stride for count, stride in zip(copy.shape, data.strides, strict=True)) + 1
        if hasattr(mmap, "MADV_DONTNEED"):  # otherwise the whole file stays in resident memory
            last = min(first + span + _PAGES_AROUND, len(self._map))
            first = max(0, first - _PAGES_AROUND)
            page = first - first % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, page, last - page)
        return copy

    def close(self) -> None:
        self._map.close()


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CheckpointError(f"{path}: not a GGUF file, it does not begin with the bytes 'GGUF'")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror or error}") from error


class _HeaderReader:
    """Reads the header from its start. Every read is first checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._num_bytes = len(data)
        self._end = min(self._num_bytes, _MAX_HEADER_BYTES)
        self._position = 4

    def counts(self) -> tuple[int, int]:
        """Check the version. Returns the number of tensors and of metadata pairs."""
        version = self._integer(4, "the version")
        if version not in (2, 3):
            if int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3):
                self._fail("the file is big-endian; only little-endian files can be read")
            self._fail(f"GGUF version {version} is not supported; versions 2 and 3 are")
        return self._integer(8, "the number of tensors"), self._integer(8, "the number of metadata pairs")

    def metadata(self, num_pairs: int) -> dict[str, Any]:
        # 8 bytes for the key's length, 1 for a key, 4 for the type, 1 for a value
        self._check_count(num_pairs, 14, "metadata pairs")
        pairs: dict[str, Any] = {}
        for index in range(num_pairs):
            key = self._string(f"the key of metadata pair {index}")
            if key in pairs:
                self._fail(f"the metadata key {key!r} appears twice")
            value_type = self._integer(4, f"the value type of {key!r}")
            pairs[key] = self._value(value_type, f"metadata {key!r}", depth=0)
        return pairs

    def tensors(self, num_tensors: int, metadata: dict[str, Any]) -> dict[str, GGUFTensorInfo]:
        alignment = self._alignment(metadata)
        # 8 bytes for the name's length, 1 for a name, 4 + 8 for one dim, 4 for the type, 8 for the offset
        self._check_count(num_tensors, 33, "tensors")
        described = [self._tensor(index) for index in range(num_tensors)]
        data_start = -(-self._position // alignment) * alignment
        tensors: dict[str, GGUFTensorInfo] = {}
        for name, ggml_type, shape, offset in described:
            if name in tensors:
                self._fail(f"the tensor {name!r} appears twice")
            if offset % alignment:
                self._fail(f"the offset {offset} of tensor {name!r} is not a multiple of the alignment {alignment}")
            num_bytes = math.prod(shape) // ggml_type.block_elements * ggml_type.block_bytes
            start = data_start + offset
            if start + num_bytes > self._num_bytes:
                self._fail(
                    f"tensor {name!r} ({ggml_type.name}, shape {list(shape)}) would lie in bytes {start} to "
                    f"{start + num_bytes}, past the end of the file at {self._num_bytes}; "
                    "the download may be incomplete"
                )
            tensors[name] = GGUFTensorInfo(name, ggml_type, shape, start, num_bytes)
        for before, after in itertools.pairwise(sorted(tensors.values(), key=lambda tensor: tensor.offset)):
            if before.offset + before.num_bytes > after.offset:
                self._fail(f"the data of tensors {before.name!r} and {after.name!r} overlap")
        return tensors

    def _tensor(self, index: int) -> tuple[str, GGMLType, tuple[int, ...], int]:
        name = self._string(f"the name of tensor {index}")
        num_dims = self._integer(4, f"the number of dims of tensor {name!r}")
        if not 1 <= num_dims <= _MAX_DIMS:
            self._fail(f"tensor {name!r} has {num_dims} dims; 1 to {_MAX_DIMS} are possible")
        dims = [self._integer(8, f"a dim of tensor {name!r}") for _ in range(num_dims)]
        type_number = self._integer(4, f"the type of tensor {name!r}")
        offset = self._integer(8, f"the offset of tensor {name!r}")
        if 0 in dims:
            self._fail(f"tensor {name!r} has a dim of 0: {dims[::-1]}")
        ggml_type = GGML_TYPES.get(type_number)
        if ggml_type is None:
            seen = f"{_OTHER_TYPES.get(type_number, 'unknown')} ({type_number})"
            supported = ", ".join(known.name for known in GGML_TYPES.values())
            self._fail(f"tensor {name!r} has type {seen}, which is not supported; supported are {supported}")
        if dims[0] % ggml_type.block_elements:
            self._fail(
                f"tensor {name!r} has rows of {dims[0]} elements, not a multiple of the "
                f"{ggml_type.block_elements} in a block of {ggml_type.name}"
            )
        return name, ggml_type, tuple(reversed(dims)), offset

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        is_power_of_two = type(alignment) is int and alignment > 0 and alignment.bit_count() == 1
        if not is_power_of_two or alignment > _MAX_ALIGNMENT:
            self._fail(f"general.alignment is {alignment!r}; it must be a power of two up to {_MAX_ALIGNMENT}")
        return int(alignment)

    def _value(self, value_type: int, what: str, depth: int) -> Any:
        if value_type == _STRING:
            return self._string(what)
        if value_type == _ARRAY:
            return self._array(what, depth + 1)
        return self._numbers(value_type, 1, what)[0]

    def _array(self, what: str, depth: int) -> Any:
        if depth > _MAX_ARRAY_DEPTH:
            self._fail(f"{what} nests arrays more than {_MAX_ARRAY_DEPTH} deep")
        item_type = self._integer(4, f"the item type of {what}")
        count = self._integer(8, f"the length of {what}")
        if item_type == _STRING:
            return self._strings(count, what)
        if item_type == _ARRAY:
            self._check_count(count, 12, f"arrays in {what}")
            return [self._array(what, depth + 1) for _ in range(count)]
        return self._numbers(item_type, count, what)

    def _numbers(self, value_type: int, count: int, what: str) -> Any:
        dtype = _NUMBERS.get(value_type)
        if dtype is None:
            self._fail(f"{what} has the unknown value type {value_type}")
        self._check_count(count, dtype.itemsize, f"values of type {dtype} in {what}")
        # A copy, because the map can't be closed while an array refers to it.
        values = np.frombuffer(self._data, dtype, count, self._position).copy()
        self._position += count * dtype.itemsize
        if value_type != _BOOL:
            return values.tolist() if count < _LARGE_ARRAY else values
        if count and values.max() > 1:
            self._fail(f"{what} has the boolean {values.max()}; 0 and 1 are possible")
        return list(map(bool, values))

    def _strings(self, count: int, what: str) -> Any:
        """Read an array of strings: a list, or the native library's `Strings` if it is as large as a vocabulary."""
        self._check_count(count, 8, f"strings in {what}")
        data, end = self._data, self._end
        if count >= _LARGE_ARRAY and (library := native.load()) is not None:
            try:
                strings = library.Strings(np.frombuffer(data, np.uint8), self._position, count, end)
            except ValueError:
                pass  # the loop below reports what is wrong
            else:
                self._position += strings.stored_bytes
                return strings
        position = self._position
        texts: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + struct.unpack_from("<Q", data, position)[0]
                if position > end:
                    self._fail(f"string {len(texts)} of {what} has {position - start} bytes, {self._past_end()}")
                texts.append(str(data[start:position], "utf-8"))
        except struct.error:
            self._fail(f"{what} announces {count} strings but ends after {len(texts)}, {self._past_end()}")
        except UnicodeDecodeError as error:
            self._fail(f"string {len(texts)} of {what} is not valid UTF-8: {error.reason}")
        self._position = position
        return texts

    def _string(self, what: str) -> str:
        num_bytes = self._integer(8, f"the length of {what}")
        self._check_count(num_bytes, 1, f"bytes in {what}")
        raw = self._data[self._position : self._position + num_bytes]
        self._position += num_bytes
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self._fail(f"{what} is not valid UTF-8: {error.reason}")

    def _integer(self, num_bytes: int, what: str) -> int:
        if num_bytes > self._end - self._position:
            self._fail(f"the header ends inside {what}, {self._past_end()}")
        start = self._position
        self._position += num_bytes
        return int.from_bytes(self._data[start : self._position], "little")

    def _check_count(self, count: int, bytes_each: int, things: str) -> None:
        if count * bytes_each > self._end - self._position:
            self._fail(f"the header announces {count} {things}, {self._past_end()}")

    def _past_end(self) -> str:
        if self._end < self._num_bytes:
            return f"past the {_MAX_HEADER_BYTES} bytes a header may take"
        return f"past the end of the file at {self._num_bytes} bytes; the file is truncated or damaged"

    def _fail(self, message: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: {message}")
