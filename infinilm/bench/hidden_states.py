"""Records a model's activations with hooks, by request and position, and finds the first difference of two records."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from infinilm.debug import HookRegistry
from infinilm.engine.llm_engine import LLM

POINTS = ("embed_tokens", "layer*_after_attention_residual", "layer*_output", "final_norm", "logits")

Rows = dict[int, dict[str, int]]
"""The record of one request: by position, the hash at each point, in the order of the forward pass."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first activation of a text that differs."""

    point: str
    position: int

    def __str__(self) -> str:
        return f"{self.point}, at position {self.position} of the text"


@contextmanager
def recording(llm: LLM) -> Iterator[dict[str, Rows]]:
    """Record all steps of an engine: activations by request id. A position computed again replaces the earlier one."""
    records: dict[str, Rows] = defaultdict(dict)
    registry = HookRegistry()

    def keep(point: str, tensor: Tensor, _layer: int) -> None:
        rows = tensor.detach().cpu().contiguous().view(torch.uint8).flatten(1).numpy()
        for request in registry.requests:
            if point == "logits":
                places = [] if request.logits_row is None else [request.logits_row]
                first = request.start + request.rows.stop - request.rows.start - 1
            else:
                places, first = list(range(request.rows.start, request.rows.stop)), request.start
            for offset, place in enumerate(places):
                found = records[request.request_id].setdefault(first + offset, {})
                found[point] = xxh3_64_intdigest(rows[place].tobytes())

    for pattern in POINTS:
        registry.register_hook(pattern, keep)
    llm.set_hook_registry(registry)
    try:
        yield records
    finally:
        llm.set_hook_registry(None)


def first_difference(ours: Rows, theirs: Rows) -> Difference | None:
    """The first point that differs, at the first position that differs. None if the records are equal."""
    for position in sorted(ours.keys() & theirs.keys()):
        for point, value in ours[position].items():
            if theirs[position].get(point, value) != value:
                return Difference(point, position)
    return None
