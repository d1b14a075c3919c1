"""The parts of `infinilm bench serve`: replies are read, runs summed up, requests made."""

import asyncio
import socket
from array import array
from itertools import pairwise
from typing import Any

import pytest
from cli.scripted_server import CHAT, COMPLETION, DONE, END, STREAM, chunk, event, token, usage
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.serve.client import Measured
from benchmarks.serve.events import INTERRUPTED, EventReader, Trace
from benchmarks.serve.figures import Errors, Figures, find_rates
from benchmarks.serve.http_connection import BUFFER_BYTES, Connection, Endpoint, split_chunks
from benchmarks.serve.work import Limits, Load, Work
from infinilm.errors import InvalidValueError

# --- reading replies ----------------------------------------------------------------------------------------


async def read_pieces(pieces: list[bytes], *, is_cut: bool = False) -> Trace:
    """What a reply is understood as that comes in exactly these packets."""
    ours, theirs = socket.socketpair()
    buffer = memoryview(bytearray(BUFFER_BYTES))
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(buffer), sock=ours)
    trace = Trace(0, 0.0)
    reader = EventReader(trace)
    exchange = asyncio.create_task(connection.exchange(b"GET", reader))
    await asyncio.sleep(0)
    for piece in pieces:
        buffer[: len(piece)] = piece
        connection.buffer_updated(len(piece))
    if is_cut:
        theirs.recv(3)
        theirs.close()
    await asyncio.wait_for(exchange, 10)
    reader.conclude()
    theirs.close()
    connection.close()
    return trace


SPACED = tuple(each.replace(b'":', b'": ').replace(b"\n", b"\r\n") for each in COMPLETION)


@pytest.mark.parametrize("events", [COMPLETION, CHAT, SPACED], ids=["completion", "chat", "spaced"])
@given(data=st.data())
def test_counts_do_not_depend_on_packets_or_chunks(events: tuple[bytes, ...], data: st.DataObject) -> None:
    def cut(content: bytes, where: set[int]) -> list[bytes]:
        edges = [0, *sorted(where), len(content)]
        return [content[start:end] for start, end in pairwise(edges)]

    body = b"".join(events)
    positions = st.sets(st.integers(1, len(body) - 1), max_size=12)
    reply = STREAM + b"".join(map(chunk, cut(body, data.draw(positions)))) + END
    pieces = cut(reply, data.draw(st.sets(st.integers(1, len(reply) - 1), max_size=12)))
    trace = asyncio.run(read_pieces(pieces))
    assert (trace.error, trace.message) == (None, "")
    assert (trace.num_events, sum(trace.counts)) == (4, 4)
    assert (trace.num_tokens, trace.num_prompt_tokens) == (4, 5)
    assert len(trace.times) == len(trace.counts) <= min(4, len(pieces))
    assert list(trace.times) == sorted(trace.times)


def test_tokens_that_come_together_are_one_arrival() -> None:
    pieces = [STREAM + chunk(token()), chunk(token(), token()) + chunk(token()), chunk(token("x", "stop"), DONE) + END]
    trace = asyncio.run(read_pieces(pieces))
    assert list(trace.counts) == [1, 3, 1]
    assert trace.num_output_tokens is None
    assert trace.num_tokens == 5


def test_a_server_that_counts_in_each_event_is_believed() -> None:
    counted = [
        event(choices=[{"text": "x", "finish_reason": None}], usage={"prompt_tokens": 5, "completion_tokens": number})
        for number in (1, 4, 5, 9)
    ]
    reply = [STREAM + chunk(counted[0]), chunk(counted[1]), chunk(*counted[2:]), chunk(usage(9), DONE) + END]
    trace = asyncio.run(read_pieces(reply))
    assert list(trace.counts) == [1, 3, 5]
    assert (trace.num_events, trace.num_tokens) == (4, 9)


