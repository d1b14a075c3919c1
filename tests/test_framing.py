"""Frames over a socket pair: however they are cut, however they end."""

import asyncio
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from infinilm.framing import MAX_FRAME_BYTES, ChannelClosedError, FrameSocket, authenticate, frame, read_frame

PAYLOADS = [b"", b"a", b"b" * 70_000, b"", b"c" * 3]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, FrameSocket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, FrameSocket(theirs)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 5000, 100_000])
def test_frames_are_the_same_however_they_are_cut(ends: tuple[socket.socket, FrameSocket], size: int) -> None:
    ours, reader = ends
    data = b"".join(map(frame, PAYLOADS))
    if size == 1:
        data = frame(b"") + frame(b"xyz")
    found = []
    for start in range(0, len(data), size):
        ours.sendall(data[start : start + size])
        found += list(reader.receive_ready_frames())
    assert found == (PAYLOADS if size > 1 else [b"", b"xyz"])
    assert list(reader.receive_ready_frames()) == []


def test_bytes_that_arrived_early_are_read_by_the_other_methods(ends: tuple[socket.socket, FrameSocket]) -> None:
    ours, reader = ends
    ours.sendall(frame(b"first") + frame(b"second")[:10])
    assert list(reader.receive_ready_frames()) == [b"first"]
    ours.sendall(frame(b"second")[10:] + b"raw bytes")
    assert reader.receive_frame() == b"second"
    buffer = bytearray(9)
    reader.receive_into(memoryview(buffer))
    assert buffer == b"raw bytes"


def test_a_frame_that_is_too_long_is_refused_before_it_is_read(ends: tuple[socket.socket, FrameSocket]) -> None:
    ours, reader = ends
    header = struct.pack("<Q", MAX_FRAME_BYTES + 1)
    ours.sendall(header)
    with pytest.raises(ChannelClosedError, match="is refused"):
        reader.receive_frame()
    ours.sendall(header)
    with pytest.raises(ChannelClosedError, match="is refused"):
        list(reader.receive_ready_frames())

    async def read() -> bytes:
        stream = asyncio.StreamReader()
        stream.feed_data(header)
        return await read_frame(stream)

    with pytest.raises(ChannelClosedError, match="is refused"):
        asyncio.run(read())


def test_a_socket_timeout_is_not_a_closed_channel(ends: tuple[socket.socket, FrameSocket]) -> None:
    _, reader = ends
    reader.socket.settimeout(0.01)
    with pytest.raises(TimeoutError):
        reader.receive_frame()


def test_an_event_loop_reads_frames_until_the_end() -> None:
    async def read() -> list[bytes]:
        stream = asyncio.StreamReader()
        stream.feed_data(b"".join(map(frame, PAYLOADS)) + frame(b"cut off")[:-1])
        stream.feed_eof()
        found = [await read_frame(stream) for _ in PAYLOADS]
        with pytest.raises(ChannelClosedError):
            await read_frame(stream)
        return found

    assert asyncio.run(read()) == PAYLOADS


@pytest.mark.parametrize(
    ("secret", "role", "is_accepted"), [(b"s", b"rank", True), (b"t", b"rank", False), (b"s", b"driver", False)]
)
def test_both_ends_prove_that_they_know_the_secret(secret: bytes, role: bytes, is_accepted: bool) -> None:
    with ThreadPoolExecutor() as threads:
        ours, theirs = map(FrameSocket, socket.socketpair())
        other = threads.submit(authenticate, theirs, secret, own=role, other=b"driver")
        if is_accepted:
            authenticate(ours, b"s", own=b"driver", other=b"rank")
        else:
            with pytest.raises(ChannelClosedError, match="does not know the secret"):
                authenticate(ours, b"s", own=b"driver", other=b"rank")
        assert (other.exception() is None) == (secret == b"s")
        ours.close()
        theirs.close()
