"""A Ray cluster of three raylets on this machine, the service on it, and clients."""

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from infinilm import ray_cluster
from infinilm.cluster import service
from infinilm.cluster.deployment import ClusterOptions
from infinilm.config import Config
from infinilm.server.messages import config_to_wire
from infinilm.server.settings import Limits, ServerSettings

KEYS = ("first-tenants-key", "second-tenants-key")
STORE = 80 << 20
APP = "infinilm"
TIMEOUT_S = 90.0


class LocalCluster:
    """The head has the driver and a front; more raylets have an engine each, or ranks of one."""

    def __init__(self, model: Path, num_workers: int) -> None:
        from ray.cluster_utils import Cluster

        self._model = model
        config = {
            "health_check_initial_delay_ms": 500,
            "health_check_period_ms": 500,
            "health_check_failure_threshold": 3,
            "worker_niceness": 0,
        }
        head = {"num_cpus": 2, "object_store_memory": STORE, "include_dashboard": False, "_system_config": config}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.workers = [self.add_worker() for _ in range(num_workers)]
        self.options: ClusterOptions | None = None

    def add_worker(self) -> Any:
        return self.cluster.add_node(num_cpus=2, object_store_memory=STORE, resources={"engine": 2})

    def deploy(self, *, replicas: tuple[int, int] = (2, 2), **settings: Any) -> list[dict[str, Any]]:
        """Deploy, or update: `settings` are the engine's."""
        config = Config.from_kwargs(model=self._model, **{"num_kvcache_blocks": 512, "max_num_seqs": 32, **settings})
        limits = Limits(max_requests=12, drain_timeout=20)
        options = ClusterOptions(
            config=config_to_wire(config),
            settings=asdict(ServerSettings(port=0, api_keys=KEYS, limits=limits)),
            secret="",
            app_name=APP,
            min_replicas=replicas[0],
            max_replicas=replicas[1],
            queued_tokens=256,
            resources={"engine": 1.0},
        )
        if self.options is None:
            service.prepare(options, self.cluster.address, cpus=1, gpus=None)
        else:
            service.fit(options, ray_cluster.live_nodes(), cpus=1, gpus=None)
            options.secret, options.num_fronts = self.options.secret, self.options.num_fronts
        self.options = options
        return service.deploy(options, is_detached=True)

    def head_url(self) -> str:
        """The front beside the driver: no test kills it."""
        import ray

        own = ray.get_runtime_context().get_node_id()
        return next(str(front["address"]) for front in service.ask_fronts(APP) if front["node"] == own)

    def close(self) -> None:
        import ray
        from ray import serve

        if self.options is not None:
            serve.shutdown()
        ray.shutdown()
        self.cluster.shutdown()


def reset_authentication() -> None:
    """Have Ray read the token's variables again: this process may have imported it before."""
    from ray._private.authentication_test_utils import reset_auth_token_state

    reset_auth_token_state()


@contextmanager
def local_cluster(model: Path, num_workers: int = 2) -> Iterator[LocalCluster]:
    ray_cluster.require_ray()
    own = {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parent)]),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setenv(name, value)
        reset_authentication()
        running = LocalCluster(model, num_workers)
        try:
            yield running
        finally:
            running.close()
    reset_authentication()


def post(url: str, key: str = KEYS[0], headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return httpx.post(
        f"{url}/v1/completions",
        json={"max_tokens": 4, "temperature": 0, **body},
        headers={"Authorization": f"Bearer {key}", **(headers or {})},
        timeout=60,
    )


def replica_of(response: httpx.Response) -> str:
    return response.headers["x-infinilm-replica"].split(",")[0]


@dataclass
class StreamClient:
    """A client that reads a stream in a thread, and notes when and how it ended."""

    url: str
    body: dict[str, Any]
    status: int = 0
    replica: str = ""
    num_events: int = 0
    error: str = ""
    is_complete: bool = False
    is_left: bool = False
    """Whether to hang up at the next event."""
    end_time: float = 0.0
    thread: Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        headers = {"Authorization": f"Bearer {KEYS[0]}"}
        body = {"temperature": 0, "ignore_eos": True, "stream": True, **self.body}
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, headers=headers, timeout=60) as response:
                self.status = response.status_code
                self.replica = response.headers.get("x-infinilm-replica", "")
                for line in response.iter_lines():
                    self._take(line)
                    if self.is_left:
                        break
        except httpx.HTTPError as error:
            self.error = f"connection: {error}"
        self.end_time = time.monotonic()

    def _take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.is_complete = True
        elif line.startswith("data: ") and "error" in (event := json.loads(line[6:])):
            self.error = event["error"]["message"]
        elif line.startswith("data: "):
            self.num_events += 1
        elif line.startswith('{"error"'):
            self.error = json.loads(line)["error"]["message"]


def wait_until(
    condition: Callable[[], bool], seconds: float = TIMEOUT_S, describe: Callable[[], object] = lambda: ""
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it took too long: {describe()}"
        time.sleep(0.1)


def num_ready() -> int:
    """Engines that all fronts see ready."""
    fronts = service.ask_fronts(APP)
    return min((sum(each["state"] == "ready" for each in front["replicas"]) for front in fronts), default=0)
