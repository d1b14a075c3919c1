"""What the engine sees of a model on disk, whatever the format."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from infinilm.errors import CheckpointError
from infinilm.loading.gguf_checkpoint import GGUFCheckpoint
from infinilm.loading.quantize import PackedRows
from infinilm.loading.safetensors_checkpoint import PICKLE_REFUSED, PICKLE_SUFFIXES, SafetensorsCheckpoint
from infinilm.text.tokenizer import Tokenizer


class Checkpoint(Protocol):
    """A model's configuration and tensors, both under Hugging Face's names."""

    path: Path
    config: dict[str, Any]
    """`config.json`, or the same made from GGUF metadata."""
    generation_config: dict[str, Any]
    """`generation_config.json`, or the same made from GGUF metadata; empty if there is none."""
    num_bytes: int
    """What the tensors take on disk."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape in the order of the file, read from the headers only."""
        ...

    def formats(self) -> Mapping[str, str]:
        """The type in which each tensor is stored, as its file calls it: `BF16`, `Q4_K`."""
        ...

    def read(self, name: str) -> Tensor:
        """Read one tensor in the type it is stored in; quantised ones come as float32."""
        ...

    def read_into(self, name: str, target: Tensor, starts: Sequence[int] | None = None) -> None:
        """Fill `target`, of any type and device, with the tensor, without a second whole copy.

        With `starts`, only the piece of the tensor is read that begins there, one number for each
        dimension, and has the shape of `target`. Several threads may call this at once.
        """
        ...

    def read_packed(self, name: str, format: str, starts: Sequence[int], shape: Sequence[int]) -> Iterator[PackedRows]:
        """The piece of a matrix that begins at `starts` and has this `shape`, some rows at a time.

        They come in GGML's blocks of `format`: as they are stored, or quantised on the way, which only
        `QUANTIZERS` can be. Several threads may call this at once.
        """
        ...

    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer; None if it has none."""
        ...

    def close(self) -> None:
        """Let go of the files; nothing can be read afterwards."""
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face directory with safetensors, or one GGUF file."""
    path = Path(path)
    if path.is_dir():
        return SafetensorsCheckpoint(path)
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
    return GGUFCheckpoint(path)


def _is_gguf(path: Path) -> bool:
    """Whether the file claims to be GGUF, by its name or its first bytes."""
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror or error}") from error
