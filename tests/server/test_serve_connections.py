"""Hostile bytes on a connection: they are refused within bounds of memory and time, and others are served meanwhile."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from server_driver import Server, check_error, read_all, serving, wait_until

KEY = "key-of-a-client"
MIB = 1 << 20
LIVE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
POST = (
    f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    "Content-Type: application/json\r\n"
).encode()
BODY = b'{"prompt": "a", "max_tokens": 2, "ignore_eos": true}'
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)


@pytest.fixture(scope="module")
def server(long_dir: Path) -> Iterator[Server]:
    limits = (
        "max_connections=40",
        "read_timeout=1",
        "write_timeout=1",
        "max_body_bytes=200000",
        "max_total_body_bytes=1000000",
    )
    with serving(long_dir, *(f"--limit={limit}" for limit in limits), key=KEY) as running:
        yield running


@pytest.fixture(autouse=True)
def neighbour_is_served(server: Server) -> Iterator[None]:
    yield
    wait_until(lambda: server.http.get("/health").status_code == 200)
    assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
    wait_until(server.is_empty)
    assert not [line for line in server.log if "Traceback" in line or " ERROR " in line]


@pytest.fixture
def connect(server: Server) -> Iterator[Callable[[], socket.socket]]:
    with ExitStack() as opened:
        yield lambda: opened.enter_context(server.connect())


def memory(server: Server) -> int:
    """Bytes that the HTTP process holds."""
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


def status_of(response: bytes) -> int:
    assert response.startswith(b"HTTP/1.1 "), response[:100]
    return int(response[9:12])


def send_until_cut(connection: socket.socket, head: bytes, piece: bytes, num_bytes: int) -> int:
    """Send until the server cuts the connection; how many bytes it took."""
    num_sent = 0
    with suppress(ConnectionError):
        connection.sendall(head)
        while num_sent < num_bytes:
            connection.sendall(piece)
            num_sent += len(piece)
    return num_sent


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (LIVE + CHUNKED + b"0\r\n", (b"x: " + b"y" * 1000 + b"\r\n") * 256),
        (LIVE + CHUNKED + b"0\r\nx: ", b"y" * (1 << 18)),
        (LIVE + CHUNKED + b"1;", b"y" * (1 << 18)),
        (LIVE + CHUNKED, (b"1;" + b"y" * 1000 + b"\r\na\r\n") * 256),
        (LIVE + CHUNKED, b"1\r\na\r\n" * 40_000),
        (LIVE + CHUNKED, b"40000\r\n" + b"a" * (1 << 18) + b"\r\n"),
        (LIVE + b"x: ", b"y" * (1 << 18)),
        (LIVE, b"x:\r\n" * (1 << 16)),
        (b"GET /", b"y" * (1 << 18)),
        (LIVE + b"\r\n", b"\r\n" * (1 << 17)),
        (LIVE + b"\r\n", (LIVE + b"\r\n") * 5000),
        (POST + CHUNKED + b"0\r\n", (b"x: " + b"y" * 1000 + b"\r\n") * 256),
    ],
    ids=[
        *("trailers", "one trailer", "one extension", "extensions", "tiny chunks", "large chunks", "one header"),
        *("headers", "url", "empty lines", "pipelined requests", "trailers with a key"),
    ],
)
def test_endless_input_is_bounded_in_memory(server: Server, connect: object, head: bytes, piece: bytes) -> None:
    """200 MiB are sent, or as much as the server takes. Meanwhile the next connection is answered."""
    before = memory(server)
    with server.connect() as connection:
        connection.settimeout(1)
        with suppress(TimeoutError):
            send_until_cut(connection, head, piece, 200 * MIB)
        assert httpx.get(f"{server.url}/health/live", timeout=10).status_code == 200
        assert memory(server) - before < 24 * MIB


def test_input_beyond_a_limit_is_named(server: Server) -> None:
    trailers = server.talk(POST + CHUNKED + b"2\r\n{}\r\n0\r\n" + b"x: %s\r\n" % (b"y" * 400) * 1000)
    assert status_of(trailers) == 431
    assert b"max_header_bytes" in trailers
    assert b"x-request-id: " in trailers
    many = server.talk(LIVE + b"x: y\r\n" * 200 + b"\r\n")
    assert status_of(many) == 431
    assert b"max_headers" in many
    large = server.talk(POST + CHUNKED + b"40000\r\n" + b" " * 0x40000 + b"\r\n0\r\n\r\n")
    assert status_of(large) == 413
    assert b"max_body_bytes" in large


def test_trailers_and_extensions_of_usual_size_are_ignored(server: Server) -> None:
    body = b"".join(b"%x;name=value\r\n%c\r\n" % (1, byte) for byte in BODY) + b"0\r\nDigest: x\r\nHost: y\r\n\r\n"
    response = server.talk(POST + b"Connection: close\r\n" + CHUNKED + body)
    assert status_of(response) == 200
    assert b'"completion_tokens":2' in response


def test_a_refusal_reaches_a_client_that_is_still_sending(server: Server) -> None:
    for _ in range(5):
        with httpx.Client(base_url=server.url, timeout=20) as client:
            response = client.post("/v1/completions", content=b" " * (20 * MIB), headers=server.headers)
            assert check_error(response, 413)["code"] == "body_too_large"
            pieces = (b" " * MIB for _ in range(20))
            headers = {**server.headers, "Content-Type": "application/json"}
            response = client.post("/v1/completions", content=pieces, headers=headers)
            assert check_error(response, 413)["code"] == "body_too_large"
            response = client.post("/v1/completions", content=b" " * (20 * MIB))
            assert check_error(response, 401)["code"] == "invalid_api_key"


def test_read_timeout_bounds_the_whole_body(server: Server) -> None:
    """A byte every 0.2 s is in time for each read, but not for the body."""
    with server.connect() as connection:
        connection.sendall(POST + CHUNKED)
        start = time.monotonic()
        connection.settimeout(0.2)
        received = b""
        while not received and time.monotonic() - start < 15:
            connection.sendall(b"1\r\n \r\n")
            with suppress(TimeoutError):
                received = connection.recv(4096)
        assert status_of(received) == 408
        assert b"read_timeout" in received


def test_slow_headers_are_cut_off(connect: Callable[[], socket.socket]) -> None:
    """All at once: a piece every 0.1 s, at the start of a connection, within headers, and after a request."""
    trickles = {
        connect(): (head, piece)
        for head in (b"", LIVE, LIVE + b"\r\n")
        for piece in (b"x", b"\r\n", b"x: y\r\n", b"\r")
        if (head, piece) != (LIVE, b"\r\n")  # a whole request
    }
    for connection, (head, _) in trickles.items():
        connection.sendall(head)
        connection.setblocking(False)
    deadline = time.monotonic() + 15
    while trickles:
        assert time.monotonic() < deadline, trickles.values()
        time.sleep(0.1)
        for connection, (_, piece) in list(trickles.items()):
            try:
                connection.sendall(piece)
                is_open = connection.recv(4096) != b""
            except BlockingIOError:
                is_open = True
            except ConnectionError:
                is_open = False
            if not is_open:
                del trickles[connection]


def test_a_client_that_reads_nothing_is_cut_off(server: Server) -> None:
    """It pipelines requests for a page and reads no response."""
    page = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n\r\n" % KEY.encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(server.connect().getpeername())
        connection.settimeout(0.5)
        start = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() - start < 15:
                with suppress(TimeoutError):
                    connection.sendall(page)
                time.sleep(0.01)
            pytest.fail("the connection is still open")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (POST + b"Connection: close\r\nContent-Length: " + b"0" * 5000 + b"\r\n\r\n", 400),
        (POST + b"Connection: close\r\nContent-Length: 0 \r\n\r\n", 400),
        (POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", 400),
        (POST + b"Content-Length: 99999999999999999\r\n\r\n", 413),
        (POST + b"Content-Length: -1\r\n\r\n", 400),
        (POST + b"Content-Length: +5\r\n\r\n", 400),
        (POST + b"Content-Length: 1_0\r\n\r\n", 400),
        (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
        (POST + b"Content-Length: 2\r\n" + CHUNKED + b"2\r\n{}\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: gzip, chunked\r\nContent-Length: 2\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: identity\r\n\r\n{}", 400),
        (POST + CHUNKED + b"zz\r\n", 400),
        (POST + CHUNKED + b"-1\r\n{}\r\n0\r\n\r\n", 400),
        (POST + CHUNKED + b"fffffffffffffffff\r\n", 400),
        (POST + CHUNKED + b"2\r\n{}xx", 400),
        (POST + CHUNKED + b"2\r\n{}\r\n0\r\n\x00: y\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: local\x00host\r\n\r\n", 400),
        (b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", 400),
        (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET http:// HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)), 400),
    ],
    ids=lambda value: repr(value[-40:]) if isinstance(value, bytes) else None,
)
def test_bad_http_gets_a_4xx(server: Server, data: bytes, status: int) -> None:
    response = server.talk(data)
    assert status_of(response) == status
    assert b'{"error":{"message":"' in response
    assert response.count(b"HTTP/1.1 ") == 1


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    bodies = [BODY.replace(b"2", b"%d" % count) for count in (30, 2, 3)]
    last = POST + b"Connection: close\r\n" + LENGTH + bodies[2]
    response = server.talk(
        POST + b"Content-Length: %d\r\n\r\n" % len(bodies[0]) + bodies[0] + POST + LENGTH + bodies[1] + last
    )
    assert [int(part.split(b",")[0]) for part in response.split(b'"completion_tokens":')[1:]] == [30, 2, 3]


@pytest.mark.parametrize(
    "garbage",
    [
        b"nonsense\r\n\r\n",
        POST + CHUNKED + b"zz\r\n",
        LIVE + b"x: " + b"y" * 40_000 + b"\r\n\r\n",
        (LIVE + b"\r\n") * 99,
    ],
    ids=["head", "body", "headers", "crowd"],
)
def test_garbage_after_a_request_does_not_damage_its_response(server: Server, garbage: bytes) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 300, "ignore_eos": True, "stream": True}).encode()
    response = server.talk(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body + garbage)
    first, _, rest = response.partition(b"data: [DONE]\n\n")
    assert first.count(b"HTTP/1.1 ") == 1
    assert first.count(b'"finish_reason":"length"') == 1
    assert rest.startswith(b"\r\n0\r\n\r\n")
    assert set(rest.split(b"HTTP/1.1 ")[1:]) <= {part for part in rest.split(b"HTTP/1.1 ")[1:] if part[:3] == b"200"}


def test_a_client_that_leaves_with_requests_pipelined_frees_its_blocks(server: Server) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True}).encode()
    with server.connect() as connection:
        connection.sendall((POST + b"Content-Length: %d\r\n\r\n" % len(body) + body) * 3)
        assert status_of(connection.recv(4096)) == 200
    wait_until(server.is_empty, 5)


def test_http_1_0_streams_without_chunks(server: Server) -> None:
    body = BODY.replace(b"}", b', "stream": true}')
    head = POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Content-Length: %d\r\n\r\n" % len(body)
    head, _, text = server.talk(head + body).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert text.startswith(b"data: {")
    assert text.endswith(b"data: [DONE]\n\n")
    whole = server.talk(POST.replace(b"HTTP/1.1", b"HTTP/1.0") + LENGTH + BODY)
    assert json.loads(whole.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 2


def test_a_client_that_expects_to_continue(server: Server) -> None:
    """It sends a body only after it was told so; for one that is too large it is not."""
    with server.connect() as connection:
        connection.sendall(POST + b"Expect: 100-continue\r\nConnection: close\r\n" + LENGTH)
        assert status_of(connection.recv(4096)) == 100
        connection.sendall(BODY)
        assert status_of(read_all(connection)) == 200
    assert status_of(server.talk(POST + b"Expect: 100-continue\r\nContent-Length: 999999\r\n\r\n")) == 413


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_an_upgrade_is_not_taken(server: Server, protocol: bytes) -> None:
    upgrade = b"Upgrade: %s\r\nConnection: Upgrade, close\r\n" % protocol
    assert status_of(server.talk(LIVE + upgrade + b"\r\n")) == 200
    response = server.talk(POST + upgrade + LENGTH + BODY)
    assert status_of(response) == 200
    assert b'"completion_tokens":2' in response
    with server.connect() as connection:
        connection.sendall(POST + upgrade + CHUNKED)
        connection.sendall(b"%x\r\n" % len(BODY))
        connection.sendall(BODY + b"\r\n0\r\n\r\n")
        assert status_of(read_all(connection)) == 200


def test_the_sign_of_life_is_answered_when_connections_are_full(
    server: Server, connect: Callable[[], socket.socket]
) -> None:
    streams = [connect() for _ in range(40)]
    body = json.dumps({"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True}).encode()
    for stream in streams:
        stream.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    for stream in streams:
        assert status_of(stream.recv(12)) == 200
    crowd = [connect() for _ in range(500)]
    for _ in range(3):
        refused = httpx.get(f"{server.url}/v1/models", headers=server.headers)
        assert check_error(refused, 503)["code"] == "too_many_connections"
        response = httpx.get(f"{server.url}/health/live")
        assert response.status_code == 200
        assert response.headers["connection"] == "close"
    for stream in streams:
        stream.setblocking(False)
        assert stream.recv(1)  # not one of them was cut off
    for connection in crowd:
        connection.close()


def test_idle_connections_make_room_for_new_ones(server: Server, connect: Callable[[], socket.socket]) -> None:
    crowd = [connect() for _ in range(300)]
    for connection in crowd[::2]:
        with suppress(ConnectionError):
            connection.sendall(LIVE)
    for _ in range(3):
        assert httpx.get(f"{server.url}/v1/models", headers=server.headers).status_code == 200


@pytest.mark.parametrize("num_bytes", [5, len(POST), len(POST + LENGTH), len(POST + LENGTH) + 9, None])
@pytest.mark.parametrize("is_reset", [False, True])
def test_clients_that_leave_in_any_phase_leave_nothing(server: Server, num_bytes: int | None, is_reset: bool) -> None:
    for _ in range(50):
        with server.connect() as connection:
            if is_reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            connection.sendall((POST + LENGTH + BODY)[:num_bytes])
    wait_until(server.is_empty, 5)
    wait_until(lambda: len(list(Path(f"/proc/{server.pid}/fd").iterdir())) < 30)


def test_the_bodies_of_all_requests_together_are_bounded(server: Server, connect: Callable[[], socket.socket]) -> None:
    """Eight clients hold back the end of their bodies; the limit is 1 MB. Then they leave."""
    crowd = [connect() for _ in range(8)]
    for connection in crowd:
        with suppress(ConnectionError):
            connection.sendall(POST + b"Content-Length: 190000\r\n\r\n" + b" " * 180_000)
    responses = []
    for connection in crowd:
        response = connection.recv(4096)
        responses.append((status_of(response), b"max_total_body_bytes" in response))
    assert {(503, True), (408, False)} == set(responses)


def test_connections_fit_the_open_files() -> None:
    code = (
        "import resource as r, sys; r.setrlimit(r.RLIMIT_NOFILE, (200, 1000))\n"
        "from infinilm.server.run import fit_open_files\n"
        "print(fit_open_files(500), r.getrlimit(r.RLIMIT_NOFILE)[0], fit_open_files(2000))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split() == ["500", "660", "840"]
    assert "max_connections=2000 needs 2160 open files" in found.stderr


def test_half_closed_connections_are_closed(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(POST + LENGTH[:10])
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""


def test_request_ids(server: Server) -> None:
    assert (
        server.http.get("/health/live", headers={"X-Request-Id": "mine.1-2_3:4"}).headers["x-request-id"]
        == "mine.1-2_3:4"
    )
    for other in ("", "a b", "ä", "x" * 129, "a\tb", "%0a"):
        made = server.http.get("/nothing", headers={b"X-Request-Id": other.encode()}).headers["x-request-id"]
        assert len(made) == 16
        assert made != other
