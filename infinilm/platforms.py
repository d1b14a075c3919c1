"""The kinds of devices: what each needs, and what differs between them.

torch is imported only when a device is used: settings and the command line need only the names.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinilm.errors import InvalidTypeError, InvalidValueError, MissingTorchError

if TYPE_CHECKING:
    import torch


class DeviceType(StrEnum):
    """The kinds of devices that models run on. Devices of other torch plug-ins are named by torch's device type."""

    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"
    XPU = "xpu"
    MPS = "mps"
    NPU = "npu"
    MUSA = "musa"
    MLU = "mlu"


@dataclass(frozen=True, slots=True)
class Platform:
    """A kind of device."""

    title: str
    remedy: str
    """What torch needs for these devices, and how to get it."""
    package: str | None = None
    """The plug-in that gives torch this device type; None: torch itself has it."""
    collectives: str | None = None
    """The backend of `torch.distributed` between these devices; None: one rank only."""
    device_type: str | None = None
    """torch's device type, if it is not the kind's name."""


_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/"
PLATFORMS = {
    DeviceType.CPU: Platform("CPU", "", collectives="gloo"),
    DeviceType.CUDA: Platform("CUDA", "needs an NVIDIA driver and torch for CUDA: pip install torch", None, "nccl"),
    DeviceType.ROCM: Platform("ROCm", f"needs torch for ROCm: {_TORCH}rocm6.4", None, "nccl", "cuda"),
    DeviceType.XPU: Platform("XPU", f"needs torch for Intel GPUs: {_TORCH}xpu", None, "xccl"),
    DeviceType.MPS: Platform("MPS", "needs a Mac with Apple silicon and torch for macOS: pip install torch"),
    DeviceType.NPU: Platform("NPU", "needs Ascend's CANN and its plug-in: pip install torch-npu", "torch_npu", "hccl"),
    DeviceType.MUSA: Platform(
        "MUSA", "needs Moore Threads' MUSA SDK and its plug-in: pip install torch_musa", "torch_musa", "mccl"
    ),
    DeviceType.MLU: Platform(
        "MLU", "needs Cambricon's Neuware and its plug-in: pip install torch_mlu", "torch_mlu", "cncl"
    ),
}
DEVICES = ("auto", *DeviceType)
_GPU_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")
"""Linux has one of these files if there is a GPU of NVIDIA or AMD, or a GPU of a Windows host."""


@dataclass(frozen=True, slots=True)
class HostDevice:
    """The CPU without torch. It has the `type` and `index` of a `torch.device`."""

    type: str = "cpu"
    index: None = None

    def __str__(self) -> str:
        return self.type


HOST = HostDevice()


@contextmanager
def require_torch(what: str) -> Iterator[None]:
    """If torch can't be imported inside, say that `what` can't run without it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise MissingTorchError(
            f"torch is not installed, and {what} can't run without it; install it: pip install 'infinilm[torch]'"
        ) from error


def count_cores() -> int:
    """The cores that this process may use, or `OMP_NUM_THREADS`: as many threads as torch would use."""
    if (asked := os.environ.get("OMP_NUM_THREADS", "")).isdecimal() and int(asked) > 0:
        return int(asked)
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    return len(cores)


def may_have_gpu() -> bool:
    """Whether torch finds a GPU that `device='auto'` would use. torch is not imported if there is no sign of a GPU."""
    if not has_torch() or (sys.platform == "linux" and not any(map(os.path.exists, _GPU_FILES))):
        return False
    import torch

    return torch.cuda.is_available()


def wake_driver() -> None:
    """Initialise the driver of NVIDIA's GPUs, if there is one. It takes a fifth of a second without the GIL."""
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuInit(0)


def has_torch() -> bool:
    """Whether torch is installed. It is not imported."""
    try:
        return find_spec("torch") is not None
    except ValueError:  # its entry in `sys.modules` is not a module
        return False


def check_device(parameter: str, name: object) -> None:
    """Refuse a setting that is not a kind of device. torch is asked only about names that are not in `DEVICES`."""
    if not isinstance(name, str):
        raise InvalidTypeError(f"{parameter}={name!r} must be a string, one of {', '.join(DEVICES)}")
    if name not in DEVICES:
        _find(name, f"{parameter}={name!r}")


