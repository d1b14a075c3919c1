"""Hooks with pipeline stages: the driver, in the last stage, runs the hooks of all stages."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from infinilm.distributed.group import CommunicationGroup

if TYPE_CHECKING:
    from infinilm.debug.taps import Taps

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32)
_HEADER_SIZE = 128
"""A header holds the layer, the dtype, the number of dimensions, up to four dimensions, and the point's name. An empty
name means that the stage has no more points."""
_NUM_NUMBERS = 7


class RemoteHooks:
    """Access to the driver's hooks from the first rank of another stage. The driver runs `serve_hooks` meanwhile."""

    def __init__(self, stages: CommunicationGroup) -> None:
        self._stages = stages
        self._driver = stages.size - 1

    def fire(self, point: str, tensor: Tensor, layer_idx: int) -> Tensor | None:
        """See `HookRegistry.fire`."""
        numbers = [layer_idx, _DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        self._send_header(numbers, point)
        self._stages.send(tensor, self._driver)
        has_replaced = self._stages.receive(torch.empty(1, dtype=torch.int64, device=tensor.device), self._driver)
        return self._stages.receive(torch.empty_like(tensor), self._driver) if has_replaced.item() else None

    def end_stage(self) -> None:
        """Tell the driver that this stage has no more points to show."""
        self._send_header([], "")

    def _send_header(self, numbers: list[int], point: str) -> None:
        padded = [*numbers, *[0] * (_NUM_NUMBERS - len(numbers)), *point.encode()]
        header = torch.tensor(padded + [0] * (_HEADER_SIZE - len(padded)), device=self._stages.info.device)
        self._stages.send(header, self._driver)


def serve_hooks(stages: CommunicationGroup, taps: "Taps") -> None:
    """Show hooks the tensors that earlier stages send, one stage after the other, and send replacements back."""
    device = stages.info.device
    for stage in range(stages.size - 1):
        while True:
            header = torch.empty(_HEADER_SIZE, dtype=torch.int64, device=device)
            layer, dtype, num_dims, *rest = stages.receive(header, stage).tolist()
            point = bytes(rest[_NUM_NUMBERS - 3 :]).rstrip(b"\0").decode()
            if not point:
                break
            tensor = torch.empty(rest[:num_dims], dtype=_DTYPES[dtype], device=device)
            replacement = taps.fire(point, stages.receive(tensor, stage), layer)
            stages.send(torch.tensor([replacement is not None], dtype=torch.int64, device=device), stage)
            if replacement is not None:
                stages.send(replacement, stage)
