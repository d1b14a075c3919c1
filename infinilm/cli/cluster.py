"""`infinilm cluster`: the service on several machines, by Ray."""

import inspect
import secrets
import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinilm.cli.answering import require_extra
from infinilm.cli.display import console, make_facts, make_table, note
from infinilm.cli.help import option
from infinilm.cli.options import ModelArgument, expand, takes_config
from infinilm.cli.serve import collect_keys, serve
from infinilm.config import Config
from infinilm.errors import InvalidValueError

if TYPE_CHECKING:
    from infinilm.cluster.deployment import ClusterOptions
    from infinilm.server.settings import ServerSettings

_WHERE_OPTIONS = {
    "address": (
        option("Cluster", str | None, "The Ray cluster. Default: RAY_ADDRESS; without it, one on this machine."),
        None,
    ),
    "name": (option("Cluster", str, "What Ray Serve calls the application.", show_default=True), "infinilm"),
}
_SCALE_OPTIONS = {
    "replicas": (option("Cluster", int | None, "Engines. Default: 1."), None),
    "min_replicas": (option("Cluster", int | None, "With --max-replicas: as many as the waiting prompts need."), None),
    "max_replicas": (option("Cluster", int | None, "The most engines."), None),
    "queued_tokens": (
        option("Cluster", int, "Waiting prompt tokens per engine that --max-replicas aims at.", show_default=True),
        4096,
    ),
    "cpus": (option("Cluster", float | None, "CPUs of each engine. Default: an equal share of a node's."), None),
    "gpus": (option("Cluster", float | None, "GPUs of each engine. Default: one per rank, where there are any."), None),
    "detach": (option("Cluster", bool, "Leave the service running, until 'cluster stop'.", "--detach"), False),
    "write_config": (option("Cluster", Path | None, "Write a YAML file for 'serve deploy' and end."), None),
}
_SERVICE_OPTIONS = {
    name: (parameter.annotation, parameter.default)
    for name, parameter in inspect.signature(inspect.unwrap(serve)).parameters.items()
    if name not in ("model", "config")
}
"""The options of `infinilm serve`, without the engine's."""


@takes_config(without=("model",), has_short_tp=True)
@expand("service", _SERVICE_OPTIONS, dict)
@expand("scale", _SCALE_OPTIONS, dict)
@expand("where", _WHERE_OPTIONS, dict)
def cluster_serve(
    model: ModelArgument = None,
    *,
    where: dict[str, Any],
    scale: dict[str, Any],
    service: dict[str, Any],
    config: Config,
) -> None:
    """Serve a model with several engines, on the machines of a Ray cluster.

    Every machine gets the HTTP service of 'infinilm serve' on its port, and each request goes to the engine that has
    the beginning of its prompt in its cache, or the least to do. Without a cluster, one is started on this machine, and
    ends with this command.
    """
    require_extra("cluster", "a cluster", "ray")
    require_extra("serve", "serving", "fastapi", "httptools", "msgspec", "prometheus_client", "uvicorn")
    from infinilm.cluster import service as cluster

    if "help" in (service["limit"] or []):
        serve(**{**_defaults(serve), "limit": ["help"]})
        return
    name, cpus, gpus = where["name"], scale["cpus"], scale["gpus"]
    settings = _make_settings(**service)
    options = _make_options(config.replace(model=model), settings, service["tool_call_parser"], name)
    options.min_replicas, options.max_replicas = _bounds(**{each: scale[each] for each in _BOUNDS})
    options.queued_tokens = scale["queued_tokens"]
    if scale["write_config"] is not None:
        options.divide()
        options.num_cpus = 1.0 if cpus is None else cpus / options.num_bundles
        options.num_gpus = (gpus or 0.0) / options.num_bundles
        _write_config(options, scale["write_config"])
        return
    cluster.prepare(options, where["address"], cpus=cpus, gpus=gpus)
    fronts = cluster.deploy(options, is_detached=scale["detach"])
    _announce(fronts, settings)
    if not scale["detach"]:
        _wait_for_signal()
        note("Ending: requests in progress finish first.")
        cluster.stop(name)


