"""Batch jobs on a real cluster of Ray, and engines in people's own pipelines."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from batch.batch_driver import SETTINGS, comparable, start_batch, write_rows
from server_driver import wait_until

import infinilm.batch
from infinilm.batch import ray_job
from infinilm.errors import EngineError, InvalidValueError

ray = pytest.importorskip("ray")
MARK = "INFINILM_BATCH_TEST"
OPTIONS = ("--num-kvcache-blocks", "512", "--max-num-seqs", "2", "--cluster", "--engines", "1")
"""Few rows at a time: there is time to kill a process."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster of this machine. Returns a text that its processes have in their environment."""
    mark = str(tmp_path_factory.mktemp("cluster"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, mark)
        patch.setenv("OMP_NUM_THREADS", "1")
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        try:
            yield mark
        finally:
            ray.shutdown()


@pytest.fixture(scope="module")
def expected(batch_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    """An input, and the answers of this machine alone."""
    folder = tmp_path_factory.mktemp("alone")
    source = write_rows(folder / "in.jsonl", 240)
    infinilm.batch.run(source, folder / "out.jsonl", batch_model, show_progress=False, **SETTINGS)
    return source, (folder / "out.jsonl").read_bytes().splitlines()


def read_parts(output: Path) -> list[bytes]:
    return [line for part in sorted(output.glob("part-*.jsonl")) for line in part.read_bytes().splitlines()]


def num_answered(output: Path) -> int:
    logs = [*output.with_name(f"{output.name}.progress").glob("*.log"), *output.glob("part-*.jsonl")]
    return sum(path.read_bytes().count(b"\n") for path in logs if path.exists())


def processes_with(mark: str) -> dict[int, bytes]:
    """The command lines of processes with a mark in their environment. Ray's workers overwrite theirs."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes():
                found[int(path.name)] = (path / "cmdline").read_bytes()
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


def engines_of(mark: str) -> list[int]:
    return [pid for pid, command in processes_with(mark).items() if b"infinilm.server.engine_process" in command]


def kill_an_actor(mark: str) -> int:
    """Kill the parent of an engine's process. Returns its id."""
    parent = int(Path(f"/proc/{engines_of(mark)[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    return parent


@pytest.mark.skipif("INFINILM_TEST_CLUSTER" not in os.environ, reason="slow: make test-cluster")
def test_a_job_outlives_its_driver_and_an_engine(
    cluster: str, expected: tuple[Path, list[bytes]], batch_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is killed, with the cluster that it started; then an actor. Every row is there once, in order."""
    source, answers = expected
    output = tmp_path / "parts"
    monkeypatch.setenv(MARK, str(tmp_path))
    with start_batch(source, output, "--model", batch_model, *OPTIONS) as process:
        wait_until(lambda: num_answered(output) >= 8, 120)
        process.kill()
    assert num_answered(output) < len(answers)

    killed: list[int] = []

    def kill() -> None:
        wait_until(lambda: engines_of(cluster), 120)  # engines of the killed driver may answer a few rows more
        num_then = num_answered(output)
        wait_until(lambda: num_answered(output) >= num_then + 8, 120)
        killed.append(kill_an_actor(cluster))

    killer = Thread(target=kill)
    killer.start()
    done = infinilm.batch.run(
        source, output, batch_model, cluster=True, engines=1, show_progress=False, **{**SETTINGS, "max_num_seqs": 2}
    )
    killer.join()
    assert killed
    assert done.num_rows == len(answers)
    assert comparable(read_parts(output)) == comparable(answers)
    assert not output.with_name("parts.progress").exists()
    wait_until(lambda: not engines_of(str(tmp_path)), 30)  # two agents of Ray itself end a minute later
    with pytest.raises(InvalidValueError, match="was begun with --cluster"):
        infinilm.batch.run(source, output, batch_model, **SETTINGS)


def test_more_engines_than_fit_are_refused(
    cluster: str, expected: tuple[Path, list[bytes]], batch_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=r"7 engines need 1 CPU each, on one node; .* has 2"):
        infinilm.batch.run(expected[0], tmp_path / "parts", batch_model, cluster=True, engines=7)


def test_another_version_on_a_node_is_refused(
    cluster: str,
    expected: tuple[Path, list[bytes]],
    batch_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_job, "__version__", "0.0.7")
    with pytest.raises(EngineError, match=r"has infinilm [0-9.]+, the driver 0\.0\.7; install the same"):
        infinilm.batch.run(expected[0], tmp_path / "parts", batch_model, cluster=True, show_progress=False)


def test_an_engine_in_a_pipeline(cluster: str, expected: tuple[Path, list[bytes]], batch_model: Path) -> None:
    from infinilm.cluster import engine_actor

    rows = [{"name": n, "prompt": f"row {n} says"} for n in range(0, 8, 2)] + [{"name": 9, "prompt": ""}]
    engine = engine_actor(batch_model, sampling={"temperature": 0, "max_tokens": 4}, **SETTINGS)
    found = ray.data.from_items(rows).map_batches(engine, batch_size=2, concurrency=1, num_cpus=1).take_all()
    by_name = {row["name"]: row for row in found}
    assert by_name[9]["answer"] is None
    assert "prompt is empty" in by_name[9]["error"]
    known = {each["custom_id"]: each for each in comparable(expected[1])}
    for name in range(0, 8, 2):
        text = known[f"plain-{name}"]["response"]["body"]["choices"][0]["text"]
        assert by_name[name]["error"] is None
        assert text.startswith(by_name[name]["answer"].rstrip("\N{REPLACEMENT CHARACTER}"))


DYING_ACTOR = """
import asyncio, os, shutil, signal, sys
from infinilm.cluster.engine_actor import engine_actor

actor = engine_actor(sys.argv[1], num_kvcache_blocks=64)()
shutil.rmtree(sys.argv[1])
os.kill(actor._host.service.service.client._handle.process.pid, signal.SIGKILL)
asyncio.run(actor({"prompt": ["x"]}))
print("not reached")
"""


def test_an_actor_ends_with_its_engine(batch_model: Path, tmp_path: Path) -> None:
    """The engine dies and can't be loaded again: the actor's process ends, so that Ray replaces it."""
    import shutil

    shutil.copytree(batch_model, tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", DYING_ACTOR, tmp_path / "model"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "this actor ends, so that Ray replaces it" in done.stderr
