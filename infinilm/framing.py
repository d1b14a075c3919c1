"""Messages between processes over a stream socket. Each is one frame: its length, then its bytes."""

import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import StreamReader

_LENGTH = struct.Struct("<Q")
MAX_FRAME_BYTES = 1 << 30
"""A longer frame is refused before memory is allocated for it."""
RECEIVE_BYTES = 1 << 20
JOIN_BYTES = 1 << 16
"""A frame and its buffers are sent in one piece if they are shorter than this together."""
NONCE_BYTES = 32
SILENCE_S = 2
"""If the other machine's kernel does not answer within this time, the connection ends."""


class ChannelClosedError(Exception):
    """The other end is closed."""


def frame(payload: bytes) -> bytes:
    """A payload as it is sent, with its length in front."""
    return _LENGTH.pack(len(payload)) + payload


def _length_in(header: bytes | bytearray) -> int:
    (length,) = _LENGTH.unpack_from(header)
    if length > MAX_FRAME_BYTES:
        raise ChannelClosedError(f"a frame of {length} bytes is refused; at most {MAX_FRAME_BYTES} are read")
    return int(length)


def _closed(error: OSError) -> Exception:
    """The error to raise. A timeout of the socket itself is raised unchanged."""
    return error if isinstance(error, TimeoutError) and error.errno is None else ChannelClosedError()


class FrameSocket:
    """One end of a socket pair, for blocking use."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._received = bytearray()
        """Received bytes of frames that `receive_ready_frames` has not returned yet."""

    def send_frame(self, payload: bytes, *buffers: memoryview) -> None:
        """Send a frame, and then buffers, which are not copied. The receiver reads them by `receive_into`."""
        parts: list[bytes | memoryview] = [frame(payload), *buffers]
        if len(parts) > 1 and sum(len(part) for part in parts) < JOIN_BYTES:
            parts = [b"".join(parts)]
        try:
            for part in parts:
                self.socket.sendall(part)
        except OSError as error:
            raise _closed(error) from error

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
            except OSError as error:
                raise _closed(error) from error
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


async def read_frame(reader: "StreamReader") -> bytes:
    """Wait for the next frame, in an event loop."""
    try:
        return await reader.readexactly(_length_in(await reader.readexactly(_LENGTH.size)))
    except (EOFError, OSError) as error:
        raise ChannelClosedError from error


def watch_connection(connection: socket.socket) -> None:
    """Send small messages at once, and let the kernel end a TCP connection if the other machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 1, "TCP_USER_TIMEOUT": SILENCE_S * 1000}
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def prove(secret: bytes, role: bytes, nonce: bytes) -> bytes:
    """A hash of the nonce that only a process with the secret can compute."""
    return hmac.new(secret, role + nonce, hashlib.sha256).digest()


def authenticate(connection: FrameSocket, secret: bytes, *, own: bytes, other: bytes) -> None:
    """Prove to the other end that this end knows the secret, and check its proof. The ends have different roles."""
    nonce, theirs, proof = secrets.token_bytes(NONCE_BYTES), bytearray(NONCE_BYTES), bytearray(NONCE_BYTES)
    try:
        connection.socket.sendall(nonce)
        connection.receive_into(memoryview(theirs))
        connection.socket.sendall(prove(secret, own, bytes(theirs)))
    except OSError as error:
        raise _closed(error) from error
    connection.receive_into(memoryview(proof))
    if not hmac.compare_digest(proof, prove(secret, other, nonce)):
        raise ChannelClosedError("the other end does not know the secret")
