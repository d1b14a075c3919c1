"""Experts stored in MXFP4, as GPT-OSS has them: 4-bit floats with a scale for every 32, decoded while they are read."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from infinilm.distributed.grouped import MXFP4
from infinilm.errors import CheckpointError
from infinilm.loading.checkpoint import Checkpoint, locate_part
from infinilm.loading.quantize import Floats, PackedRows
from infinilm.text.tokenizer import Tokenizer

GROUP = 32
"""Numbers that share a scale, two in a byte, the first in its lower half."""
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_NO_NUMBER = 255
"""An exponent that is NaN."""
_BLOCKS, _SCALES = "_blocks", "_scales"


class Mxfp4Checkpoint:
    """A checkpoint whose tensors `name_blocks` and `name_scales` are seen as `name`; see `Checkpoint` for the rest.

    Blocks are uint8 `[experts, out, in / 32, 16]` and scales uint8 `[experts, out, in / 32]`, exponents of 2 plus 127.
    The tensor is `[experts, in, out]`, as in checkpoints that are not quantised.
    """

    def __init__(self, stored: Checkpoint) -> None:
        self._stored = stored
        self.path, self.config, self.generation_config = stored.path, stored.config, stored.generation_config
        self.num_bytes = stored.num_bytes
        shapes = stored.shapes()
        self._decoded = {
            name.removesuffix(_BLOCKS): self._decoded_shape(name, shapes) for name in shapes if name.endswith(_BLOCKS)
        }

    def _decoded_shape(self, blocks: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int, int]:
        shape, scales = shapes[blocks], shapes.get(blocks.removesuffix(_BLOCKS) + _SCALES)
        kinds = {self._stored.formats().get(blocks.removesuffix(_BLOCKS) + end) for end in (_BLOCKS, _SCALES)}
        if len(shape) != 4 or shape[3] != GROUP // 2 or scales != shape[:3] or kinds != {"U8"}:
            raise CheckpointError(
                f"{self.path}: {blocks!r} of shape {list(shape)}, with scales of {scales and list(scales)}, can't be "
                "MXFP4: it must be U8 [experts, out, in / 32, 16], and the scales the same but for the last; the types "
                f"are {', '.join(sorted(map(str, kinds)))}"
            )
        return shape[0], shape[2] * GROUP, shape[1]

    def _parts(self) -> set[str]:
        return {name + end for name in self._decoded for end in (_BLOCKS, _SCALES)}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        parts = self._parts()
        plain = {name: shape for name, shape in self._stored.shapes().items() if name not in parts}
        return plain | self._decoded

    def formats(self) -> Mapping[str, str]:
        parts = self._parts()
        plain = {name: format for name, format in self._stored.formats().items() if name not in parts}
        return plain | dict.fromkeys(self._decoded, "MXFP4")

    def packed_format(self, name: str, *, is_native: bool) -> str | None:
        return MXFP4 if name in self._decoded and not is_native else None

    def check_values(self) -> None:
        """There is nothing to check."""

    def read(self, name: str) -> Tensor:
        if name not in self._decoded:
            return self._stored.read(name)
        target = torch.empty(self._decoded[name])
        self.read_into(name, target)
        return target

    def read_into(self, name: str, target: Tensor, starts: Sequence[int] | None = None) -> None:
        if name not in self._decoded:
            self._stored.read_into(name, target, starts)
            return
        starts = locate_part(self.path, name, self._decoded[name], target.shape, starts)
        for own, (blocks, scales) in zip(target, self._read_experts(name, starts, target.shape), strict=True):
            own.copy_(decode(blocks, scales).narrow(1, starts[1] % GROUP, len(own)).t())

    def _read_experts(self, name: str, starts: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """The blocks and scales of each expert, `[out, groups, 16]` and `[out, groups]`, that hold a part."""
        expert, column, row = starts
        num_experts, num_columns, num_rows = shape
        first = column // GROUP
        num_groups = -(-(column + num_columns) // GROUP) - first
        blocks = torch.empty(1, num_rows, num_groups, GROUP // 2, dtype=torch.uint8)
        scales = torch.empty(1, num_rows, num_groups, dtype=torch.uint8)
        for index in range(expert, expert + num_experts):
            self._stored.read_into(name + _BLOCKS, blocks, (index, row, first, 0))
            self._stored.read_into(name + _SCALES, scales, (index, row, first))
            if bool((scales == _NO_NUMBER).any()):
                raise CheckpointError(
                    f"{self.path}: {name + _SCALES!r} of expert {index} has {_NO_NUMBER}, which stands for no number; "
                    "the file is damaged"
                )
            yield blocks[0], scales[0]

    def read_floats(self, name: str, starts: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Floats:
        target = torch.empty(self.shapes()[name] if shape is None else tuple(shape))
        self.read_into(name, target, starts)
        return target.numpy()

    def read_packed(self, name: str, format: str, starts: Sequence[int], shape: Sequence[int]) -> Iterator[PackedRows]:
        """See `Checkpoint`. The rows of experts, uint8 `[out, in / 2 + in / 32]`, are codes and scales."""
        if name not in self._decoded or format != MXFP4:
            yield from self._stored.read_packed(name, format, starts, shape)
            return
        starts = locate_part(self.path, name, self._decoded[name], shape, starts)
        if starts[1] % GROUP or shape[1] % GROUP:
            raise CheckpointError(
                f"{self.path}: columns of {name!r} from {starts[1]} on are no whole groups of {GROUP}"
            )
        for index, (blocks, scales) in enumerate(self._read_experts(name, starts, shape)):
            yield torch.cat((blocks.flatten(1), scales), dim=1), torch.arange(shape[2]) + index * shape[2]

    def tokenizer(self) -> Tokenizer | None:
        return self._stored.tokenizer()

    def close(self) -> None:
        self._stored.close()


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """The floats of `blocks` uint8 `[rows, groups, 16]` and `scales` uint8 `[rows, groups]`: `[rows, groups * 32]`."""
    indices = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(2)  # [rows, groups, 32]
    values = _VALUES[indices.int()]
    return torch.ldexp(values, scales.int()[..., None] - 127).flatten(1)
