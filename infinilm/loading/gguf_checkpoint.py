"""A GGUF file as a Hugging Face checkpoint: tensor names, config and row order are converted."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from infinilm.distributed.grouped import MXFP4
from infinilm.errors import CheckpointError
from infinilm.loading.checkpoint import locate_part
from infinilm.loading.gguf import GGMLType, GGUFFile, GGUFTensorInfo
from infinilm.loading.gguf_config import GGUFMetadata, make_config
from infinilm.loading.gguf_families import HYBRIDS
from infinilm.loading.gguf_names import name_tensors
from infinilm.loading.mxfp4 import NATIVE_FORMAT, PACKED_FORMATS, check_exponents, pack, take_apart
from infinilm.loading.quantize import PLAIN_TYPES, Floats, Ints, PackedRows, dequantize, quantize_rows
from infinilm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

# Tensors are decoded in slices of about this many elements, few enough for the CPU's caches.
_SLICE_ELEMENTS = 2**18
_COPIED_ELEMENTS = 2**21  # per slice of blocks that are not decoded: more would raise the peak of memory

# Architectures whose files permute the rows of q and k, see `_unpermute`.
_PERMUTED_ARCHITECTURES = {"llama", "mistral", "mistral3", "granite", "smollm3"}

# Architectures whose files store norms as the factor 1 + weight.
_ARCHITECTURES_WITH_WHOLE_NORMS = {"gemma2", "gemma3", *HYBRIDS}
_SAMPLING_KEYS = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Keys of a generation config, with their names in llama.cpp's `general.sampling`."""


