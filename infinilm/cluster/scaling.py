"""The autoscaling policy: how many replicas there should be."""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext


class QueuedTokens:
    """An autoscaling policy for Ray Serve: enough replicas that each has about `target` prompt tokens waiting.

    A replica is removed only if the others then have less than half of the target: queues are empty most of the time.
    """

    def __init__(self, target: int) -> None:
        self._target = target

    def __call__(self, context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        waiting = sum((context.aggregated_metrics or {}).get("queued_tokens", {}).values())
        current = context.target_num_replicas
        wanted = math.ceil(waiting / self._target)
        if wanted <= current and waiting > self._target * (current - 1) / 2:
            wanted = current
        elif wanted < current:
            wanted = current - 1
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(max(wanted, low), high), {}
