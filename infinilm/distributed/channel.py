"""Messages between the engine's process and a rank's: numbers, texts and tensors, never code.

A message is a JSON object in a frame, followed by the raw bytes of its tensors. Nothing that is received is executed or
unpickled.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from infinilm.framing import FrameSocket


@dataclass(frozen=True, slots=True)
class Message:
    """A command or a reply: values that JSON can hold, and tensors by name."""

    values: dict[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class Channel(FrameSocket):
    """One end of a pair of connected sockets."""

    def send(self, message: Message) -> None:
        """Send a message. Tensors on a device are copied to the host first."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in message.tensors.items()}
        header = {
            "values": message.values,
            "tensors": [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()],
        }
        self.send_frame(json.dumps(header).encode(), *map(_bytes_of, tensors.values()))

    def receive(self) -> Message:
        """Wait for the next message."""
        try:
            header = json.loads(self.receive_frame())
            tensors = {}
            for name, dtype, shape in header["tensors"]:
                tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                self.receive_into(_bytes_of(tensors[name]))
        except BaseException:
            self.hang_up()  # the rest of this message would be read as the next
            raise
        return Message(header["values"], tensors)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # tensors of 0 or 1 numbers may have strides that `view` refuses
    return flat.view(torch.uint8).numpy().data
