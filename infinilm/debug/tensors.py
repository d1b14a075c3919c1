"""Statistics of a tensor, and the differences of two."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infinilm.checks import check_real
from infinilm.errors import InvalidTypeError

AnyTensor = Tensor | npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TensorStats:
    """`min`, `max` and `mean` are those of the finite values, None if there are none."""

    shape: tuple[int, ...]
    dtype: str
    min: float | None
    max: float | None
    mean: float | None
    num_nan: int
    num_inf: int

    def __str__(self) -> str:
        finite = "no finite values"
        if self.min is not None:
            finite = f"min {_show(self.min)}, max {_show(self.max)}, mean {_show(self.mean)}"
        return f"{self.dtype} {list(self.shape)}: {finite}, {self.num_nan} NaN, {self.num_inf} inf"


def tensor_stats(tensor: AnyTensor) -> TensorStats:
    """The statistics of a tensor or array of any shape and real dtype."""
    values, dtype = _values_of("tensor", tensor)
    finite = values[values.isfinite()]
    is_empty = finite.numel() == 0
    return TensorStats(
        shape=tuple(values.shape),
        dtype=dtype,
        min=None if is_empty else finite.min().item(),
        max=None if is_empty else finite.max().item(),
        mean=None if is_empty else finite.double().mean().item(),
        num_nan=int(values.isnan().sum()),
        num_inf=int(values.isinf().sum()),
    )


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """The result of `compare_tensors`. Fields that need equal shapes are None if shapes differ.

    NaN equals NaN. If just one value is NaN, or infinities differ, the difference is infinite.
    """

    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    dtype_a: str
    dtype_b: str
    rtol: float
    atol: float
    are_equal: bool = False
    """All values are equal; dtypes may differ."""
    is_close: bool = False
    """No value differs by more than the tolerance, `atol + rtol * abs(b)`."""
    max_abs_diff: float | None = None
    where: tuple[int, ...] | None = None
    """The first index of the largest difference; None also if there is no difference."""
    value_a: float | None = None
    value_b: float | None = None
    """The values at `where`."""
    mean_abs_diff: float | None = None
    """Over the elements where both are finite; None also if there are none."""
    num_different: int | None = None
    """Elements that differ by more than the tolerance."""
    share_different: float | None = None
    num_nan_mismatches: int | None = None
    """Elements where just one of the two is NaN."""
    num_inf_mismatches: int | None = None
    """Elements where an infinity meets another number."""

    def __str__(self) -> str:
        dtypes = self.dtype_a if self.dtype_a == self.dtype_b else f"{self.dtype_a} and {self.dtype_b}"
        if self.shape_a != self.shape_b:
            return f"{dtypes}, not close: shapes {list(self.shape_a)} and {list(self.shape_b)} differ"
        start = f"{dtypes} {list(self.shape_a)}, "
        if self.where is None:
            return f"{start}equal"
        parts = [
            f"{start}{'close' if self.is_close else 'not close'} (rtol {self.rtol:g}, atol {self.atol:g})",
            f"beyond that: {self.num_different} of {math.prod(self.shape_a)} ({self.share_different:.3%})",
            f"largest difference {_show(self.max_abs_diff)} at {list(self.where)}: "
            f"{_show(self.value_a)} and {_show(self.value_b)}",
        ]
        if self.mean_abs_diff is not None:
            parts.append(f"mean difference {_show(self.mean_abs_diff)}")
        if self.num_nan_mismatches:
            parts.append(f"NaN mismatches: {self.num_nan_mismatches}")
        if self.num_inf_mismatches:
            parts.append(f"inf mismatches: {self.num_inf_mismatches}")
        return "; ".join(parts)


def compare_tensors(a: AnyTensor, b: AnyTensor, *, rtol: float = 1e-5, atol: float = 1e-8) -> TensorComparison:
    """Compare two tensors or arrays of any real dtype, on any device, within a tolerance of `atol + rtol * abs(b)`."""
    check_real("rtol", rtol, low=0, high=math.inf)
    check_real("atol", atol, low=0, high=math.inf)
    (x, dtype_a), (y, dtype_b) = _values_of("a", a), _values_of("b", b)
    common = (tuple(x.shape), tuple(y.shape), dtype_a, dtype_b, rtol, atol)
    if x.shape != y.shape:
        return TensorComparison(*common)
    is_same = (x == y) | (x.isnan() & y.isnan())
    are_finite = x.isfinite() & y.isfinite()
    diff = (x.double() - y.double()).abs_().masked_fill_(~are_finite, math.inf).masked_fill_(is_same, 0)
    is_close = is_same | (are_finite & (diff <= atol + rtol * y.double().abs()))
    are_equal, num_different = bool(is_same.all()), int((~is_close).sum())
    # Integers past 2⁵³ can differ by less than float64 resolves; equal values are never the worst.
    worst = None if are_equal else int(diff.masked_fill(is_same, -1).argmax())
    has_inf = (x.isinf() | y.isinf()) & ~(x.isnan() | y.isnan())
    return TensorComparison(
        *common,
        are_equal=are_equal,
        is_close=num_different == 0,
        max_abs_diff=0.0 if worst is None else diff.flatten()[worst].item(),
        where=None if worst is None else tuple(int(i) for i in np.unravel_index(worst, x.shape)),
        value_a=None if worst is None else x.flatten()[worst].item(),
        value_b=None if worst is None else y.flatten()[worst].item(),
        mean_abs_diff=diff[are_finite].mean().item() if are_finite.any() else None,
        num_different=num_different,
        share_different=num_different / max(1, x.numel()),
        num_nan_mismatches=int((x.isnan() != y.isnan()).sum()),
        num_inf_mismatches=int((has_inf & ~is_same).sum()),
    )


def _values_of(name: str, tensor: AnyTensor) -> tuple[Tensor, str]:
    """The values on the host, as int64 if the type fits, else as float64; and their original dtype."""
    if isinstance(tensor, np.ndarray):
        dtype = str(tensor.dtype)
        if tensor.dtype.kind not in "biuf":
            raise InvalidTypeError(f"{name} is an array of {dtype}; it must hold real numbers")
        wide = np.int64 if np.can_cast(tensor.dtype, np.int64) else np.float64
        return torch.from_numpy(tensor.astype(wide, order="C")), dtype
    if not isinstance(tensor, Tensor):
        raise InvalidTypeError(f"{name} is {type(tensor).__name__}; it must be a tensor or a NumPy array")
    if tensor.is_complex():
        raise InvalidTypeError(f"{name} is a tensor of {tensor.dtype}; it must hold real numbers")
    is_integer = not tensor.is_floating_point() and tensor.dtype != torch.uint64
    values = tensor.detach().cpu().to(torch.int64 if is_integer else torch.float64)
    return values, str(tensor.dtype).removeprefix("torch.")


def _show(value: float | None) -> str:
    """A number with the digits that distinguish float32 values."""
    return f"{value:.9g}" if isinstance(value, float) else str(value)
