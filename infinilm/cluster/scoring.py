"""Chooses the replica that answers a request, by the contents of its prefix cache and by its load.

This code does not use Ray: the simulation in `benchmarks/cluster_router.py` runs it with thousands of replicas.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

RUNNING_TOKENS = 128
"""The load of an answer in progress, in waiting prompt tokens."""
SESSION_TOKENS = 4096
"""A session moves to another replica if its own has this many tokens more to compute."""
EXPECTED_S = 10.0
"""How long a prompt that was sent to a replica counts as cached there, unless the replica reports its blocks before."""


class Choice(NamedTuple):
    replica_id: str
    reason: str
    """"prefix" (its cache holds the prompt's beginning), "session", or "load" (the less loaded of two)."""
    cached_tokens: int


@dataclass(slots=True)
class ReplicaView:
    """A front's knowledge of one replica."""

    queued_tokens: int = 0
    """Prompt tokens that wait there, from all fronts, by its last report."""
    num_running: int = 0
    sent_tokens: int = 0
    """Tokens sent to it since that report."""
    cached: set[int] = field(default_factory=set)
    """Hashes of the blocks in its prefix cache."""
    expected: dict[int, float] = field(default_factory=dict)
    """Hashes of blocks that it should have soon, each with the time until which this is assumed; the oldest first."""

    @property
    def load(self) -> int:
        return self.queued_tokens + self.sent_tokens + RUNNING_TOKENS * self.num_running

    def count_cached(self, hashes: Sequence[int]) -> int:
        """How many blocks of a prompt's beginning it holds.

        A cache drops the last block of a text first, so a bisection finds the end of the cached beginning.
        """
        cached, expected = self.cached, self.expected
        low, high = 0, len(hashes)
        if not high or (hashes[0] not in cached and hashes[0] not in expected):
            return 0
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in cached or hashes[middle - 1] in expected:
                low = middle
            else:
                high = middle - 1
        return low


class Scoreboard:
    """The views of all replicas. Hashes are chained from the tenant's salt, so tenants share no prefixes here."""

    def __init__(self, block_size: int = 1) -> None:
        self.block_size = block_size
        self.views: dict[str, ReplicaView] = {}
        self._random = random.Random(0)

    def drop(self, replica_id: str) -> None:
        self.views.pop(replica_id, None)

    def change_cache(self, replica_id: str, added: Iterable[int], removed: Iterable[int]) -> None:
        """Note the blocks that a replica's cache has gained and lost. This also adds a new replica."""
        view = self.views.setdefault(replica_id, ReplicaView())
        for each in removed:
            view.cached.discard(each)
            view.expected.pop(each, None)
        for each in added:
            view.cached.add(each)
            view.expected.pop(each, None)

    def note_load(self, replica_id: str, queued_tokens: int, num_running: int) -> None:
        view = self.views[replica_id]
        view.queued_tokens, view.num_running, view.sent_tokens = queued_tokens, num_running, 0

    def choose(self, hashes: Sequence[int], num_tokens: int, allowed: Sequence[str], session: str = "") -> Choice:
        """The replica of `allowed` with the fewest tokens to compute before this prompt's first token.

        The candidates are the replicas that hold some of the prompt, the session's replica, and two drawn at random.
        """
        block_size, views = self.block_size, self.views
        num_cached = {
            replica_id: count * block_size
            for replica_id in allowed
            if (count := views[replica_id].count_cached(hashes)) > 0
        }
        home = max(allowed, key=lambda each: xxh3_64_intdigest(f"{session}/{each}".encode())) if session else None
        drawn = self._random.sample(allowed, min(2, len(allowed)))
        best = min(
            {*num_cached, *drawn, home or drawn[0]},
            key=lambda each: (
                num_tokens - num_cached.get(each, 0) + views[each].load - SESSION_TOKENS * (each == home),
                each,
            ),
        )
        cached = num_cached.get(best, 0)
        return Choice(best, "session" if best == home else "prefix" if cached else "load", cached)

    def note_sent(self, choice: Choice, hashes: Sequence[int], num_tokens: int, time: float) -> None:
        """Count a prompt that was sent to the chosen replica."""
        view = self.views[choice.replica_id]
        view.sent_tokens += num_tokens - choice.cached_tokens
        for each in hashes:
            view.expected.pop(each, None)  # moves it to the end, where the newest are
            view.expected[each] = time + EXPECTED_S
        while view.expected and view.expected[oldest := next(iter(view.expected))] < time:
            del view.expected[oldest]
