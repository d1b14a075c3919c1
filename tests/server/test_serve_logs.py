"""Logs: what they say, and that a file which takes none of them changes nothing about how requests are served."""

import fcntl
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server_driver import Server, serving, wait_until

from infinilm.server.logs import LogFormatter, QueuedStream

KEY = "key-in-the-environment"
SHOWN_KEY = "key-on-the-command-line"
LONG = {"prompt": "Once upon a time", "max_tokens": 500, "ignore_eos": True, "stream": True}
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING|ERROR) [\w.]+ \[([\w.:-]+)\] (.*)")


# --- a file that takes nothing ------------------------------------------------------------------------------


def full_disk() -> tuple[int, int | None]:
    return os.open("/dev/full", os.O_WRONLY), None


def closed_pipe() -> tuple[int, int | None]:
    reader, writer = os.pipe()
    os.close(reader)
    return writer, None


def unread_pipe() -> tuple[int, int | None]:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    return writer, reader


@pytest.fixture(scope="module", params=[full_disk, closed_pipe, unread_pipe], ids=lambda make: make.__name__)
def mute(long_dir: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server whose log can't be written."""
    writer, reader = request.param()
    with serving(long_dir, "--num-kvcache-blocks", "2048", "--log-requests", stderr=writer) as running:
        os.close(writer)
        yield running
    if reader is not None:
        os.close(reader)


def test_requests_are_served_although_the_log_fails(mute: Server) -> None:
    for _ in range(100):
        response = mute.post("/v1/completions", prompt="a", max_tokens=1)
        assert response.status_code == 200
        assert response.headers["x-request-id"]
    for _ in range(20):
        assert mute.talk(b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert mute.is_empty()


def test_a_killed_engine_is_restarted_although_the_log_fails(mute: Server) -> None:
    os.kill(mute.engine_pid, signal.SIGKILL)
    wait_until(lambda: not mute.is_ready())
    wait_until(mute.is_ready, 60)
    assert mute.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200


def test_sigterm_drains_although_the_log_fails(mute: Server) -> None:
    """The last with this server."""
    with mute.http.stream("POST", "/v1/completions", json=LONG) as response:
        assert response.status_code == 200
        mute.terminate()
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert mute.wait() == 0


# --- what is logged -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(long_dir: Path) -> Iterator[Server]:
    options = ("--num-kvcache-blocks", "2048", "--log-requests", "--api-key", SHOWN_KEY)
    with serving(long_dir, *options, key=KEY) as running:
        yield running


def logged(server: Server, words: str) -> re.Match[str]:
    """The line that has these words, which must have the usual form."""
    wait_until(lambda: any(words in line for line in server.log))
    line = next(line for line in server.log if words in line)
    found = LINE.fullmatch(line.rstrip("\n"))
    assert found is not None, line
    return found


def test_a_request_is_logged_with_its_id(server: Server) -> None:
    headers = {**server.headers, "X-Request-Id": "mine-17"}
    body = {"prompt": "a", "max_tokens": 3, "ignore_eos": True, "user": "forged\n2026-01-01T00:00:00.000Z INFO x [y] z"}
    given = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
    assert given.headers["x-request-id"] == "mine-17"
    found = logged(server, "[mine-17]")
    assert found[1] == "INFO"
    assert "completion_tokens 3" in found[3]
    made = server.post("/v1/completions", prompt="a", max_tokens=1).headers["x-request-id"]
    assert logged(server, f"[{made}]")[2] == made


def test_the_engine_logs_in_the_same_form(server: Server) -> None:
    assert logged(server, "infinilm.executor.loader")[1] == "INFO"


def test_junk_is_counted_and_not_logged(server: Server) -> None:
    name = 'infinilm_http_responses_total{route="other",status="400"}'
    before, num_lines = server.metrics().get(name, 0), len(server.log)
    for _ in range(10):
        assert server.talk(b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert server.metrics()[name] == before + 10
    assert len(server.log) == num_lines


def test_keys_are_kept_from_the_engine_and_the_log(server: Server) -> None:
    assert server.http.get("/v1/models").status_code == 200
    assert httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {SHOWN_KEY}"}).status_code == 200
    for name in ("environ", "cmdline"):
        content = Path(f"/proc/{server.engine_pid}/{name}").read_bytes()
        assert KEY.encode() not in content
        assert SHOWN_KEY.encode() not in content
    assert "--api-key-file or INFINILM_API_KEY" in logged(server, "--api-key shows in the list of processes")[3]
    assert not [line for line in server.log if KEY in line or SHOWN_KEY in line]


def test_sighup_lets_requests_finish(server: Server) -> None:
    """The last with this server. A second SIGHUP, as of a terminal and of its shell, does not cut them off."""
    with server.http.stream("POST", "/v1/completions", json=LONG) as response:
        assert response.status_code == 200
        server.signal(signal.SIGHUP)
        time.sleep(0.1)
        server.signal(signal.SIGHUP)
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert server.wait() == 0


def test_an_error_at_the_start_is_printed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "infinilm", "serve", str(tmp_path / "nothing")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert "nothing" in ended.stderr


# --- the stream ---------------------------------------------------------------------------------------------


def test_a_stream_drops_and_counts_what_does_not_fit() -> None:
    writer, reader = unread_pipe()
    assert reader is not None
    stream = QueuedStream(writer, max_chars=10_000)
    for index in range(1000):
        assert stream.write(f"line {index:95}\n") == 101
    with pytest.raises(TypeError, match="bytes"):
        stream.write(b"")  # type: ignore[arg-type]
    assert not stream.wait_written(0.1)
    assert 0 < stream.num_dropped < 1000
    with os.fdopen(reader) as file:
        kept = [next(file) for _ in range(1000 - stream.num_dropped)]
        assert kept[0].split() == ["line", "0"]
        assert stream.wait_written(10)
        num_before = stream.num_dropped
        stream.write("the end \ud800\n")
        lines = [next(file), next(file)]
    assert f"[{num_before} log lines were dropped]\n" in lines
    assert "the end \\ud800\n" in lines
    wait_until(lambda: stream.write("x\n") and stream.num_dropped > num_before)  # the pipe is closed now
    os.close(writer)


def test_a_process_ends_while_its_log_is_stuck() -> None:
    """The text before is more than the pipe holds; stdin, stdout and stderr may be closed too."""
    code = (
        "import logging, sys; from infinilm.server.logs import install_logging; install_logging()\n"
        "logging.getLogger('infinilm').warning('x' * 100_000); print('y' * 100_000, file=sys.stderr); sys.exit(3)"
    )
    for make in (full_disk, closed_pipe, unread_pipe):
        writer, reader = make()
        ended = subprocess.run([sys.executable, "-c", code], stderr=writer, timeout=60, check=False)
        assert ended.returncode == 3
        for fd in (writer, reader):
            if fd is not None:
                os.close(fd)
    shell = f'exec "{sys.executable}" -c "$0" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", shell, code], timeout=60, check=False).returncode == 3


def test_control_characters_of_a_message_are_escaped() -> None:
    record = logging.LogRecord("name", logging.INFO, "", 0, "a\nb\x1b[2J%s\u2028", ("\r",), None)
    assert LogFormatter().format(record).endswith("INFO name [-] a\\nb\\x1b[2J\\r\\u2028")
