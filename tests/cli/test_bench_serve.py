"""`infinilm bench serve` against servers: what it sends and when, what it counts, how it ends."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.cli_driver import Cli, Done
from cli.scripted_server import (
    CHAT,
    CUT,
    DONE,
    END,
    STREAM,
    Asked,
    Script,
    ScriptedServer,
    Step,
    answer,
    chunk,
    event,
    scripted,
    token,
    usage,
    whole,
)

from benchmarks.serve.work import Work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--streams", "1", "--rate", "1"], "streams and rate given; use one of"),
        (["--streams", "0"], "streams=0 is out of range"),
        (["--rate", "0"], r"rate=0.0 is out of range"),
        (["--burst", "2", "--requests", "3"], "burst=2 is the number of requests"),
        (["--seconds", "-1"], "seconds=-1.0 is out of range"),
        (["--input-len", "4", "--prefix-len", "5"], "prefix_len=5 must not be more than input_len=4"),
        (["--prompts", "no-such-file"], "--prompts no-such-file can't be read"),
        (["--prompts", os.devnull], "there are no prompts"),
        (["--prompts", os.devnull, "--input-len", "3"], "input_len=3 is for random prompts"),
        (["--body", "{"], "--body '{' is no JSON"),
        (["--body", "[]"], "--body '[]' must be a JSON object"),
        (["--body", '{"stream": false}'], "the field 'stream' can't be given"),
        (["--max-ttft", "0"], "max_ttft=0.0 is out of range"),
        (["--base-url", "localhost:8000"], "base_url='localhost:8000' is no address"),
        (["--base-url", "http://x:99999"], "base_url='http://x:99999' is no address"),
        (["--api-key", "a\nb"], "api_key has characters"),
        (["--plot", "picture.doc"], "--plot picture.doc: use a name that ends with"),
        (["--plot", "no-such-directory/x.png"], "there is no directory no-such-directory"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(cli: Cli, options: list[str], message: str) -> None:
    done = cli("bench", "serve", *options)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert len(done.err.splitlines()) == 1


def test_options_before_the_subcommand_are_not_ignored(cli: Cli) -> None:
    done = cli("bench", "--repeat", "2", "serve")
    assert done.code == 2
    assert "--repeat is of no use before a subcommand; see 'infinilm bench serve --help'" in done.err


# --- runs ---------------------------------------------------------------------------------------------------


def measure(cli: Cli, server: ScriptedServer, *options: str) -> tuple[Done, dict[str, Any]]:
    done = cli("bench", "serve", "--base-url", server.url, "--json", "-", *options)
    return done, json.loads(done.out) if done.out else {}


def test_a_closed_loop_keeps_its_streams_busy(cli: Cli) -> None:
    num_open, most = 0, 0

    def script(asked: Asked) -> Iterator[Step]:
        nonlocal num_open, most
        num_open += 1
        most = max(most, num_open)
        *steps, end = answer(6, delay=0.004)
        yield from steps
        num_open -= 1
        yield end

    with scripted(script) as server:
        options = ("--streams", "3", "--requests", "11", "--output-len", "6", "--input-len", "4", "--seed", "7")
        done, report = measure(cli, server, *options, "--temperature", "0.6", "--body", '{"top_k": 3}')
    assert done.code == 0, done.err
    figures = report["figures"]
    assert (most, server.num_connections) == (3, 1 + 3)  # the probe's, and one for each stream
    assert (figures["num_answered"], figures["num_output_tokens"], figures["num_events"]) == (11, 66, 66)
    assert (figures["num_prompt_tokens"], figures["errors"], figures["has_usage"]) == (55, [], True)
    for name, least in (("ttft", 0.004), ("itl", 0.0), ("tpot", 0.003), ("latency", 6 * 0.004)):
        spread = figures[name]
        assert least <= spread["p50"] <= spread["p90"] <= spread["p99"] <= spread["max"] < 10, name
    assert figures["output_per_second"] == pytest.approx(66 / figures["seconds"])
    assert 0 < figures["cpu_share"] <= figures["peak_cpu_share"]
    probe, *asked = server.asked
    assert probe.body["max_tokens"] == 4
    expected = Work(model="scripted", input_len=4, output_len=6, seed=7, fields=report["work"]["fields"])
    key = str
    assert sorted((each.body for each in asked), key=key) == sorted((expected.body(i) for i in range(11)), key=key)
    assert asked[0].body["temperature"] == 0.6
    assert asked[0].body["top_k"] == 3
    assert asked[0].body["ignore_eos"] is True
    assert asked[0].body["stream_options"] == {"include_usage": True}
    assert sorted(each["index"] for each in report["requests"]) == list(range(11))


@pytest.mark.parametrize("load", [("--rate", "400", "--requests", "12"), ("--burst", "12")])
def test_an_open_loop_waits_for_no_answer(cli: Cli, load: tuple[str, ...]) -> None:
    """Nothing is answered before the last request is there."""
    all_there = asyncio.Event()

    def script(asked: Asked) -> Iterator[Step]:
        if len(server.asked) == 1 + 12:
            all_there.set()
        if len(server.asked) > 1:
            yield all_there
        yield from answer(2)

    with scripted(script) as server:
        done, report = measure(cli, server, *load, "--timeout", "20")
    assert (done.code, report["figures"]["num_answered"]) == (0, 12), done.err


def test_seconds_end_a_run_without_cutting_answers(cli: Cli) -> None:
    with scripted(lambda _: answer(3, delay=0.05)) as server:
        done, report = measure(cli, server, "--streams", "2", "--seconds", "0.2")
    assert done.code == 0
    requests = report["requests"]
    assert len(requests) >= 2
    assert all(each["error"] is None and each["num_output_tokens"] == 3 for each in requests)
    assert max(each["start"] + each["latency"] for each in requests) == pytest.approx(report["figures"]["seconds"])


def test_several_processes_share_the_work(cli: Cli) -> None:
    with scripted(lambda _: answer(5)) as server:
        done, report = measure(cli, server, "--burst", "9", "--processes", "2", "--seed", "1", "--output-len", "5")
    assert done.code == 0, done.err
    assert sorted(each["index"] for each in report["requests"]) == list(range(9))
    assert report["figures"]["num_output_tokens"] == 45
    expected = Work(model="scripted", output_len=5, seed=1)
    prompts = sorted(each.body["prompt"] for each in server.asked[1:])
    assert prompts == sorted(expected.body(index)["prompt"] for index in range(9))


def test_texts_are_used_by_turns_and_warming_up_is_not_counted(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "texts"
    file.write_text("first\n\nsecond\n")
    reply = [STREAM, chunk(*CHAT), END]
    with scripted(lambda _: reply) as server:
        options = ("--streams", "1", "--requests", "3", "--prompts", str(file), "--chat", "--stop-at-eos")
        done, report = measure(cli, server, *options, "--warmup", "2")
    assert done.code == 0
    assert (report["figures"]["num_requests"], len(server.asked)) == (3, 1 + 2 + 3)
    texts = [each.body["messages"][0]["content"] for each in server.asked[3:]]
    assert texts == ["first", "second", "first"]
    assert {each.path for each in server.asked} == {"/v1/chat/completions"}
    assert not any("ignore_eos" in each.body for each in server.asked)


def test_each_kind_of_error_is_counted(cli: Cli) -> None:
    failures: list[list[Step]] = [
        [whole(429, {"error": {"message": "too many requests"}})],
        [whole(500, {"detail": "broken"}, headers="Connection: close\r\n"), CUT],
        [STREAM, chunk(token()), chunk(event(error={"message": "the engine died", "code": 500})), chunk(DONE), END],
        [STREAM, chunk(token()), CUT],
        [STREAM, chunk(token()), END],
        [STREAM, chunk(token(), b"data: {oops\n\n", DONE), END],
        [STREAM, chunk(DONE), END],
        [b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"],
        [STREAM, chunk(token()), 30.0],
    ]
    script: Iterator[list[Step]] = iter([answer(2), *failures, answer(2), [whole(429, {"error": "again"})]])
    with scripted(lambda _: next(script)) as server:
        options = ("--streams", "1", "--requests", "11", "--timeout", "0.7")
        done, report = measure(cli, server, *options)
        assert done.code == 0
    found = {each["kind"]: (each["count"], each["example"]) for each in report["figures"]["errors"]}
    assert found == {
        "HTTP 429": (2, "too many requests"),
        "HTTP 500": (1, "broken"),
        "error in the stream": (1, "the engine died"),
        "connection lost": (1, "the server closed the connection in mid-reply"),
        "cut off": (1, "the stream ended without a finish_reason or [DONE]"),
        "malformed event": (1, "b'{oops'"),
        "empty": (1, "the stream has no text"),
        "no stream": (1, "the reply is of the type 'application/json'"),
        "timeout": (1, "not answered within 0.7 s"),
    }
    assert (report["figures"]["num_answered"], report["figures"]["num_output_tokens"]) == (1, 2)


@pytest.mark.parametrize(
    "script",
    [lambda _: [*answer(1), CUT], lambda asked: answer(1) if asked.is_first else [CUT]],
    ids=["after-a-reply", "when-used-again"],
)
def test_a_connection_that_is_closed_while_idle_is_no_error(cli: Cli, script: Script) -> None:
    with scripted(script) as server:
        done, report = measure(cli, server, "--streams", "1", "--requests", "5")
    assert (done.code, report["figures"]["num_answered"], report["figures"]["errors"]) == (0, 5, [])


def test_what_the_server_does_not_know_is_left_out(cli: Cli) -> None:
    def script(asked: Asked) -> list[Step]:
        for name in ("ignore_eos", "stream_options"):
            if name in asked.body:
                return [whole(422, {"detail": [{"loc": ["body", name], "msg": "extra"}]})]
        return [STREAM, chunk(token(), token(), token("", "stop")), END]

    with scripted(script) as server:
        done, report = measure(cli, server, "--streams", "1", "--requests", "2")
        table = cli("bench", "serve", "--base-url", server.url, "--requests", "2")
    assert done.code == 0
    assert "does not know ignore_eos: answers may be shorter" in done.err
    assert "does not know stream_options: tokens are counted by events" in done.err
    assert report["work"]["fields"] == {}
    figures = report["figures"]
    assert (figures["num_output_tokens"], figures["has_usage"], figures["num_prompt_tokens"]) == (4, False, None)
    assert "! the server sent no usage: tokens are counted by events" in table.out


# --- what is shown ------------------------------------------------------------------------------------------


def test_the_table_the_file_and_the_picture(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from PIL import Image

    script: Iterator[list[Step]] = iter(
        [answer(4), *[answer(4, delay=0.002)] * 7, [whole(503, {"error": {"message": "later"}})]]
    )
    with scripted(lambda _: next(script)) as server:
        options = ("--streams", "2", "--requests", "8", "--output-len", "4", "--max-ttft", "9000")
        files = ("--json", tmp_path / "run.json", "--plot", tmp_path / "run.png")
        done = cli("bench", "serve", "--base-url", server.url, *options, *files)
    assert done.code == 0, done.err
    figures = json.loads((tmp_path / "run.json").read_text())["figures"]
    lines = done.out.splitlines()
    assert lines[0] == "scripted · 2 streams, 8 requests · 256 tokens in, 4 out"
    assert f"7 of 8 answered in {figures['seconds']:.1f} s" in done.out
    assert "within the limits" in done.out
    (ttft,) = [line for line in lines if line.startswith("first token (TTFT)")]
    assert f"{figures['ttft']['p50'] * 1000:.1f} ms" in ttft
    (error,) = [line for line in lines if line.startswith("HTTP 503")]
    assert error.split() == ["HTTP", "503", "later", "1"]
    assert max(map(len, lines)) <= 80
    with Image.open(tmp_path / "run.png") as picture:
        assert (picture.format, picture.width > picture.height > 400) == ("PNG", True)
        colors = picture.convert("RGB").getcolors(1 << 24)
        assert colors is not None
        assert len(colors) > 50


def test_a_server_that_packs_tokens_is_told_of(cli: Cli) -> None:
    packed = [STREAM, chunk(token("a b")), chunk(token("c d")), chunk(token("e f", "length"), usage(6), DONE), END]
    with scripted(lambda _: packed) as server:
        done = cli("bench", "serve", "--base-url", server.url, "--requests", "2", "--output-len", "8")
    assert "! an event brings 2.00 tokens on average" in done.out
    assert "! answers have 6.0 tokens, not 8" in done.out


# --- servers that are no good -------------------------------------------------------------------------------


def failure(cli: Cli, *options: str) -> str:
    """The one line that is said."""
    done = cli("bench", "serve", *options)
    assert (done.code, done.out) == (1, "")
    (line,) = done.err.splitlines()
    return line.removeprefix("error: ")


def test_no_server(cli: Cli) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        expected = f"no server at {url}: Connection refused; start one with: infinilm serve"
        assert failure(cli, "--base-url", url) == expected


def test_a_missing_key_a_wrong_model_and_another_service(cli: Cli) -> None:
    with scripted(lambda _: answer(1), models=whole(401, {"error": {"message": "no key"}})) as server:
        line = failure(cli, "--base-url", server.url)
        assert line == f"{server.url}/v1/models answers HTTP 401: no key; give the key with --api-key"
    with scripted(lambda _: answer(1)) as server:
        line = failure(cli, "--base-url", server.url, "--model", "nope")
        assert line == f"{server.url} does not serve 'nope'; it serves scripted, other"
        assert server.asked == []
    with scripted(lambda _: answer(1), models=whole(200, ["hello"])) as server:
        assert "is not what OpenAI's API says" in failure(cli, "--base-url", server.url)


def test_the_key_is_sent_and_not_told(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINILM_API_KEY", "from-environment and-more")
    with scripted(lambda _: answer(1)) as server:
        done, _ = measure(cli, server, "--requests", "1")
        assert server.asked[-1].headers["authorization"] == "Bearer from-environment"
        measure(cli, server, "--requests", "1", "--api-key", "given", "--model", "other")
        assert server.asked[-1].headers["authorization"] == "Bearer given"
        assert server.asked[-1].body["model"] == "other"
    assert "from-environment" not in done.out


def test_a_request_that_is_refused_ends_before_the_load(cli: Cli) -> None:
    refusal = whole(400, {"error": {"message": "token id 9999 is not below 300"}})
    with scripted(lambda _: [refusal]) as server:
        line = failure(cli, "--base-url", server.url)
        assert line == (
            f"{server.url}/v1/completions answers HTTP 400: token id 9999 is not below 300; "
            "prompts are token ids below 10000 (--vocab-size)"
        )
        assert len(server.asked) == 1


def test_no_answer_at_all_is_a_failure(cli: Cli) -> None:
    failure: list[Step] = [whole(500, {"error": {"message": "x"}})]
    script = iter([answer(1), failure, failure])
    with scripted(lambda _: next(script)) as server:
        done = cli("bench", "serve", "--base-url", server.url, "--streams", "1", "--requests", "2")
    assert done.code == 1
    assert "0 of 2 answered" in done.out
    assert done.err.splitlines()[-1] == "error: no request was answered"


@pytest.mark.parametrize("num_processes", [1, 2])
def test_ctrl_c_shows_what_was_measured(num_processes: int) -> None:
    """Every second answer never ends."""

    def script(asked: Asked) -> Iterator[Step]:
        if len(server.asked) % 2:
            yield from answer(3)
        else:
            yield STREAM + chunk(token())
            yield 60.0

    with scripted(script) as server:
        options = ["--base-url", server.url, "--burst", "8", "--processes", str(num_processes), "--json", "-"]
        process = subprocess.Popen(
            [sys.executable, "-m", "infinilm", "bench", "serve", *options], stdout=subprocess.PIPE, text=True
        )
        while len(server.asked) < 9:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    report = json.loads(out)
    assert report["is_interrupted"] is True
    figures = report["figures"]
    assert figures["num_answered"] + figures["num_interrupted"] == 8
    assert figures["num_interrupted"] >= 4
    assert figures["errors"] == []


# --- our own server -----------------------------------------------------------------------------------------


def test_our_own_server(cli: Cli, tiny_dir: Path) -> None:
    pytest.importorskip("uvicorn")
    process = subprocess.Popen(
        [sys.executable, "-m", "infinilm", "serve", str(tiny_dir), "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stderr is not None
        lines = []
        url = None
        for line in process.stderr:
            lines.append(line)
            if url := re.search(r"address\s+(http://\S+)", line):
                break
        assert url, "".join(lines)
        options = ("--vocab-size", "300", "--input-len", "20", "--output-len", "12", "--json", "-")
        for load in (("--streams", "4", "--requests", "10"), ("--rate", "50", "--requests", "10", "--chat")):
            done = cli("bench", "serve", "--base-url", url[1], *options, *load)
            assert done.code == 0, done.err
            figures = json.loads(done.out)["figures"]
            assert (figures["num_answered"], figures["num_output_tokens"], figures["errors"]) == (10, 120, [])
            assert figures["num_prompt_tokens"] == 200 or "--chat" in load
            assert 0 < figures["num_events"] <= 120
    finally:
        process.terminate()
        process.communicate(timeout=30)
