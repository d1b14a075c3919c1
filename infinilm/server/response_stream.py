"""The output of one HTTP request for text: its engine requests, its answers, and its time limit."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from infinilm.outputs import AnswerDelta, RequestMetrics
from infinilm.server.api_errors import ApiError
from infinilm.server.engine_client import EngineClient
from infinilm.server.engine_request import DeltaQueue, EngineRequest, now
from infinilm.server.metrics import Metrics
from infinilm.text.answer import Answer

logger = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[Any]]
CLIENT_GONE = 499
MAX_ROUTE_LENGTH = 1024
OUTCOMES = {CLIENT_GONE: "disconnected", 408: "timeout", 504: "timeout", 400: "invalid", 429: "rejected"}


@dataclass(slots=True)
class Chunk:
    """One delta's addition to an answer."""

    answer: Answer
    text: str
    delta: AnswerDelta
    """The tokens of the text."""
    is_end: bool
    """Whether the answer ends with this chunk."""


class ResponseStream:
    """Reads the output of one HTTP request's engine requests. `close` cancels requests that have not ended."""

    def __init__(
        self,
        client: EngineClient,
        metrics: Metrics,
        *,
        requests: Sequence[EngineRequest],
        answers: Sequence[Answer],
        output: DeltaQueue,
        log_as: str | None = None,
    ) -> None:
        self.requests = list(requests)
        self.answers = list(answers)
        self._client = client
        self._metrics = metrics
        self._output = output
        self._log_as = log_as
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.Task[None] | None = None
        self._outcome = "error"
        self._has_entered = False
        self._is_closed = False

    async def begin(self, receive: Receive, *, timeout: float | None, max_timeout: float) -> None:
        """Submit the requests and wait for the first output. Errors until then are raised before anything is sent.

        `timeout` is the client's, `max_timeout` the server's.
        """
        try:
            self._client.enter(self.requests)
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
            await self._output.wait()
            self._raise_error()
            if (delta := self._output.next_delta) is not None and not delta.token_ids:
                _check(delta)
        except BaseException as error:
            self._note_failure(error)
            self.close()
            raise

    async def read_chunks(self) -> list[Chunk]:
        """The output since the last call; waits if there is none."""
        try:
            items = await self._output.read_all()
            self._raise_error()
            return self._make_chunks(items)
        except BaseException as error:
            self._note_failure(error)
            raise

    def _make_chunks(self, items: list[tuple[EngineRequest, AnswerDelta | None]]) -> list[Chunk]:
        chunks: list[Chunk] = []
        for request, delta in items:
            assert delta is not None
            _, index, token_ids, logprobs, finish_reason, stop_reason, _, _, _ = delta
            answer = self.answers[request.first_answer + index]
            if answer.finish_reason is not None:
                continue
            self._metrics.num_output_tokens += len(token_ids)
            text = answer.append(token_ids, finish_reason, stop_reason)
            if answer.stop_reason is None:  # an error after a stop string is of no interest
                _check(delta)
            if logprobs is not None:
                answer.logprobs += logprobs
                if num_dropped := len(answer.logprobs) - answer.num_tokens:  # tokens after a stop string
                    del answer.logprobs[-num_dropped:]
                    delta = delta._replace(logprobs=logprobs[:-num_dropped])  # noqa: PLW2901
            is_end = answer.finish_reason is not None
            chunks.append(Chunk(answer, text, delta, is_end))
            if is_end and finish_reason is None:
                self._client.cancel(request, index)
        return chunks

    @property
    def is_over(self) -> bool:
        """Whether the engine has ended all requests and all output was read."""
        return self._output.is_empty and all(request.is_ended for request in self.requests)

    def end_answer(self, answer: Answer) -> None:
        """End an answer that is complete, though the engine would continue it."""
        answer.finish_reason = "stop"
        request = next(each for each in reversed(self.requests) if each.first_answer <= answer.index)
        self._client.cancel(request, answer.index - request.first_answer)

    def close(self) -> None:
        """Cancel engine requests that have not ended, and count the HTTP request."""
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
            for request in self.requests:
                self._client.cancel(request)
        self._count()
        if self._log_as is not None:
            usage, timings = self.usage(), self.timings()
            logger.info("%s: %s; %s; %s", self._log_as, self._outcome, _listed(usage), _listed(timings))

    def _raise_error(self) -> None:
        for request in self.requests:
            if request.error is not None:
                raise request.error

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._fail(ApiError(CLIENT_GONE, "the client is gone"))

    def _fail(self, error: ApiError) -> None:
        for request in self.requests:
            request.fail(error)
            self._client.cancel(request)

    def _note_failure(self, error: BaseException) -> None:
        if isinstance(error, ApiError):
            self._outcome = OUTCOMES.get(error.status, "error")
        elif isinstance(error, asyncio.CancelledError):
            self._outcome = "cancelled"

    # --- numbers ----------------------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        """Numbers of tokens, as OpenAI counts them."""
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in self.requests)
        num_output_tokens = sum(answer.num_tokens for answer in self.answers)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens()},
        }

    def timings(self) -> dict[str, Any]:
        """Times in seconds (means over the request's prompts), speed, and number of cached tokens."""
        per_request = [_timings(request) for request in self.requests]
        means = {name: _mean([each[name] for each in per_request]) for name in ("queue_s", "ttft_s", "itl_s")}
        last = max((request.last_time for request in self.requests if request.last_time is not None), default=None)
        elapsed = last - self.requests[0].arrival_time if last is not None else None
        num_tokens = sum(answer.num_tokens for answer in self.answers)
        return {
            **means,
            "tokens_per_second": round(num_tokens / elapsed, 3) if elapsed else None,
            "cached_tokens": self._num_cached_tokens(),
        }

    def headers(self) -> dict[str, str]:
        """Headers of the response: in a cluster, which replica answers."""
        route = "; ".join(request.route for request in self.requests if request.route)
        return {"X-InfiniLM-Replica": route[:MAX_ROUTE_LENGTH]} if route else {}

    def _num_cached_tokens(self) -> int:
        return sum(request.metrics.num_cached_tokens for request in self.requests if request.metrics is not None)

    def _count(self) -> None:
        metrics = self._metrics
        metrics.requests.labels(self._outcome).inc()
        metrics.num_cached_tokens += self._num_cached_tokens()
        for request in self.requests:
            if request.submit_time is None:
                continue
            metrics.num_prompt_tokens += len(request.prompt_token_ids)
            timings = _timings(request)
            for histogram, name in ((metrics.queue_time, "queue_s"), (metrics.ttft, "ttft_s"), (metrics.itl, "itl_s")):
                if (value := timings[name]) is not None:
                    histogram.observe(value)
            metrics.duration.observe(now() - request.arrival_time)


def _timings(request: EngineRequest) -> dict[str, float | None]:
    first, last = request.first_time, request.last_time
    queue = itl = None
    if request.submit_time is not None:
        waited = (request.metrics or RequestMetrics()).queue_time
        queue = request.submit_time - request.arrival_time + (waited or 0.0)
    num_gaps = request.num_output_tokens - request.params.n
    if first is not None and last is not None and num_gaps > 0:
        itl = (last - first) * request.params.n / num_gaps
    return {"queue_s": queue, "ttft_s": None if first is None else first - request.arrival_time, "itl_s": itl}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 6) if known else None


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if isinstance(value, (int, float)))


def _check(delta: AnswerDelta) -> None:
    """Raise the engine's error if it gave the answer up. Other answers' last deltas have the error, too."""
    if delta.error is not None and delta.finish_reason == "abort":
        raise ApiError(500, f"the engine gave the request up: {delta.error}", code="engine_error")
