"""Messages between processes: each is one frame, its length and then its bytes, over a stream socket."""

import asyncio
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

_LENGTH = struct.Struct("<Q")
MAX_FRAME_BYTES = 1 << 30
"""A longer frame is refused before memory is allocated for it."""
RECEIVE_BYTES = 1 << 20


class ChannelClosedError(Exception):
    """The other end is closed."""


def frame(payload: bytes) -> bytes:
    """A payload as it is sent."""
    return _LENGTH.pack(len(payload)) + payload


def _length_in(header: bytes | bytearray) -> int:
    (length,) = _LENGTH.unpack_from(header)
    if length > MAX_FRAME_BYTES:
        raise ChannelClosedError(f"a frame of {length} bytes is refused; at most {MAX_FRAME_BYTES} are read")
    return int(length)


class FrameSocket:
    """One end of a socket pair, for blocking use."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._received = bytearray()
        """Bytes of frames that `receive_ready_frames` has not returned."""

    def send_frame(self, payload: bytes, *buffers: memoryview) -> None:
        """Send a frame, and then buffers, which are not copied. The receiver reads them by `receive_into`."""
        try:
            self.socket.sendall(frame(payload))
            for buffer in buffers:
                self.socket.sendall(buffer)
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelClosedError from error

    def receive_frame(self) -> bytes:
        """Wait for the next frame."""
        header = bytearray(_LENGTH.size)
        self.receive_into(memoryview(header))
        payload = bytearray(_length_in(header))
        self.receive_into(memoryview(payload))
        return bytes(payload)

    def receive_into(self, view: memoryview) -> None:
        """Fill a buffer with the next bytes."""
        if self._received:
            num_bytes = min(len(view), len(self._received))
            view[:num_bytes] = self._received[:num_bytes]
            del self._received[:num_bytes]
            view = view[num_bytes:]
        while view:
            try:
                num_bytes = self.socket.recv_into(view)
            except TimeoutError:
                raise
            except OSError as error:
                raise ChannelClosedError from error
            if num_bytes == 0:
                raise ChannelClosedError
            view = view[num_bytes:]

    def receive_ready_frames(self) -> Iterator[bytes]:
        """The frames that have arrived, without waiting."""
        received = self._received
        try:
            data = self.socket.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosedError from error
        if not data:
            raise ChannelClosedError
        received += data
        while len(received) >= _LENGTH.size and len(received) >= (end := _LENGTH.size + _length_in(received)):
            payload = bytes(received[_LENGTH.size : end])
            del received[:end]
            yield payload

    def wait(self) -> None:
        """Wait for a frame to begin. Unlike `receive_frame` it can be interrupted."""
        try:
            self.socket.recv(1, socket.MSG_PEEK)
        except OSError as error:
            raise ChannelClosedError from error

    def hang_up(self) -> None:
        """End the connection in both directions, for both processes and all threads."""
        with suppress(OSError):  # it has ended
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up and free the socket."""
        self.hang_up()
        self.socket.close()


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Wait for the next frame, in an event loop."""
    try:
        return await reader.readexactly(_length_in(await reader.readexactly(_LENGTH.size)))
    except (asyncio.IncompleteReadError, OSError) as error:
        raise ChannelClosedError from error