def split_device(value: "str | torch.device", parameter: str = "device") -> tuple[str, int | None]:
    """The kind and the number, if any, of a device such as `cuda:1`. `require_device` refuses missing kinds."""
    kind, _, index = str(value).partition(":")
    if index and not index.isdecimal():
        raise InvalidValueError(f"{parameter}={str(value)!r} is unknown; use a kind and a number, such as cuda:0")
    require_device(kind, f"{parameter}={str(value)!r}")
    return kind, int(index) if index else None


def require_device(kind: str, asked: str) -> str:
    """torch's device type of this kind. Imports the plug-in, or raises an error that says what is missing.

    `asked` is the setting in errors, such as `device='npu'`.
    """
    if kind == DeviceType.CPU:
        return "cpu"
    with require_torch(asked):
        import torch
    platform = _find(kind, asked)
    device_type = platform.device_type or kind
    needs = f"{platform.title} {platform.remedy}. Or use 'cpu'"
    if platform.package is not None:
        try:
            import_module(platform.package)
        except (ImportError, OSError) as error:
            is_missing = isinstance(error, ModuleNotFoundError) and error.name == platform.package
            reason = "is not installed" if is_missing else f"can't be imported ({error})"
            raise InvalidValueError(f"{asked}: the package {platform.package} {reason}; {needs}") from error
    if kind == DeviceType.ROCM and torch.version.hip is None:
        raise InvalidValueError(f"{asked}: this torch ({torch.__version__}) is not built for ROCm; {needs}")
    if device_type != "cpu" and not getattr(torch, device_type).is_available():
        raise InvalidValueError(f"{asked}: torch finds no {platform.title} device here; {needs}")
    return device_type


def _find(kind: str, asked: str) -> Platform:
    """The platform of a kind: one of `PLATFORMS`, or that of a torch plug-in that is imported."""
    if kind in tuple(DeviceType):
        return PLATFORMS[DeviceType(kind)]
    import torch

    known = f"use one of {', '.join(DEVICES)}, or the device type of a torch plug-in that is imported"
    try:
        device = torch.device(kind)
    except RuntimeError:
        raise InvalidValueError(f"{asked} is unknown; {known}") from None
    module: Any = getattr(torch, device.type, None)
    if ":" in kind or not hasattr(module, "is_available"):
        raise InvalidValueError(f"{asked} is not supported; {known}")
    return Platform(kind.upper(), f"needs the plug-in's drivers; torch.{kind} says more")


def select_indices(device_type: str, indices: list[int], source: str) -> "list[torch.device]":
    """The devices with these numbers. `source` is the setting in errors."""
    import torch

    count = getattr(torch, device_type).device_count()
    if missing := [index for index in indices if index >= count]:
        title = _find(device_type, source).title
        raise InvalidValueError(
            f"{source} names {missing}, but there are {count} {title} devices, numbered from 0; use fewer ranks, "
            "or others"
        )
    if len(indices) > 1 and collectives_of(device_type) is None:
        raise InvalidValueError(
            f"{source} asks for {len(indices)} ranks, but torch has no collectives between {device_type} devices here; "
            "use one rank"
        )
    return [torch.device(device_type, index) for index in indices]


def collectives_of(device_type: str) -> str | None:
    """The backend of `torch.distributed` between devices of a type; None: there is none."""
    return PLATFORMS[DeviceType(device_type)].collectives if device_type in tuple(DeviceType) else None


def is_nvidia(device: "torch.device") -> bool:
    """Whether this is an NVIDIA GPU: steps are asynchronous, sampling included; Triton and CUDA graphs may be used."""
    if device.type != "cuda":
        return False
    import torch

    return torch.version.hip is None


def sampling_device(device: "torch.device") -> "torch.device":
    """The device that draws tokens: an NVIDIA GPU itself, which has kernels for it; for other devices the CPU."""
    import torch

    return device if is_nvidia(device) else torch.device("cpu")


def free_device_bytes(device: "torch.device") -> int:
    """The free memory of a device other than a CPU, after torch has released the memory of freed tensors."""
    import torch

    module: Any = torch.get_device_module(device)
    module.empty_cache()
    if device.type == "mps":
        return int(module.recommended_max_memory() - module.driver_allocated_memory())
    return int(module.mem_get_info(device)[0])


def has_bfloat16(device: "torch.device") -> bool:
    """Whether a device computes in bfloat16, as far as its plug-in says. NVIDIA GPUs without it emulate it."""
    import torch

    if device.type in ("cpu", "cuda"):
        return True
    check = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    return check is None or bool(check())
