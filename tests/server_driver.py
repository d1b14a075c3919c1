"""Real servers, real HTTP: what the tests of the service start and how they talk to it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import httpx
import openai
from processes import children

TIME_LIMIT_S = 240.0
"""What runs longer hangs."""


class Server:
    """`infinilm serve` in a process of its own, on a free port. Its log is read, unless `stderr` is a file."""

    def __init__(
        self, model: Path, *options: str, key: str | None = None, stderr: int = subprocess.PIPE, **environment: str
    ) -> None:
        self.key = key
        port = 0 if stderr == subprocess.PIPE else free_port()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "infinilm", "serve", str(model), "--port", str(port), *options],
            stderr=stderr,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **({"INFINILM_API_KEY": key} if key else {}), **environment},
            process_group=0,
        )
        self._timer = Timer(TIME_LIMIT_S, self._process.kill)
        self._timer.start()
        self.log: list[str] = []
        self.url = f"http://127.0.0.1:{port}" if port else self._find_address()
        self._reader = Thread(target=self._keep_log, daemon=True)
        self._reader.start()
        self.http = httpx.Client(base_url=self.url, headers=self.headers, timeout=20)
        # Any: tests give dictionaries of their own where the client's annotations have one class per kind of message.
        self.openai: Any = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key or "none", max_retries=0, timeout=20)
        if port:
            wait_until(self.is_ready, 60)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def engine_pid(self) -> int:
        (pid,) = (child for child in children(self.pid) if is_engine(child))
        return pid

    def _find_address(self) -> str:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log.append(line)
            if found := re.search(r"address\s+(http://\S+)", line):
                return found.group(1)
        raise AssertionError(f"the server ended with {self._process.wait()}: {''.join(self.log)}")

    def _keep_log(self) -> None:
        if self._process.stderr is not None:
            self.log.extend(self._process.stderr)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def error(self, path: str, status: int, **body: Any) -> dict[str, Any]:
        """The error that a request is answered with, after a look at its shape."""
        return check_error(self.post(path, **body), status)

    def metrics(self) -> dict[str, float]:
        """Samples by name and labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if not x.startswith("#"))}

    def is_empty(self) -> bool:
        """Whether the engine works on nothing and holds no block."""
        found = self.metrics()
        names = ("requests_running", "requests_waiting", "requests_open", "kv_blocks_used", "tokens_admitted")
        return not any(found[f"infinilm_{name}"] for name in names)

    def is_ready(self) -> bool:
        try:
            return self.http.get("/health/ready").status_code == 200
        except httpx.ConnectError:
            return False

    def connect(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=20)

    def talk(self, data: bytes) -> bytes:
        """Send raw bytes; all that is received until the server closes."""
        with self.connect() as connection:
            connection.sendall(data)
            return read_all(connection)

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        """Its exit code."""
        return self._process.wait(TIME_LIMIT_S)

    def stop(self) -> None:
        self.http.close()
        self.openai.close()
        self.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._timer.cancel()
        self._reader.join()


@contextmanager
def serving(
    model: Path, *options: str, key: str | None = None, stderr: int = subprocess.PIPE, **environment: str
) -> Iterator[Server]:
    server = Server(model, *options, key=key, stderr=stderr, **environment)
    try:
        yield server
    finally:
        server.stop()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def read_all(connection: socket.socket) -> bytes:
    """All bytes until the other side closes."""
    received = b""
    while piece := connection.recv(65536):
        received += piece
    return received


def is_engine(pid: int) -> bool:
    return runs(pid, b"infinilm.server.engine_process")


def runs(pid: int, module: bytes) -> bool:
    """Whether a process is there and runs a module."""
    try:
        return module in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def check_error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a whole stream, which must be well-formed and end with [DONE]."""
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""], parts[-3:]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def wait_until(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)
