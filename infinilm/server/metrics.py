"""The service's counters and histograms, for Prometheus."""

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

__all__ = ["CONTENT_TYPE", "Metrics", "counter", "gauge"]

LATENCY_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)


class Metrics(Collector):
    """Counters since the start of the HTTP process. Collectors of the engine's state can be added to `registry`.

    Numbers of tokens are plain integers, because they change with every token.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.registry.register(self)
        self.requests = Counter(
            "infinilm_requests", "Requests for text, by how they ended.", ["outcome"], registry=self.registry
        )
        self.responses = Counter(
            "infinilm_http_responses", "Responses by route and status.", ["route", "status"], registry=self.registry
        )
        self.queue_time = self._histogram("queue", "From arrival to the first step.")
        self.ttft = self._histogram("time_to_first_token", "From arrival to the first token.")
        self.itl = self._histogram("inter_token", "Mean time between two tokens of a request.", TOKEN_BOUNDS_S)
        self.duration = self._histogram("request", "From arrival to the last token.")

    def _histogram(self, name: str, help_text: str, bounds: tuple[float, ...] = LATENCY_BOUNDS_S) -> Histogram:
        return Histogram(f"infinilm_{name}_seconds", help_text, buckets=bounds, registry=self.registry)

    def collect(self) -> Iterator[Metric]:
        """The numbers of tokens."""
        yield counter("prompt_tokens", "Tokens of prompts.", self.num_prompt_tokens)
        yield counter(
            "cached_prompt_tokens", "Tokens of prompts that were in the prefix cache.", self.num_cached_tokens
        )
        yield counter("output_tokens", "Tokens generated.", self.num_output_tokens)

    def write_text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(_WithoutCreationTimes(self.registry))


class _WithoutCreationTimes(Collector):
    """Leaves out the library's `_created` samples, which it adds to each counter and histogram."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


def counter(name: str, help_text: str, value: float) -> Metric:
    """A counter with a value, `infinilm_<name>_total`."""
    return CounterMetricFamily(f"infinilm_{name}", help_text, value=value)


def gauge(name: str, help_text: str, value: float) -> Metric:
    """A gauge with a value, `infinilm_<name>`."""
    return GaugeMetricFamily(f"infinilm_{name}", help_text, value=value)
