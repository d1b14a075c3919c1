"""Triton's compiler for a GPU that is not there: kernels are compiled for an H200, and launches only noted.

For processes of their own: where this is imported, nothing can be computed by kernels.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

launched: list[str] = []


class _Launcher:
    def __init__(self, source: Any, metadata: Any) -> None:
        self._name = source.name

    def __call__(self, *_: object) -> None:
        launched.append(self._name)


class _Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, name: str, *_: object) -> tuple[object, ...]:
        return name, name, 0, 0, 1024


class _OfflineDriver(DriverBase):  # type: ignore[misc]
    launcher_cls = _Launcher
    utils = _Utils()

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@triton.jit
def broken_kernel(x):
    """Can't be compiled."""
    tl.static_assert(x is None, "there is something")


driver.set_active(_OfflineDriver())