class GGUFCheckpoint:
    """One GGUF file; see `Checkpoint` for the attributes and methods."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._file = GGUFFile(self.path)
        try:
            metadata = GGUFMetadata(self._file)
            self.config: dict[str, Any] = make_config(metadata, self._file)
            self._tensors = name_tensors(self._file, metadata.architecture, self.config["num_hidden_layers"])
        except BaseException:
            self._file.close()
            raise
        token_ids = {key: self.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        given = token_ids | {name: metadata.sampling(key) for name, key in _SAMPLING_KEYS.items()}
        self.generation_config = {key: value for key, value in given.items() if value is not None}
        self.num_bytes = sum(tensor.num_bytes for tensor in self._tensors.values())
        self._has_permuted_rows = metadata.architecture in _PERMUTED_ARCHITECTURES
        self._has_whole_norms = metadata.architecture in _ARCHITECTURES_WITH_WHOLE_NORMS
        self.has_tiled_heads = metadata.architecture in ("qwen35", "qwen35moe")
        """Whether value heads of a delta net that share a key head are stored `num_key_heads` heads apart."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def formats(self) -> Mapping[str, str]:
        return {name: tensor.ggml_type.name for name, tensor in self._tensors.items()}

    def packed_format(self, name: str, *, is_native: bool) -> str | None:
        stored = self._tensor(name).ggml_type.name
        if stored == MXFP4:
            return NATIVE_FORMAT if is_native else MXFP4
        return None if stored in PLAIN_TYPES else stored

    def check_values(self) -> None:
        """There is nothing to check."""

    def read(self, name: str) -> "Tensor":
        import torch

        tensor = self._tensor(name)
        dtype = getattr(torch, PLAIN_TYPES.get(tensor.ggml_type.name, "float32"))
        target = torch.empty(tensor.shape, dtype=dtype)
        self.read_into(name, target)
        return target

    def read_into(self, name: str, target: "Tensor", starts: Sequence[int] | None = None) -> None:
        import torch

        for offset, values in self._decoded(name, target.shape, starts):
            target[offset : offset + len(values)].copy_(torch.from_numpy(values))

    def read_floats(self, name: str, starts: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Floats:
        out = np.empty(self._tensor(name).shape if shape is None else tuple(shape), dtype=np.float32)
        for offset, values in self._decoded(name, out.shape, starts):
            out[offset : offset + len(values)] = values
        return out

    def _decoded(
        self, name: str, shape: Sequence[int], starts: Sequence[int] | None
    ) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield the part of `shape` that begins at `starts`, some rows at a time, with the index of their first row."""
        tensor = self._tensor(name)
        starts = locate_part(self.path, name, tensor.shape, shape, starts)
        if not math.prod(shape):
            return
        head_dim = self._find_permutation(name, starts[0], shape[0])
        _, num_blocks = _covering_blocks(tensor.ggml_type, starts[-1], shape[-1])
        decoded_shape = (*shape[:-1], num_blocks * tensor.ggml_type.block_elements)
        row_elements = math.prod(decoded_shape[1:])
        granule = head_dim or 1  # rows are permuted within heads, so a slice holds whole heads
        step = max(1, _SLICE_ELEMENTS // (row_elements * granule)) * granule
        if len(shape) == 1:
            step = shape[0]
        for offset in range(0, shape[0], step):
            part = (min(step, shape[0] - offset), *shape[1:])
            values = self._decode(tensor, (starts[0] + offset, *starts[1:]), part)
            if head_dim is not None:
                values = _unpermute(values, head_dim)
            if self._has_whole_norms and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
                values = values - np.float32(1)
            if name.endswith("linear_attn.A_log"):  # the file stores -exp(A_log)
                values = np.log(-values)
            yield offset, values

    def read_packed(self, name: str, format: str, starts: Sequence[int], shape: Sequence[int]) -> Iterator[PackedRows]:
        tensor = self._tensor(name)
        starts = locate_part(self.path, name, tensor.shape, shape, starts)
        num_rows, num_columns = shape
        head_dim = self._find_permutation(name, starts[0], num_rows)
        block = tensor.ggml_type
        is_repacked = block.name == MXFP4 and format in PACKED_FORMATS
        if block.name != format and not is_repacked:
            yield from quantize_rows(self, name, format, starts, shape, granule=head_dim or 1)
            return
        if starts[1] % block.block_elements or num_columns % block.block_elements:
            raise CheckpointError(
                f"{self.path}: columns {starts[1]} to {starts[1] + num_columns} of {name!r} are not whole blocks of "
                f"{block.block_elements}, as {format} has them"
            )
        first, num_blocks = _covering_blocks(block, starts[1], num_columns)
        step = max(1, _COPIED_ELEMENTS // (num_columns * (head_dim or 1))) * (head_dim or 1)
        for offset in range(0, num_rows, step):
            places = np.arange(offset, min(offset + step, num_rows))
            raw = self._file.read_blocks(tensor, (starts[0] + offset, first), (len(places), num_blocks))
            if is_repacked:
                codes, exponents = take_apart(raw.reshape(*raw.shape[:2], -1))
                check_exponents(exponents, f"{self.path}: {name!r}")
                raw = pack(codes, exponents, format, f"{self.path}: {name!r}")
            yield raw.reshape(len(raw), -1), places if head_dim is None else _unpermuted(places, head_dim)

    def input_order(self, name: str) -> Ints | None:  # noqa: ARG002
        return None

    def tokenizer(self) -> Tokenizer | None:
        return Tokenizer.from_gguf(self._file.metadata)

    def close(self) -> None:
        self._file.close()

    def _tensor(self, name: str) -> GGUFTensorInfo:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}") from None

    def _find_permutation(self, name: str, first_row: int, num_rows: int) -> int | None:
        """The size of the heads in which rows are permuted, see `_unpermute`; None if rows are not permuted."""
        if not self._has_permuted_rows or not (".q_proj." in name or ".k_proj." in name):
            return None
        head_dim: int = self.config["head_dim"]
        if first_row % head_dim or num_rows % head_dim:
            raise CheckpointError(
                f"{self.path}: rows {first_row} to {first_row + num_rows} of {name!r} cannot be read alone: "
                f"rows are permuted inside a head, so a part must hold whole heads of {head_dim} rows"
            )
        return head_dim

    def _decode(self, tensor: GGUFTensorInfo, starts: tuple[int, ...], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """The values of a part, in the file's order."""
        block = tensor.ggml_type
        first, num_blocks = _covering_blocks(block, starts[-1], shape[-1])
        raw = self._file.read_blocks(tensor, (*starts[:-1], first), (*shape[:-1], num_blocks))
        values = dequantize(raw, block, (*shape[:-1], num_blocks * block.block_elements))
        begin = starts[-1] - first * block.block_elements
        return values[..., begin : begin + shape[-1]]


def _covering_blocks(block: GGMLType, start: int, length: int) -> tuple[int, int]:
    """The first block, and the number of blocks, that hold `length` elements of a row from `start` on."""
    first = start // block.block_elements
    return first, -(-(start + length) // block.block_elements) - first


def _unpermute(rows: npt.NDArray[Any], head_dim: int) -> npt.NDArray[Any]:
    """Put the rows of q or k (`[heads · head_dim, …]`) into Hugging Face's order.

    Rotary embedding rotates pairs of rows. GGUF's llama stores the two rows of a pair next to each other: (0, 1), (2,
    3), …. Hugging Face stores the first rows of all pairs before the second rows: (0, half), (1, half + 1), …
    """
    return rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _unpermuted(rows: npt.NDArray[np.int64], head_dim: int) -> npt.NDArray[np.int64]:
    """The indices that `_unpermute` moves the given rows to."""
    pair, half = rows % head_dim // 2, rows % 2
    return rows - rows % head_dim + half * (head_dim // 2) + pair
