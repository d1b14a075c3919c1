"""Clients that leave, engines that die, signals: every request is answered or cleanly cut, and nothing stays behind."""

import asyncio
import json
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoints import make_reference, save
from processes import children, ranks
from server_driver import Server, check_error, is_engine, runs, serving, wait_until
from tiny_tokenizer import save_tokenizer

LONG = {"prompt": "Once upon a time", "max_tokens": 8000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server(long_dir: Path) -> Iterator[Server]:
    limits = ("--limit", "write_timeout=0.5", "--limit", "drain_timeout=2")
    with serving(long_dir, "--num-kvcache-blocks", "4096", *limits) as running:
        yield running


def lines_of(response: httpx.Response) -> list[str]:
    return [line for line in response.iter_lines() if line]


def test_a_grammar_bomb_as_the_first_request_is_refused_in_time(server: Server) -> None:
    """What tries it out is there before anybody asks for a form, and is there again afterwards."""
    wait_until(lambda: trial_processes(server.engine_pid), 30)
    bomb = {"patternProperties": {f"^p{i}x.*$": {"maxLength": i} for i in range(1000)}}
    start = time.monotonic()
    assert "longer than 1.6 s" in server.error("/v1/completions", 400, prompt="a", guided_json=bomb)["message"]
    assert time.monotonic() - start < 10  # two seconds, but the machine may be busy with other things
    wait_until(lambda: trial_processes(server.engine_pid), 30)  # the one that tried it out was killed before the reply


def trial_processes(engine: int) -> list[int]:
    return [pid for pid in children(engine) if runs(pid, b"infinilm.structured.trial_process")]


def test_a_client_that_leaves_frees_its_blocks(server: Server) -> None:
    before = server.metrics()["infinilm_output_tokens_total"]
    with server.http.stream("POST", "/v1/completions", json=LONG) as response:
        lines = response.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["choices"]
        wait_until(lambda: server.metrics()["infinilm_kv_blocks_used"] > 0)
    wait_until(server.is_empty, 2)
    found = server.metrics()
    assert found['infinilm_requests_total{outcome="disconnected"}'] == 1
    assert found["infinilm_output_tokens_total"] - before < 4000


def test_a_client_that_leaves_without_streaming_frees_its_blocks(server: Server) -> None:
    before = server.metrics()['infinilm_requests_total{outcome="disconnected"}']
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={**LONG, "stream": False}, timeout=0.4)
    wait_until(server.is_empty, 2)
    assert server.metrics()['infinilm_requests_total{outcome="disconnected"}'] == before + 1


