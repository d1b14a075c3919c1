"""Copies between host and device that nobody waits for."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(device: torch.device, *arrays: npt.NDArray[Any]) -> tuple[Tensor, ...]:
    """Arrays of one type on a device, in one copy. On a CPU they are shared, not copied."""
    if device.type == "cpu":
        return tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    pieces = torch.split(packed.pin_memory().to(device, non_blocking=True), [array.size for array in arrays])
    return tuple(piece.view(array.shape) for piece, array in zip(pieces, arrays, strict=True))


def to_pinned(tensor: Tensor) -> Tensor:
    """A copy of a GPU's tensor on the host; it is complete when the GPU has done what it was given so far."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def reserve_pinned(max_bytes: int) -> None:
    """Have torch keep the pinned memory that `to_device` needs for up to `max_bytes` and a few steps at once.

    To take more of it from the system waits until the device has nothing left to do.
    """
    sizes = [1 << bits for bits in range(12, max_bytes.bit_length() + 1)]
    held = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes for _ in range(4)]
    del held
