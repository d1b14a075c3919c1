"""What takes longer on a cluster of three raylets: `make test-cluster`."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest
from cluster_driver import APP, KEYS, LocalCluster, StreamClient, local_cluster, num_ready, post, replica_of, wait_until

from infinilm import LLM, SamplingParams
from infinilm.cluster import service
from infinilm.cluster.client import ClusterClient, ReplicaAddress, Ticket
from infinilm.cluster.scoring import Scoreboard
from infinilm.cluster.wire import split_hashes
from infinilm.config import Config
from infinilm.engine.sequence import block_hashes
from infinilm.server.admission import Admission
from infinilm.server.guard import KeyRing
from infinilm.server.messages import HASH_BYTES
from infinilm.server.settings import Limits

pytestmark = pytest.mark.skipif("INFINILM_TEST_CLUSTER" not in os.environ, reason="slow: make test-cluster")

BLOCK = 16


@pytest.fixture(scope="module")
def cluster(long_dir: Path) -> Iterator[LocalCluster]:
    with local_cluster(long_dir) as running:
        running.deploy(num_kvcache_blocks=128)
        wait_until(lambda: num_ready() == 2)
        yield running


@pytest.fixture(scope="module")
def url(cluster: LocalCluster) -> str:
    return cluster.head_url()


class Observer:
    """Follows the caches of all replicas, as a front does, in a thread of its own."""

    def __init__(self, secret: str) -> None:
        self._client: ClusterClient | None = None
        self._secret = bytes.fromhex(secret)
        self._ended = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_until_complete, args=[self._run()], daemon=True)
        self._thread.start()
        wait_until(lambda: self._client is not None and self._client.ready is not None)

    async def _run(self) -> None:
        limits = Limits()
        self._client = ClusterClient(Config(), limits, Admission(limits), lambda: self, self._secret)
        await self._client.start()
        await self._ended.wait()
        await self._client.stop()

    @asynccontextmanager
    async def choose_replica(self, ticket: Ticket, *, _reserve: bool) -> AsyncIterator[None]:
        await asyncio.sleep(2)
        fronts = await asyncio.to_thread(service.ask_fronts, APP)
        found = {each["replica"]: each for each in fronts[0]["replicas"]}
        ticket.note([ReplicaAddress(name, each["host"], each["port"], each["node"]) for name, each in found.items()])
        yield

    @property
    def board(self) -> Scoreboard:
        assert self._client is not None
        return self._client.scoreboard

    def best(self, token_ids: list[int]) -> int:
        """The most tokens of a prompt that any replica's cache holds."""
        salt = KeyRing(KEYS).find(KEYS[0].encode())
        assert salt is not None
        joined = b"".join(each[:HASH_BYTES] for each in block_hashes(token_ids, salt.encode(), BLOCK))
        hashes = split_hashes(joined)
        return max((view.count_cached(hashes) * BLOCK for view in list(self.board.views.values())), default=0)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(10)


def tokenize(url: str, text: str) -> list[int]:
    import httpx

    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    found: list[int] = httpx.post(f"{url}/tokenize", json={"prompt": text}, headers=headers).json()["tokens"]
    return found


def chat_traffic(
    url: str, observer: Observer, tag: str, *, conversations: int, turns: int, sessions: list[str] | None = None
) -> tuple[float, float]:
    """Conversations by turns, each with a system prompt of 320 tokens of its kind. The hit rate, and the oracle's."""
    texts = [f"{tag}{number % 3} " * 80 + f"conversation {number}. " for number in range(conversations)]
    num_tokens = num_cached = num_best = count = 0
    for turn in range(turns):
        for number in range(conversations):
            texts[number] += f"And what about point {turn}? "
            time.sleep(0.25)  # for the observer to hear of the last one
            best = observer.best(tokenize(url, texts[number]))
            headers = {"X-Session-Id": sessions[count % 2]} if sessions else {}
            count += 1
            response = post(url, headers=headers, prompt=texts[number], max_tokens=16).json()
            texts[number] += response["choices"][0]["text"].replace("\ufffd", "")
            num_tokens += response["usage"]["prompt_tokens"]
            num_cached += response["usage"]["prompt_tokens_details"]["cached_tokens"]
            num_best += best
    return num_cached / num_tokens, num_best / num_tokens


