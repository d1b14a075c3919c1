"""Admission control: which requests are accepted, and in which order the engine gets them.

The engine gets only requests that it can begin soon. The others wait here in lanes: each tenant (API key) has one lane
for short and one for long prompts. Lanes take turns. A lane's requests in the engine do not delay other lanes: the
engine's scheduler computes long prompts beside short ones, and shares its steps among tenants.
"""

from collections import Counter, deque

from infinilm.server.api_errors import ApiError
from infinilm.server.engine_request import EngineRequest, now
from infinilm.server.settings import Limits

NUM_STEPS_AHEAD = 3
"""A lane of short prompts may have the prompt tokens of this many steps in the engine before their first token."""
NUM_LONG_AHEAD = 8
"""A lane of long prompts (more than one step each) may have this many in the engine before their first token."""
SHARED_PART = 8
"""A tenant with more than its share of the engine's rows leaves 1/8 of them to others."""
MAX_RETRY_AFTER_S = 60.0

Lane = tuple[str, bool]
"""A tenant, and whether its prompts are long."""


class Admission:
    """Holds requests until the engine has capacity, and refuses them when too many wait.

    It does not know the engine: `EngineClient` submits what `pop_ready` returns, and reports first tokens and ends.
    """

    def __init__(self, limits: Limits, *, has_tenants: bool = False) -> None:
        self._limits = limits
        self._has_tenants = has_tenants
        """Whether there can be more than one tenant."""
        self._max_num_seqs = self._max_step_tokens = 1
        self._queues: dict[Lane, deque[EngineRequest]] = {}
        """The waiting requests of each lane. The first lane is the next one in turn."""
        self.num_requests = 0
        self.num_tokens = 0
        self.num_waiting = 0
        self._num_rows: Counter[str] = Counter()
        """The answers in the engine, by tenant."""
        self._num_ahead: Counter[Lane] = Counter()
        """By lane: the prompt tokens (in a long lane: the requests) in the engine that wait for a first token."""
        self._mean_seconds = 1.0

    def set_capacity(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Set the engine's limits of rows and of tokens in a step."""
        self._max_num_seqs, self._max_step_tokens = max_num_seqs, max_num_batched_tokens

    def enter(self, requests: list[EngineRequest]) -> None:
        """Queue the prompts of one HTTP request, all or none."""
        num_tokens = sum(request.num_charged_tokens for request in requests)
        limits = self._limits
        if self.num_requests + len(requests) > limits.max_requests:
            raise self._refuse(
                f"{self.num_requests} requests are at work or waiting, of max_requests={limits.max_requests}"
            )
        if self.num_requests and self.num_tokens + num_tokens > limits.max_total_tokens:
            raise self._refuse(
                f"this request may take {num_tokens} tokens, and {self.num_tokens} of "
                f"max_total_tokens={limits.max_total_tokens} are taken by others; a lower max_tokens helps"
            )
        self.num_requests += len(requests)
        self.num_tokens += num_tokens
        self.num_waiting += len(requests)
        for request in requests:
            self._queues.setdefault(self._lane(request), deque()).append(request)

    def _refuse(self, message: str) -> ApiError:
        num_at_work = max(self.num_requests - self.num_waiting, 1)
        wait = self._mean_seconds * (1 + self.num_waiting / num_at_work)
        headers = {"Retry-After": str(round(min(max(wait, 1.0), MAX_RETRY_AFTER_S)))}
        return ApiError(429, f"the server is full: {message}", code="server_full", headers=headers)

    def pop_ready(self) -> EngineRequest | None:
        """Remove and return the next request for the engine; None if it can't begin one soon."""
        lane = self._next_lane()
        if lane is None:
            return None
        queue = self._queues.pop(lane)
        request = queue.popleft()
        if queue:
            self._queues[lane] = queue  # at the end: the other lanes are next
        self.num_waiting -= 1
        self._num_rows[request.tenant] += request.params.n
        self._num_ahead[lane] += self._size(request)
        return request

    def _next_lane(self) -> Lane | None:
        """The first lane whose next request the engine can be given."""
        if not self._queues:
            return None
        num_rows = self._num_rows.total()
        max_rows = self._max_num_seqs + max(1, self._max_num_seqs // 8)  # for rows that become free meanwhile
        for lane, queue in self._queues.items():
            if num_rows == 0:
                return lane
            num_after = num_rows + queue[0].params.n
            if num_after > max_rows:
                return None  # requests with fewer answers must not overtake this one, or it could wait for ever
            max_ahead = NUM_LONG_AHEAD if lane[1] else NUM_STEPS_AHEAD * self._max_step_tokens
            if self._num_ahead[lane] < max_ahead and num_after <= self._max_rows_with(lane[0], max_rows):
                return lane
        return None

    def _max_rows_with(self, tenant: str, max_rows: int) -> int:
        """The most rows in use after a tenant's next request. A tenant that has its share leaves some to others."""
        num_seqs = self._max_num_seqs
        has_share = self._num_rows[tenant] * (len(self._num_rows) + 1) >= num_seqs
        return num_seqs - num_seqs // SHARED_PART if self._has_tenants and has_share else max_rows

    def _lane(self, request: EngineRequest) -> Lane:
        return request.tenant, len(request.prompt_token_ids) > self._max_step_tokens

    def _size(self, request: EngineRequest) -> int:
        """How much a request counts in `_num_ahead`."""
        return 1 if self._lane(request)[1] else len(request.prompt_token_ids)

    def note_first_token(self, request: EngineRequest) -> None:
        """Stop counting a prompt as ahead: it is computed, or will not be."""
        self._num_ahead[self._lane(request)] -= self._size(request)

    def note_end(self, request: EngineRequest) -> None:
        """Free the capacity of a request that `pop_ready` returned."""
        self._num_rows[request.tenant] -= request.params.n
        if not self._num_rows[request.tenant]:
            del self._num_rows[request.tenant]
        if request.first_time is None:
            self.note_first_token(request)
        self._mean_seconds += 0.1 * (now() - request.arrival_time - self._mean_seconds)
        self._uncount(request)

    def remove(self, request: EngineRequest) -> None:
        """Remove a waiting request."""
        lane = self._lane(request)
        queue = self._queues[lane]
        queue.remove(request)
        if not queue:
            del self._queues[lane]
        self.num_waiting -= 1
        self._uncount(request)

    def fail_waiting(self, error: ApiError) -> None:
        for request in [request for queue in self._queues.values() for request in queue]:
            request.fail(error)
            self.remove(request)

    def _uncount(self, request: EngineRequest) -> None:
        request.is_ended = True
        self.num_requests -= 1
        self.num_tokens -= request.num_charged_tokens
