"""A torch plug-in for tests: gives torch the device type `npu`, with two devices whose memory is the host's.

Tensors on it wrap tensors of the host, which compute. A tensor on the device can't be used as if it were the host's, as
with a real one. Collectives are Gloo's, under the name of Ascend's.
"""

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

dist: Any = distributed


class Devices:
    """What becomes `torch.npu`."""

    current = 0

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return self.current

    def set_device(self, device: torch.device) -> None:
        self.current = device.index

    def empty_cache(self) -> None:
        pass

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        assert device.type == "npu"
        return 3 << 30, 4 << 30

    def is_bf16_supported(self) -> bool:
        return False


devices = Devices()


class DeviceTensor(Tensor):
    """`host` on the device."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> "DeviceTensor":
        made = Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device("npu", devices.current),
        )
        made.host = host
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return compute(operation, args, kwargs or {})

    def tolist(self) -> Any:
        return self.host.tolist()


def to_host(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.host
    return torch.device("cpu") if isinstance(value, torch.device) else value


def compute(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the host. The result is on the device, unless it is a copy that was asked for on the host."""
    if operation is torch.ops.aten.copy_.default:
        to_host(args[0]).copy_(to_host(args[1]))
        return args[0]
    others = [
        value for value in args if isinstance(value, Tensor) and value.dim() and not isinstance(value, DeviceTensor)
    ]
    assert not others, f"{operation} of tensors on the device and on the host"
    device = kwargs.get("device")
    result = operation(*tree_map(to_host, args), **tree_map(to_host, kwargs))
    if device is not None and device.type == "cpu":
        return result
    if operation._schema.is_mutable and operation._opname.endswith("_"):
        return args[0]
    with torch.inference_mode(False):  # a view of an ordinary tensor is one in any mode
        return tree_map(lambda value: DeviceTensor(value) if isinstance(value, Tensor) else value, result)


class HostGroup:
    """The process group of a rank: Gloo's, of the tensors on the host."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self._group = dist.ProcessGroupGloo(store, rank, size, timeout)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._group, name)
        return lambda *args: method(*tree_map(to_host, args))


_setup_privateuseone_for_python_backend("npu", devices)
library = torch.library.Library("aten", "IMPL")
for name, made in (
    ("empty.memory_format", torch.ops.aten.empty.memory_format),
    ("empty_strided", torch.ops.aten.empty_strided.default),
):
    library.impl(name, lambda *args, made=made, **kwargs: compute(made, args, kwargs), "PrivateUse1")
dist.Backend.register_backend("hccl", HostGroup, devices=["npu"])
