"""Batch jobs with real engines: the answers are those of the server and of `LLM`, whatever happens on the way."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_driver import MIXED, NUM_GOOD, SETTINGS, comparable, start_batch, write_rows
from server_driver import wait_until

import infinilm.batch
from infinilm import LLM, Config, SamplingParams
from infinilm.batch.answering import Answer, RowAnswerer, RowOptions, answer_all
from infinilm.batch.rows import Source, parse
from infinilm.server.direct import DirectService

NUM_PLAIN = 60
OPTIONS = ("--num-kvcache-blocks", "512", "--max-num-seqs", "16")


class Answers:
    """The answers to one file, in three ways."""

    def __init__(self, model: Path, path: Path) -> None:
        self.source = Source(path)
        self.together: list[bytes] = []
        self.alone: dict[int, bytes] = {}
        self.with_death: list[bytes] = []
        self.num_restarts = 0
        os.environ["OMP_NUM_THREADS"] = "1"
        asyncio.run(self._answer(DirectService(Config(model=model, **SETTINGS))))

    async def _answer(self, service: DirectService) -> None:
        await service.start()
        try:
            answerer = RowAnswerer(service, RowOptions(seed=0))
            self.together = await self._answer_all(answerer)
            for row in self.source.read():
                if row.index < NUM_GOOD:
                    call = parse(row)
                    body = {"seed": json.loads(answerer._make_body(row, call))["seed"], **call.body}
                    self.alone[row.index] = (await service.post(call.url, json.dumps(body).encode())).content
            self.with_death = await self._answer_all(answerer, kill_after=10, service=service)
            self.num_restarts = service.service.client.num_restarts
        finally:
            await service.stop()

    async def _answer_all(
        self, answerer: RowAnswerer, kill_after: int = -1, service: DirectService | None = None
    ) -> list[bytes]:
        answers: list[Answer] = []

        def keep(answer: Answer) -> None:
            answers.append(answer)
            if len(answers) == kill_after and service is not None:
                handle = service.service.client._handle
                assert handle is not None
                os.kill(handle.process.pid, signal.SIGKILL)

        await answer_all(answerer, self.source.read(), 20, keep, self.source.scan().duplicates)
        return [answer.line for answer in sorted(answers, key=lambda answer: answer.row)]


@pytest.fixture(scope="module")
def answers(batch_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return Answers(batch_model, write_rows(tmp_path_factory.mktemp("batch") / "in.jsonl", NUM_PLAIN))


def test_answers_are_those_of_the_server_alone(answers: Answers) -> None:
    for row, body in answers.alone.items():
        line = b'{"response":{"request_id":"","body":%s}}' % body
        expected = comparable([line])[0]["response"]["body"]
        assert comparable([answers.together[row]])[0]["response"]["body"] == expected
    assert len(answers.alone) == NUM_GOOD


def test_answers_are_those_of_llm_alone(answers: Answers, batch_model: Path) -> None:
    found = comparable(answers.together)
    plain = {row.index: parse(row).body for row in answers.source.read() if row.index >= len(MIXED)}
    torch.set_num_threads(1)  # a tiny model is slower with threads
    with LLM(batch_model, num_kvcache_blocks=64) as llm:
        for index, body in plain.items():
            if body["temperature"] == 0:
                params = SamplingParams(temperature=0, max_tokens=body["max_tokens"])
                output = llm.generate(body["prompt"], params, use_tqdm=False)[0]
                assert found[index]["response"]["body"]["choices"][0]["text"] == output.text


def test_bad_rows_are_errors_with_line_and_cause(answers: Answers) -> None:
    found = [json.loads(line) for line in answers.together]
    assert [n for n, answer in enumerate(found) if answer["error"] is not None] == [*range(NUM_GOOD, len(MIXED))]
    errors = {n: found[n]["error"]["message"] for n in range(NUM_GOOD, len(MIXED))}
    assert errors == {
        10: "line 11: temperature: input should be greater than or equal to 0",
        11: "line 12: unknown is not known to this server",
        12: "line 13: the custom_id is that of line 3; give each its own",
        13: f"line 14: there is no model 'gpt-4' here; use {found[0]['response']['body']['model']!r}",
        14: "line 15: a str; use an object with prompt, messages, or url and body",
    }
    assert found[10]["response"]["status_code"] == 400
    assert found[12]["response"] is None


def test_a_death_of_the_engine_changes_no_answer(answers: Answers) -> None:
    assert answers.num_restarts == 1
    assert comparable(answers.with_death) == comparable(answers.together)


def test_a_killed_job_goes_on(answers: Answers, batch_model: Path, tmp_path: Path) -> None:
    """Killed in the middle and, as if torn, in a record: every row once, in order, equal to an unbroken run's."""
    output = tmp_path / "out.jsonl"
    log = tmp_path / "out.jsonl.progress" / "answers.log"
    with start_batch(answers.source.path, output, "--model", batch_model, *OPTIONS) as process:
        wait_until(lambda: log.exists() and log.read_bytes().count(b"\n") >= 8, 120)
        process.kill()
    kept = log.read_bytes()
    assert not output.exists()
    log.write_bytes(kept[: kept.rstrip(b"\n").rindex(b"\n") + 20])
    done = infinilm.batch.run(answers.source.path, output, batch_model, show_progress=False, **SETTINGS)
    num_before = done.num_rows - done.num_new_rows
    assert 7 <= num_before < done.num_rows
    assert done.num_errors == len(MIXED) - NUM_GOOD
    assert comparable(output.read_bytes().splitlines()) == comparable(answers.together)
    assert not log.parent.exists()
    again = infinilm.batch.run(answers.source.path, output, batch_model, show_progress=False, **SETTINGS)
    assert (again.num_new_rows, again.num_errors) == (0, done.num_errors)


def test_alone_nothing_of_ray_is_imported() -> None:
    code = "import sys, infinilm.batch, infinilm.cli.batch; print('ray' in sys.modules, 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == [
        "False",
        "False",
    ]


def test_the_command_reports_errors(tmp_path: Path, batch_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from infinilm.cli.main import run

    source = write_rows(tmp_path / "in.jsonl", 0)
    calls: list[list[Any]] = [
        [source, tmp_path / "out.jsonl", "--temperature", "500"],
        [source, tmp_path / "out.jsonl", "--engines", "2"],
        [source, tmp_path / "out.parquet"],
        [source, tmp_path / "no" / "out.jsonl"],
        [tmp_path / "in.csv", tmp_path / "out.jsonl"],
    ]
    errors = []
    for call in calls:
        assert run(["batch", *map(str, call), "--model", str(batch_model)]) == 2
        errors.append(capsys.readouterr().err)
    for error, part in zip(errors, ["temperature", "--cluster", ".parquet", "no folder", ".csv"], strict=True):
        assert part in error
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
