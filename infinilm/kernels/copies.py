"""Asynchronous copies between host and device."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(device: torch.device, *arrays: npt.NDArray[Any]) -> tuple[Tensor, ...]:
    """Copy arrays of one type to a device in one transfer. On a CPU they share memory."""
    if device.type == "cpu":
        return tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    moved = packed.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else packed.to(device)
    pieces = torch.split(moved, [array.size for array in arrays])
    return tuple(piece.view(array.shape) for piece, array in zip(pieces, arrays, strict=True))


def to_pinned(tensor: Tensor) -> Tensor:
    """Start an asynchronous copy of a GPU's tensor into pinned memory. It is complete when the stream has reached
    it."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def reserve_pinned(max_bytes: int) -> None:
    """Reserve the pinned memory that `to_device` needs for up to `max_bytes` and a few steps at once.

    Allocating more of it later would synchronise with the device.
    """
    sizes = [1 << bits for bits in range(12, max_bytes.bit_length() + 1)]
    held = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes for _ in range(4)]
    del held
