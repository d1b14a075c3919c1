"""Weight formats: how matrices are stored, loaded and multiplied. Each has a file; `WeightFormats` chooses one."""

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


def __getattr__(name: str) -> Any:  # classes that need torch are imported at first use
    if name in _FILES:
        return getattr(import_module(f"infinilm.layers.formats.{_FILES[name]}"), name)
    raise AttributeError(f"module 'infinilm.layers.formats' has no attribute {name!r}")


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """The formats in which matrices stay quantised, by the matrices' names in a checkpoint.

    A format is one of `FORMATS`, or the name of a `GroupedFormat`: any on a GPU, but only 8-bit floats on a CPU.
    """

    by_name: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    """The prefix of all names that methods are called with."""
    matrices: Mapping[str, Any] = field(default_factory=dict)
    """Existing matrices of the native library, by name; if it is empty, matrices are made."""
    is_ordered: bool = False
    """Whether a row's products with dense matrices must have the same bits whatever other rows there are."""
    is_native: bool = True
    """True: the native library multiplies matrices. False: a GPU does."""
    halves: Mapping[str, str] = field(default_factory=dict)
    """The 16-bit types that dense matrices keep on a CPU, as torch's names, by matrix name. The types are the
    checkpoint's; products are still computed in float32."""
    activation_bits: int = 16
    """The bits of the activations that the native library multiplies matrices with; see `bits_of`."""

    def bits_of(self, name: str) -> int:
        """A matrix's `activation_bits`. The head, which may be the embedding, has 16: rounding costs most there."""
        return 16 if name.endswith(("embed_tokens.weight", "lm_head.weight")) else self.activation_bits

    def below(self, prefix: str) -> "WeightFormats":
        """The same formats for a part of the model: `prefix` is added to `self.prefix`."""
        return replace(self, prefix=self.prefix + prefix)

    def find(self, names: Sequence[str], columns: ShardRange) -> list[str] | None:
        """The formats of matrices that are multiplied as one; None if they can't all stay quantised.

        Each matrix must have one of `FORMATS`, and this rank's `columns` must be whole blocks.
        """
        formats = [self.by_name.get(self.prefix + name) for name in names]
        found = [format for format in formats if format in FORMATS and _has_whole_blocks(columns, FORMATS[format])]
        if not self.is_native:
            from infinilm.layers.formats.tiled import tile_format
        has_tiles = self.is_native or all(columns.length % tile_format(format).chunk == 0 for format in found)
        return found if has_tiles and len(found) == len(formats) else None

    def find_grouped(self, names: Sequence[str], columns: ShardRange) -> str | None:
        """The `GroupedFormat` of matrices that are multiplied as one; None if they have none or different ones."""
        name = self._find_common(names, columns)
        if name is None or name in FORMATS:
            return None
        if self.is_native:
            return name
        from infinilm.layers.formats.tiled import tile_format

        return name if tile_format(name).has_tiles else None

    def find_of_experts(self, names: Sequence[str], columns: ShardRange) -> str | None:
        """The common format of these experts' matrices. A GPU keeps any format; a CPU keeps formats outside `FORMATS`.

        None if the matrices have none or different ones, or if the format reorders inputs.
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
            return None  # a rank's share of the columns would contain inputs of all groups
        format = FORMATS.get(name) or grouped
        return name if format is not None and _has_whole_blocks(columns, format) else None

    def find_half(self, names: Sequence[str]) -> str | None:
        """The 16-bit type of dense matrices that are multiplied as one; None if they have none or different ones."""
        found = {self.halves.get(self.prefix + name) for name in names}
        return found.pop() if len(found) == 1 else None

    def find_matrices(self, names: Sequence[str]) -> list[Any] | None:
        """The existing matrices with these `names`; None: they must be made."""
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
        """Make the matrices with these `names` and numbers of `rows`, which are multiplied as one.

        They stay quantised if all of them can; otherwise all are dense. This method chooses the format.
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
"""All matrices are dense."""


def is_native(shard: Shard) -> bool:
    """Whether the native library stores and multiplies this matrix."""
    if not isinstance(shard, PackedShard):
        return False
    from infinilm.layers.formats.lines import LinesPart
    from infinilm.layers.formats.rounded import RoundedPart
    from infinilm.layers.formats.tiled import TiledPart

    return not isinstance(shard.matrix, TiledPart | RoundedPart | LinesPart)


def _has_whole_blocks(columns: ShardRange, format: "PackedFormat | GroupedFormat") -> bool:
    return columns.start % format.block_columns == 0 and columns.length % format.block_columns == 0


class WeightOptions(TypedDict, total=False):
    """The options with which weights are made."""

    dtype: Required["torch.dtype"]
    device: Required["torch.device | str"]
    formats: WeightFormats


class LayerOptions(WeightOptions, total=False):
    """The options with which a layer makes its weights, and the ranks that share the layer."""

    group: "CommunicationGroup"


def below(options: LayerOptions, prefix: str) -> LayerOptions:
    """The same options for a part of the model; see `WeightFormats.below`."""
    return {**options, "formats": options.get("formats", DENSE).below(prefix)}
