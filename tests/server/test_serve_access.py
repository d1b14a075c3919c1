"""Keys: who gets in, whose turn it is, and what tenants see of each other."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import openai
import pytest
from server_driver import Server, check_error, serving, wait_until

from infinilm.cli.main import run

ONE, TWO = "key-of-the-first", "key-of-the-second"


@pytest.fixture(scope="module")
def server(long_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One row, and room for six requests or 1,000 tokens."""
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(f"{TWO}\n")
    limits = ("max_requests=6", "max_total_tokens=1000", "max_connections=40", "read_timeout=1")
    options = [*(f"--limit={limit}" for limit in limits), "--api-key-file", str(keys)]
    with serving(long_dir, "--max-num-seqs", "1", "--host", "0.0.0.0", *options, key=ONE) as running:
        running.url = running.url.replace("0.0.0.0", "127.0.0.1")
        running.http.base_url = running.url
        yield running


def ask(server: Server, key: str, **body: object) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", **body}, headers=headers, timeout=30)


def test_every_route_but_the_sign_of_life_needs_a_key(server: Server) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    asked = [(path, method) for path, methods in paths.items() for method in methods]
    assert len(asked) > 9
    for path, method in [*asked, ("/openapi.json", "get"), ("/nothing", "get"), ("/metrics/", "get")]:
        response = httpx.request(method, f"{server.url}{path}")
        if path == "/health/live":
            assert response.status_code == 200
        else:
            error = check_error(response, 401)
            assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
    assert httpx.get(f"{server.url}/").status_code != 401


@pytest.mark.parametrize("header", ["", "Bearer", f"Basic {ONE}", f"Bearer {ONE}x", f"Bearer {ONE[:-1]}", ONE])
def test_other_keys_are_refused(server: Server, header: str) -> None:
    check_error(httpx.get(f"{server.url}/v1/models", headers={"Authorization": header}), 401)


def test_both_keys_open(server: Server) -> None:
    for key in (ONE, TWO):
        assert ask(server, key, max_tokens=1).status_code == 200
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_tenants_do_not_share_the_prefix_cache(server: Server) -> None:
    def cached(key: str) -> int:
        return ask(server, key, prompt="z" * 100, max_tokens=1).json()["timings"]["cached_tokens"]

    assert [cached(ONE), cached(ONE), cached(TWO), cached(TWO)] == [0, 96, 0, 96]


def test_too_many_tokens_and_requests_are_refused(server: Server) -> None:
    too_many = asyncio.run(_ask_together(server, [(ONE, 150)] * 12, pause=0))
    codes = [response.status_code for response in too_many]
    assert sorted(codes) == [200] * 6 + [429] * 6
    refused = next(response for response in too_many if response.status_code == 429)
    error = check_error(refused, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "server_full")
    assert "max_requests=6" in error["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    too_long = asyncio.run(_ask_together(server, [(ONE, 400)] * 4, pause=0))
    assert sorted(response.status_code for response in too_long) == [200, 200, 429, 429]
    assert "max_total_tokens=1000" in check_error(next(r for r in too_long if r.status_code == 429), 429)["message"]
    wait_until(server.is_empty)


def test_tenants_take_turns(server: Server) -> None:
    """One sends four requests, then another sends one: it does not wait for all four."""
    order: list[str] = []
    asyncio.run(_ask_together(server, [(ONE, 150)] * 5 + [(TWO, 50)], order, pause=0.005))
    assert order.index(TWO) < 5


async def _ask_together(
    server: Server, asked: list[tuple[str, int]], order: list[str] | None = None, pause: float = 0.03
) -> list[httpx.Response]:
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:

        async def one(index: int, key: str, max_tokens: int) -> httpx.Response:
            await asyncio.sleep(pause * index)  # they come in this order
            body = {"prompt": "a", "max_tokens": max_tokens, "ignore_eos": True}
            response = await client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
            if order is not None:
                order.append(key)
            return response

        return await asyncio.gather(*(one(index, *pair) for index, pair in enumerate(asked)))


@pytest.fixture
def connect(server: Server) -> Iterator[Callable[[], socket.socket]]:
    """Opens connections, which are closed again."""
    host, port = server.url.removeprefix("http://").split(":")
    with ExitStack() as opened:
        yield lambda: opened.enter_context(socket.create_connection((host, int(port)), timeout=10))


def test_requests_that_never_end_are_cut_off(connect: Callable[[], socket.socket]) -> None:
    silent, slow_head, slow_body = connect(), connect(), connect()
    slow_head.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ONE}\r\n"
    slow_body.sendall(head.encode() + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
    assert slow_body.recv(4096).startswith(b"HTTP/1.1 408 ")
    for connection in (silent, slow_head):
        with suppress(ConnectionResetError):
            assert connection.recv(4096) == b""


def test_settings_that_are_refused(
    long_dir: Path, tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(*options: str) -> str:
        """What `infinilm serve` says before it ends."""
        assert run(["serve", *options]) == 2
        return capsys.readouterr().err

    model = str(long_dir)
    assert "there is no API key" in refusal(model, "--host", "0.0.0.0")
    assert "8 or more" in refusal(model, "--api-key", "short")
    assert "can't be read" in refusal(model, "--api-key-file", str(tmp_path / "none"))
    assert "unknown limit 'max_m'" in refusal(model, "--limit", "max_m=3")
    assert "max_n='x' must be a number" in refusal(model, "--limit", "max_n=x")
    assert "num_kvcache_blocks=1000000000000 needs" in refusal(
        model, "--num-kvcache-blocks", "1000000000000", "--port", "0"
    )
    port = server.url.rpartition(":")[2]
    assert "is another program using it?" in refusal(model, "--port", port)
