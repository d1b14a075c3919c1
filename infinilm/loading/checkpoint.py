"""The checkpoint interface that the engine uses, for every file format."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from infinilm.errors import CheckpointError
from infinilm.loading.quantize import Floats, Ints, PackedRows
from infinilm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor


class Checkpoint(Protocol):
    """A model's configuration and tensors, both under Hugging Face's names."""

    path: Path
    config: dict[str, Any]  # `config.json`, or its equivalent from GGUF metadata
    generation_config: dict[str, Any]  # `generation_config.json`, or its equivalent; empty if there is none
    num_bytes: int  # size of the tensors on disk

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes by tensor name, in file order. Reads only headers."""

    def formats(self) -> Mapping[str, str]:
        """The stored type of each tensor, as its file names it, such as `BF16` or `Q4_K`."""

    def packed_format(self, name: str, *, is_native: bool) -> str | None:
        """The format in which `read_packed` returns a matrix without rounding; None if there is none.

        It is one of GGML's formats for the native library, else a `GroupedFormat` for other devices.
        """

    def check_values(self) -> None:
        """Refuse invalid scales and indices of quantised matrices. This reads tensors, not only headers."""

    def read(self, name: str) -> "Tensor":
        """Read a tensor in its stored type; quantised ones as float32."""

    def read_into(self, name: str, target: "Tensor", starts: Sequence[int] | None = None) -> None:
        """Fill `target`, of any type and device, with the tensor, without a second full copy. Thread-safe.

        With `starts`, one index per dimension, it reads only the part that begins there and has the shape of `target`.
        """

    def read_floats(self, name: str, starts: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Floats:
        """The tensor as float32, or its part of this `shape` that begins at `starts`. Thread-safe."""

    def read_packed(self, name: str, format: str, starts: Sequence[int], shape: Sequence[int]) -> Iterator[PackedRows]:
        """Yield the part of a matrix that begins at `starts` and has this `shape`, some rows at a time. Thread-safe.

        `format` is the `packed_format`, the stored GGML format, or one of `QUANTIZERS`; with the latter, rows are
        quantised while reading.
        """

    def input_order(self, name: str) -> Ints | None:
        """The order of a matrix's columns in its `packed_format` for a GPU; None: the stored order."""

    def tokenizer(self) -> Tokenizer | None: ...

    def close(self) -> None: ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face directory with safetensors, or one GGUF file, as a checkpoint of its language model."""
    from infinilm.loading.parts import view_language_model

    checkpoint = _open(Path(path))
    try:
        return view_language_model(checkpoint)
    except BaseException:
        checkpoint.close()
        raise


def _open(path: Path) -> Checkpoint:
    from infinilm.loading.assembled import assemble
    from infinilm.loading.gguf_checkpoint import GGUFCheckpoint
    from infinilm.loading.mxfp4 import Mxfp4Checkpoint
    from infinilm.loading.quantized_checkpoint import QuantizedCheckpoint
    from infinilm.loading.quantized_config import MXFP4
    from infinilm.loading.safetensors_checkpoint import PICKLE_REFUSED, PICKLE_SUFFIXES, SafetensorsCheckpoint

    if path.is_dir():
        checkpoint = SafetensorsCheckpoint(path)
        if checkpoint.quant_method is None:
            return checkpoint
        return Mxfp4Checkpoint(checkpoint) if checkpoint.quant_method == MXFP4 else QuantizedCheckpoint(checkpoint)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(f"{path}: {PICKLE_REFUSED}")
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path}: one safetensors file says nothing about the architecture; "
            f"give the directory that also holds its config.json"
        )
    if not path.is_file() or not _is_gguf(path):
        raise CheckpointError(f"{path}: neither a GGUF file nor a directory with config.json and safetensors weights")
    file = GGUFCheckpoint(path)
    try:
        return assemble(file)
    except BaseException:
        file.close()
        raise


def _is_gguf(path: Path) -> bool:
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror or error}") from error


def locate_part(
    file: Path, name: str, shape: Sequence[int], part_shape: Sequence[int], starts: Sequence[int] | None
) -> tuple[int, ...]:
    """The start of a part of a tensor in each dimension; an error unless it lies inside the tensor of `shape`.

    Without `starts` the part must be the whole tensor.
    """
    if starts is None:
        if tuple(part_shape) != tuple(shape):
            raise CheckpointError(f"{file}: {name!r} has shape {list(shape)}, not {list(part_shape)}")
        return (0,) * len(shape)
    is_inside = len(starts) == len(part_shape) == len(shape) and all(
        0 <= start <= start + length <= size for start, length, size in zip(starts, part_shape, shape, strict=True)
    )
    if not is_inside:
        raise CheckpointError(
            f"{file}: a part of shape {list(part_shape)} that begins at {list(starts)} does not lie inside "
            f"{name!r}, which has shape {list(shape)}"
        )
    return tuple(starts)
