"""Weight formats: how matrices are kept, loaded and multiplied. One file each; `WeightFormats` chooses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Required, TypedDict

from infinilm.distributed.shard import PackedShard, Shard, ShardRange
from infinilm.layers.formats.packed import FORMATS, MatrixOutline, PackedFormat

if TYPE_CHECKING:
    import torch

    from infinilm.distributed.group import CommunicationGroup
    from infinilm.distributed.grouped import GroupedFormat
    from infinilm.layers.formats.dense import DenseWeight
    from infinilm.layers.formats.float8 import Float8Weight
    from infinilm.layers.formats.gguf import GGUFWeight
    from infinilm.layers.formats.rounded import RoundedWeight
    from infinilm.layers.formats.tiled import TiledWeight
    from infinilm.layers.formats.weight import Weight

__all__ = [
    "DENSE",
    "FORMATS",
    "DenseWeight",
    "Float8Weight",
    "GGUFWeight",
    "LayerOptions",
    "MatrixOutline",
    "RoundedWeight",
    "TiledWeight",
    "Weight",
    "WeightFormats",
    "WeightOptions",
    "below",
    "is_native",
]

_FILES = {
    "DenseWeight": "dense",
    "Float8Weight": "float8",
    "GGUFWeight": "gguf",
    "RoundedWeight": "rounded",
    "TiledWeight": "tiled",
    "Weight": "weight",
}


def __getattr__(name: str) -> Any:  # what needs torch is imported when it is asked for
    if name in _FILES:
        return getattr(import_module(f"infinilm.layers.formats.{_FILES[name]}"), name)
    raise AttributeError(f"module 'infinilm.layers.formats' has no attribute {name!r}")


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """In which formats matrices are to stay quantised, by their names in a checkpoint.

    They are `FORMATS`, and those that `GroupedFormat` names: all of them on a GPU, 8-bit floats on a CPU.
    """

    by_name: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    """Of the names that are asked for."""
    matrices: Mapping[str, Any] = field(default_factory=dict)
    """The native library's matrices that are there already, by name; others are made."""
    is_ordered: bool = False
    """Whether a row's products with dense matrices have the same bits whatever other rows there are."""
    is_native: bool = True
    """Whether the native library multiplies matrices, or a device does."""
    halves: Mapping[str, str] = field(default_factory=dict)
    """torch's names of the 16-bit types that dense matrices have in memory on a CPU, by name: those of the checkpoint,
    while float32 is computed in."""
    activation_bits: int = 16
    """Of what the native library multiplies matrices with; see `bits_of`."""

    def bits_of(self, name: str) -> int:
        """`activation_bits` of a matrix: the head's, which may be the embedding, are 16. Rounding costs most there."""
        return 16 if name.endswith(("embed_tokens.weight", "lm_head.weight")) else self.activation_bits

    def below(self, prefix: str) -> "WeightFormats":
        """The same for a part of the model, whose names go on after `prefix`."""
        return replace(self, prefix=self.prefix + prefix)

    def find(self, names: Sequence[str], columns: ShardRange) -> list[str] | None:
        """The formats of matrices that are multiplied as one; None if they can't all stay quantised.

        Each must have a format, and this rank's `columns` of it must be whole blocks.
        """
        formats = [self.by_name.get(self.prefix + name) for name in names]
        found = [format for format in formats if format in FORMATS and _has_whole_blocks(columns, FORMATS[format])]
        if not self.is_native:
            from infinilm.layers.formats.tiled import tile_format
        has_tiles = self.is_native or all(columns.length % tile_format(format).chunk == 0 for format in found)
        return found if has_tiles and len(found) == len(formats) else None

    def find_grouped(self, names: Sequence[str], columns: ShardRange) -> str | None:
        """The `GroupedFormat` of matrices that are multiplied as one; None if they have none, or several."""
        name = self._find_common(names, columns)
        if name is None or name in FORMATS:
            return None
        if self.is_native:
            return name
        from infinilm.layers.formats.tiled import tile_format

        return name if tile_format(name).has_tiles else None

    def find_of_experts(self, names: Sequence[str], columns: ShardRange) -> str | None:
        """The format in which a device, or a CPU if it is none of `FORMATS`, keeps all of these experts.

        None if they have none, or several, or their inputs are in another order.
        """
        from infinilm.distributed.grouped import GroupedFormat

        name = self._find_common(names, columns)
        format = None if name is None else GroupedFormat.parse(name)
        return None if format is not None and format.order else name

    def _find_common(self, names: Sequence[str], columns: ShardRange) -> str | None:
        from infinilm.distributed.grouped import GroupedFormat

        (name, *others) = {self.by_name.get(self.prefix + name) for name in names}
        if name is None or others:
            return None
        grouped = GroupedFormat.parse(name)
        if grouped is not None and grouped.order and columns.length < columns.full:
            return None  # a part of the columns has inputs of all groups
        format = FORMATS.get(name) or grouped
        return name if format is not None and _has_whole_blocks(columns, format) else None

    def find_half(self, names: Sequence[str]) -> str | None:
        """The 16-bit type of dense matrices that are multiplied as one; None if they have none, or several."""
        found = {self.halves.get(self.prefix + name) for name in names}
        return found.pop() if len(found) == 1 else None

    def find_matrices(self, names: Sequence[str]) -> list[Any] | None:
        """Those of these `names` that are there already; None: they are to be made."""
        return [self.matrices[self.prefix + name] for name in names] if self.matrices else None

    def create(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        columns: ShardRange,
        *,
        dtype: "torch.dtype",
        device: "torch.device | str",
        is_table: bool = False,
    ) -> "Weight":
        """Make the matrices of these `names`, which are multiplied as one and have so many `rows` each.

        If all can stay quantised they do; otherwise all are dense. This is where a format is chosen.
        """
        from infinilm.layers.formats.dense import DenseWeight
        from infinilm.layers.formats.float8 import Float8Weight
        from infinilm.layers.formats.gguf import GGUFWeight
        from infinilm.layers.formats.rounded import RoundedWeight, can_round
        from infinilm.layers.formats.tiled import TiledWeight

        found, grouped = self.find(names, columns), self.find_grouped(names, columns)
        if found and self.is_native:
            bits = self.bits_of(self.prefix + names[0])
            return GGUFWeight(found, rows, columns.length, device, self.find_matrices(names), activation_bits=bits)
        if grouped and self.is_native and not is_table:
            return Float8Weight(grouped, rows, columns.length, device=device)
        options: dict[str, Any] = {"dtype": dtype, "device": device, "is_ordered": self.is_ordered}
        if grouped and not is_table and not self.is_ordered and can_round(grouped, rows, columns.length, dtype, device):
            return RoundedWeight(grouped, rows, columns.length, dtype=dtype, device=device)
        if (found or grouped) and not is_table and not self.is_native:
            return TiledWeight(found or [str(grouped)] * len(rows), rows, columns.length, **options)
        return DenseWeight(rows, columns.length, is_table=is_table, half=self.find_half(names), **options)


DENSE = WeightFormats()
"""All matrices are plain ones."""


def is_native(shard: Shard) -> bool:
    """Whether the native library keeps and multiplies this matrix."""
    if not isinstance(shard, PackedShard):
        return False
    from infinilm.layers.formats.lines import LinesPart
    from infinilm.layers.formats.rounded import RoundedPart
    from infinilm.layers.formats.tiled import TiledPart

    return not isinstance(shard.matrix, TiledPart | RoundedPart | LinesPart)


def _has_whole_blocks(columns: ShardRange, format: "PackedFormat | GroupedFormat") -> bool:
    return columns.start % format.block_columns == 0 and columns.length % format.block_columns == 0


class WeightOptions(TypedDict, total=False):
    """How weights are made."""

    dtype: Required["torch.dtype"]
    device: Required["torch.device | str"]
    formats: WeightFormats


class LayerOptions(WeightOptions, total=False):
    """How a layer makes its weights, and the ranks that share it."""

    group: "CommunicationGroup"


def below(options: LayerOptions, prefix: str) -> LayerOptions:
    """The same options for a part of the model whose weight names go on after `prefix`."""
    return {**options, "formats": options.get("formats", DENSE).below(prefix)}
