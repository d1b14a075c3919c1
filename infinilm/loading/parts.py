"""A checkpoint whose tensors are parts of the stored ones: a multimodal model's text, fused projections, experts."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infinilm.errors import CheckpointError
from infinilm.loading.checkpoint import Checkpoint, locate_part
from infinilm.loading.quantize import PackedRows, quantize_rows
from infinilm.text.tokenizer import Tokenizer

# Where multimodal checkpoints have their language model's weights, and what they are called in the model alone.
_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_QKV = re.compile(r"(.+\.self_attn\.)qkv_proj\.(weight|bias)")
_GATE_UP = re.compile(r"(.+\.mlp\.)gate_up_proj\.(weight|bias)")
_DELTA_NET = re.compile(r"(.+\.linear_attn\.)(in_proj_|conv1d)(qkv)?\.(weight)")
_EXPERTS = re.compile(r"(.+\.experts\.)(gate_up_proj|down_proj)")
FUSED_FAMILIES = frozenset({"gemma4_text", "glm4", "phi3", "qwen3_5_text", "qwen3_5_moe_text"})
"""By `model_type`: those whose files have one tensor for q, k and v, for gate and up, or for all experts."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a stored tensor, or of one expert's matrix in it: runs of equal length that begin at `starts`."""

    source: str
    starts: tuple[int, ...]
    shape: tuple[int, ...]
    expert: int | None = None

    def runs(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Where `count` rows from `first` on are: a row of the source, the first of these rows there, how many."""
        length, done = self.shape[0] // len(self.starts), 0
        while done < count:
            run, offset = divmod(first + done, length)
            size = min(length - offset, count - done)
            yield self.starts[run] + offset, done, size
            done += size

    def cut(self, stored: Tensor) -> Tensor:
        """This part of the stored tensor."""
        matrix = stored if self.expert is None else stored[self.expert]
        if not self.shape:
            return matrix
        return torch.cat([matrix[start : start + size] for start, _, size in self.runs(0, self.shape[0])])


def find_parts(shapes: Mapping[str, tuple[int, ...]], *, is_fused: bool) -> dict[str, Part]:
    """The tensors of the language model among those of a checkpoint, by their names in the model alone."""
    parts = {name: Part(name, (0,), tuple(shape)) for name, shape in shapes.items()}
    if any(name.startswith(tuple(_TEXT_PREFIXES)) for name in shapes):
        parts = {renamed: part for name, part in parts.items() if (renamed := _text_name(name)) is not None}
    if not is_fused:
        return parts
    found: dict[str, Part] = {}
    for name, part in parts.items():
        found |= _split(name, part, parts)
    return found


def _text_name(name: str) -> str | None:
    """A tensor's name in the language model alone; None if it is not its."""
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
    """The matrices of each expert, of a tensor of all experts: gates and ups, or downs."""
    num_experts, num_rows, num_columns = part.shape
    names = ["gate_proj", "up_proj"] if match[2] == "gate_up_proj" else ["down_proj"]
    size = num_rows // len(names)
    if size * len(names) != num_rows:
        raise CheckpointError(f"{match[0]!r} of shape {list(part.shape)} can't be divided into gate and up")
    return {
        f"{match[1]}{expert}.{name}.weight": Part(part.source, (index * size,), (size, num_columns), expert)
        for expert in range(num_experts)
        for index, name in enumerate(names)
    }


class PartialCheckpoint:
    """A checkpoint seen as `parts` of its tensors; see `Checkpoint` for the attributes and methods."""

    def __init__(self, whole: Checkpoint, parts: Mapping[str, Part]) -> None:
        self._whole, self._parts = whole, parts
        self.path, self.config, self.generation_config = whole.path, whole.config, whole.generation_config
        self.num_bytes = whole.num_bytes

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: part.shape for name, part in self._parts.items()}

    def formats(self) -> Mapping[str, str]:
        stored = self._whole.formats()
        return {name: stored[part.source] for name, part in self._parts.items()}

    def read(self, name: str) -> Tensor:
        part = self._part(name)
        if part.expert is None:
            return part.cut(self._whole.read(part.source))
        target = torch.empty(part.shape)
        self.read_into(name, target)
        return target

    def read_into(self, name: str, target: Tensor, starts: Sequence[int] | None = None) -> None:
        part = self._part(name)
        starts = locate_part(self.path, name, part.shape, target.shape, starts)
        if not starts:
            self._whole.read_into(part.source, target)
            return
        for row, offset, count in part.runs(starts[0], len(target)):
            rows, place = target[offset : offset + count], (row, *starts[1:])
            if part.expert is None:
                self._whole.read_into(part.source, rows, place)
            else:
                self._whole.read_into(part.source, rows[None], (part.expert, *place))

    def read_packed(self, name: str, format: str, starts: Sequence[int], shape: Sequence[int]) -> Iterator[PackedRows]:
        part = self._part(name)
        starts = locate_part(self.path, name, part.shape, shape, starts)
        if part.expert is not None:
            yield from quantize_rows(self, name, format, starts, shape)
            return
        for row, offset, count in part.runs(starts[0], shape[0]):
            for blocks, places in self._whole.read_packed(part.source, format, (row, starts[1]), (count, shape[1])):
                yield blocks, places + offset

    def tokenizer(self) -> Tokenizer | None:
        return self._whole.tokenizer()

    def close(self) -> None:
        self._whole.close()

    def _part(self, name: str) -> Part:
        if name not in self._parts:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}")
        return self._parts[name]


def view_language_model(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the tensors of its language model, each projection with a tensor of its own."""
    shapes = checkpoint.shapes()
    text = checkpoint.config.get("text_config")
    config = text if isinstance(text, Mapping) else checkpoint.config
    try:
        parts = find_parts(shapes, is_fused=config.get("model_type") in FUSED_FAMILIES)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    is_as_stored = all(part.source == name for name, part in parts.items()) and len(parts) == len(shapes)
    return checkpoint if is_as_stored else PartialCheckpoint(checkpoint, parts)
