"""Whether Triton kernels can run; does not import Triton."""

import os
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from infinilm.platforms import is_nvidia

if TYPE_CHECKING:
    import torch

# Needed for bfloat16 matrix instructions and asynchronous copies to shared memory.
_LEAST_CAPABILITY = (8, 0)


def has_kernels(device: "torch.device | str") -> bool:
    """Whether layers on this device use our kernels."""
    if str(device) == "cpu":
        return False
    import torch

    device = torch.device(device)
    return device.type == "cuda" and why_no_triton(device) is None


def why_no_triton(device: "torch.device") -> str | None:
    """Why Triton kernels can't run on the device; None if they can.

    With `TRITON_INTERPRET=1` in the environment a CPU can run them too: slowly, to check them.
    """
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda":
        return f"Triton kernels need a CUDA device, not {device}"
    if not is_nvidia(device):
        return "the Triton kernels are written for NVIDIA GPUs, and this torch is built for ROCm"
    import torch

    capability = capability_of(device)
    if capability < _LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {_dotted(capability)}, and {_dotted(_LEAST_CAPABILITY)} is needed"
    return None


@cache
def capability_of(device: "torch.device") -> tuple[int, int]:
    """The compute capability of a CUDA device, cached: torch asks the driver each time, which takes as long as a
    launch."""
    import torch

    return torch.cuda.get_device_capability(device)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
