"""The front: the HTTP service of one node, in front of the engine replicas of all nodes."""

import asyncio
import itertools
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from threading import Event
from typing import TYPE_CHECKING, Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from infinilm.cluster.client import ClusterClient, Handle, ReplicaLink
from infinilm.cluster.loop_thread import LoopThread
from infinilm.config import Config
from infinilm.errors import EngineError
from infinilm.server.admission import Admission
from infinilm.server.logs import install_logging
from infinilm.server.messages import Ready
from infinilm.server.run import loop_factory, serve
from infinilm.server.service import Service
from infinilm.server.settings import Limits, ServerSettings

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.serve.handle import DeploymentHandle

UNBOUNDED = 1 << 60


class ClusterService(Service):
    """The service of `infinilm serve` with replicas instead of one engine. Replicas queue and refuse, fronts do not."""

    def __init__(
        self,
        config: Config,
        settings: ServerSettings,
        *,
        tool_call_parser: str | None,
        make_handle: Callable[[], Handle],
        secret: bytes,
    ) -> None:
        super().__init__(config, settings, tool_call_parser=tool_call_parser)
        unbounded = replace(settings.limits, max_requests=UNBOUNDED, max_total_tokens=UNBOUNDED)
        self.admission = Admission(unbounded, has_tenants=len(settings.api_keys) > 1)
        self.client: ClusterClient = ClusterClient(config, settings.limits, self.admission, make_handle, secret)
        self.metrics.registry.register(ReplicaCollector(self.client))
        tag = secrets.token_hex(4)
        self._ids = (f"{tag}-{number}" for number in itertools.count())  # a replica has requests of several fronts


class ReplicaCollector(Collector):
    """The engines' numbers for Prometheus, with the labels `replica` and `node`."""

    def __init__(self, client: ClusterClient) -> None:
        self._client = client

    def collect(self) -> Iterator[Metric]:
        gauges = {
            "ready": ("1 if the replica takes requests.", lambda link: int(link.is_open)),
            "requests": ("Requests that it has admitted.", lambda link: link.load.num_requests),
            "requests_running": ("Answers that it computes.", lambda link: link.load.stats.num_running),
            "queued_tokens": ("Prompt tokens that wait for it.", lambda link: link.load.queued_tokens),
            "kv_blocks": ("Blocks of its KV cache.", lambda link: link.load.stats.num_blocks),
            "kv_blocks_cached": ("Blocks that can be found again.", lambda link: link.load.stats.num_cached_blocks),
        }
        counters = {
            "steps": ("Steps since its engine's last start.", lambda link: link.load.stats.num_steps),
            "prefill_tokens": ("Prompt tokens computed.", lambda link: link.load.stats.num_prefill_tokens),
            "cached_tokens": ("Prompt tokens found in its cache.", lambda link: link.load.stats.num_cached_tokens),
            "output_tokens": ("Tokens generated.", lambda link: link.load.stats.num_decode_tokens),
            "restarts": ("Restarts of its engine.", lambda link: link.load.num_restarts),
        }
        kinds: list[tuple[Callable[..., Any], dict[str, Any]]]
        kinds = [(GaugeMetricFamily, gauges), (CounterMetricFamily, counters)]
        for kind, table in kinds:
            for name, (text, read) in table.items():
                family = kind(f"infinilm_replica_{name}", text, labels=["replica", "node"])
                for link in self._client.links.values():
                    if link.load is not None:
                        family.add_metric([link.address.replica_id, link.address.node_id[:8]], read(link))
                yield family


def describe_link(link: ReplicaLink) -> dict[str, Any]:
    """A replica as `infinilm cluster status` shows it."""
    load, address = link.load, link.address
    known = {"replica": address.replica_id, "node": address.node_id, "host": address.host, "port": address.port}
    if load is None:
        return {**known, "state": "connecting"}
    stats = load.stats
    num_prompt_tokens = stats.num_cached_tokens + stats.num_prefill_tokens
    return {
        **known,
        "state": load.state,
        "cause": load.cause,
        "requests": load.num_requests,
        "queued_tokens": load.queued_tokens,
        "cached_blocks": stats.num_cached_blocks,
        "blocks": stats.num_blocks,
        "tokens_per_second": link.token_rate,
        "hit_rate": stats.num_cached_tokens / num_prompt_tokens if num_prompt_tokens else 0.0,
    }


class Front:
    """The Ray Serve deployment of the HTTP service. One runs on each node and listens there."""

    def __init__(
        self,
        model: str | None,
        settings: dict[str, Any],
        *,
        tool_call_parser: str | None,
        secret: str,
        app_name: str,
        engines: "DeploymentHandle[Any]",
        keeper: "ActorHandle[Any] | None" = None,
    ) -> None:
        import ray

        install_logging()
        self._node_id = ray.get_runtime_context().get_node_id()
        self._app_name = app_name
        self._keeper = keeper
        self._address: str | None = None
        self._listens = Event()

        def make_handle() -> Handle:
            self._listens.set()  # the service has bound its socket
            engines._init(_run_router_in_separate_loop=False)  # the router runs in the service's own loop
            handle: Handle = engines
            return handle

        self._service = ClusterService(
            Config(model=model),
            ServerSettings(
                **{**settings, "limits": Limits(**settings["limits"]), "api_keys": tuple(settings["api_keys"])}
            ),
            tool_call_parser=tool_call_parser,
            make_handle=make_handle,
            secret=bytes.fromhex(secret),
        )
        self._thread = LoopThread("front", loop_factory())
        self._serving: Future[None] = self._thread.start(serve(self._service, self._note_ready))
        self._serving.add_done_callback(lambda _: self._listens.set())
        self._listens.wait()
        self._raise_if_ended()
        if keeper is not None:
            self._watch = self._thread.start(self._end_with_driver())

    def _note_ready(self, ready: Ready, address: str) -> None:  # noqa: ARG002
        self._address = address

    def _raise_if_ended(self) -> None:
        if self._serving.done():
            self._serving.result()
            raise EngineError("the front has ended")

    def check_health(self) -> None:
        self._raise_if_ended()

    def describe(self) -> dict[str, Any]:
        """This front's address, and the replicas as it sees them."""
        client = self._service.client
        return {
            "node": self._node_id,
            "address": self._address,
            "state": str(client.state),
            "cause": client.cause,
            "requests": self._service.admission.num_requests,
            "replicas": [describe_link(link) for link in client.links.values()],
        }

    async def _end_with_driver(self) -> None:
        """Delete the application when the process that started it has ended."""
        from ray import serve as ray_serve
        from ray.exceptions import RayActorError

        assert self._keeper is not None
        with suppress(RayActorError):
            await self._keeper.wait.remote()
        await asyncio.to_thread(ray_serve.delete, self._app_name, _blocking=False)

    async def __del__(self) -> None:
        """Ray Serve calls this before it stops the front."""
        await self._thread.call(self._stop())

    async def _stop(self) -> None:
        await self._service.drain()
        self._service.client.cause = "the front was told to stop"
        self._service.client.failed.set()
        with suppress(EngineError):
            await asyncio.wrap_future(self._serving)