def find_sessions(url: str) -> list[str]:
    """Two session names, one for each replica: requests that alternate them are round robin."""
    found: dict[str, str] = {}
    for number in range(40):
        name = f"session-{number}"
        found.setdefault(replica_of(post(url, headers={"X-Session-Id": name}, prompt=name)), name)
    assert len(found) == 2
    return list(found.values())


def test_the_hit_rate_is_near_the_oracles_also_after_a_restart_and_evictions(cluster: LocalCluster, url: str) -> None:
    import ray

    assert cluster.options is not None
    observer = Observer(cluster.options.secret)
    try:
        fresh = chat_traffic(url, observer, "fresh", conversations=4, turns=4)
        turns = chat_traffic(url, observer, "turns", conversations=4, turns=4, sessions=find_sessions(url))
        crowd = chat_traffic(url, observer, "crowd", conversations=10, turns=3)  # more than the caches hold
        victim = service.ask_fronts(APP)[0]["replicas"][0]["replica"]
        actor = next(name for name in _actor_names() if victim in name)
        ray.kill(ray.get_actor(actor, namespace="serve"))
        wait_until(lambda: victim not in str(service.ask_fronts(APP)) and num_ready() == 2)
        again = chat_traffic(url, observer, "again", conversations=4, turns=4)
    finally:
        observer.close()
    for name, (rate, best) in {"router": fresh, "round robin": turns, "evictions": crowd, "restart": again}.items():
        print(f"{name}: hit rate {rate:.1%}, oracle {best:.1%}")
    for rate, best in (fresh, crowd, again):
        assert rate >= 0.95 * best
    assert turns[0] < fresh[0]


def _actor_names() -> list[str]:
    import ray

    return [str(each["name"]) for each in ray.util.list_named_actors(all_namespaces=True)]


@contextmanager
def steady_traffic(url: str) -> Iterator[list[str]]:
    """Four clients that ask one thing after the other. Yields the list of what failed."""
    failures: list[str] = []
    ended = Event()

    def ask(number: int) -> None:
        count = 0
        while not ended.is_set():
            count += 1
            response = post(url, prompt=f"client {number} asks {count}", max_tokens=30)
            if response.status_code != 200:
                failures.append(response.text)

    threads = [Thread(target=ask, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        ended.set()
        for thread in threads:
            thread.join(60)


def running_replicas() -> set[str]:
    return {each["replica"] for each in service.ask_fronts(APP)[0]["replicas"] if each["state"] == "ready"}


def test_an_update_and_a_scale_down_fail_no_request(cluster: LocalCluster, url: str) -> None:
    before = running_replicas()
    fronts = {front["address"] for front in service.ask_fronts(APP)}
    with steady_traffic(url) as failures:
        cluster.deploy(num_kvcache_blocks=320)
        wait_until(lambda: len(running_replicas()) == 2 and not running_replicas() & before)
        cluster.deploy(num_kvcache_blocks=320, replicas=(1, 1))
        wait_until(lambda: len(running_replicas()) == 1)
        time.sleep(1)
    assert not failures
    assert {front["address"] for front in service.ask_fronts(APP)} == fronts  # they went on all the time


@pytest.mark.parametrize("executor", ["auto", "ray-spread"])
def test_an_engine_of_two_ranks_answers_like_one(
    cluster: LocalCluster, url: str, long_dir: Path, executor: str
) -> None:
    before = running_replicas()
    cluster.deploy(num_kvcache_blocks=320, replicas=(1, 1), tensor_parallel_size=2, executor=executor)
    wait_until(lambda: len(running_replicas() - before) == 1 and not running_replicas() & before)
    prompts = [f"question {number} " * 5 for number in range(4)]
    with LLM(long_dir, num_kvcache_blocks=64) as llm:
        alone = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0), use_tqdm=False)
    answers = [post(url, prompt=prompt, max_tokens=12).json()["choices"][0]["text"] for prompt in prompts]
    assert answers == [expected.outputs[0].text for expected in alone]
    processes = [pid for pid in _pids("infinilm.executor.rank_process") if _is_ours(pid)]
    (own,) = {each["node"] for each in service.ask_fronts(APP)[0]["replicas"]}
    others = {worker.node_id for worker in cluster.workers} - {own}
    assert (len(processes), _rank_nodes()) == ((1, set()) if executor == "auto" else (0, others))


