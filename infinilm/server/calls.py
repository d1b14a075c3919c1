"""One HTTP request for text: its jobs, its answers, and when it must be over."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from infinilm.outputs import RequestMetrics
from infinilm.server.admission import Admission
from infinilm.server.answers import Answer
from infinilm.server.api_errors import ApiError
from infinilm.server.jobs import Inbox, Job, now
from infinilm.server.messages import Delta
from infinilm.server.metrics import Metrics

logger = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[Any]]
CLIENT_GONE = 499


@dataclass(slots=True)
class News:
    """What is new about an answer."""

    answer: Answer
    text: str
    delta: Delta
    """What the text was made of."""
    is_end: bool
    """Whether the answer ends with it."""


class Call:
    """Follows the jobs of one HTTP request. Whatever happens, `close` leaves nothing behind in the engine."""

    def __init__(
        self,
        admission: Admission,
        metrics: Metrics,
        *,
        jobs: Sequence[Job],
        answers: Sequence[Answer],
        inbox: Inbox,
        log_as: str | None = None,
    ) -> None:
        self.jobs = list(jobs)
        self.answers = list(answers)
        self._admission = admission
        self._metrics = metrics
        self._inbox = inbox
        self._log_as = log_as
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.Task[None] | None = None
        self._outcome = "error"
        self._has_entered = False
        self._is_closed = False

    async def begin(self, receive: Receive, *, timeout: float | None, max_timeout: float) -> None:
        """Get in line, and wait for the first news. If that is an error, raise it: nothing was sent yet.

        `timeout` is what the request itself asks for, `max_timeout` what the server allows.
        """
        try:
            self._admission.enter(self.jobs)
        except ApiError as error:
            self._outcome = "rejected" if error.status == 429 else "unavailable"
            self.close()
            raise
        self._has_entered = True
        seconds, status = (timeout, 408) if timeout is not None and timeout < max_timeout else (max_timeout, 504)
        expired = ApiError(status, f"the request was not answered within {seconds:g} s", code="timeout")
        self._timer = asyncio.get_running_loop().call_later(seconds, self._fail, expired)
        self._watch = asyncio.create_task(self._watch_client(receive))
        try:
            await self._inbox.wait()
            self._raise_error()
        except BaseException as error:
            self._note_failure(error)
            self.close()
            raise

    async def read(self) -> list[News]:
        """What came since the last time; waits if that is nothing."""
        news: list[News] = []
        try:
            items = await self._inbox.take()
            self._raise_error()
        except BaseException as error:
            self._note_failure(error)
            raise
        for job, delta in items:
            assert delta is not None
            answer = self.answers[job.first_answer + delta.index]
            if answer.is_done:
                continue
            self._metrics.num_output_tokens += len(delta.token_ids)
            text = answer.take(delta)
            is_end = answer.finish_reason is not None
            news.append(News(answer, text, delta, is_end))
            if is_end and delta.finish_reason is None:
                self.end_early(job, delta.index)
        return news

    @property
    def is_over(self) -> bool:
        """Whether the engine has ended all jobs, and all of it was read."""
        return self._inbox.is_empty and all(job.is_ended for job in self.jobs)

    def end_early(self, job: Job, index: int) -> None:
        """End an answer that is done though the engine would go on with it: it knows neither stop strings nor calls."""
        self._admission.leave_answer(job, index)

    def close(self) -> None:
        """End what has not ended, and count."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()
        if self.is_over and all(answer.is_done for answer in self.answers):
            self._outcome = "length" if any(a.finish_reason == "length" for a in self.answers) else "stop"
        if self._has_entered:
            for job in self.jobs:
                self._admission.leave(job)
        self._count()
        if self._log_as is not None:
            usage, timings = self.usage(), self.timings()
            logger.info("%s: %s; %s; %s", self._log_as, self._outcome, _listed(usage), _listed(timings))

    def _raise_error(self) -> None:
        for job in self.jobs:
            if job.error is not None:
                raise job.error

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._fail(ApiError(CLIENT_GONE, "the client is gone"))

    def _fail(self, error: ApiError) -> None:
        for job in self.jobs:
            job.fail(error)
            self._admission.leave(job)

    def _note_failure(self, error: BaseException) -> None:
        outcomes = {CLIENT_GONE: "disconnected", 408: "timeout", 504: "timeout", 400: "invalid"}
        if isinstance(error, ApiError):
            self._outcome = outcomes.get(error.status, "error")
        elif isinstance(error, asyncio.CancelledError):
            self._outcome = "cancelled"

    # --- numbers ----------------------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        """Tokens, as OpenAI counts them."""
        num_prompt_tokens = sum(len(job.prompt_token_ids) for job in self.jobs)
        num_output_tokens = sum(answer.num_tokens for answer in self.answers)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens()},
        }

    def timings(self) -> dict[str, Any]:
        """Seconds, from the request's arrival here; of several prompts, the means."""
        per_job = [_timings(job) for job in self.jobs]
        means = {name: _mean([each[name] for each in per_job]) for name in ("queue_s", "ttft_s", "itl_s")}
        last = max((job.last_time for job in self.jobs if job.last_time is not None), default=None)
        elapsed = last - self.jobs[0].arrival_time if last is not None else None
        num_tokens = sum(answer.num_tokens for answer in self.answers)
        return {
            **means,
            "tokens_per_second": round(num_tokens / elapsed, 3) if elapsed else None,
            "cached_tokens": self._num_cached_tokens(),
        }

    def _num_cached_tokens(self) -> int:
        return sum(job.metrics.num_cached_tokens for job in self.jobs if job.metrics is not None)

    def _count(self) -> None:
        metrics = self._metrics
        metrics.outcomes[self._outcome] += 1
        metrics.num_cached_tokens += self._num_cached_tokens()
        for job in self.jobs:
            if job.submit_time is None:
                continue
            metrics.num_prompt_tokens += len(job.prompt_token_ids)
            timings = _timings(job)
            for histogram, name in ((metrics.queue_time, "queue_s"), (metrics.ttft, "ttft_s"), (metrics.itl, "itl_s")):
                if (value := timings[name]) is not None:
                    histogram.observe(value)
            metrics.duration.observe(now() - job.arrival_time)


def _timings(job: Job) -> dict[str, float | None]:
    first, last = job.first_time, job.last_time
    queue = itl = None
    if job.submit_time is not None:
        waited = (job.metrics or RequestMetrics()).queue_time
        queue = job.submit_time - job.arrival_time + (waited or 0.0)
    num_gaps = job.num_output_tokens - job.params.n
    if first is not None and last is not None and num_gaps > 0:
        itl = (last - first) * job.params.n / num_gaps
    return {"queue_s": queue, "ttft_s": None if first is None else first - job.arrival_time, "itl_s": itl}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 6) if known else None


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if isinstance(value, (int, float)))
