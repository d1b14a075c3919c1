"""Engines that hang, and engines that can't be started again: requests are told, and the service recovers or ends."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_driver import Server, check_error, serving, wait_until

STEP_TIMEOUT_S = 3.0
LONG = {"prompt": "Once upon a time", "max_tokens": 8000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server(long_dir: Path) -> Iterator[Server]:
    with serving(long_dir, "--num-kvcache-blocks", "1024", "--limit", f"step_timeout={STEP_TIMEOUT_S}") as running:
        yield running


def check_works(server: Server) -> None:
    assert server.post("/v1/completions", prompt="a", max_tokens=2).status_code == 200


def last_error(lines: Iterator[str]) -> dict[str, str]:
    *_, last = [line for line in lines if line]
    return json.loads(last.removeprefix("data: "))["error"]


def test_an_idle_engine_that_hangs_is_replaced(server: Server) -> None:
    engine = server.engine_pid
    os.kill(engine, signal.SIGSTOP)
    wait_until(lambda: not server.is_ready(), 30)
    health = server.http.get("/health/ready").json()
    assert health["status"] == "restarting"
    assert "no progress for 3 s" in health["cause"]
    assert "step_timeout" in health["cause"]
    wait_until(server.is_ready, 60)
    assert server.engine_pid != engine
    check_works(server)


def test_requests_of_an_engine_that_hangs_are_told(server: Server) -> None:
    engine = server.engine_pid
    with server.http.stream("POST", "/v1/completions", json=LONG) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(engine, signal.SIGSTOP)
        error = last_error(lines)
    assert error["code"] == "engine_died"
    assert "no progress for 3 s" in error["message"]
    refused = server.post("/v1/completions", prompt="a", max_tokens=1)
    assert "no progress" in check_error(refused, 503)["message"]
    wait_until(server.is_ready, 60)
    assert server.engine_pid != engine
    check_works(server)
    assert server.is_empty()


def test_a_watcher_that_slept_itself_kills_nothing(server: Server) -> None:
    """As after Ctrl-Z, or in a container that was paused."""
    engine = server.engine_pid
    os.kill(server.pid, signal.SIGSTOP)
    os.kill(engine, signal.SIGSTOP)
    time.sleep(2 * STEP_TIMEOUT_S)
    os.kill(server.pid, signal.SIGCONT)
    time.sleep(0.3)
    assert server.is_ready()
    os.kill(engine, signal.SIGCONT)
    time.sleep(STEP_TIMEOUT_S)
    assert server.engine_pid == engine
    check_works(server)


def test_an_engine_that_works_on_while_its_watcher_sleeps_is_kept(server: Server) -> None:
    engine = server.engine_pid
    with server.http.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 500}) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(server.pid, signal.SIGSTOP)
        time.sleep(2 * STEP_TIMEOUT_S)
        os.kill(server.pid, signal.SIGCONT)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.engine_pid == engine


def test_a_damaged_model_ends_the_service(long_dir: Path, tmp_path: Path) -> None:
    """The engine can't be started again, so the service says why and ends with an error."""
    model = tmp_path / "model"
    shutil.copytree(long_dir, model)
    with serving(model, "--num-kvcache-blocks", "1024") as server:
        (weights,) = model.glob("*.safetensors")
        weights.write_bytes(b"damaged")
        with server.http.stream("POST", "/v1/completions", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(server.engine_pid, signal.SIGKILL)
            assert "SIGKILL" in last_error(lines)["message"]
        assert server.wait() == 2
        log = "".join(server.log)
        assert log.count("starting it again") == 1
        assert log.count("can't be started again") == 1
        assert weights.name in log
