"""Where a piece of a tensor lies: a rank of several reads only its own."""

from collections.abc import Sequence
from pathlib import Path

from infinilm.errors import CheckpointError


def locate_piece(
    file: Path, name: str, shape: Sequence[int], piece_shape: Sequence[int], starts: Sequence[int] | None
) -> tuple[int, ...]:
    """The start of a part of a tensor in each dimension; an error unless it lies inside the tensor of `shape`.

    Without `starts` the part must be the whole tensor.
    """
    if starts is None:
        if tuple(piece_shape) != tuple(shape):
            raise CheckpointError(f"{file}: {name!r} has shape {list(shape)}, not {list(piece_shape)}")
        return (0,) * len(shape)
    is_inside = len(starts) == len(piece_shape) == len(shape) and all(
        0 <= start <= start + length <= size for start, length, size in zip(starts, piece_shape, shape, strict=True)
    )
    if not is_inside:
        raise CheckpointError(
            f"{file}: a piece of shape {list(piece_shape)} that begins at {list(starts)} does not lie inside "
            f"{name!r}, which has shape {list(shape)}"
        )
    return tuple(starts)
