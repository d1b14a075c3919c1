"""A connection to a Ray cluster, and what is checked before anything is deployed there."""

import logging
import os
import socket
from dataclasses import dataclass
from typing import Any

from infinilm.errors import InvalidValueError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
CONNECT_TIMEOUT_S = 3.0
ASK_TIMEOUT_S = 60.0


@dataclass(frozen=True, eq=False)
class Node:
    node_id: str
    host: str
    resources: dict[str, float]

    def count_fitting(self, asked: dict[str, float]) -> int:
        """How many times the asked resources fit."""
        counts = [int(self.resources.get(name, 0.0) // amount) for name, amount in asked.items() if amount > 0]
        return min(counts, default=1 << 30)

    def __str__(self) -> str:
        return f"{self.node_id[:8]} ({self.host})"


def require_ray() -> None:
    """Raise if the extra is not installed."""
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")  # its log files have all of it
    try:
        import ray
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise InvalidValueError(
            f"clusters need {error.name}; install it with: pip install 'infinilm[cluster]'"
        ) from None


def connect(address: str | None, *, may_start: bool) -> None:
    """Connect to the cluster at `address` or RAY_ADDRESS. Without both, start a local one, or find one."""
    require_ray()
    import ray

    address = address or os.environ.get("RAY_ADDRESS") or ("local" if may_start else "auto")
    _check_reachable(address)
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address == "local":
        # By default Ray's workers get the CPU last of all processes (nice 15).
        quiet |= {"include_dashboard": False, "_system_config": {"worker_niceness": 0}}
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
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]
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


def check_resources(nodes: list[Node], asked: dict[str, float], num_replicas: int) -> None:
    """Refuse more replicas than fit, before Ray waits for nodes that nobody will add."""
    counts = {node: node.count_fitting(asked) for node in nodes}
    num_fitting = sum(counts.values())
    if num_fitting >= num_replicas:
        return
    wanted = _list(asked)
    there = "; ".join(
        f"node {node} has {_list({name: node.resources.get(name, 0.0) for name in asked})}, which is enough for {count}"
        for node, count in counts.items()
    )
    raise InvalidValueError(
        f"{num_replicas} replicas ask for {wanted} each, and {num_fitting} fit: {there}; ask for fewer (--replicas), "
        "for less (--cpus, --gpus), or add nodes"
    )


def _list(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items() if amount or name == "CPU")


def check_versions(nodes: list[Node]) -> None:
    """Refuse nodes whose Python, Ray or InfiniLM differ from this process's: they would fail in odd ways later."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    own = own_versions()
    task = ray.remote(num_cpus=0, max_retries=0)(own_versions)
    answers = {
        node: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)).remote()
        for node in nodes
    }
    ray.wait(list(answers.values()), num_returns=len(answers), timeout=ASK_TIMEOUT_S)
    wrong = []
    for node, answer in answers.items():
        try:
            found = ray.get(answer, timeout=0)
        except Exception as error:  # whatever keeps the node from answering
            wrong.append(f"node {node} does not answer: {str(error).splitlines()[-1]}")
            continue
        wrong += [
            f"node {node} has {name} {version}, this process {own[name]}"
            for name, version in found.items()
            if version != own[name]
        ]
    if wrong:
        raise InvalidValueError(f"the nodes differ: {'; '.join(wrong)}; install the same on all")


def own_versions() -> dict[str, str]:
    import platform

    import ray

    from infinilm import __version__

    return {"InfiniLM": __version__, "Ray": ray.__version__, "Python": platform.python_version()}
