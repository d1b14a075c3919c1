"""Deploys the service on Ray, asks for its status, and ends it, for `infinilm cluster`."""

import os
import secrets
import time
from threading import Event
from typing import Any

from infinilm import ray_cluster
from infinilm.cluster.deployment import ClusterOptions, build_application
from infinilm.errors import EngineError, InvalidValueError

POLL_S = 0.25
STATUS_TIMEOUT_S = 30.0
NAME_PREFIX = "infinilm"


class Keeper:
    """An actor that lives as long as the driver. When it is gone, fronts end the application."""

    def wait(self) -> None:
        Event().wait()


def shared_secret(app_name: str) -> str:
    """An application's secret, the same for all its deployments, because an update leaves fronts running."""
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

    key = f"{NAME_PREFIX}:{app_name}:secret".encode()
    _internal_kv_put(key, secrets.token_hex(32).encode(), overwrite=False)
    found = _internal_kv_get(key)
    assert found is not None
    return str(found.decode())


def choose_resources(nodes: list[ray_cluster.Node], device: str, num_ranks: int, num_parts: int) -> tuple[float, float]:
    """The default CPUs and GPUs of a part: a GPU per rank if there are any, else an equal share of a node's CPUs.

    A part is a replica, or one of its ranks.
    """
    if _uses_gpus(nodes, device):
        return 1.0, float(num_ranks)
    per_node = -(-num_parts // len(nodes))
    smallest = min(node.resources.get("CPU", 1.0) for node in nodes)
    return float(max(1, int(smallest // per_node))), 0.0


def _uses_gpus(nodes: list[ray_cluster.Node], device: str) -> bool:
    has_gpus = any(node.resources.get("GPU") for node in nodes)
    return device.startswith("cuda") or (device == "auto" and has_gpus)


def fit(options: ClusterOptions, nodes: list[ray_cluster.Node], *, cpus: float | None, gpus: float | None) -> None:
    """Choose the resources of replicas, and refuse more than there are.

    A replica's ranks are processes on its node if a node has enough GPUs for all of them, otherwise actors.
    """
    config = options.config
    device = str(config["device"])
    num_ranks = config["tensor_parallel_size"] * config["pipeline_parallel_size"]
    most_gpus = max(node.resources.get("GPU", 0.0) for node in nodes)
    if config["executor"] == "auto" and _uses_gpus(nodes, device) and 0 < most_gpus < num_ranks:
        config["executor"] = "ray"
    options.divide()
    num_cpus, num_gpus = choose_resources(
        nodes, device, num_ranks // options.num_bundles, options.max_replicas * options.num_bundles
    )
    options.num_cpus = num_cpus if cpus is None else cpus / options.num_bundles
    options.num_gpus = num_gpus if gpus is None else gpus / options.num_bundles
    ray_cluster.check_resources(nodes, options.bundle, options.min_replicas, options.num_bundles)


def deploy(options: ClusterOptions, *, is_detached: bool) -> list[dict[str, Any]]:
    """Deploy or update the application. Returns the status of its fronts once all of them serve requests."""
    import ray
    from ray import serve

    keeper = None if is_detached else ray.remote(num_cpus=0)(Keeper).remote()
    serve.start(proxy_location="Disabled")
    is_update = options.app_name in serve.status().applications
    try:
        serve.run(build_application(options, keeper), name=options.app_name, route_prefix=None)
    except RuntimeError as error:
        cause = explain_failure(options.app_name)
        if not is_update:  # after a failed update the old replicas may still serve
            serve.delete(options.app_name)
        raise EngineError(f"the service could not be started: {cause}") from error
    return wait_ready(options.app_name)


def explain_failure(app_name: str) -> str:
    """Ray Serve's messages about deployments that are not healthy, the last line of each."""
    from ray import serve

    application = serve.status().applications.get(app_name)
    if application is None:
        return "Ray Serve does not know it"
    causes = [deployment.message for deployment in application.deployments.values() if deployment.message]
    lines = [message.strip().splitlines()[-1] for message in causes or [application.message]]
    return "; ".join(dict.fromkeys(lines))


def wait_ready(app_name: str) -> list[dict[str, Any]]:
    fronts = ask_fronts(app_name)
    while not fronts or any(front["state"] != "ready" or front["address"] is None for front in fronts):
        time.sleep(POLL_S)
        fronts = ask_fronts(app_name)
    return fronts


def ask_fronts(app_name: str) -> list[dict[str, Any]]:
    """The status of each front, with the replicas that it sees.

    A front whose node has just died is left out: Ray Serve has not noticed yet, and will start another.
    """
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import RayServeException

    try:
        handle = serve.get_app_handle(app_name)
        answers = handle.broadcast("describe").results(timeout_s=STATUS_TIMEOUT_S, return_exceptions=True)
    except RayServeException as error:
        raise InvalidValueError(
            f"there is no application {app_name!r} on this cluster; start it with: infinilm cluster serve"
        ) from error
    found: list[dict[str, Any]] = []
    for answer in answers:
        if isinstance(answer, RayActorError):
            continue
        if isinstance(answer, BaseException):
            raise answer
        found.append(answer)
    return found


def stop(app_name: str) -> None:
    """End the application: its requests finish first. Ray Serve itself ends if it has no other application."""
    from ray import serve

    applications = serve.status().applications
    if app_name not in applications:
        raise InvalidValueError(f"there is no application {app_name!r} on this cluster")
    serve.delete(app_name)
    if not serve.status().applications:
        serve.shutdown()


def prepare(options: ClusterOptions, address: str | None, *, cpus: float | None, gpus: float | None) -> None:
    """Connect, check the cluster, and complete the options from its nodes."""
    ray_cluster.connect(address, may_start=True)
    nodes = ray_cluster.live_nodes()
    ray_cluster.check_authentication(nodes, dict(os.environ))
    fit(options, nodes, cpus=cpus, gpus=gpus)
    if len(nodes) > 1:
        ray_cluster.check_versions(nodes)
    options.num_fronts = len(nodes)
    options.secret = shared_secret(options.app_name)