def _rank_nodes() -> set[str]:
    """The nodes that have ranks as actors."""
    import ray._private.state

    actors = ray._private.state.actors().values()
    ranks = [each for each in actors if each["ActorClassName"] == "RankActor" and each["State"] == "ALIVE"]
    return {each["Address"]["NodeID"] for each in ranks}


def test_waiting_prompts_bring_another_replica(cluster: LocalCluster, url: str) -> None:
    cluster.deploy(num_kvcache_blocks=320, replicas=(1, 2), max_num_seqs=2)
    clients: list[StreamClient] = []

    def is_grown() -> bool:
        clients[:] = [client for client in clients if client.thread.is_alive()]
        while len(clients) < 10:
            clients.append(StreamClient(url, {"prompt": f"{time.time()} " + "wait " * 60, "max_tokens": 1000}))
        return len(running_replicas()) == 2

    wait_until(is_grown)
    for client in clients:
        client.is_left = True


def test_the_engines_process_is_killed_and_its_replica_starts_another(cluster: LocalCluster, url: str) -> None:
    cluster.deploy(num_kvcache_blocks=320)
    wait_until(lambda: num_ready() == 2)
    engines = [pid for pid in _pids("infinilm.server.engine_process") if _is_ours(pid)]
    os.kill(engines[0], signal.SIGKILL)
    answers = [post(url, prompt=f"after the death {number}") for number in range(8)]
    assert all(answer.status_code == 200 for answer in answers)
    wait_until(lambda: num_ready() == 2)


def _pids(text: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return found


def _is_ours(pid: int) -> bool:
    """Whether a process belongs to this test's cluster."""
    try:
        return os.environ["RAY_AUTH_TOKEN"].encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def run_cli(*arguments: str, **environment: str) -> "subprocess.Popen[str]":
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-m", "infinilm", "cluster", "serve", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**clean, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
    )


def read_until(process: "subprocess.Popen[str]", text: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return line
    raise AssertionError(f"the command has ended without {text!r}")


def test_the_driver_is_killed_and_nothing_is_left(long_dir: Path) -> None:
    tag = f"INFINILM_TEST_TAG=killed-{os.getpid()}"
    name, _, value = tag.partition("=")
    process = run_cli(str(long_dir), "--port", "0", "--num-kvcache-blocks", "64", **{name: value})
    read_until(process, "engines")

    def left() -> list[str]:
        return [_command(path.parent) for path in Path("/proc").glob("[0-9]*/environ") if _has(path, tag)]

    assert len(left()) > 3
    process.kill()
    process.wait()
    wait_until(lambda: not left(), describe=left)


def test_the_driver_is_killed_and_a_running_cluster_loses_the_application(
    cluster: LocalCluster, long_dir: Path
) -> None:
    from ray import serve

    secrets = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
    options = ("--port", "0", "--name", "short-lived", "--cpus", "0.5", "--address", cluster.cluster.address)
    process = run_cli(str(long_dir), "--num-kvcache-blocks", "64", *options, **secrets)
    read_until(process, "engines")
    assert "short-lived" in serve.status().applications
    process.kill()
    process.wait()
    wait_until(lambda: "short-lived" not in serve.status().applications)


def _command(process: Path) -> str:
    return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()


def _has(path: Path, text: str) -> bool:
    try:
        return text.encode() in path.read_bytes()
    except OSError:
        return False


def test_a_model_that_cannot_be_loaded_is_named_in_one_line(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    secrets = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
    options = ("--port", "0", "--name", "broken", "--cpus", "0.5", "--address", cluster.cluster.address)
    process = run_cli(str(tmp_path), *options, **secrets)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 2
    assert "error: the service could not be started" in errors
    assert str(tmp_path) in errors
