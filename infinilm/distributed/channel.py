"""Messages between the engine's process and a rank's: numbers, texts and tensors, never code.

A message is a JSON object followed by the raw bytes of its tensors. Nothing that is received is executed or
unpickled.
"""

import json
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_LENGTH = struct.Struct("<Q")


class ChannelClosedError(Exception):
    """The other end is gone."""


@dataclass(frozen=True, slots=True)
class Message:
    """What is asked or answered: values that JSON can hold, and tensors by name."""

    values: dict[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class Channel:
    """One end of a pair of connected sockets."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, message: Message) -> None:
        """Send a message whole. Tensors are copied from their device first, if they are on one."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in message.tensors.items()}
        header = {
            "values": message.values,
            "tensors": [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()],
        }
        encoded = json.dumps(header).encode()
        try:
            self._socket.sendall(_LENGTH.pack(len(encoded)) + encoded)
            for tensor in tensors.values():
                self._socket.sendall(_bytes_of(tensor))
        except OSError as error:
            raise ChannelClosedError from error

    def receive(self) -> Message:
        """Wait for the next message."""
        try:
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
            header = json.loads(self._read(length))
            tensors = {}
            for name, dtype, shape in header["tensors"]:
                tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                self._read_into(_bytes_of(tensors[name]))
        except BaseException:
            self.hang_up()  # what is left of this message would be taken for the next
            raise
        return Message(header["values"], tensors)

    def wait(self) -> None:
        """Wait for a message to begin. Unlike `receive` it can be interrupted."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except OSError as error:
            raise ChannelClosedError from error

    def hang_up(self) -> None:
        """Say that nothing more will be sent or received, in both processes and all threads."""
        with suppress(OSError):  # it says so already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up for good."""
        self.hang_up()
        self._socket.close()

    def _read(self, num_bytes: int) -> bytes:
        buffer = bytearray(num_bytes)
        self._read_into(memoryview(buffer))
        return bytes(buffer)

    def _read_into(self, view: memoryview) -> None:
        while view:
            try:
                num_bytes = self._socket.recv_into(view)
            except OSError as error:
                raise ChannelClosedError from error
            if num_bytes == 0:
                raise ChannelClosedError
            view = view[num_bytes:]


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    if tensor.numel() == 0:
        return memoryview(b"")  # an empty tensor may have strides that `view` refuses
    return tensor.flatten().view(torch.uint8).numpy().data
