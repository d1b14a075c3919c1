"""Temperature, and how large a piece of work to do at once."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Scale:
    """How n rows' logits are scaled: minus the row's greatest, over its temperature.

    The greatest scaled logit is 0, so no temperature, however low, makes one overflow.
    """

    row_max: torch.Tensor  # [n, 1] float32
    temperature: torch.Tensor  # [n, 1] float32

    @classmethod
    def of(cls, logits: torch.Tensor, temperature: torch.Tensor) -> "Scale":
        return cls(logits.amax(dim=-1, keepdim=True), temperature)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The scaled logits, new, of any of the rows' `logits` [n, m]."""
        return (logits - self.row_max).div_(self.temperature)

    def select(self, rows: torch.Tensor | slice) -> "Scale":
        return Scale(self.row_max[rows], self.temperature[rows])


ELEMENTS_PER_PASS = 2**18  # on a CPU, larger operands leave the cache between one operation and the next


def row_passes(logits: torch.Tensor) -> Iterator[slice]:
    """The rows of `logits` [n, m], in slices that fit into the cache."""
    num_rows, width = logits.shape
    rows_at_once = max(1, ELEMENTS_PER_PASS // width) if logits.device.type == "cpu" else num_rows
    for start in range(0, num_rows, rows_at_once):
        yield slice(start, start + rows_at_once)
