"""A prompt on its way through the service, and the place where its news is picked up."""

import asyncio
from dataclasses import dataclass
from time import perf_counter

from infinilm.outputs import RequestMetrics, TokenLogprobs
from infinilm.sampling_params import SamplingParams
from infinilm.server.api_errors import ApiError
from infinilm.server.messages import Delta


class Inbox:
    """The news of one or more jobs, for one reader who takes all there is at a time."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: list[tuple[Job, Delta | None]] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, job: "Job", delta: "Delta | None") -> None:
        """Leave news; None: the job has failed."""
        self._items.append((job, delta))
        if self._waiter is not None:
            self._waiter.set_result(None)
            self._waiter = None

    async def take(self) -> "list[tuple[Job, Delta | None]]":
        """All that came since the last time; waits if that is nothing."""
        if not self._items:
            self._waiter = waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._items

    async def wait(self) -> None:
        """Until there is something to take."""
        items = await self.take()
        self._items = items + self._items


@dataclass(slots=True, eq=False)
class Job:
    """One prompt, from when it is let in until the engine has ended it."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    inbox: Inbox
    tenant: str
    """Whose it is: tenants take turns, and share nothing in the prefix cache."""
    arrival_time: float
    first_answer: int = 0
    """The place of its first answer among those of the whole reply."""
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
        """What it may come to take up."""
        return len(self.prompt_token_ids) + self.params.n * self.params.max_tokens

    def take(self, delta: Delta, now: float) -> None:
        """Note what a step brought, and pass it on."""
        if num_tokens := len(delta.token_ids):
            if self.first_time is None:
                self.first_time = now
            self.last_time = now
            self.num_output_tokens += num_tokens
        if delta.metrics is not None:
            self.metrics = delta.metrics
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.num_open -= 1
        self.inbox.put(self, delta)

    def fail(self, error: ApiError) -> None:
        """End it with an error; whoever waits for it is told. What has an error already keeps it."""
        if self.error is None and not self.is_ended:
            self.error = error
            self.inbox.put(self, None)


def now() -> float:
    """The clock of all times here; the engine's process reads the same one."""
    return perf_counter()
