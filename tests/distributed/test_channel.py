"""Messages over a pair of sockets."""

import socket
import struct
from collections.abc import Iterator
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from infinilm.distributed.channel import Channel, Message
from infinilm.framing import ChannelClosedError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


@pytest.fixture
def ends(sockets: tuple[socket.socket, socket.socket]) -> tuple[Channel, Channel]:
    return Channel(sockets[0]), Channel(sockets[1])


def through(ends: tuple[Channel, Channel], message: Message) -> Message:
    """Sent from a thread: a large message waits for its reader."""
    sender = Thread(target=ends[0].send, args=(message,))
    sender.start()
    received = ends[1].receive()
    sender.join()
    return received


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_through_bit_by_bit(ends: tuple[Channel, Channel], dtype: torch.dtype) -> None:
    numbers = torch.randint(0, 2, (48,), dtype=torch.uint8) if dtype == torch.bool else torch.randint(0, 256, (48,))
    tensor = numbers.to(torch.uint8).view(dtype).view(2, -1)
    (received,) = through(ends, Message(tensors={"x": tensor})).tensors.values()
    assert (received.dtype, received.shape) == (tensor.dtype, tensor.shape)
    assert received.flatten().view(torch.uint8).equal(tensor.flatten().view(torch.uint8))


TENSORS = {
    "scalar": torch.tensor(3.5),
    "one": torch.tensor([7]),
    "empty": torch.empty(0),
    "no rows": torch.empty(0, 5, dtype=torch.bfloat16),
    "no columns": torch.empty(5, 0, dtype=torch.int32),
    "transposed": torch.arange(6).view(2, 3).t(),
    "strided": torch.arange(20)[3::4],
    "expanded": torch.ones(1, 1).expand(3, 4),
    "with gradient": torch.ones(2, requires_grad=True),
    "larger than any buffer": torch.arange(3_000_000),
}


def test_tensors_of_every_shape_in_one_message(ends: tuple[Channel, Channel]) -> None:
    received = through(ends, Message({"what": "all"}, TENSORS))
    assert received.values == {"what": "all"}
    assert list(received.tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert (received.tensors[name].dtype, received.tensors[name].shape) == (tensor.dtype, tensor.shape), name
        assert received.tensors[name].equal(tensor), name
    received.tensors["one"][0] = 8  # a tensor of its own, to do with as one likes
    assert TENSORS["one"].tolist() == [7]


@torch.inference_mode()
def test_tensors_of_inference_mode_are_sent(ends: tuple[Channel, Channel]) -> None:
    assert through(ends, Message(tensors={"x": torch.ones(2)})).tensors["x"].tolist() == [1, 1]


VALUES = [
    {},
    {"number": 2**70, "real": 0.1, "none": None, "flag": True, "text": "ä\n\0", "list": [1, [2]], "map": {"a": {}}},
    {"long": "x" * 1_000_000},
]


@pytest.mark.parametrize("values", VALUES, ids=["nothing", "all kinds", "long"])
def test_values(ends: tuple[Channel, Channel], values: dict[str, Any]) -> None:
    received = through(ends, Message(values))
    assert (received.values, received.tensors) == (values, {})


def test_messages_keep_their_order_and_go_both_ways(ends: tuple[Channel, Channel]) -> None:
    for number in range(5):
        ends[0].send(Message({"number": number}, {"x": torch.tensor([number])}))
    for number in range(5):
        received = ends[1].receive()
        assert (received.values["number"], received.tensors["x"].item()) == (number, number)
    ends[1].send(Message({"answer": 5}))
    assert ends[0].receive().values == {"answer": 5}


def test_what_is_no_plain_value_is_refused(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        ends[0].send(Message({"code": print}))
    assert through(ends, Message({"fine": 1})).values == {"fine": 1}  # nothing of it was sent


def test_a_closed_end_is_reported_to_both(ends: tuple[Channel, Channel]) -> None:
    ends[0].close()
    for end in ends:
        with pytest.raises(ChannelClosedError):
            end.receive()
        with pytest.raises(ChannelClosedError):
            end.send(Message())


def test_an_end_that_closes_in_the_middle_of_a_message(sockets: tuple[socket.socket, socket.socket]) -> None:
    sockets[0].sendall(struct.pack("<Q", 100) + b"{")
    sockets[0].close()
    with pytest.raises(ChannelClosedError):
        Channel(sockets[1]).receive()


def test_what_is_left_of_a_broken_message_is_not_taken_for_the_next(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    ends = Channel(sockets[0]), Channel(sockets[1])
    sockets[0].sendall(struct.pack("<Q", 1) + b"{}")
    with pytest.raises(ValueError, match="property name"):
        ends[1].receive()
    with pytest.raises(ChannelClosedError):
        ends[0].receive()


def test_a_reader_that_goes_while_a_large_message_is_sent(ends: tuple[Channel, Channel]) -> None:
    errors: list[type[BaseException]] = []

    def send() -> None:
        try:
            ends[0].send(Message(tensors={"x": torch.zeros(10_000_000)}))
        except ChannelClosedError as error:
            errors.append(type(error))

    sender = Thread(target=send)
    sender.start()
    ends[1].wait()
    ends[1].close()
    sender.join(30)
    assert errors == [ChannelClosedError]


def test_waiting_takes_nothing_and_ends_when_somebody_hangs_up(ends: tuple[Channel, Channel]) -> None:
    ends[0].send(Message({"number": 1}))
    ends[1].wait()
    assert ends[1].receive().values == {"number": 1}
    waiting = Thread(target=ends[1].wait)
    waiting.start()
    ends[1].hang_up()
    waiting.join(30)
    assert not waiting.is_alive()
    for end in ends:
        with pytest.raises(ChannelClosedError):
            end.receive()


@pytest.mark.parametrize("array", [np.empty((0, 1)), np.ones((4, 3))[::2, 1][:1], np.ones((2, 3)), np.float32(3)])
def test_tensors_of_odd_strides_arrive(array: np.ndarray) -> None:
    ours, theirs = map(Channel, socket.socketpair())
    tensor = torch.from_numpy(np.asarray(array))
    ours.send(Message({}, {"x": tensor, "y": torch.arange(3)}))
    received = theirs.receive().tensors
    torch.testing.assert_close(received["x"], tensor)
    assert received["y"].tolist() == [0, 1, 2]
    ours.close()
    theirs.close()
