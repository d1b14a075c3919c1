"""Which piece of a weight a rank holds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from infinilm.errors import EngineError, InvalidValueError


@dataclass(frozen=True, slots=True)
class ShardRange:
    """`length` of `full` rows or columns, from `start` on."""

    start: int
    length: int
    full: int

    @classmethod
    def whole(cls, full: int) -> "ShardRange":
        """All of them."""
        return cls(0, full, full)

    @classmethod
    def share(cls, name: str, full: int, rank: int, size: int) -> "ShardRange":
        """The share of one of `size` ranks; `name` says what is shared out, which must come out even."""
        if full % size:
            raise InvalidValueError(
                f"{name}={full} can't be shared out evenly over {size} ranks; "
                "use a tensor parallel size that divides it"
            )
        length = full // size
        return cls(rank * length, length, full)


class WeightReader(Protocol):
    """What shards need of a checkpoint; see `loading.checkpoint.Checkpoint`."""

    def read_into(self, name: str, target: Tensor, starts: Sequence[int] | None = None) -> None:
        """Fill `target` with the piece of a tensor that begins at `starts`."""

    def read_packed(
        self, name: str, format: str, starts: Sequence[int], shape: Sequence[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The piece of a matrix as GGML's blocks of `format`, and the rows they belong to, some at a time."""


@dataclass(frozen=True, slots=True)
class WeightShard:
    """A rank's piece of a weight: the model's own memory, and where the piece lies in the whole tensor."""

    tensor: Tensor
    """A view of the model's memory in the shape of the checkpoint; filling it fills the model."""
    full_shape: tuple[int, ...]
    starts: tuple[int, ...]
    """Where the piece begins in each dimension of the whole."""

    @classmethod
    def whole(cls, tensor: Tensor) -> "WeightShard":
        """A weight that every rank holds whole."""
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.dim())

    @classmethod
    def of(cls, tensor: Tensor, *pieces: ShardRange) -> "WeightShard":
        """A weight of which `tensor` holds one piece in each dimension."""
        return cls(tensor, tuple(piece.full for piece in pieces), tuple(piece.start for piece in pieces))

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        return self.tensor.nbytes

    def load(self, name: str, reader: "WeightReader") -> None:
        """Read this piece of the tensor `name`."""
        reader.read_into(name, self.tensor, self.starts)

    def cut(self, full: Tensor) -> Tensor:
        """This piece of the `full` tensor, a view of it."""
        for dim, (start, length) in enumerate(zip(self.starts, self.tensor.shape, strict=True)):
            full = full.narrow(dim, start, length)
        return full


class PackedMatrix(Protocol):
    """A quantised matrix in the memory of a model, in a layout of its own."""

    @property
    def format(self) -> str:
        """GGML's name of the type whose blocks it takes."""

    @property
    def num_bytes(self) -> int:
        """What it takes."""

    def load(self, blocks: Tensor, rows: Tensor, /) -> None:
        """Put rows of GGML's blocks, uint8 `[n, bytes of a row]`, in the places `rows`, int64 `[n]`."""


@dataclass(frozen=True, slots=True)
class PackedShard:
    """A rank's piece of a matrix that stays quantised."""

    matrix: PackedMatrix
    shape: tuple[int, int]
    """The piece's. The matrix may have rows to spare."""
    full_shape: tuple[int, int]
    starts: tuple[int, int]
    """Where the piece begins in each dimension of the whole."""

    @classmethod
    def of(cls, matrix: PackedMatrix, rows: ShardRange, columns: ShardRange) -> "PackedShard":
        """A matrix that holds these rows and columns of the whole."""
        return cls(matrix, (rows.length, columns.length), (rows.full, columns.full), (rows.start, columns.start))

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        return self.matrix.num_bytes

    def load(self, name: str, reader: "WeightReader") -> None:
        """Read this piece of the tensor `name`."""
        for blocks, rows in reader.read_packed(name, self.matrix.format, self.starts, self.shape):
            self.matrix.load(blocks, rows)


Shard = WeightShard | PackedShard
Weights = Mapping[str, Shard]
"""A model's weights by their names in a Hugging Face checkpoint."""


def dense_weights(weights: Weights) -> dict[str, WeightShard]:
    """The weights of a model that keeps none of them quantised."""
    dense = {name: shard for name, shard in weights.items() if isinstance(shard, WeightShard)}
    if len(dense) < len(weights):
        raise EngineError("quantised weights can't be read or replaced; load the model with quantization='none'")
    return dense
