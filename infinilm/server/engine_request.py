"""A prompt on its way through the service, and the queue in which its output arrives."""

import asyncio
from dataclasses import dataclass
from time import perf_counter as now  # the clock of all times here; the engine's process reads the same one

from infinilm.outputs import AnswerDelta, RequestMetrics, TokenLogprobs
from infinilm.sampling_params import SamplingParams
from infinilm.server.api_errors import ApiError

__all__ = ["DeltaQueue", "EngineRequest", "now"]


class DeltaQueue:
    """The output of one or more requests, for one reader that takes all items at once."""

    __slots__ = ("_has_items", "_items")

    def __init__(self) -> None:
        self._items: list[tuple[EngineRequest, AnswerDelta | None]] = []
        self._has_items = asyncio.Event()

    def put(self, request: "EngineRequest", delta: AnswerDelta | None) -> None:
        """Add a delta; None: the request has failed."""
        self._items.append((request, delta))
        self._has_items.set()

    async def read_all(self) -> "list[tuple[EngineRequest, AnswerDelta | None]]":
        """Remove and return all items; wait if there is none."""
        await self._has_items.wait()
        self._has_items.clear()
        items, self._items = self._items, []
        return items

    @property
    def is_empty(self) -> bool:
        return not self._items

    @property
    def next_delta(self) -> AnswerDelta | None:
        """What is read next, if it is a delta."""
        return self._items[0][1] if self._items else None

    async def wait(self) -> None:
        """Wait until there is something to read."""
        await self._has_items.wait()


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One prompt, from its admission until the engine has ended it."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    output: DeltaQueue
    tenant: str
    """The API key's tenant. Tenants take turns, and share nothing in the prefix cache."""
    arrival_time: float
    session: str = ""
    """The client's name for its session. In a cluster a session's requests go to one replica."""
    route: str = ""
    """In a cluster: the replica that answers, and why it was chosen. It becomes a header of the response."""
    first_answer: int = 0
    """The index of its first answer among the answers of the HTTP request."""
    submit_time: float | None = None
    first_time: float | None = None
    last_time: float | None = None
    num_output_tokens: int = 0
    num_open: int = 0
    """Answers that the engine has not ended."""
    is_ended: bool = False
    error: ApiError | None = None
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def __post_init__(self) -> None:
        self.num_open = self.params.n

    @property
    def num_charged_tokens(self) -> int:
        """The most tokens that the request can take."""
        return len(self.prompt_token_ids) + self.params.n * self.params.max_tokens

    def append_delta(self, delta: AnswerDelta, time: float) -> None:
        """Add a step's result and pass it to the reader."""
        if num_tokens := len(delta.token_ids):
            if self.first_time is None:
                self.first_time = time
            self.last_time = time
            self.num_output_tokens += num_tokens
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.num_open -= 1
            self.metrics = delta.metrics
        self.output.put(self, delta)

    def fail(self, error: ApiError) -> None:
        """Record an error and wake the reader. An earlier error stays."""
        if self.error is None and not self.is_ended:
            self.error = error
            self.output.put(self, None)
