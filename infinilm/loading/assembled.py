"""GGUF checkpoints with tensors that are assembled from several stored ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from infinilm.errors import CheckpointError
from infinilm.loading.checkpoint import Checkpoint, locate_part
from infinilm.loading.quantize import Floats, Ints, PackedRows
from infinilm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

_KEYS = re.compile(r"(.+\.self_attn\.)k_b_proj\.weight")


@dataclass(frozen=True, slots=True)
class _Assembled:
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    read: Callable[[Checkpoint, Sequence[int], Sequence[int]], Floats]
    """Reads a part of the tensor, given its start and its shape."""


class AssembledCheckpoint:
    """A checkpoint with `assembled` tensors in place of their sources; see `Checkpoint` for the rest."""

    def __init__(self, stored: Checkpoint, assembled: Mapping[str, _Assembled]) -> None:
        self._stored, self._assembled = stored, assembled
        self.path, self.config, self.generation_config = stored.path, stored.config, stored.generation_config
        self.num_bytes = stored.num_bytes
        self._sources = {source for each in assembled.values() for source in each.sources}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        plain = {name: shape for name, shape in self._stored.shapes().items() if name not in self._sources}
        return plain | {name: each.shape for name, each in self._assembled.items()}

    def formats(self) -> Mapping[str, str]:
        stored = self._stored.formats()
        plain = {name: format for name, format in stored.items() if name not in self._sources}
        return plain | {name: stored[each.sources[0]] for name, each in self._assembled.items()}

    def packed_format(self, name: str, *, is_native: bool) -> str | None:
        return None if name in self._assembled else self._stored.packed_format(name, is_native=is_native)

    def check_values(self) -> None:
        self._stored.check_values()

    def read(self, name: str) -> Tensor:
        if name not in self._assembled:
            return self._stored.read(name)
        import torch

        return torch.from_numpy(self.read_floats(name))

    def read_floats(self, name: str, starts: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Floats:
        if name not in self._assembled:
            return self._stored.read_floats(name, starts, shape)
        each = self._assembled[name]
        shape = each.shape if shape is None else shape
        return each.read(self._stored, locate_part(self.path, name, each.shape, shape, starts), shape)

    def read_into(self, name: str, target: Tensor, starts: Sequence[int] | None = None) -> None:
        if name not in self._assembled:
            self._stored.read_into(name, target, starts)
            return
        import torch

        target.copy_(torch.from_numpy(self.read_floats(name, starts, target.shape)))

    def read_packed(self, name: str, format: str, starts: Sequence[int], shape: Sequence[int]) -> Iterator[PackedRows]:
        return self._stored.read_packed(name, format, starts, shape)

    def input_order(self, name: str) -> Ints | None:
        return self._stored.input_order(name)

    def tokenizer(self) -> Tokenizer | None:
        return self._stored.tokenizer()

    def close(self) -> None:
        self._stored.close()


def assemble(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with DeepSeek's separate key and value matrices joined into one."""
    shapes = checkpoint.shapes()
    found: dict[str, _Assembled] = {}
    for name in shapes:
        if match := _KEYS.fullmatch(name):
            values = f"{match[1]}v_b_proj.weight"
            found[f"{match[1]}kv_b_proj.weight"] = _join_heads(checkpoint, name, values)
    return AssembledCheckpoint(checkpoint, found) if found else checkpoint


def _join_heads(stored: Checkpoint, keys: str, values: str) -> _Assembled:
    """For each head first the lines for keys, which are stored transposed, then those for values."""
    shapes = stored.shapes()
    key_shape, value_shape = shapes[keys], shapes.get(values, ())
    if len(key_shape) != 3 or len(value_shape) != 3 or (key_shape[0], key_shape[1]) != (value_shape[0], value_shape[2]):
        raise CheckpointError(
            f"{stored.path}: {keys!r} of shape {list(key_shape)} and {values!r} of {list(value_shape)} must be "
            "[heads, rank, key size] and [heads, value size, rank]"
        )
    (num_heads, rank, key_dim), value_dim = key_shape, value_shape[1]
    width = key_dim + value_dim

    def read(checkpoint: Checkpoint, starts: Sequence[int], shape: Sequence[int]) -> Floats:
        (first, odd), (count, rest) = divmod(starts[0], width), divmod(shape[0], width)
        if odd or rest:
            raise CheckpointError(f"{checkpoint.path}: keys and values of {keys!r} must be read by whole heads")
        for_keys = checkpoint.read_floats(keys, (first, starts[1], 0), (count, shape[1], key_dim))
        for_values = checkpoint.read_floats(values, (first, 0, starts[1]), (count, value_dim, shape[1]))
        return np.concatenate((for_keys.transpose(0, 2, 1), for_values), axis=1).reshape(shape)

    return _Assembled((num_heads * width, rank), (keys, values), read)
