"""Who gets in, and whose turn it is.

The engine serves in the order it is handed jobs. So it is handed only what it can begin soon; the others wait here,
and tenants (API keys) take turns.
"""

from collections import deque

from infinilm.server.api_errors import ApiError, shutting_down
from infinilm.server.engine_client import EngineClient, State
from infinilm.server.jobs import Job, now
from infinilm.server.settings import Limits

NUM_STEPS_AHEAD = 3
"""The engine is handed prompts for so many steps: it never waits for one, and not many are beyond taking turns."""
MAX_RETRY_AFTER_S = 60.0


class Admission:
    """Holds jobs back until the engine has room, and refuses them when too many wait."""

    def __init__(self, client: EngineClient, limits: Limits) -> None:
        self._client = client
        self._limits = limits
        self._queues: dict[str, deque[Job]] = {}
        """The waiting jobs of each tenant; the tenant whose turn it is comes first."""
        self.num_jobs = 0
        self.num_tokens = 0
        self.num_waiting = 0
        self.is_draining = False
        self._num_rows = 0
        """Answers that the engine is at work on, or will be."""
        self._num_ahead = 0
        """Prompt tokens of jobs that the engine has and has not drawn a token for."""
        self._mean_seconds = 1.0
        client.on_start = self._note_start
        client.on_end = self._note_end
        client.on_change = self._note_change

    def enter(self, jobs: list[Job]) -> None:
        """Let in the jobs of one request, all or none."""
        self.check_open()
        num_tokens = sum(job.num_charged_tokens for job in jobs)
        limits = self._limits
        if self.num_jobs + len(jobs) > limits.max_requests:
            raise self._refuse(
                f"{self.num_jobs} requests are at work or waiting, of max_requests={limits.max_requests}"
            )
        if self.num_jobs and self.num_tokens + num_tokens > limits.max_total_tokens:
            raise self._refuse(
                f"this request may take {num_tokens} tokens, and {self.num_tokens} of "
                f"max_total_tokens={limits.max_total_tokens} are taken by others; a lower max_tokens helps"
            )
        self.num_jobs += len(jobs)
        self.num_tokens += num_tokens
        self.num_waiting += len(jobs)
        for job in jobs:
            self._queues.setdefault(job.tenant, deque()).append(job)
        self._hand_out()

    def check_open(self) -> None:
        """Refuse at once what can't be served at all now."""
        if self.is_draining:
            raise shutting_down()
        if self._client.state is not State.READY:
            raise self._client.down_error()

    def leave(self, job: Job) -> None:
        """End a job before its time."""
        if job.is_ended:
            return
        if job.submit_time is not None:
            self._client.abort(job)
            return
        queue = self._queues[job.tenant]
        queue.remove(job)
        if not queue:
            del self._queues[job.tenant]
        self._drop(job)

    def leave_answer(self, job: Job, answer: int) -> None:
        """End one answer of a job that the engine has, before its time; the others go on."""
        if not job.is_ended:
            self._client.abort(job, answer)

    def _refuse(self, message: str) -> ApiError:
        num_at_work = max(self.num_jobs - self.num_waiting, 1)
        wait = self._mean_seconds * (1 + self.num_waiting / num_at_work)
        headers = {"Retry-After": str(round(min(max(wait, 1.0), MAX_RETRY_AFTER_S)))}
        return ApiError(429, f"the server is full: {message}", code="server_full", headers=headers)

    def _hand_out(self) -> None:
        """Give the engine jobs, one tenant after the other, while it can begin them soon."""
        while self._queues and self._client.state is State.READY:
            tenant, queue = next(iter(self._queues.items()))
            if not self._has_room(queue[0]):
                return
            job = queue.popleft()
            del self._queues[tenant]
            if queue:
                self._queues[tenant] = queue  # at the end: the others come first
            self.num_waiting -= 1
            self._num_rows += job.params.n
            self._num_ahead += len(job.prompt_token_ids)
            self._client.submit(job)

    def _has_room(self, job: Job) -> bool:
        ready = self._client.ready
        assert ready is not None
        if self._num_rows == 0:
            return True
        max_rows = ready.max_num_seqs + max(1, ready.max_num_seqs // 8)  # for rows that become free meanwhile
        max_ahead = NUM_STEPS_AHEAD * ready.max_num_batched_tokens
        return self._num_rows + job.params.n <= max_rows and (self._num_ahead == 0 or self._num_ahead < max_ahead)

    def _note_start(self, job: Job) -> None:
        self._num_ahead -= len(job.prompt_token_ids)
        self._hand_out()

    def _note_end(self, job: Job) -> None:
        self._num_rows -= job.params.n
        if job.first_time is None:
            self._num_ahead -= len(job.prompt_token_ids)
        self.num_jobs -= 1
        self.num_tokens -= job.num_charged_tokens
        self._mean_seconds += 0.1 * (now() - job.arrival_time - self._mean_seconds)
        self._hand_out()

    def _drop(self, job: Job) -> None:
        """A job ends that the engine never saw."""
        job.is_ended = True
        self.num_waiting -= 1
        self.num_jobs -= 1
        self.num_tokens -= job.num_charged_tokens

    def _note_change(self) -> None:
        """When the engine has died, what waits for it fails too: nobody knows when it will be back."""
        if self._client.state is State.READY:
            self._hand_out()
            return
        self._fail_waiting(self._client.down_error())

    def fail_all(self, error: ApiError) -> None:
        """Cut off everybody."""
        self._fail_waiting(error)
        self._client.fail_all(error)

    def _fail_waiting(self, error: ApiError) -> None:
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            for job in queue:
                job.fail(error)
                self._drop(job)
