"""A checkpoint whose tensors are parts of stored ones: a multimodal model's text model, fused projections, experts."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from infinilm.errors import CheckpointError
from infinilm.loading.checkpoint import Checkpoint, locate_part
from infinilm.loading.quantize import PLAIN_TYPES, Floats, Ints, PackedRows, quantize_rows
from infinilm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

# Prefixes of the language model's weights in multimodal checkpoints, and their prefixes in the language model alone.
_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_QKV = re.compile(r"(.+\.self_attn\.)qkv_proj\.(weight|bias)")
_GATE_UP = re.compile(r"(.+\.mlp\.)gate_up_proj\.(weight|bias)")
_DELTA_NET = re.compile(r"(.+\.linear_attn\.)(in_proj_|conv1d)(qkv)?\.(weight)")
_DELTA_NET_PART = re.compile(r"(.+\.linear_attn\.)(.+)")
_EXPERTS = re.compile(r"(.+\.experts\.)(gate_up_proj|down_proj)")
_TURNED_EXPERTS = re.compile(r"(.+\.experts\.)(gate_up_proj|down_proj)(_bias)?")
MAX_EXPERTS = 10_000
"""More experts than any model has: a checkpoint with more is damaged."""
FUSED_FAMILIES = frozenset({"gemma4_text", "glm4", "gpt_oss", "phi3", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"})
"""The `model_type`s whose files have one tensor for q, k and v, for gate and up, or for all experts."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a stored tensor, or of one expert's matrix in it: runs of equal length that begin at `starts`.

    With `columns`, the columns are also runs. With a `step` above 1 there is one start, and the part is every `step`-th
    row from it on. If `is_turned`, the source is transposed.
    """

    source: str
    starts: tuple[int, ...]
    shape: tuple[int, ...]
    expert: int | None = None
    columns: tuple[int, ...] | None = None
    step: int = 1
    is_turned: bool = False

    def rows(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Locate `count` rows from `first` on. Yields for each run its first row in the source, the number of rows
        before it, and its number of rows."""
        return _runs(self.starts, self.shape[0], first, count)

    def pieces(
        self, starts: Sequence[int], shape: Sequence[int]
    ) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Locate a block of this `shape` from `starts` on. Yields for each contiguous piece its place in the source and
        its slices of the block."""
        for row, offset, count in self.rows(starts[0], shape[0]):
            rows = slice(offset, offset + count)
            if self.columns is None:
                yield (row, *starts[1:]), (rows,)
                continue
            for column, place, width in _runs(self.columns, self.shape[1], starts[1], shape[1]):
                yield (row, column), (rows, slice(place, place + width))

    def cut(self, stored: "Tensor") -> "Tensor":
        """This part of the stored tensor."""
        import torch

        matrix = stored if self.expert is None else stored[self.expert]
        if not self.shape:
            return matrix
        if self.is_turned or self.step > 1:
            return (matrix.t() if self.is_turned else matrix)[self.starts[0] :: self.step]
        rows = torch.cat([matrix[row : row + count] for row, _, count in self.rows(0, self.shape[0])])
        if self.columns is None:
            return rows
        return torch.cat([rows[:, at : at + width] for at, _, width in self._columns()], dim=1)

    def _columns(self) -> Iterator[tuple[int, int, int]]:
        return _runs(self.columns or (0,), self.shape[1], 0, self.shape[1])


def _runs(starts: Sequence[int], size: int, first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Locate `count` of `size` rows, from `first` on, in runs of equal length.

    Yields for each run the place of its first row in the source, the number of rows before it, and its number of rows.
    """
    length, done = size // len(starts), 0
    while done < count:
        run, offset = divmod(first + done, length)
        taken = min(length - offset, count - done)
        yield starts[run] + offset, done, taken
        done += taken


