"""The cluster's router with thousands of replicas, simulated: no engines, but the router's own scoring code.

    python -m benchmarks.cluster_router --replicas 1000 --picture docs/cluster_router.png

Conversations begin with one of a few system prompts, popular ones far more often (Zipf), and grow by a question and an
answer at each turn. A replica computes prompts one after the other and keeps the least recently used blocks no longer
than they fit. The router hears of caches and queues 0.2 s late. Beside it: round robin, the least loaded replica, and
consistent hashing of the conversation's beginning. The oracle's hit rate is that of a request that is always sent to a
replica with the longest cached beginning, in the caches that the router's own choices have made.
"""

import argparse
import bisect
import heapq
import json
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xxhash import xxh3_64_intdigest

from infinilm.cluster.scoring import Scoreboard

BLOCK = 16
REPORT_S = 0.2
PREFILL_RATE = 8000.0
"""Prompt tokens per second of a replica."""
TOKEN_S = 0.02
"""Between two tokens of an answer."""


@dataclass
class Turn:
    time: float
    conversation: int
    blocks: list[int]
    num_answer_tokens: int


@dataclass
class Replica:
    num_blocks: int
    cache: "OrderedDict[int, None]" = field(default_factory=OrderedDict)
    busy_until: float = 0.0
    ends: list[float] = field(default_factory=list)
    num_computed: int = 0
    added: set[int] = field(default_factory=set)
    removed: set[int] = field(default_factory=set)

    def count_cached(self, blocks: Sequence[int]) -> int:
        return next((index for index, each in enumerate(blocks) if each not in self.cache), len(blocks))

    def take(self, turn: Turn) -> tuple[int, float]:
        """Answer a turn. Returns the number of cached blocks, and the time to the first token."""
        num_cached = self.count_cached(turn.blocks)
        num_tokens = (len(turn.blocks) - num_cached) * BLOCK
        self.num_computed += num_tokens
        self.busy_until = max(self.busy_until, turn.time) + num_tokens / PREFILL_RATE
        heapq.heappush(self.ends, self.busy_until + turn.num_answer_tokens * TOKEN_S)
        for each in reversed(turn.blocks):  # the beginning is touched last, so it is evicted last
            if each not in self.cache:
                self.added.add(each)
                self.removed.discard(each)
            self.cache[each] = None
            self.cache.move_to_end(each)
        while len(self.cache) > self.num_blocks:
            lost, _ = self.cache.popitem(last=False)
            self.removed.add(lost)
            self.added.discard(lost)
        return num_cached, self.busy_until - turn.time

    def load(self, time: float) -> tuple[int, int]:
        """Prompt tokens that wait, and answers in progress."""
        while self.ends and self.ends[0] <= time:
            heapq.heappop(self.ends)
        return int(max(self.busy_until - time, 0.0) * PREFILL_RATE), len(self.ends)


