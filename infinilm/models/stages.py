"""Pipeline stages: the layers of a model that a rank holds."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from infinilm.distributed.shard import Weights
from infinilm.errors import InvalidValueError

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage `index` of `count`, numbered from 0, and its layers."""

    index: int
    count: int
    layers: range

    @classmethod
    def whole(cls, num_layers: int) -> "Stage":
        return cls(0, 1, range(num_layers))

    def __str__(self) -> str:
        return f"stage {self.index} of {self.count} (layers {self.layers.start} to {self.layers.stop - 1})"

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


def divide_layers(weights: Weights, num_layers: int, num_stages: int, *, is_tied: bool) -> list[Stage]:
    """Divide a model's layers so that each stage holds about the same number of bytes of `weights`.

    The first stage also holds the embedding, and the last one the head, which is a copy of the embedding if tied.
    """
    if num_stages > num_layers:
        raise InvalidValueError(
            f"pipeline_parallel_size={num_stages} is more than the model's {num_layers} layers; use {num_layers} "
            "or less"
        )
    costs = [0] * num_layers
    for name, shard in weights.items():
        if found := _LAYER.search(name):
            costs[int(found[1])] += shard.num_bytes
        elif "embed" in name:
            costs[0] += shard.num_bytes
            costs[-1] += shard.num_bytes * is_tied
        else:
            costs[-1] += shard.num_bytes
    starts = _cut(costs, num_stages)
    return [
        Stage(index, num_stages, range(start, end))
        for index, (start, end) in enumerate(zip(starts, [*starts[1:], num_layers], strict=True))
    ]


def _cut(costs: Sequence[int], num_parts: int) -> list[int]:
    """The start of each part, so that the costliest part costs as little as possible and the others are similar.

    Among equally good cuts it takes the one with the cheapest last part, because the last stage also samples.
    """
    # For each number of costs assigned so far: the badness of the best parts, and their starts. The power makes the
    # costliest part count most.
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for part in range(1, num_parts + 1):
        best = {
            end: min(
                (
                    (badness + sum(costs[start:end]) ** 8, [*starts, start])
                    for start, (badness, starts) in best.items()
                    if start < end
                ),
                key=lambda cut: (cut[0], -cut[1][-1]),
            )
            for end in range(part, len(costs) - num_parts + part + 1)
        }
    return best[len(costs)][1]