@expand("where", _WHERE_OPTIONS, dict)
def cluster_status(*, where: dict[str, Any]) -> None:
    """Show the nodes and engines of a cluster's service: what they hold, what waits, how fast they are."""
    from infinilm import ray_cluster
    from infinilm.cluster.service import ask_fronts

    ray_cluster.connect(where["address"], may_start=False)
    fronts = ask_fronts(where["name"])
    table = make_table("node", "address", "state", "requests")
    for front in fronts:
        table.add_row(front["node"][:8], str(front["address"]), front["state"], str(front["requests"]))
    console().print(table)
    table = make_table("replica", "node", "state", "cached blocks", "open", "queued", "tok/s", "hits")
    seen = {each["replica"]: each for front in fronts for each in front["replicas"]}
    for each in seen.values():
        blocks = f"{each.get('cached_blocks', 0):,} of {each.get('blocks', 0):,}"
        numbers = (str(each.get("requests", 0)), f"{each.get('queued_tokens', 0):,}")
        rates = (f"{each.get('tokens_per_second', 0.0):.1f}", f"{each.get('hit_rate', 0.0):.0%}")
        table.add_row(each["replica"], each["node"][:8], each["state"], blocks, *numbers, *rates)
    console().print(table)


@expand("where", _WHERE_OPTIONS, dict)
def cluster_stop(*, where: dict[str, Any]) -> None:
    """End a cluster's service. Its requests finish first."""
    from infinilm import ray_cluster
    from infinilm.cluster.service import stop

    ray_cluster.connect(where["address"], may_start=False)
    stop(where["name"])
    note(f"{where['name']} has ended.")


def _defaults(command: Any) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(command).parameters.items()}


_BOUNDS = ("replicas", "min_replicas", "max_replicas")


def _bounds(replicas: int | None, min_replicas: int | None, max_replicas: int | None) -> tuple[int, int]:
    low, high = min_replicas, max_replicas
    if replicas is not None and (low is not None or high is not None):
        raise InvalidValueError(
            "--replicas is for a fixed number; give either it, or --min-replicas and --max-replicas"
        )
    if replicas is not None or (low is None and high is None):
        low = high = 1 if replicas is None else replicas
    low = 1 if low is None else low
    high = low if high is None else high
    if not 1 <= low <= high:
        raise InvalidValueError(f"there are {low} to {high} replicas asked for; the least is 1, and not above the most")
    return low, high


def _make_settings(
    *,
    host: str,
    port: int,
    api_key: list[str] | None,
    api_key_file: Path | None,
    limit: list[str] | None,
    tool_call_parser: str | None,  # noqa: ARG001 (the service's, not its settings')
    **others: Any,
) -> "ServerSettings":
    from infinilm.server.settings import Limits, ServerSettings

    keys = collect_keys(api_key or [], api_key_file)
    return ServerSettings(host=host, port=port, api_keys=keys, limits=Limits.from_pairs(limit or []), **others)


def _make_options(
    config: Config, settings: "ServerSettings", tool_call_parser: str | None, name: str
) -> "ClusterOptions":
    from infinilm.cluster.deployment import ClusterOptions
    from infinilm.server.messages import config_to_wire

    return ClusterOptions(
        config=config_to_wire(config),
        settings=asdict(settings),
        secret=secrets.token_hex(32),
        app_name=name,
        tool_call_parser=tool_call_parser,
    )


def _write_config(options: "ClusterOptions", path: Path) -> None:
    from infinilm.cluster.deployment import to_yaml

    try:
        path.touch(mode=0o600)  # it holds the secret and the API keys
        path.write_text(to_yaml(options), encoding="utf-8")
    except OSError as error:
        raise InvalidValueError(f"--write-config {path}: can't be written: {error.strerror or error}") from error
    note(f"Deploy it with:  serve deploy {path}")


def _announce(fronts: list[dict[str, Any]], settings: "ServerSettings") -> None:
    num_replicas = len({each["replica"] for front in fronts for each in front["replicas"]})
    facts = {f"node {front['node'][:8]}": front["address"] for front in fronts}
    facts["engines"] = str(num_replicas)
    facts["access"] = f"{len(settings.api_keys)} API keys" if settings.api_keys else "these machines only, no API key"
    console(err=True).print(make_facts(facts))


def _wait_for_signal() -> None:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in signals:
        signal.signal(number, lambda *_: None)
    signal.sigwait(signals)
