"""Conversions between tensors, NumPy arrays and lists."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infinilm.errors import InvalidTypeError, InvalidValueError

IntArray = npt.NDArray[np.int64]

_NUMPY_TYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("float32", "float16", "float64", "bool"),
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    )
)


def infini_to_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """The tensor as an array. It shares the tensor's memory on the CPU, otherwise it is a copy.

    Supported are floats of 16, 32 or 64 bits, integers and bool. A bfloat16 tensor, which NumPy does not have, is
    copied to float32 with the same values. Other types are refused.
    """
    if not isinstance(tensor, Tensor):
        raise InvalidTypeError(f"tensor must be a torch tensor, not {type(tensor).__name__}")
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.float()
    if tensor.dtype not in _NUMPY_TYPES:
        raise InvalidValueError(
            f"tensor.dtype={tensor.dtype} is not supported; use float32, float16, bfloat16 or integers"
        )
    return tensor.detach().cpu().numpy()


def read_rows(name: str, values: Any, limit: int) -> IntArray:
    """Convert integers `[rows, columns]`, or one row `[columns]`, to an array `[rows, columns]`.

    `values` is a torch tensor, a NumPy array or nested lists, with integers from 0 to `limit` - 1. Errors call it
    `name`.
    """
    array = _as_array(name, values)
    if array.ndim == 1:
        array = array[None]
    if array.size == 0:
        raise InvalidValueError(f"{name} of shape {list(array.shape)} is empty; give at least one number in each row")
    if array.dtype.kind not in "iu":
        raise InvalidTypeError(f"{name} must hold integers, not values of type {array.dtype}")
    if array.ndim != 2:
        raise InvalidValueError(f"{name} has shape {list(array.shape)}; use [batch, seq] or [seq]")
    outside = (array < 0) | (array >= limit)
    if outside.any():
        row, column = np.argwhere(outside)[0]
        raise InvalidValueError(f"{name}[{row}, {column}]={array[row, column]} is out of range; use 0 to {limit - 1}")
    return array.astype(np.int64)


def _as_array(name: str, values: Any) -> npt.NDArray[Any]:
    if isinstance(values, Tensor):
        if values.is_nested or values.is_meta or values.layout is not torch.strided:
            raise InvalidTypeError(f"{name} must be a dense tensor, not a nested, sparse or meta one")
        if values.dtype not in _NUMPY_TYPES:
            raise InvalidTypeError(f"{name} must hold integers, not values of type {values.dtype}")
        return infini_to_numpy(values)
    try:
        return np.asarray(values)
    except (TypeError, RuntimeError) as error:
        raise InvalidTypeError(f"{name} can't be made an array: {error}") from error
    except ValueError as error:
        raise InvalidValueError(
            f"{name} has rows of different lengths; give rows of one length, or one row at a time"
        ) from error
