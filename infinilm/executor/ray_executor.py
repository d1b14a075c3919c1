"""Ranks on the nodes of a Ray cluster.

Each rank is an actor, which Ray places and watches. Everything else works as with processes of one host: commands go
over a TCP connection from each rank to the driver, tensors over Gloo or NCCL.
"""

import os
import secrets
import select
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from infinilm.distributed.channel import Channel, Message
from infinilm.errors import EngineError, InvalidValueError
from infinilm.executor.processes import ProcessExecutor
from infinilm.executor.rank_process import serve
from infinilm.executor.worker_processes import Place, RankProcess
from infinilm.framing import ChannelClosedError, authenticate, watch_connection
from infinilm.models.cpu import avoid_false_amx
from infinilm.ray_cluster import (
    GROUP_VARIABLE,
    STRATEGIES,
    Node,
    ask,
    check_authentication,
    compare_versions,
    connect,
    describe_room,
    describe_shortage,
    live_nodes,
    own_versions,
    require_ray,
)

if TYPE_CHECKING:
    from ray.actor import ActorHandle

PLACE_LIMIT_S = 20.0
"""How long to wait for resources that are in use."""
START_LIMIT_S = 120.0
"""The time for actors to start and import torch, and again to connect."""
CAUSE_S = 1.8
"""How long to look for the cause of a lost connection, which may be the first sign of a node's death."""
PROBE_S = 0.5
HANDSHAKE_S = 5.0
ROLES = (b"driver", b"rank")


class RankActor:
    """One rank. Ray calls `report`, then `run`, which returns when the rank ends."""

    def report(self) -> dict[str, Any]:
        """What the driver needs to know before it starts the ranks."""
        import ray

        return {
            "versions": own_versions(),
            "pid": os.getpid(),
            "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            "gpus": [str(each) for each in ray.get_gpu_ids()],
        }

    def run(self, rank: int, host: str, port: int, secret: bytes, *, has_low_precision: bool) -> None:
        """Serve the driver, which listens at `host` and `port`."""
        if has_low_precision:
            avoid_false_amx()
        channel = Channel(socket.create_connection((host, port), START_LIMIT_S))
        authenticate(channel, secret, own=ROLES[1], other=ROLES[0])
        channel.socket.settimeout(None)
        watch_connection(channel.socket)
        channel.send(Message({"rank": rank}))
        Thread(target=_exit_with, args=[channel.socket], daemon=True).start()
        with suppress(ChannelClosedError):  # the driver has ended
            serve(channel)


def _exit_with(connection: socket.socket) -> None:
    """End this process when the driver closes the connection, even in the middle of a command."""
    _wait_for_end(connection, None)
    sleep(PROBE_S)  # an orderly end takes less
    os._exit(1)


def _wait_for_end(connection: socket.socket, timeout_s: float | None) -> bool:
    """Whether the other end has closed the connection."""
    poll = select.poll()
    try:
        poll.register(connection, getattr(select, "POLLRDHUP", select.POLLHUP))
    except ValueError:  # this end has closed it
        return True
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


class RayRank:
    """See `RankProcess`. An actor, its node and its connection."""

    def __init__(self, rank: int, actor: "ActorHandle[Any]", node: Node, pid: int, running: "Future[None]") -> None:
        self.socket: socket.socket = socket.socket()  # replaced when the rank connects
        self.rank = rank
        self.node = node
        self._actor = actor
        self._pid = pid
        self.running = running
        self._is_killed = False

    def has_ended(self) -> bool:
        return self.running.done() or _wait_for_end(self.socket, 0)

    def kill(self) -> None:
        import ray

        if not self._is_killed and ray.is_initialized():
            self._is_killed = True
            ray.kill(self._actor)

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._is_killed:
            with suppress(Exception):  # however it ends
                self.running.result(timeout_s)
        self.kill()

    def describe_death(self, title: str) -> str:
        """Names the node's death if that is the cause. Ray itself may learn of it seconds later."""
        deadline = monotonic() + CAUSE_S
        while (is_alive := self._is_node_alive()) and not self.running.done() and monotonic() < deadline:
            sleep(0.05)
        if not is_alive:
            address = f"{self.node.host}:{self.node.raylet_port}"
            return f"{title} died with its node: the raylet at {address} does not answer"
        return f"{title} (process {self._pid}) died: {self._cause()}"

    def _is_node_alive(self) -> bool:
        try:
            socket.create_connection((self.node.host, self.node.raylet_port), PROBE_S).close()
        except OSError:
            return False
        return True

    def _cause(self) -> str:
        if not self.running.done():
            return "it has closed its connection"
        error = self.running.exception()
        if error is None:
            return "it has ended"
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return next((line for line in lines if "exit" in line or "died because" in line), lines[-1] if lines else "")