def make_trace(options: argparse.Namespace) -> Iterator[Turn]:
    """Turns in the order of their time."""
    draw = random.Random(options.seed)
    ids = iter(range(1 << 62))
    systems = [[next(ids) for _ in range(draw.randint(16, 128))] for _ in range(options.systems)]
    weights = [1 / (rank + 1) for rank in range(options.systems)]
    waiting: list[tuple[float, int, list[int], int]] = []
    time, count, number = 0.0, 0, 0
    rate = options.rate / options.turns
    next_start = 0.0
    while count < options.requests:
        if not waiting or next_start < waiting[0][0]:
            time = next_start
            next_start += draw.expovariate(rate)
            number += 1
            blocks = list(draw.choices(systems, weights)[0])
            entry = (time, number, blocks, 1 + int(draw.expovariate(1 / max(options.turns - 1, 1e-9))))
        else:
            entry = heapq.heappop(waiting)
        time, conversation, blocks, num_left = entry
        blocks = blocks + [next(ids) for _ in range(1 + int(draw.expovariate(1 / 8)))]
        num_answer_tokens = 16 + int(draw.expovariate(1 / 200))
        yield Turn(time, conversation, blocks, num_answer_tokens)
        count += 1
        if num_left > 1:
            grown = blocks + [next(ids) for _ in range(num_answer_tokens // BLOCK)]
            later = time + num_answer_tokens * TOKEN_S + draw.expovariate(1 / 20)
            heapq.heappush(waiting, (later, conversation, grown, num_left - 1))


class Cluster:
    """The replicas, and the router's view of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.names = [f"r{number}" for number in range(options.replicas)]
        self.replicas = {name: Replica(options.blocks) for name in self.names}
        self.board = Scoreboard(BLOCK)
        self.touched: set[str] = set()
        self.reports: deque[tuple[float, str, list[int], list[int]]] = deque()
        self.next_report = 0.0
        for name in self.names:
            self.board.change_cache(name, (), ())
        ring = sorted((xxh3_64_intdigest(f"{name}/{copy}".encode()), name) for name in self.names for copy in range(64))
        self.ring_keys = [key for key, _ in ring]
        self.ring_names = [name for _, name in ring]
        self.turn = 0

    def hear(self, time: float) -> None:
        """Let the reports of the last interval arrive."""
        while time >= self.next_report:
            for name in list(self.touched):
                replica = self.replicas[name]
                self.board.change_cache(name, replica.added, replica.removed)
                replica.added, replica.removed = set(), set()
                queued, running = replica.load(self.next_report)
                self.board.note_load(name, queued, running)
                if not queued and not running:
                    self.touched.discard(name)
            self.next_report += REPORT_S

    def by_router(self, turn: Turn) -> str:
        choice = self.board.choose(turn.blocks, len(turn.blocks) * BLOCK, self.names)
        self.board.note_sent(choice, turn.blocks, len(turn.blocks) * BLOCK, turn.time)
        return choice.replica_id

    def by_turns(self, turn: Turn) -> str:  # noqa: ARG002
        self.turn += 1
        return self.names[self.turn % len(self.names)]

    def by_load(self, turn: Turn) -> str:
        name = min(self.names, key=lambda each: self.board.views[each].load)
        self.board.views[name].sent_tokens += len(turn.blocks) * BLOCK
        return name

    def by_hash(self, turn: Turn) -> str:
        """Hash the beginning that all turns of a conversation share: the system prompt and the first question."""
        place = bisect.bisect(self.ring_keys, xxh3_64_intdigest(f"c{turn.conversation}".encode()))
        return self.ring_names[place % len(self.ring_names)]


POLICIES: dict[str, Callable[[Cluster, Turn], str]] = {
    "this router": Cluster.by_router,
    "round robin": Cluster.by_turns,
    "least loaded": Cluster.by_load,
    "consistent hashing": Cluster.by_hash,
}


def simulate(name: str, options: argparse.Namespace) -> dict[str, float]:
    cluster = Cluster(options)
    holders: dict[int, set[str]] = {}
    times, num_cached, num_best, num_blocks = [], 0, 0, 0
    for turn in make_trace(options):
        cluster.hear(turn.time)
        best = 0
        for depth, each in enumerate(turn.blocks):
            if not any(each in cluster.replicas[holder].cache for holder in holders.get(each, ())):
                break
            best = depth + 1
        chosen = POLICIES[name](cluster, turn)
        found, seconds = cluster.replicas[chosen].take(turn)
        cluster.touched.add(chosen)
        for each in turn.blocks:
            holders.setdefault(each, set()).add(chosen)
        times.append(seconds)
        num_cached += found
        num_best += best
        num_blocks += len(turn.blocks)
    times.sort()
    work = sorted(replica.num_computed for replica in cluster.replicas.values())
    return {
        "hit_rate": num_cached / num_blocks,
        "oracle_hit_rate": num_best / num_blocks,
        "ttft_p50": times[len(times) // 2],
        "ttft_p99": times[len(times) * 99 // 100],
        "mean_busy": sum(work) / len(work) / PREFILL_RATE / turn.time,
        "most_busy": work[-1] / PREFILL_RATE / turn.time,
    }


def draw_picture(results: dict[str, dict[str, float]], options: argparse.Namespace, path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.4))
    names = list(results)
    colours = ["tab:blue", "tab:gray", "tab:gray", "tab:gray"]
    panels = (
        ("hit_rate", "prompt tokens found in a cache", 100, "%"),
        ("ttft_p99", "time to first token, p99", 1000, " ms"),
        ("most_busy", "busiest replica: time spent on prompts", 100, "%"),
    )
    for axis, (key, title, factor, unit) in zip(axes, panels, strict=True):
        values = [results[name][key] * factor for name in names]
        bars = axis.barh(names, values, color=colours)
        axis.bar_label(bars, [f"{value:,.1f}{unit}" for value in values], padding=3)
        axis.set_xlim(0, max(values) * 1.35)
        axis.set_title(title, fontsize=10)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
        if axis is not axes[0]:
            axis.set_yticklabels([])
    figure.suptitle(
        f"Simulated: {options.replicas:,} replicas, {options.requests:,} requests of conversations, no engines",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=40_000)
    parser.add_argument("--rate", type=float, default=None, help="requests per second; default: 1.5 per replica")
    parser.add_argument("--turns", type=float, default=5.0, help="mean turns of a conversation")
    parser.add_argument("--systems", type=int, default=200, help="different system prompts")
    parser.add_argument("--blocks", type=int, default=4096, help="blocks of a replica's cache")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    if options.rate is None:
        options.rate = 1.5 * options.replicas
    results = {}
    for name in POLICIES:
        results[name] = simulate(name, options)
        print(name, {key: round(value, 4) for key, value in results[name].items()}, flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    if options.picture:
        draw_picture(results, options, options.picture)


if __name__ == "__main__":
    main()