def test_a_reader_who_does_not_read_is_cut_off_and_holds_up_nobody(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(as_request(json.dumps({**LONG, "n": 16, "logprobs": 20}).encode()))
        wait_until(lambda: not server.is_empty())
        quick = server.post("/v1/completions", prompt="a", max_tokens=3, ignore_eos=True).json()
        assert quick["usage"]["completion_tokens"] == 3
        wait_until(server.is_empty, 20)


def test_a_deadline_ends_a_request(server: Server) -> None:
    error = server.error("/v1/completions", 408, **{**LONG, "stream": False}, timeout=0.3)
    assert (error["code"], error["type"]) == ("timeout", "timeout_error")
    with server.http.stream("POST", "/v1/completions", json={**LONG, "timeout": 0.3}) as response:
        assert response.status_code == 200
        last = lines_of(response)[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    wait_until(server.is_empty, 2)


def test_500_clients_of_which_half_leave(server: Server) -> None:
    rng = random.Random(1)
    plans = [(rng.randint(1, 30), rng.random() * 2 if rng.random() < 0.5 else None) for _ in range(500)]
    num_served = asyncio.run(_visit_all(server.url, plans))
    assert num_served == sum(leaves is None for _, leaves in plans)
    wait_until(server.is_empty, 5)
    wait_until(lambda: len(list(Path(f"/proc/{server.pid}/fd").iterdir())) < 60)
    assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200


async def _visit_all(url: str, plans: list[tuple[int, float | None]]) -> int:
    host, port = url.removeprefix("http://").split(":")
    return sum(await asyncio.gather(*(_visit(host, int(port), *plan) for plan in plans)))


async def _visit(host: str, port: int, num_tokens: int, leaves_after: float | None) -> bool:
    """Ask for some tokens and read them all; or for many, and leave."""
    is_stream = num_tokens % 2 == 0
    body = {**LONG, "stream": is_stream, "max_tokens": 8000 if leaves_after else num_tokens, "prompt": "a" * num_tokens}
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(as_request(json.dumps(body).encode()))
        async with asyncio.timeout(leaves_after):
            head, _, text = (await reader.read()).partition(b"\r\n\r\n")
    except TimeoutError:
        assert leaves_after is not None
        return False
    finally:
        writer.transport.abort()
    assert head.startswith(b"HTTP/1.1 200 ")
    if is_stream:
        assert b"data: [DONE]" in text
        assert text.count(b'"finish_reason":"length"') == 1
    else:
        assert json.loads(text)["usage"]["completion_tokens"] == num_tokens
    return True


def as_request(body: bytes) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + body


def test_a_grammar_that_fails_at_work_fails_alone(server: Server) -> None:
    """Its rows grow with every token, until they are too long."""
    grammar = "start: s\ns: s s s s s s | A |\nA: /[a-z]/"
    body = {"prompt": "a", "guided_grammar": grammar, "min_tokens": 200, "max_tokens": 400}
    with server.http.stream("POST", "/v1/completions", json=LONG) as other:
        lines = other.iter_lines()
        next(lines)
        whole = server.error("/v1/completions", 500, **body)
        streamed = server.post("/v1/completions", **body, stream=True)
        first, *_, last = (json.loads(x.removeprefix("data: ")) for x in streamed.text.strip().split("\n\n"))
        assert first["choices"][0]["text"].isalpha()
        for error in (whole, last["error"]):
            assert error["code"] == "engine_error"
            assert "can't continue with this grammar" in error["message"]
        fine = server.post("/v1/completions", prompt="a", guided_choice=["fine"]).json()["choices"][0]
        assert (fine["text"], fine["finish_reason"]) == ("fine", "stop")
        assert json.loads([line for line, _ in zip(lines, range(50), strict=False) if line][-1][6:])["choices"]
    wait_until(server.is_empty, 2)


def test_an_engine_that_is_killed_is_named_and_started_again(server: Server) -> None:
    engine = server.engine_pid
    with server.http.stream("POST", "/v1/completions", json=LONG) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(engine, signal.SIGKILL)
        *_, last = [line for line in lines if line]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "engine_died"
    assert "SIGKILL" in error["message"]
    assert server.http.get("/health/live").status_code == 200
    health = server.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "restarting")
    assert "SIGKILL" in health.json()["cause"]
    refused = server.post("/v1/completions", prompt="a", max_tokens=1)
    assert "SIGKILL" in check_error(refused, 503)["message"]
    assert int(refused.headers["retry-after"]) >= 1
    wait_until(server.is_ready, 30)
    assert server.engine_pid != engine
    assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
    assert server.metrics()["infinilm_engine_restarts_total"] == 1
    assert server.is_empty()


def test_sigterm_lets_requests_finish_and_refuses_new_ones(server: Server) -> None:
    """The last of this module: the server is gone afterwards."""
    engine = server.engine_pid
    with (
        httpx.Client(base_url=server.url, timeout=20) as other,
        server.http.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 100}) as short,
        other.stream("POST", "/v1/completions", json=LONG) as endless,
    ):
        assert short.status_code == endless.status_code == 200
        server.terminate()
        time.sleep(0.2)
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
        assert check_error(refused, 503)["code"] == "shutting_down"
        assert httpx.get(f"{server.url}/health/ready").json()["status"] == "draining"
        assert lines_of(short)[-1] == "data: [DONE]"
        last: Any = lines_of(endless)[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert server.wait() == 0
    wait_until(lambda: not is_engine(engine), 5)


@pytest.fixture(scope="module")
def shared_out(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose engine is three processes."""
    directory = tmp_path_factory.mktemp("shared-out")
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96, "intermediate_size": 96}
    save(make_reference("llama-mha", vocab_size=300, eos_token_id=1, max_position_embeddings=4096, **sizes), directory)
    save_tokenizer(directory)
    with serving(directory, "--tp", "3", "--num-kvcache-blocks", "512") as running:
        yield running


def test_a_rank_that_is_killed_is_named_and_the_engine_started_again(shared_out: Server) -> None:
    server, engine = shared_out, shared_out.engine_pid
    body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True}
    with (
        ThreadPoolExecutor() as pool,
        server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        others = [pool.submit(server.post, "/v1/completions", **body) for _ in range(3)]
        wait_until(lambda: server.metrics()["infinilm_requests_open"] == 4)
        os.kill(ranks(engine)[1], signal.SIGKILL)
        errors = [check_error(other.result(), 500) for other in others]
        *_, last = [line for line in lines if line]
    for error in (*errors, json.loads(last.removeprefix("data: "))["error"]):
        assert error["code"] == "engine_died"
        assert "rank 2" in error["message"]
    wait_until(server.is_ready, 60)
    assert server.engine_pid != engine
    assert len(ranks(server.engine_pid)) == 2
    assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
    assert server.is_empty()


def test_an_engine_ends_with_its_server(shared_out: Server) -> None:
    """The last of that server: nobody tells the engine and its ranks, and all the same they go."""
    engine = shared_out.engine_pid
    processes = [engine, *children(engine)]
    assert len(processes) >= 3
    os.kill(shared_out.pid, signal.SIGKILL)
    shared_out.wait()
    wait_until(lambda: not any(runs(process, b"infinilm") for process in processes), 5)
