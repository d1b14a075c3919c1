"""One engine whose ranks are on the nodes of a real Ray cluster: a head and one more raylet, in this order of tests."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from cluster_driver import LocalCluster, local_cluster, wait_until
from troubled_model import save_troubled, trouble

from infinilm import LLM, InferEngine, SamplingParams
from infinilm.cache import PagedKVCacheConfig
from infinilm.distributed import DistConfig
from infinilm.errors import InvalidValueError, WorkerDiedError
from infinilm.executor import ray_executor

SETTINGS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 48, "num_kvcache_blocks": 64}
FOUR: dict[str, Any] = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "executor": "ray"}
PROMPTS = [list(range(5, 5 + length)) for length in (4, 60, 17)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)

slow = pytest.mark.skipif("INFINILM_TEST_CLUSTER" not in os.environ, reason="slow: make test-cluster")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_troubled(tmp_path_factory.mktemp("troubled"))


@pytest.fixture(scope="module")
def cluster(checkpoint: Path) -> Iterator[LocalCluster]:
    with local_cluster(checkpoint, num_workers=1) as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", running.cluster.address)
        yield running


@pytest.fixture(scope="module")
def engine(cluster: LocalCluster, checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, **SETTINGS, **FOUR) as llm:
        yield llm


def open_groups() -> list[str]:
    import ray

    table = ray.util.placement_group_table()
    return [str(each["state"]) for each in table.values() if each["state"] != "REMOVED"]


def live_actors() -> list[str]:
    import ray._private.state

    table = ray._private.state.actors()
    return [str(each["ActorID"]) for each in table.values() if each["State"] != "DEAD"]


def generate_for_ever(llm: LLM) -> None:
    while True:
        llm.generate(PROMPTS, ENDLESS, use_tqdm=False)


def test_logits_equal_one_ranks(cluster: LocalCluster, checkpoint: Path) -> None:
    found = []
    for distributed, executor in ((DistConfig(), "auto"), (DistConfig(2, pp_size=2), "ray")):
        with InferEngine(checkpoint, distributed, "cpu", PagedKVCacheConfig(16), executor=executor) as engine:
            logits = engine(input_ids=[PROMPTS[1], PROMPTS[1][::-1]], return_logits=True, return_hidden_states=True)
            answers = engine.generate([PROMPTS[2], PROMPTS[2]], 6, temperature=0).token_ids
            found.append((logits, answers))
    (alone, alone_answers), (spread, spread_answers) = found
    torch.testing.assert_close(spread.logits, alone.logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(spread.hidden_states, alone.hidden_states, atol=1e-4, rtol=0)
    assert spread_answers == alone_answers
    wait_until(lambda: not open_groups() and not live_actors(), 10, lambda: (open_groups(), live_actors()))


def test_tokens_equal_one_ranks(engine: LLM, checkpoint: Path) -> None:
    with LLM(checkpoint, **SETTINGS) as llm:
        alone = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    spread = engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [each.token_ids for each in spread] == [each.token_ids for each in alone]
    nodes = [place.node for place in map(engine.executor._ranks.place, range(4))]  # type: ignore[attr-defined]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]  # a stage on each, the driver's on the driver's node


def test_an_error_on_a_rank_names_rank_and_node(
    cluster: LocalCluster, engine: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    output = engine.generate(trouble("own", 1, "before"), GREEDY, use_tqdm=False)[0]
    assert output.error == "TroubleError: in trouble"
    assert caplog.records[-1].exc_info
    notes = "\n".join(getattr(caplog.records[-1].exc_info[1], "__notes__", ()))
    assert f"on rank 1 in stage 0 on node {cluster.workers[0].node_id[:8]}" in notes
    assert engine.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].error is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 6}, r"6 ranks ask for 1 CPU each, and 4 fit: node \w{8} \(.*has 2 CPU.*; node"),
        ({"tensor_parallel_size": 3, "executor": "ray-spread"}, "each of 3 ranks on a node of its own.* 2 nodes"),
        ({"distributed": DistConfig([1, 0])}, r"tp_device_ids=\[1, 0\] and executor='ray' disagree"),
        (
            {"tensor_parallel_size": 2},
            r"2 ranks, of which .* must take one, found no room within 0.2 s; they ask",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    engine: LLM, checkpoint: Path, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_executor, "PLACE_LIMIT_S", 0.2)
    with pytest.raises(InvalidValueError, match=message):
        LLM(checkpoint, **SETTINGS, **{"executor": "ray", **settings})
    assert open_groups() == ["CREATED"]


def test_a_dead_node_is_named_within_three_seconds(cluster: LocalCluster, engine: LLM) -> None:
    victim = cluster.workers.pop()
    died_at = 0.0

    def kill() -> None:
        nonlocal died_at
        time.sleep(0.5)
        died_at = time.monotonic()
        cluster.cluster.remove_node(victim, allow_graceful=False)

    killer = Thread(target=kill)
    killer.start()
    message = rf"rank \d in stage 0 on node {victim.node_id[:8]} \(.*\) died with its node: the raylet at .* not answer"
    with pytest.raises(WorkerDiedError, match=message):
        generate_for_ever(engine)
    elapsed = time.monotonic() - died_at
    killer.join()
    assert elapsed < 3
    print(f"the dead node was named after {elapsed:.2f} s")
    with pytest.raises(WorkerDiedError, match=victim.node_id[:8]):
        engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    wait_until(lambda: not open_groups() and not live_actors(), 10, lambda: (open_groups(), live_actors()))


@slow
def test_a_killed_rank_is_named_with_its_node(cluster: LocalCluster, checkpoint: Path) -> None:
    with LLM(checkpoint, **SETTINGS, tensor_parallel_size=2, executor="ray") as llm:
        (rank,) = llm.executor._ranks._started.values()  # type: ignore[attr-defined]
        os.kill(rank._pid, signal.SIGKILL)
        died_at = time.monotonic()
        with pytest.raises(WorkerDiedError, match=rf"rank 1 on node \w+ \(.*\) \(process {rank._pid}\) died: "):
            generate_for_ever(llm)
        assert time.monotonic() - died_at < 3


@slow
@pytest.mark.parametrize("end", ["exit", "raise", "kill"])
def test_nothing_is_left_of_a_driver_that_ends(cluster: LocalCluster, checkpoint: Path, end: str) -> None:
    ends = {"exit": "sys.exit(0)", "raise": "raise ValueError", "kill": "os.kill(os.getpid(), 9)"}
    when = "Timer(0.5, lambda: os.kill(os.getpid(), 9)).start()" if end == "kill" else ""
    code = f"""
        import os, sys
        from threading import Timer
        sys.path.append({str(Path(__file__).parents[1])!r})
        import troubled_model
        from infinilm import LLM, SamplingParams
        llm = LLM({str(checkpoint)!r}, tensor_parallel_size=2, executor="ray", **{SETTINGS!r})
        (rank,) = llm.executor._ranks._started.values()
        print(rank._pid, flush=True)
        {when}
        for _ in range({1000 if end == "kill" else 1}):
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=50), use_tqdm=False)
        {ends[end]}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, check=False, timeout=120
    )
    assert done.returncode == {"exit": 0, "raise": 1, "kill": -9}[end]
    pid = int(done.stdout.split()[0])
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 5)
    wait_until(lambda: not open_groups() and not live_actors(), 20, lambda: (open_groups(), live_actors()))
