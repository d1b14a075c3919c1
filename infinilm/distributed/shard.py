"""The part of a weight that a rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from infinilm.distributed.grouped import GroupedFormat
from infinilm.errors import CheckpointError, EngineError, InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ShardRange:
    """`length` of `full` rows or columns, from `start` on."""

    start: int
    length: int
    full: int

    @classmethod
    def whole(cls, full: int) -> ShardRange:
        return cls(0, full, full)

    @classmethod
    def share(cls, name: str, full: int, rank: int, size: int) -> ShardRange:
        """The equal share of one of `size` ranks; `name` is used in the error if `full` is not divisible."""
        if full % size:
            raise InvalidValueError(
                f"{name}={full} can't be shared out evenly over {size} ranks; "
                "use a tensor parallel size that divides it"
            )
        length = full // size
        return cls(rank * length, length, full)


class WeightReader(Protocol):
    """The part of `loading.checkpoint.Checkpoint` that shards need."""

    def read_into(self, name: str, target: Tensor, starts: Sequence[int] | None = None) -> None: ...
    def read_floats(
        self, name: str, starts: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> npt.NDArray[np.float32]: ...
    def read_packed(
        self, name: str, format: str, starts: Sequence[int], shape: Sequence[int]
    ) -> Iterator[tuple[Any, Any]]: ...
    def input_order(self, name: str) -> npt.NDArray[np.int64] | None: ...


@dataclass(frozen=True, slots=True)
class WeightShard:
    """A rank's part of a dense weight: the model's own memory, and its place in the full tensor."""

    tensor: Tensor
    """A view of the model's memory in the checkpoint's shape; filling it fills the model."""
    full_shape: tuple[int, ...]
    starts: tuple[int, ...]
    """Start of the part in each dimension of the full tensor."""

    @classmethod
    def whole(cls, tensor: Tensor) -> WeightShard:
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.dim())

    @classmethod
    def of(cls, tensor: Tensor, *pieces: ShardRange) -> WeightShard:
        """A weight of which `tensor` holds one range per dimension."""
        return cls(tensor, tuple(piece.full for piece in pieces), tuple(piece.start for piece in pieces))

    @property
    def num_bytes(self) -> int:
        return self.tensor.nbytes

    def load(self, name: str, reader: WeightReader) -> None:
        reader.read_into(name, self.tensor, self.starts)

    def cut(self, full: Tensor) -> Tensor:
        """This part of the `full` tensor, as a view."""
        return _cut(full, self.starts, self.tensor.shape)


@dataclass(frozen=True, slots=True)
class ArrayShard:
    """A whole weight in an array of float32."""

    array: npt.NDArray[np.float32]

    @property
    def full_shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def num_bytes(self) -> int:
        return self.array.nbytes

    def load(self, name: str, reader: WeightReader) -> None:
        self.array[...] = reader.read_floats(name, None, self.array.shape)


class PackedMatrix(Protocol):
    """A quantised matrix in the model's memory, in its own layout."""

    @property
    def format(self) -> str:
        """GGML's name of the block type that it loads."""

    @property
    def num_bytes(self) -> int: ...
    def load(self, blocks: Any, rows: Any, /) -> None:
        """Store rows of GGML blocks, uint8 `[n, bytes of a row]`, at the indices `rows`, int64 `[n]`."""

    def dequantize(self, rows: Tensor, out: Tensor, /) -> None:
        """Fill `out`, float32 `[n, columns]` on the host, with the values of these rows."""


class ReorderedMatrix(PackedMatrix, Protocol):
    """A matrix in a `GroupedFormat` with an order. The model's memory has its columns in that order."""

    def set_input_order(self, order: npt.NDArray[np.int64]) -> None:
        """Set the checkpoint's column for each column in memory, `[columns]`."""


@dataclass(frozen=True, slots=True)
class PackedShard:
    """A rank's part of a quantised matrix."""

    matrix: PackedMatrix
    shape: tuple[int, ...]
    """Rows and columns of this part. The matrix may have padding rows."""
    full_shape: tuple[int, ...]
    starts: tuple[int, ...]
    """Start of the part in each dimension of the full matrix."""

    @classmethod
    def of(cls, matrix: PackedMatrix, *pieces: ShardRange) -> PackedShard:
        """A weight of which `matrix` holds one range per dimension."""
        shape, full = tuple(piece.length for piece in pieces), tuple(piece.full for piece in pieces)
        return cls(matrix, shape, full, tuple(piece.start for piece in pieces))

    def cut(self, full: Tensor) -> Tensor:
        """This part of the `full` tensor, as a view."""
        return _cut(full, self.starts, self.shape)

    @property
    def num_bytes(self) -> int:
        return self.matrix.num_bytes

    def values(self) -> Tensor:
        """The values of the matrix, float32 on the host."""
        import torch

        out = torch.empty(self.shape)
        self.matrix.dequantize(torch.arange(len(out)), out)
        return out

    def load(self, name: str, reader: WeightReader) -> None:
        format = GroupedFormat.parse(self.matrix.format)
        if format is not None and format.order:
            order = reader.input_order(name)
            assert order is not None  # or the format would have none
            cast(ReorderedMatrix, self.matrix).set_input_order(order)
        for blocks, rows in reader.read_packed(name, self.matrix.format, self.starts, self.shape):
            try:
                self.matrix.load(blocks, rows)
            except CheckpointError as error:
                raise CheckpointError(f"{name!r} {error}") from error


def _cut(full: Tensor, starts: Sequence[int], shape: Sequence[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(starts, shape, strict=True)):
        full = full.narrow(dim, start, length)
    return full


Shard = WeightShard | PackedShard
Weights = Mapping[str, Shard]
"""A model's weights by their names in a Hugging Face checkpoint."""


def dense_weight(name: str, shard: Shard) -> WeightShard:
    """The shard, or an error if its matrix is quantised."""
    if isinstance(shard, PackedShard):
        raise EngineError(
            f"{name} is quantised ({shard.matrix.format}) and can't be read or replaced; load the model with "
            "quantization='none'"
        )
    return shard


def dense_weights(weights: Weights) -> dict[str, WeightShard]:
    """The weights of a model without quantised ones; an error if there are any."""
    return {name: dense_weight(name, shard) for name, shard in weights.items()}
