"""A case: requests, when they come, what happens to them, and the engine they share. Plain data made from a seed."""

from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from fuzz.specs import RequestSpec, make_spec

PATHS = ("step", "step_deltas", "stream", "generate", "async", "server")

Entry = Literal["add", "stream", "generate"]
Action = Literal["listen", "raise", "abort_self", "abort_other", "add_other"]

CASES_PER_POOL = 64
"""So many neighbouring cases draw their requests from the same pool: the lone runs are made once."""
SPECS_PER_POOL = 64


@dataclass(frozen=True)
class Callback:
    """A listener, and what it does when it is called for the `at_call`-th time."""

    action: Action
    at_call: int
    target: str
    """Whom "abort_other" aborts, or "add_other" adds before its time."""
    answer: int | None
    """Which answer only; None: the whole request."""


@dataclass(frozen=True)
class Arrival:
    """A request that comes at a tick: before the step of this number."""

    name: str
    tick: int
    spec: RequestSpec
    entry: Entry = "add"
    request_id: str | None = None
    """None: the engine chooses one. One that is in use is not taken; one that was in use is."""
    cache_salt: str | None = None
    callback: Callback | None = None


@dataclass(frozen=True)
class Abort:
    """Somebody ends a request, or one of its answers, between two steps."""

    tick: int
    target: str
    answer: int | None


@dataclass(frozen=True)
class EngineSettings:
    """Of the engine that all requests share."""

    num_kvcache_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    attention_backend: str
    max_in_flight: int
    min_awaited_tokens: int

    def kwargs(self) -> dict[str, Any]:
        """For `LLM`."""
        return {
            "num_kvcache_blocks": self.num_kvcache_blocks,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "enable_prefix_caching": self.enable_prefix_caching,
            "attention_backend": self.attention_backend,
        }


SERVED_ENGINES = (
    EngineSettings(7, 4, 20, True, "torch", 1, 256),
    EngineSettings(64, 8, 64, True, "native", 1, 256),
)
"""A server is not started anew for each case."""


@dataclass(frozen=True)
class Case:
    """One history."""

    seed: int
    path: str
    engine: EngineSettings
    arrivals: tuple[Arrival, ...]
    aborts: tuple[Abort, ...]
    fault_at: int | None
    """The step that breaks."""
    turns: tuple[int, ...] = field(repr=False)
    """Who is next where streams and steps take turns: one number per tick, repeated."""

    def features(self) -> set[str]:
        found = set().union(*(arrival.spec.features for arrival in self.arrivals))
        found |= {f"callback: {each.callback.action}" for each in self.arrivals if each.callback}
        found |= {f"entry: {each.entry}" for each in self.arrivals}
        found |= {"abort answer" if each.answer is not None else "abort request" for each in self.aborts}
        found |= {"cache_salt"} if any(each.cache_salt for each in self.arrivals) else set()
        found |= {"broken step"} if self.fault_at else set()
        found.add(f"{self.engine.max_in_flight} in flight")
        return found


def make_case(seed: int, path: str) -> Case:
    """Case `seed` of a path."""
    random = Random(f"case {path} {seed}")
    num_requests = random.choice((1, 2, 3, 4, 5, 6, 8))
    names = [f"r{index}" for index in range(num_requests)]
    specs = _draw_specs(random, seed, path)
    arrivals = tuple(_draw_arrival(random, random.choice(specs), path, name, names) for name in names)
    return Case(
        seed=seed,
        path=path,
        engine=_draw_engine(random)
        if path != "server"
        else SERVED_ENGINES[seed // CASES_PER_POOL % len(SERVED_ENGINES)],
        arrivals=tuple(sorted(arrivals, key=lambda arrival: arrival.tick)),
        aborts=tuple(_draw_abort(random, arrivals) for _ in range(random.choice((0, 0, 1, 2, 3)))),
        fault_at=random.randrange(1, 30) if path != "server" and random.random() < 0.1 else None,
        turns=tuple(random.randrange(60) for _ in range(40)),
    )


def _draw_engine(random: Random) -> EngineSettings:
    return EngineSettings(
        num_kvcache_blocks=random.choice((6, 6, 7, 9, 64)),
        max_num_seqs=random.choice((1, 2, 4, 8, 8)),
        max_num_batched_tokens=random.choice((3, 8, 20, 64, 1024)),
        enable_prefix_caching=random.random() < 0.75,
        attention_backend=random.choice(("torch", "native")),
        max_in_flight=random.choice((1, 2)),
        min_awaited_tokens=random.choice((16, 32, 256)),
    )


def _draw_specs(random: Random, seed: int, path: str) -> list[RequestSpec]:
    """A few, so that the same request may come more than once."""
    first = seed // CASES_PER_POOL * SPECS_PER_POOL
    numbers = range(first, first + SPECS_PER_POOL)
    if random.random() < 0.3:  # only plain requests are computed several steps at a time
        numbers = range(-(-first // 3) * 3, numbers.stop, 3)
    specs = [make_spec(number) for number in random.sample(numbers, 10)]
    if path == "server":  # processors can't be sent
        specs = [spec for spec in specs if "logits_processors" not in spec.settings]
    return specs[:6]


def _draw_arrival(random: Random, spec: RequestSpec, path: str, name: str, names: list[str]) -> Arrival:
    entry: Entry = "add"
    if path == "server":
        entry = random.choice(("stream", "generate"))
    elif path == "stream" and spec.num_answers == 1 and random.random() < 0.7:
        entry = "stream"
    elif path in ("stream", "generate") and random.random() < (0.2 if path == "stream" else 0.7):
        entry = "generate"
    chance = 0.35 if entry == "add" or path == "server" else 0.0
    return Arrival(
        name=name,
        tick=random.choice((0, 0, random.randrange(1, 20))) if entry != "generate" else random.choice((0, 4, 9)),
        spec=spec,
        entry=entry,
        request_id=random.choice((None, name, name, random.choice(names), str(random.randrange(4)))),
        cache_salt=random.choice(("", "one", "two")) if chance and random.random() < 0.3 else None,
        callback=_draw_callback(random, spec, names) if random.random() < chance else None,
    )


def _draw_callback(random: Random, spec: RequestSpec, names: list[str]) -> Callback:
    action: Action = random.choice(("listen", "listen", "raise", "abort_self", "abort_other", "add_other"))
    answer = random.randrange(spec.num_answers) if random.random() < 0.4 else None
    if action == "abort_other":  # whose number of answers is not known here
        answer = random.choice((None, 0))
    return Callback(action, random.choice((1, 1, 2, 3, 5, 8)), random.choice(names), answer)


def _draw_abort(random: Random, arrivals: tuple[Arrival, ...]) -> Abort:
    target = random.choice(arrivals)
    answer = random.randrange(target.spec.num_answers) if random.random() < 0.4 else None
    return Abort(target.tick + random.choice((0, 1, 2, 4, 7, 12)), target.name, answer)