def test_a_reply_may_have_a_length_or_end_with_the_connection() -> None:
    body = b"".join(COMPLETION)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    sized = head + b"content-length: %d\r\n\r\n" % len(body)
    assert asyncio.run(read_pieces([sized + body[:50], body[50:]])).num_tokens == 4
    assert asyncio.run(read_pieces([head + b"\r\n" + body], is_cut=True)).num_tokens == 4


@pytest.mark.parametrize("reply", [b"SSH-2.0-x\r\n\r\n", STREAM + b"zz\r\n", STREAM + b"-2\r\n", b"x" * 70_000])
def test_what_is_not_http_is_an_error(reply: bytes) -> None:
    with pytest.raises(ConnectionResetError, match="no valid HTTP"):
        asyncio.run(read_pieces([reply]))


def test_chunks_are_split_off_as_a_whole() -> None:
    assert split_chunks(b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\nrest") == (b"abcde", b"rest", True)
    assert split_chunks(b"3\r\nabc\r\nA\r\nd") == (b"abc", b"A\r\nd", False)
    assert split_chunks(b"3\r\nabc\r") == (b"", b"3\r\nabc\r", False)


def test_addresses() -> None:
    endpoint = Endpoint.parse("https://host.example/api/v1/", "secret")
    assert str(endpoint) == "https://host.example:443/api"
    head, body = endpoint.request("/v1/completions", {"prompt": [1, 2]}).split(b"\r\n\r\n")
    assert head.startswith(b"POST /api/v1/completions HTTP/1.1\r\nHost: host.example:443\r\n")
    assert b"\r\nAuthorization: Bearer secret" in head
    assert body == b'{"prompt":[1,2]}'
    assert str(Endpoint.parse("http://[::1]:8000")) == "http://[::1]:8000"
    assert "secret" not in str(endpoint)


# --- figures ------------------------------------------------------------------------------------------------


def make_trace(start: float, times: list[float], counts: list[int], **fields: Any) -> Trace:
    end = fields.pop("end", times[-1] if times else start)
    num_events = sum(counts)
    return Trace(0, start, 0.0, end, array("d", times), array("L", counts), num_events, **fields)


def test_arrivals_within_a_millisecond_are_one_packet() -> None:
    traces = [make_trace(0.0, [1.0, 1.0001, 1.0009, 1.02, 1.0201], [1] * 5), make_trace(0.0, [1.0], [1])]
    figures = Figures.of(Measured(traces, 0.25, 0.5))
    assert figures.gap is not None
    assert figures.gap.p50 < 0.001
    assert figures.packet_gap is not None
    assert figures.packet_gap.max == pytest.approx(0.02)


def test_figures_of_a_known_run() -> None:
    traces = [
        make_trace(0.0, [0.5, 1.5, 3.5], [1, 1, 4], num_prompt_tokens=10, num_output_tokens=6, end=4.0),
        make_trace(1.0, [1.25, 1.75], [2, 1], num_prompt_tokens=20, num_output_tokens=3),
        make_trace(2.0, [9.0, 10.0], [1, 1], error=INTERRUPTED),
        make_trace(2.0, [9.0], [5], error="HTTP 500", message="first"),
        make_trace(2.5, [], [], error="HTTP 500", message="second"),
        make_trace(2.5, [], [], error="timeout"),
    ]
    figures = Figures.of(Measured(traces, 0.25, 0.5), Limits(ttft=0.3))
    assert (figures.num_requests, figures.num_answered, figures.num_interrupted) == (6, 2, 1)
    assert figures.errors == [Errors("HTTP 500", 2, "first"), Errors("timeout", 1, "")]
    assert figures.seconds == 10.0
    assert (figures.num_prompt_tokens, figures.num_output_tokens) == (30, 6 + 3 + 2)
    assert (figures.output_per_second, figures.total_per_second) == (1.1, 4.1)
    assert (figures.requests_per_second, figures.good_per_second) == (0.2, 0.1)
    assert figures.ttft is not None
    assert (figures.ttft.p50, figures.ttft.max) == (0.375, 0.5)
    assert figures.itl is not None
    assert figures.itl.mean == pytest.approx((1.0 + 4 * 0.5 + 0.5) / 6)  # 2 s for 4 tokens count as 0.5 s four times
    assert (figures.itl.p50, figures.itl.max) == (0.5, 1.0)
    assert figures.gap is not None
    assert (figures.gap.p50, figures.gap.max) == (1.0, 2.0)
    assert figures.packet_gap == figures.gap
    assert figures.tpot is not None
    assert (figures.tpot.max, figures.tpot.mean) == (0.6, 0.55)
    assert figures.latency is not None
    assert (figures.latency.p50, figures.latency.max) == (2.375, 4.0)
    assert (figures.cpu_share, figures.lateness) == (0.25, None)


def test_percentiles() -> None:
    traces = [make_trace(0.0, [float(number)], [1]) for number in range(101)]
    ttft = Figures.of(Measured(traces)).ttft
    assert ttft is not None
    assert (ttft.p50, ttft.p90, ttft.p99, ttft.max, ttft.mean) == (50.0, 90.0, 99.0, 100.0, 50.0)


def test_no_traces_are_no_figures() -> None:
    figures = Figures.of(Measured())
    assert (figures.num_requests, figures.output_per_second, figures.ttft, figures.itl) == (0, 0.0, None, None)


def test_rates_over_time() -> None:
    traces = [make_trace(10.0, [10.5, 11.5, 13.9], [2, 3, 1]), make_trace(10.2, [10.6], [4])]
    middles, rates = find_rates(traces, width=2.0)
    assert (middles.tolist(), rates.tolist()) == ([1.0, 3.0], [4.5, 0.5])


# --- what is sent, and when ---------------------------------------------------------------------------------


def test_prompts_are_repeatable_and_share_what_they_shall() -> None:
    work, same = (
        Work(model="m", input_len=12, prefix_len=8, vocab_size=50, seed=3, fields={"top_k": 5}) for _ in range(2)
    )
    bodies = [work.body(index) for index in range(20)]
    assert bodies == [same.body(index) for index in range(20)]
    prompts = [body["prompt"] for body in bodies]
    assert {len(prompt) for prompt in prompts} == {12}
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 20
    assert max(map(max, prompts)) < 50
    assert work.body(-1)["prompt"] not in prompts
    assert Work(input_len=12, prefix_len=8, vocab_size=50, seed=4).body(0)["prompt"][:8] != prompts[0][:8]
    rest = {name: value for name, value in bodies[0].items() if name != "prompt"}
    assert rest == {"model": "m", "max_tokens": 128, "stream": True, "top_k": 5}


def test_chats_are_made_of_words() -> None:
    work = Work(input_len=9, is_chat=True)
    (message,) = work.body(0)["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 9
    assert work.path == "/v1/chat/completions"


def test_arrivals_are_random_and_repeatable() -> None:
    load = Load(rate=50.0, requests=4000)
    times = list(load.arrivals(seed=1))
    assert times == list(load.arrivals(seed=1)) != list(load.arrivals(seed=2))
    gaps = [after - before for before, after in pairwise(times)]
    assert times[-1] == pytest.approx(80.0, rel=0.1)
    assert sum(gap < 0.02 for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.05)  # 1 - 1/e: exponential
    limited = list(Load(rate=50.0, seconds=2.0).arrivals(seed=1))
    assert limited == [time for time in times if time <= 2.0]
    assert list(Load(burst=3).arrivals(seed=1)) == [0.0] * 3


def test_loads_and_work_say_what_they_are() -> None:
    assert str(Load(streams=1, requests=2000)) == "1 stream, 2,000 requests"
    assert str(Load(rate=2.5, requests=1, seconds=9)) == "2.5 requests/s, 1 request, 9 s"
    assert str(Load(burst=256)) == "256 requests at once"
    assert str(Work(input_len=9, prefix_len=3)) == "9 tokens in (3 shared), 128 out"


def test_a_load_needs_an_end() -> None:
    with pytest.raises(InvalidValueError, match="the load has no end"):
        Load(streams=1)
