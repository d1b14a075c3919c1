"""Which requests are let in, and in which order the engine gets them.

The engine is handed only what it can begin soon. The other jobs wait here in lanes, one for the short and one for the
long prompts of each tenant (API key). Lanes take turns, and a lane's jobs in the engine hold up no other lane: the
engine's scheduler computes long prompts beside short ones, and shares its steps among tenants.
"""

from collections import Counter, deque

from infinilm.server.api_errors import ApiError, shutting_down
from infinilm.server.engine_client import EngineClient, State
from infinilm.server.jobs import Job, now
from infinilm.server.settings import Limits

NUM_STEPS_AHEAD = 3
"""A lane of short prompts may have so many steps' prompt tokens in the engine that have not drawn a token."""
NUM_LONG_AHEAD = 8
"""A lane of long prompts, those of more than one step, may have so many of them there."""
SHARED_PART = 8
"""A tenant with more than its share of the engine's rows leaves 1/8 of them to others."""
MAX_RETRY_AFTER_S = 60.0

Lane = tuple[str, bool]
"""A tenant, and whether its prompts are long."""


class Admission:
    """Holds jobs back until the engine has room, and refuses them when too many wait."""

    def __init__(self, client: EngineClient, limits: Limits, *, has_tenants: bool = False) -> None:
        self._client = client
        self._limits = limits
        self._has_tenants = has_tenants
        """Whether there can be more than one."""
        self._queues: dict[Lane, deque[Job]] = {}
        """The waiting jobs of each lane; the lane whose turn it is comes first."""
        self.num_jobs = 0
        self.num_tokens = 0
        self.num_waiting = 0
        self.is_draining = False
        self._num_rows: Counter[str] = Counter()
        """By tenant: answers that the engine is at work on, or will be."""
        self._num_ahead: Counter[Lane] = Counter()
        """By lane: prompt tokens (of a long lane, jobs) that the engine has and has not drawn a token for."""
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
            self._queues.setdefault(self._lane(job), deque()).append(job)
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
        lane = self._lane(job)
        queue = self._queues[lane]
        queue.remove(job)
        if not queue:
            del self._queues[lane]
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
        """Give the engine jobs, one lane after the other, while it can begin them soon."""
        while self._client.state is State.READY and (lane := self._next_lane()) is not None:
            queue = self._queues.pop(lane)
            job = queue.popleft()
            if queue:
                self._queues[lane] = queue  # at the end: the others come first
            self.num_waiting -= 1
            self._num_rows[job.tenant] += job.params.n
            self._num_ahead[lane] += self._size(job)
            self._client.submit(job)

    def _next_lane(self) -> Lane | None:
        """The first lane whose next job the engine can be given."""
        ready = self._client.ready
        assert ready is not None
        num_rows = self._num_rows.total()
        max_rows = ready.max_num_seqs + max(1, ready.max_num_seqs // 8)  # for rows that become free meanwhile
        for lane, queue in self._queues.items():
            if num_rows == 0:
                return lane
            num_after = num_rows + queue[0].params.n
            if num_after > max_rows:
                return None  # no job with fewer answers passes this one: it would wait for ever
            if self._may_begin(lane) and num_after <= self._max_rows_with(lane[0], max_rows):
                return lane
        return None

    def _may_begin(self, lane: Lane) -> bool:
        assert self._client.ready is not None
        max_tokens = NUM_STEPS_AHEAD * self._client.ready.max_num_batched_tokens
        return self._num_ahead[lane] < (NUM_LONG_AHEAD if lane[1] else max_tokens)

    def _max_rows_with(self, tenant: str, max_rows: int) -> int:
        """Rows that may be in use with a tenant's next job: fewer if it has its share, to leave some to others."""
        assert self._client.ready is not None
        num_seqs = self._client.ready.max_num_seqs
        has_share = self._num_rows[tenant] * (len(self._num_rows) + 1) >= num_seqs
        return num_seqs - num_seqs // SHARED_PART if self._has_tenants and has_share else max_rows

    def _lane(self, job: Job) -> Lane:
        assert self._client.ready is not None
        return job.tenant, len(job.prompt_token_ids) > self._client.ready.max_num_batched_tokens

    def _size(self, job: Job) -> int:
        """What a job counts in its lane."""
        return 1 if self._lane(job)[1] else len(job.prompt_token_ids)

    def _note_start(self, job: Job) -> None:
        self._num_ahead[self._lane(job)] -= self._size(job)
        self._hand_out()

    def _note_end(self, job: Job) -> None:
        self._num_rows[job.tenant] -= job.params.n
        if not self._num_rows[job.tenant]:
            del self._num_rows[job.tenant]
        if job.first_time is None:
            self._num_ahead[self._lane(job)] -= self._size(job)
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
