"""What the service counts, in the text format that Prometheus reads."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator

LATENCY_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, str], ...]


class Histogram:
    """How often a time was at most each of some bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        """Its samples."""
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{"+Inf" if bound == float("inf") else f"{bound:g}"}"}} {total}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {total}"


class Metrics:
    """Counters since the start of the HTTP process. The engine's own state is added when they are shown."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        """Requests for text, by how they ended."""
        self.responses: Counter[tuple[str, int]] = Counter()
        """HTTP responses by route and status."""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.queue_time = Histogram(LATENCY_BOUNDS_S)
        self.ttft = Histogram(LATENCY_BOUNDS_S)
        self.itl = Histogram(TOKEN_BOUNDS_S)
        self.duration = Histogram(LATENCY_BOUNDS_S)

    def lines(self, gauges: dict[str, tuple[str, float]], counters: dict[str, tuple[str, float]]) -> Iterator[str]:
        """All samples; `gauges` and `counters` are those of the moment, with their help, by name."""
        yield from _family("requests_total", "counter", "Requests for text, by how they ended.")
        yield from _samples("requests_total", (((("outcome", k),), v) for k, v in sorted(self.outcomes.items())))
        yield from _family("http_responses_total", "counter", "Responses by route and status.")
        labelled = (
            ((("route", route), ("status", str(status))), v) for (route, status), v in sorted(self.responses.items())
        )
        yield from _samples("http_responses_total", labelled)
        own = {
            "prompt_tokens_total": ("Tokens of prompts.", self.num_prompt_tokens),
            "cached_prompt_tokens_total": ("Tokens of prompts that were in the prefix cache.", self.num_cached_tokens),
            "output_tokens_total": ("Tokens generated.", self.num_output_tokens),
        }
        for name, (help_text, value) in {**own, **counters}.items():
            yield from _single(name, "counter", help_text, value)
        for name, (help_text, value) in gauges.items():
            yield from _single(name, "gauge", help_text, value)
        for name, help_text, histogram in (
            ("queue_seconds", "From arrival to the first step.", self.queue_time),
            ("time_to_first_token_seconds", "From arrival to the first token.", self.ttft),
            ("inter_token_seconds", "Mean time between two tokens of a request.", self.itl),
            ("request_seconds", "From arrival to the last token.", self.duration),
        ):
            yield from _family(name, "histogram", help_text)
            yield from histogram.lines(f"infinilm_{name}")


def _family(name: str, kind: str, help_text: str) -> Iterator[str]:
    yield f"# HELP infinilm_{name} {help_text}"
    yield f"# TYPE infinilm_{name} {kind}"


def _single(name: str, kind: str, help_text: str, value: float) -> Iterator[str]:
    yield from _family(name, kind, help_text)
    yield f"infinilm_{name} {value:g}" if isinstance(value, float) else f"infinilm_{name} {value}"


def _samples(name: str, labelled: Iterable[tuple[Labels, float]]) -> Iterator[str]:
    for labels, value in labelled:
        written = ",".join(f'{key}="{text}"' for key, text in labels)
        yield f"infinilm_{name}{{{written}}} {value}"