class _Heads(NamedTuple):
    """The heads of delta nets. If tiled, value heads that share a key head are stored `num_keys` heads apart."""

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    is_tiled: bool

    def of_values(self, first: int, dim: int) -> tuple[int, ...]:
        """The start of each value head of `dim` lines, with the first at `first`; one start if heads are in order."""
        if not self.is_tiled:
            return (first,)
        share = self.num_values // self.num_keys
        return tuple(first + (head % share * self.num_keys + head // share) * dim for head in range(self.num_values))

    def by_key(self, offset: int, width: int) -> tuple[int, ...]:
        """The start of each key head's lines, at `offset` in its group of `width` lines."""
        return tuple(head * width + offset for head in range(self.num_keys))


def find_parts(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], *, has_tiled_heads: bool = False
) -> dict[str, Part]:
    """The language model's tensors in a checkpoint, by their names in the language model alone.

    The `config` is the language model's. `has_tiled_heads` is for delta nets, see `_Heads`.
    """
    parts = {name: Part(name, (0,), tuple(shape)) for name, shape in shapes.items()}
    if any(name.startswith(tuple(_TEXT_PREFIXES)) for name in shapes):
        parts = {renamed: part for name, part in parts.items() if (renamed := _text_name(name)) is not None}
    if config.get("model_type") not in FUSED_FAMILIES:
        return parts
    heads = _read_heads(config, has_tiled_heads) if has_tiled_heads or config["model_type"] == "qwen3_next" else None
    found: dict[str, Part] = {}
    if config["model_type"] == "gpt_oss":
        for name, part in parts.items():
            match = _TURNED_EXPERTS.fullmatch(name)
            found |= _split_turned(match, part) if match else {name: part}
        return found
    for name, part in parts.items():
        match = _DELTA_NET_PART.fullmatch(name)
        split = _split_heads(match, part, heads) if match and heads is not None else None
        found |= split or _split(name, part, parts)
    return found


def _read_heads(config: Mapping[str, Any], is_tiled: bool) -> _Heads:
    defaults = {"num_key_heads": 16, "num_value_heads": 32, "key_head_dim": 128, "value_head_dim": 128}
    sizes = [config.get(f"linear_{name}", default) for name, default in defaults.items()]
    if not all(type(size) is int and size > 0 for size in sizes) or sizes[1] % sizes[0]:
        named = ", ".join(f"linear_{name}={size!r:.20}" for name, size in zip(defaults, sizes, strict=True))
        raise CheckpointError(f"{named} must be positive integers, and value heads a multiple of key heads")
    num_keys, num_values, key_dim, value_dim = sizes
    return _Heads(num_keys, num_values, key_dim, value_dim, is_tiled and num_keys != num_values)


def _split_heads(match: re.Match[str], part: Part, heads: _Heads) -> dict[str, Part] | None:
    """The parts of a delta net's tensor with reordered heads; None if the tensor is split as in other models."""
    prefix, name = match.groups()
    keys, values = heads.num_keys * heads.key_dim, heads.num_values * heads.value_dim
    share = heads.num_values // heads.num_keys
    inner = share * heads.value_dim
    width = 2 * (heads.key_dim + inner)
    plain: dict[str, tuple[tuple[int, ...], int]]
    match name.removesuffix(".weight"):
        case "in_proj_qkv" | "conv1d" as stem:
            stem = stem.removesuffix("_qkv")
            plain = {f"{stem}_q": ((0,), keys), f"{stem}_k": ((keys,), keys)}
            plain |= {f"{stem}_v": (heads.of_values(2 * keys, heads.value_dim), values)}
        case "in_proj_z":
            plain = {"in_proj_z": (heads.of_values(0, heads.value_dim), values)}
        case "in_proj_a" | "in_proj_b" | "A_log" | "dt_bias" as stem:
            plain = {stem: (heads.of_values(0, 1), heads.num_values)}
        case "in_proj_qkvz":
            plain = {
                "in_proj_q": (heads.by_key(0, width), keys),
                "in_proj_k": (heads.by_key(heads.key_dim, width), keys),
            }
            plain |= {"in_proj_v": (heads.by_key(2 * heads.key_dim, width), values)}
            plain |= {"in_proj_z": (heads.by_key(2 * heads.key_dim + inner, width), values)}
        case "in_proj_ba":
            plain = {"in_proj_b": (heads.by_key(0, 2 * share), heads.num_values)}
            plain |= {"in_proj_a": (heads.by_key(share, 2 * share), heads.num_values)}
        case "out_proj" if heads.is_tiled and len(part.shape) == 2 and part.shape[1] == values:
            return {match[0]: replace(part, columns=heads.of_values(0, heads.value_dim))}
        case _:
            return None
    if part.shape[0] != sum(size for _, size in plain.values()):
        raise CheckpointError(f"{match[0]!r} of shape {list(part.shape)} can't be divided into {', '.join(plain)}")
    end = ".weight" if name.endswith(".weight") else ""
    return {
        f"{prefix}{own}{end}": Part(part.source, starts, (size, *part.shape[1:]))
        for own, (starts, size) in plain.items()
    }


def _text_name(name: str) -> str | None:
    """A tensor's name in the language model alone; None if it belongs to another part of the model."""
    for prefix, own in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name if name.startswith("lm_head.") else None


def _split(name: str, part: Part, parts: Mapping[str, Part]) -> dict[str, Part]:
    if (match := _EXPERTS.fullmatch(name)) and len(part.shape) == 3:
        return _split_experts(match, part)
    if match := _QKV.fullmatch(name):
        out = parts.get(f"{match[1]}o_proj.weight")
        if out is None or len(out.shape) != 2 or part.shape[0] < out.shape[1] or (part.shape[0] - out.shape[1]) % 2:
            raise CheckpointError(f"{name!r} of shape {list(part.shape)} can't be divided into q, k and v")
        num_kv = (part.shape[0] - out.shape[1]) // 2
        sizes = {"q_proj": out.shape[1], "k_proj": num_kv, "v_proj": num_kv}
    elif match := _GATE_UP.fullmatch(name):
        if part.shape[0] % 2:
            raise CheckpointError(f"{name!r} of shape {list(part.shape)} can't be divided into gate and up")
        sizes = dict.fromkeys(("gate_proj", "up_proj"), part.shape[0] // 2)
    elif (match := _DELTA_NET.fullmatch(name)) and (match[2] == "conv1d") != bool(match[3]):
        gate = parts.get(f"{match[1]}in_proj_z.weight")
        if gate is None or part.shape[0] < gate.shape[0] or (part.shape[0] - gate.shape[0]) % 2:
            raise CheckpointError(f"{name!r} of shape {list(part.shape)} can't be divided into q, k and v")
        num_keys, stem = (part.shape[0] - gate.shape[0]) // 2, match[2].rstrip("_")
        sizes = {f"{stem}_q": num_keys, f"{stem}_k": num_keys, f"{stem}_v": gate.shape[0]}
    else:
        return {name: part}
    found, start = {}, 0
    kind = name.rpartition(".")[2]
    for piece, size in sizes.items():
        found[f"{match[1]}{piece}.{kind}"] = Part(part.source, (start,), (size, *part.shape[1:]))
        start += size
    return found


def _split_experts(match: re.Match[str], part: Part) -> dict[str, Part]:
    """Split a tensor of all experts into each expert's matrices: gate and up, or down."""
    num_experts, num_rows, num_columns = part.shape
    names = ["gate_proj", "up_proj"] if match[2] == "gate_up_proj" else ["down_proj"]
    size = num_rows // len(names)
    if size * len(names) != num_rows or not 0 < num_experts <= MAX_EXPERTS:
        raise CheckpointError(f"{match[0]!r} of shape {list(part.shape)} can't be divided into gate and up of experts")
    return {
        f"{match[1]}{expert}.{name}.weight": Part(part.source, (index * size,), (size, num_columns), expert)
        for expert in range(num_experts)
        for index, name in enumerate(names)
    }


def _split_turned(match: re.Match[str], part: Part) -> dict[str, Part]:
    """The same for tensors with inputs first, `[experts, in, out]`, or biases. Lines of gate and up alternate."""
    names = ["gate_proj", "up_proj"] if match[2] == "gate_up_proj" else ["down_proj"]
    num_dims, num_lines = 2 if match[3] else 3, part.shape[-1]
    if len(part.shape) != num_dims or num_lines % len(names) or not 0 < part.shape[0] <= MAX_EXPERTS:
        raise CheckpointError(f"{match[0]!r} of shape {list(part.shape)} can't be divided into {' and '.join(names)}")
    shape = (num_lines // len(names), *part.shape[1:-1])
    kind = "bias" if match[3] else "weight"
    return {
        f"{match[1]}{expert}.{name}.{kind}": Part(
            part.source, (first,), shape, expert, step=len(names), is_turned=kind == "weight"
        )
        for expert in range(part.shape[0])
        for first, name in enumerate(names)
    }


class PartialCheckpoint:
    """A checkpoint that presents `parts` of the tensors of `whole`; see `Checkpoint` for the interface."""

    def __init__(self, whole: Checkpoint, parts: Mapping[str, Part]) -> None:
        self._whole, self._parts = whole, parts
        self.path, self.config, self.generation_config = whole.path, whole.config, whole.generation_config
        self.num_bytes = whole.num_bytes

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: part.shape for name, part in self._parts.items()}

    def formats(self) -> Mapping[str, str]:
        stored = self._whole.formats()
        return {name: self._format(part, stored[part.source]) for name, part in self._parts.items()}

    @staticmethod
    def _format(part: Part, stored: str) -> str:
        """The format of a part. Reordered columns are quantised again, because blocks can't be cut."""
        return "Q8_0" if part.columns is not None and stored not in PLAIN_TYPES else stored

    def packed_format(self, name: str, *, is_native: bool) -> str | None:
        part = self._part(name)
        packed = self._whole.packed_format(part.source, is_native=is_native)
        return None if packed is None else self._format(part, packed)

    def check_values(self) -> None:
        self._whole.check_values()

    def read(self, name: str) -> "Tensor":
        import torch

        part = self._part(name)
        if part.expert is None:
            return part.cut(self._whole.read(part.source))
        target = torch.empty(part.shape)
        self.read_into(name, target)
        return target

    def read_into(self, name: str, target: "Tensor", starts: Sequence[int] | None = None) -> None:
        part = self._part(name)
        starts = locate_part(self.path, name, part.shape, target.shape, starts)
        if not starts:
            self._whole.read_into(part.source, target)
            return
        if part.is_turned or part.step > 1:
            import torch

            target.copy_(torch.from_numpy(self._read_lines(part, starts, target.shape)))
            return
        for place, here in part.pieces(starts, target.shape):
            if part.expert is None:
                self._whole.read_into(part.source, target[here], place)
            else:
                self._whole.read_into(part.source, target[here][None], (part.expert, *place))

    def read_floats(self, name: str, starts: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Floats:
        part = self._part(name)
        out = np.empty(part.shape if shape is None else tuple(shape), dtype=np.float32)
        starts = locate_part(self.path, name, part.shape, out.shape, starts)
        if not starts:
            return self._whole.read_floats(part.source)
        if part.is_turned or part.step > 1:
            return self._read_lines(part, starts, out.shape)
        for place, here in part.pieces(starts, out.shape):
            at, size = (
                (place, out[here].shape) if part.expert is None else ((part.expert, *place), (1, *out[here].shape))
            )
            out[here] = self._whole.read_floats(part.source, at, size).reshape(out[here].shape)
        return out

    def _read_lines(self, part: Part, starts: Sequence[int], shape: Sequence[int]) -> Floats:
        """Read some of an expert's lines, which are every `step`-th line of a tensor with inputs first."""
        lines = part.starts[0] + part.step * starts[0], part.step * (shape[0] - 1) + 1
        place = (part.expert or 0, *starts[1:], lines[0])
        values = self._whole.read_floats(part.source, place, (1, *shape[1:], lines[1]))[0][..., :: part.step]
        return np.ascontiguousarray(values.T)

    def read_packed(self, name: str, format: str, starts: Sequence[int], shape: Sequence[int]) -> Iterator[PackedRows]:
        part = self._part(name)
        starts = locate_part(self.path, name, part.shape, shape, starts)
        if part.expert is not None or part.columns is not None:
            yield from quantize_rows(self, name, format, starts, shape)
            return
        for row, offset, count in part.rows(starts[0], shape[0]):
            for blocks, places in self._whole.read_packed(part.source, format, (row, starts[1]), (count, shape[1])):
                yield blocks, places + offset

    def input_order(self, name: str) -> Ints | None:
        return self._whole.input_order(self._part(name).source)

    def tokenizer(self) -> Tokenizer | None:
        return self._whole.tokenizer()

    def close(self) -> None:
        self._whole.close()

    def _part(self, name: str) -> Part:
        if name not in self._parts:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}")
        return self._parts[name]


def view_language_model(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint reduced to its language model, with a separate tensor for each projection."""
    shapes = checkpoint.shapes()
    text = checkpoint.config.get("text_config")
    config = text if isinstance(text, Mapping) else checkpoint.config
    try:
        parts = find_parts(shapes, config, has_tiled_heads=getattr(checkpoint, "has_tiled_heads", False))
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    is_as_stored = all(part.source == name for name, part in parts.items()) and len(parts) == len(shapes)
    return checkpoint if is_as_stored else PartialCheckpoint(checkpoint, parts)