class _Bundle(NamedTuple):
    """A part of the placement group: room for one rank."""

    number: int
    node: Node


class RayRanks:
    """See `Ranks`. All ranks are placed, started and connected when this is made."""

    def __init__(
        self, tp_size: int, num_stages: int, device: torch.device, *, strategy: str, dtype: torch.dtype
    ) -> None:
        import ray

        if not ray.is_initialized():
            connect(None, may_start=False)
        nodes = live_nodes()
        check_authentication(nodes, dict(os.environ))
        self.driver = tp_size * (num_stages - 1)
        self._num_ranks = tp_size * num_stages
        self._asked = {"CPU": 1.0} if device.type == "cpu" else {"GPU": 1.0}
        self._actors: dict[int, ActorHandle[Any]] = {}
        self._started: dict[int, RayRank] = {}
        self.driver_gpu: str | None = None
        """The GPU that Ray reserves for the driver. None in a replica, which sees only its own GPU."""
        self._has_group = GROUP_VARIABLE in os.environ
        self._group = self._find_group() if self._has_group else self._make_group(nodes, strategy)
        try:
            bundles = self._wait_for_room({node.node_id: node for node in nodes})
            by_rank = assign(bundles, tp_size, num_stages)
            self._nodes = {rank: bundle.node for rank, bundle in by_rank.items()}
            self._counts = Counter(self._nodes.values())
            reports = self._start_actors(by_rank, has_driver=device.type != "cpu" and not self._has_group)
            self._num_cores = {rank: report["num_cores"] for rank, report in reports.items()}
            self._connect(reports, has_low_precision=dtype != torch.float32 and device.type == "cpu")
        except BaseException:
            self.close()
            raise

    def place(self, rank: int) -> Place:
        node = self._nodes[rank]
        num_ranks = self._counts[node]
        num_cores = torch.get_num_threads() if rank == self.driver else self._num_cores[rank]
        return Place(num_ranks, node.host, str(node), max(1, num_cores // num_ranks))

    def start(self, rank: int) -> RankProcess:
        return self._started[rank]

    def close(self) -> None:
        import ray

        if self._group is None or not ray.is_initialized():
            return
        for actor in self._actors.values():
            ray.kill(actor)
        if not self._has_group:
            ray.util.remove_placement_group(self._group)
        self._group = None

    def _find_group(self) -> Any:
        """The placement group of the replica that this engine belongs to."""
        from ray._raylet import PlacementGroupID
        from ray.util.placement_group import PlacementGroup

        return PlacementGroup(PlacementGroupID(bytes.fromhex(os.environ[GROUP_VARIABLE])))

    def _make_group(self, nodes: list[Node], strategy: str) -> Any:
        """Make a group for this engine. Refuse what can never fit, because Ray would wait for more nodes."""
        import ray

        if shortage := describe_shortage(nodes, self._asked, self._num_ranks):
            raise InvalidValueError(f"{self._num_ranks} ranks {shortage}; use fewer ranks, or add nodes")
        if strategy == "STRICT_SPREAD" and len(nodes) < self._num_ranks:
            raise InvalidValueError(
                f"executor='ray-spread' puts each of {self._num_ranks} ranks on a node of its own, and there are "
                f"{len(nodes)} nodes; use executor='ray', fewer ranks, or add nodes"
            )
        own_id = ray.get_runtime_context().get_node_id()
        return ray.util.placement_group(
            [self._asked] * self._num_ranks,
            strategy=strategy,
            bundle_label_selector=[{"ray.io/node-id": own_id}] + [{}] * (self._num_ranks - 1),
        )

    def _wait_for_room(self, nodes: Mapping[str, Node]) -> list[_Bundle]:
        import ray
        from ray._private.state import available_resources_per_node

        if not self._group.wait(PLACE_LIMIT_S):
            free = available_resources_per_node()
            there = [
                Node(node_id, node.host, {name: free.get(node_id, {}).get(name, 0.0) for name in self._asked})
                for node_id, node in nodes.items()
            ]
            own = nodes[ray.get_runtime_context().get_node_id()]
            room = describe_room(there, self._asked)
            raise InvalidValueError(
                f"{self._num_ranks} ranks, of which this process's node {own} must take one, found no room within "
                f"{PLACE_LIMIT_S:g} s; they {room}; use fewer ranks, end what uses the nodes, or add nodes"
            )
        placed = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        return [_Bundle(index, nodes[placed[index]]) for index in sorted(placed)]

    def _start_actors(self, by_rank: Mapping[int, _Bundle], *, has_driver: bool) -> dict[int, dict[str, Any]]:
        """Start the actors, one for the driver's GPU too, and return their reports by rank."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kind = ray.remote(max_restarts=0, max_task_retries=0)(RankActor)
        for rank, bundle in by_rank.items():
            if rank != self.driver or has_driver:
                where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle.number)
                num_gpus = self._asked.get("GPU", 0)
                self._actors[rank] = kind.options(num_cpus=0, num_gpus=num_gpus, scheduling_strategy=where).remote()
        refs = {rank: actor.report.remote() for rank, actor in self._actors.items()}
        reports: dict[int, dict[str, Any]] = ask(refs, self._describe, START_LIMIT_S)
        compare_versions({self._nodes[rank]: report["versions"] for rank, report in reports.items()})
        if has_driver:
            self.driver_gpu = reports.pop(self.driver)["gpus"][0]
        return reports

    def _connect(self, reports: Mapping[int, Mapping[str, Any]], *, has_low_precision: bool) -> None:
        """Let every rank connect to this process."""
        host, secret = self._nodes[self.driver].host, secrets.token_bytes(32)
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            port = listener.getsockname()[1]
            for rank, report in reports.items():
                actor = self._actors[rank]
                running = actor.run.remote(rank, host, port, secret, has_low_precision=has_low_precision).future()
                self._started[rank] = RayRank(rank, actor, self._nodes[rank], report["pid"], running)
            missing = dict(self._started)
            deadline = monotonic() + START_LIMIT_S
            listener.settimeout(PROBE_S)
            while missing:
                self._accept(listener, secret, missing)
                if dead := [each for each in missing.values() if each.running.done()]:
                    raise EngineError(dead[0].describe_death(self._describe(dead[0].rank)))
                if missing and monotonic() > deadline:
                    late = ", ".join(map(self._describe, missing))
                    raise EngineError(
                        f"{late} could not connect to the driver at {host}:{port} within {START_LIMIT_S:g} s; is a "
                        "firewall between the nodes?"
                    )

    def _accept(self, listener: socket.socket, secret: bytes, missing: dict[int, RayRank]) -> None:
        """Accept the connection of a rank, if one arrives soon."""
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            return
        channel = Channel(connection)
        connection.settimeout(HANDSHAKE_S)
        try:
            authenticate(channel, secret, own=ROLES[0], other=ROLES[1])
            rank = missing.pop(channel.receive().values["rank"])
        except (ChannelClosedError, TimeoutError):  # not one of our ranks
            channel.close()
            return
        connection.settimeout(None)
        watch_connection(connection)
        rank.socket.close()
        rank.socket = connection

    def _describe(self, rank: int) -> str:
        return f"rank {rank} on node {self._nodes[rank]}"


def assign(bundles: Sequence[_Bundle], tp_size: int, num_stages: int) -> dict[int, _Bundle]:
    """A bundle for each rank. Bundle 0, on the driver's node, is the driver's.

    Ranks of one stage communicate the most, so they are assigned together, node by node, the driver's stage first.
    """
    driver = tp_size * (num_stages - 1)
    counts = Counter(bundle.node for bundle in bundles)
    own = bundles[0].node
    order = sorted(bundles[1:], key=lambda each: (each.node is not own, -counts[each.node], each.node.node_id))
    ranks = [*range(driver, tp_size * num_stages), *range(driver)]
    return dict(sorted(zip(ranks, [bundles[0], *order], strict=True)))


class RayExecutor(ProcessExecutor):
    """See `Executor`. The driver is in this process; the other ranks are actors."""

    def __init__(
        self,
        kind: str,
        devices: Sequence[torch.device],
        dtype: torch.dtype,
        attention_backend: str = "auto",
        num_stages: int = 1,
    ) -> None:
        """`kind` is `Config.executor`: "ray" or "ray-spread"."""
        require_ray("ray")
        tp_size = len(devices) // num_stages
        ranks = RayRanks(tp_size, num_stages, devices[0], strategy=STRATEGIES[kind], dtype=dtype)
        try:
            super().__init__(_own_devices(devices, ranks), dtype, attention_backend, num_stages, ranks)
        except BaseException:
            ranks.close()
            raise


def _own_devices(devices: Sequence[torch.device], ranks: RayRanks) -> list[torch.device]:
    """An actor sees only the GPU that Ray gives it; the driver sees all GPUs that this process may use."""
    if devices[0].type == "cpu":
        return list(devices)
    own = [torch.device(device.type, 0) for device in devices]
    if ranks.driver_gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        index = visible.split(",").index(ranks.driver_gpu) if visible else int(ranks.driver_gpu)
        own[ranks.driver] = torch.device(devices[0].type, index)
    return own
