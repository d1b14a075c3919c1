"""Connects to a Ray cluster, and checks it before anything is deployed there."""

import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from infinilm.errors import InvalidValueError

if TYPE_CHECKING:
    import ray

K = TypeVar("K")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
STRATEGIES = {"ray": "PACK", "ray-spread": "STRICT_SPREAD"}
"""By `Config.executor`: how Ray places ranks, on as few nodes as possible or each on its own node."""
GROUP_VARIABLE = "INFINILM_PLACEMENT_GROUP"
"""Names the placement group for the ranks of an engine's process, if there is one. Its first bundle is the driver's."""
LOCAL_SYSTEM = {
    "worker_niceness": 0,  # by default Ray's workers get the CPU last of all processes (nice 15)
    "raylet_report_resources_period_milliseconds": 1000,
    "task_events_report_interval_ms": 0,
    "enable_metrics_collection": False,
    "event_stats": False,
}
"""Settings of a cluster on this machine alone. Ray's own work takes cores from the engines, so it is reduced."""
CONNECT_TIMEOUT_S = 3.0
ASK_TIMEOUT_S = 60.0


@dataclass(frozen=True, eq=False)
class Node:
    node_id: str
    host: str
    resources: dict[str, float]
    raylet_port: int = 0

    def count_fitting(self, asked: dict[str, float]) -> int:
        """How many times the asked resources fit."""
        counts = [int(self.resources.get(name, 0.0) // amount) for name, amount in asked.items() if amount > 0]
        return min(counts, default=1 << 30)

    def __str__(self) -> str:
        return f"{self.node_id[:8]} ({self.host})"


def require_ray(part: str = "ray.serve") -> None:
    """Raise if `part` of Ray, which the extra installs, is missing."""
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")  # its log files contain everything
    try:
        import_module(part)
    except ImportError as error:
        raise InvalidValueError(
            f"clusters need {error.name}; install it with: pip install 'infinilm[cluster]'"
        ) from None


def connect(address: str | None, *, may_start: bool) -> None:
    """Connect to the cluster at `address` or RAY_ADDRESS. Without both, start a local one, or find one."""
    require_ray("ray.serve" if may_start else "ray")
    import ray

    address = address or os.environ.get("RAY_ADDRESS") or ("local" if may_start else "auto")
    _check_reachable(address)
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address == "local":
        os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.5")
        quiet |= {"include_dashboard": False, "_system_config": LOCAL_SYSTEM}
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        ray.init(address=address, namespace="infinilm", **quiet)
    except ConnectionError as error:
        raise InvalidValueError(
            f"no Ray cluster is reachable at {address!r}: {str(error).splitlines()[0]}; start one with 'ray start "
            "--head' and give its address in --address or RAY_ADDRESS"
        ) from None
    except RuntimeError as error:  # among others: another version of Ray or Python than the cluster's
        raise InvalidValueError(f"the Ray cluster at {address!r} refuses this process: {error}") from None


def _check_reachable(address: str) -> None:
    """Refuse an address where nothing listens: Ray itself would try for a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise InvalidValueError(
            f"no Ray cluster is reachable at {address!r}: {error}; start one with 'ray start --head' and give its "
            "address in --address or RAY_ADDRESS"
        ) from None


def live_nodes() -> list[Node]:
    import ray

    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"], node["NodeManagerPort"])
        for node in ray.nodes()
        if node["Alive"]
    ]


def check_authentication(nodes: list[Node], environment: dict[str, str]) -> None:
    """Refuse a cluster that other machines can reach without a token: a client of Ray can run any code."""
    is_reachable = any(node.host not in LOOPBACK for node in nodes)
    if is_reachable and environment.get("RAY_AUTH_MODE", "").lower() != "token":
        raise InvalidValueError(
            f"the Ray cluster listens on {nodes[0].host}, which other machines can reach, without token "
            "authentication; start Ray on all nodes with RAY_AUTH_MODE=token and the same token (ray get-auth-token "
            "--generate), and set RAY_AUTH_MODE=token here"
        )


def check_resources(nodes: list[Node], asked: dict[str, float], num_replicas: int, num_ranks: int = 1) -> None:
    """Refuse more replicas than fit, because Ray would wait for more nodes.

    If the ranks of a replica may be on several nodes, each of its `num_ranks` ranks needs the `asked` resources.
    """
    if shortage := describe_shortage(nodes, asked, num_replicas * num_ranks):
        what = f"{num_replicas * num_ranks} ranks of {num_replicas}" if num_ranks > 1 else num_replicas
        raise InvalidValueError(
            f"{what} replicas {shortage}; ask for fewer (--replicas), for less (--cpus, --gpus), or add nodes"
        )


def describe_shortage(nodes: list[Node], asked: dict[str, float], number: int) -> str | None:
    """Text on what is asked and what each node has; None if it fits `number` times."""
    num_fitting = sum(node.count_fitting(asked) for node in nodes)
    return None if num_fitting >= number else describe_room(nodes, asked)


def describe_room(nodes: list[Node], asked: dict[str, float]) -> str:
    counts = {node: node.count_fitting(asked) for node in nodes}
    there = "; ".join(
        f"node {node} has {_list({name: node.resources.get(name, 0.0) for name in asked})}, which is enough for {count}"
        for node, count in counts.items()
    )
    return f"ask for {_list(asked)} each, and {sum(counts.values())} fit: {there}"


def _list(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items() if amount or name == "CPU")


def check_versions(nodes: list[Node]) -> None:
    """Refuse nodes whose Python, Ray or InfiniLM differ from this process's: they would fail in odd ways later."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(own_versions)
    answers = {
        node: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)).remote()
        for node in nodes
    }
    compare_versions(ask(answers, lambda node: f"node {node}", ASK_TIMEOUT_S))


def ask(answers: "Mapping[K, ray.ObjectRef[Any]]", title: Callable[[K], str], timeout_s: float) -> dict[K, Any]:
    """The answers by key. If some do not arrive, raises an error that names them by their `title`."""
    import ray

    ray.wait(list(answers.values()), num_returns=len(answers), timeout=timeout_s)
    found, wrong = {}, []
    for key, answer in answers.items():
        try:
            found[key] = ray.get(answer, timeout=0)
        except ray.exceptions.GetTimeoutError:
            wrong.append(f"{title(key)} does not answer within {timeout_s:g} s")
        except Exception as error:  # any reason for not answering
            wrong.append(f"{title(key)} does not answer: {str(error).strip().splitlines()[-1]}")
    if wrong:
        raise InvalidValueError("; ".join(wrong))
    return found


def compare_versions(found: Mapping[Node, Mapping[str, str]]) -> None:
    """Refuse versions that differ from this process's."""
    own = own_versions()
    wrong = [
        f"node {node} has {name} {version}, this process {own[name]}"
        for node, versions in found.items()
        for name, version in versions.items()
        if version != own[name]
    ]
    if wrong:
        raise InvalidValueError(f"the nodes differ: {'; '.join(wrong)}; install the same on all")


def own_versions() -> dict[str, str]:
    import platform

    import ray

    from infinilm import __version__

    return {"InfiniLM": __version__, "Ray": ray.__version__, "Python": platform.python_version()}
