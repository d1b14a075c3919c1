"""Formats of quantised matrices on a device: rows of codes, with a scale for every group of columns."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GROUP_STEP = 16
"""The number of columns in a group is a multiple of this."""
SCALE_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""torch's names of the types of scales."""
EXPONENTS = "E8M0"
"""Scales that are exponents of 2 plus 127, uint8."""
MXFP4 = "MXFP4"
_WHOLE, _ORDER = "row", "order="


@dataclass(frozen=True, slots=True)
class GroupedFormat:
    """`value = scale * (code - zero)`; codes are 4-bit integers, or floats, which have no zeros."""

    bits: int
    group: int | None
    """Columns that share a scale; None: whole rows."""
    scale_type: str
    """One of `SCALE_TYPES`; or `EXPONENTS`, if codes are 4-bit floats."""
    has_zeros: bool = False
    """Whether groups have zeros. Otherwise the 4-bit code 8 stands for 0."""
    rounds_inputs: bool = False
    """Whether many inputs at a time are rounded to 8-bit floats, with a scale for each row."""
    order: str = ""
    """A hash of the order of the inputs, if it is not the checkpoint's, in which a group's inputs may lie apart."""

    @property
    def name(self) -> str:
        """For example `INT4 128 F16 zeros`, which `parse` reads."""
        if self.is_mxfp4:
            return MXFP4
        words = ["INT4" if self.bits == 4 else "FP8", str(self.group or _WHOLE), self.scale_type]
        words += [*["zeros"] * self.has_zeros, *["rounded"] * self.rounds_inputs]
        return " ".join([*words, *([_ORDER + self.order] if self.order else [])])

    @classmethod
    def parse(cls, name: str) -> GroupedFormat | None:
        """The format of this name; None if it is another kind of format."""
        if name == MXFP4:
            return cls(4, 32, EXPONENTS)
        kind, *rest = name.split(" ")
        if kind not in ("INT4", "FP8"):
            return None
        group = None if rest[0] == _WHOLE else int(rest[0])
        bits = 4 if kind == "INT4" else 8
        order = next((word.removeprefix(_ORDER) for word in rest if word.startswith(_ORDER)), "")
        return cls(bits, group, rest[1], has_zeros="zeros" in rest, rounds_inputs="rounded" in rest, order=order)

    @property
    def is_mxfp4(self) -> bool:
        return self.scale_type == EXPONENTS

    @property
    def block_columns(self) -> int:
        """A rank's piece of a row must have whole blocks of so many columns, for groups and for the kernels' reads."""
        return lcm(self.group or 1, 1 if self.is_mxfp4 else 256 // self.bits)

    def sizes(self, columns: int) -> tuple[int, int, int]:
        """The bytes of a row's codes, scales and zeros."""
        num_groups = columns // self.group if self.group else 1
        return columns * self.bits // 8, num_groups * self.scale_dtype.itemsize, num_groups * self.has_zeros

    @property
    def scale_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = torch.uint8 if self.is_mxfp4 else getattr(torch, SCALE_TYPES[self.scale_type])
        return dtype

    def pack(self, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        """Rows as bytes, uint8 `[n, sum of sizes]`, of codes `[n, columns]`, scales and zeros `[n, groups]`."""
        import torch

        if self.bits == 4:
            codes = codes[:, ::2] | (codes[:, 1::2] << 4)
        parts = [codes, scales.to(self.scale_dtype)]
        if self.has_zeros and zeros is not None:
            parts.append(zeros)
        return torch.cat([part.reshape(-1).view(torch.uint8).view(len(part), -1) for part in parts], dim=1)

    def take_apart(self, rows: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes uint8 `[n, columns]`, scales float32 `[n, groups]`, and zeros, twice in an int32, of packed rows.

        Scales of 4-bit floats stay as they are.
        """
        import torch

        codes, scales, zeros = torch.split(rows, list(self.sizes(columns)), dim=1)
        if self.bits == 4:
            codes = unpack_codes(codes)
        if self.is_mxfp4:
            return codes, scales, None
        floats = scales.contiguous().view(self.scale_dtype).float()
        return codes, floats, zeros.int() * 0x10001 if self.has_zeros else None


def unpack_codes(packed: Tensor) -> Tensor:
    """4-bit codes, uint8 `[n, columns]`, of bytes `[n, columns / 2]`. The lower half is the first column's code."""
    import torch

    return torch.stack((packed & 0x0F, packed >> 4), dim=2).flatten(1)
