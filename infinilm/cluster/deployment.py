"""The application for Ray Serve: fronts and engine replicas, built from options that JSON can hold."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from infinilm.cluster.front import Front
from infinilm.cluster.replica import EngineReplica
from infinilm.ray_cluster import STRATEGIES

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.serve import Application

HEALTH_PERIOD_S = 5.0
SHUTDOWN_MARGIN_S = 15.0
"""Time beyond `drain_timeout` for the engine's process to end."""
PATH = "infinilm.cluster.deployment:build"


@dataclass(kw_only=True)
class ClusterOptions:
    """The options of a deployment. Their `asdict` is the `args` of `serve deploy`'s YAML."""

    config: dict[str, Any]
    """The engine's settings, by `config_to_wire`."""
    settings: dict[str, Any]
    """The fields of `ServerSettings`."""
    secret: str
    """Fronts and replicas authenticate each other with it. In hexadecimal digits."""
    app_name: str
    tool_call_parser: str | None = None
    min_replicas: int = 1
    max_replicas: int = 1
    num_fronts: int = 1
    num_bundles: int = 1
    """The parts of a replica's resources: one, or one for each rank, if ranks may be on several nodes."""
    num_cpus: float = 1.0
    """The CPUs of each part; `num_gpus` likewise."""
    num_gpus: float = 0.0
    queued_tokens: int = 4096
    """Autoscaling aims at this many waiting prompt tokens per replica."""
    resources: dict[str, float] = field(default_factory=dict)

    def divide(self) -> None:
        """Make each rank a part, if ranks may be on several nodes."""
        if self.config["executor"] in STRATEGIES:
            self.num_bundles = self.config["tensor_parallel_size"] * self.config["pipeline_parallel_size"]

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of each part."""
        return {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}


def build(args: dict[str, Any]) -> "Application":
    """The application, for `serve deploy`."""
    return build_application(ClusterOptions(**args))


def build_application(options: ClusterOptions, keeper: "ActorHandle[Any] | None" = None) -> "Application":
    """The application. With a `keeper`, it ends when that actor ends."""
    from ray import serve

    limits = options.settings["limits"]
    shutdown_s = limits["drain_timeout"] + SHUTDOWN_MARGIN_S
    engine_args = {
        "config": options.config,
        "limits": limits,
        "has_tenants": len(options.settings["api_keys"]) > 1,
        "secret": options.secret,
    }
    front_args = {
        "model": options.config["model"],
        "settings": options.settings,
        "tool_call_parser": options.tool_call_parser,
        "secret": options.secret,
        "app_name": options.app_name,
    }
    engines = serve.deployment(
        EngineReplica,
        name="engine",
        ray_actor_options={
            "num_cpus": options.num_cpus,
            "num_gpus": options.num_gpus,
            "resources": options.resources,
        },
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=limits["step_timeout"] + HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=shutdown_s,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=2,
        max_surge_percent=100,
        request_router_config={"request_router_class": "infinilm.cluster.router.ReplicaLister"},
        **_placement(options),
        **_scaling(options),
    )
    engines = engines.options(version=_version(engine_args), _internal=True).bind(**engine_args)
    front = serve.deployment(
        Front,
        name="front",
        num_replicas=options.num_fronts,
        max_replicas_per_node=1,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=1.0,
        graceful_shutdown_timeout_s=shutdown_s,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=2,
    )
    front = front.options(version=_version(front_args), _internal=True)
    return front.bind(**front_args, engines=engines, keeper=keeper)


def _version(arguments: dict[str, Any]) -> str:
    """A version that is equal for equal arguments: a deployment with unchanged arguments is not restarted."""
    from infinilm import __version__

    text = json.dumps([__version__, arguments], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _placement(options: ClusterOptions) -> dict[str, Any]:
    """A replica whose ranks are actors has a placement group, and is itself in its first part."""
    if options.num_bundles == 1:
        return {}
    bundle = {name: amount for name, amount in options.bundle.items() if amount}
    return {
        "placement_group_bundles": [bundle] * options.num_bundles,
        "placement_group_strategy": STRATEGIES[options.config["executor"]],
    }


def _scaling(options: ClusterOptions) -> dict[str, Any]:
    if options.min_replicas == options.max_replicas:
        return {"num_replicas": options.min_replicas}
    return {
        "autoscaling_config": {
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "look_back_period_s": 5.0,
            "upscale_delay_s": 5.0,
            "downscale_delay_s": 60.0,
            "policy": {
                "policy_function": "infinilm.cluster.scaling:QueuedTokens",
                "policy_kwargs": {"target": options.queued_tokens},
            },
        }
    }


def to_yaml(options: ClusterOptions) -> str:
    """A configuration for `serve deploy`."""
    import yaml  # type: ignore[import-untyped]

    application = {
        "name": options.app_name,
        "route_prefix": None,
        "import_path": PATH,
        "args": asdict(options),
    }
    text: str = yaml.safe_dump({"proxy_location": "Disabled", "applications": [application]}, sort_keys=False)
    return text
