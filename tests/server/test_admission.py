"""The order in which the engine is given requests, without an engine."""

from collections.abc import Callable
from types import SimpleNamespace

from infinilm.sampling_params import SamplingParams
from infinilm.server.admission import NUM_LONG_AHEAD, NUM_STEPS_AHEAD, Admission
from infinilm.server.engine_client import State
from infinilm.server.jobs import Inbox, Job
from infinilm.server.settings import Limits

STEP_TOKENS = 100


class FakeClient:
    """Takes jobs and works on none of them."""

    def __init__(self, max_num_seqs: int) -> None:
        self.state = State.READY
        self.ready = SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=STEP_TOKENS)
        self.jobs: list[Job] = []
        self.on_start: Callable[[Job], None]
        self.on_end: Callable[[Job], None]

    def submit(self, job: Job) -> None:
        job.submit_time = 0.0
        self.jobs.append(job)

    def begin(self, job: Job) -> None:
        job.first_time = 0.0
        self.on_start(job)

    def end(self, job: Job) -> None:
        self.jobs.remove(job)
        job.is_ended = True
        self.on_end(job)

    @property
    def tenants(self) -> str:
        return "".join(job.tenant for job in self.jobs)


def make(max_num_seqs: int = 64, *, has_tenants: bool = True, **limits: int) -> tuple[Admission, FakeClient]:
    client = FakeClient(max_num_seqs)
    return Admission(client, Limits(**limits), has_tenants=has_tenants), client  # type: ignore[arg-type]


def job(tenant: str, num_tokens: int = 10, n: int = 1) -> Job:
    return Job(tenant, [1] * num_tokens, SamplingParams(n=n, max_tokens=5), Inbox(), tenant, 0.0)


def test_long_prompts_of_one_tenant_hold_up_no_other() -> None:
    admission, client = make()
    admission.enter([job("a", 10_000) for _ in range(30)])
    assert client.tenants == "a" * NUM_LONG_AHEAD
    admission.enter([job("b", 10)])
    admission.enter([job("c", 10_000)])
    assert client.tenants == "a" * NUM_LONG_AHEAD + "bc"


def test_nor_short_ones_of_the_same_tenant() -> None:
    admission, client = make(has_tenants=False)
    admission.enter([job("", 10_000) for _ in range(30)])
    admission.enter([job("", 10)])
    assert len(client.jobs[-1].prompt_token_ids) == 10


def test_short_prompts_of_one_tenant_hold_up_no_other() -> None:
    admission, client = make()
    admission.enter([job("a", 50) for _ in range(30)])
    assert client.tenants == "a" * (NUM_STEPS_AHEAD * 2)
    admission.enter([job("b", 50)])
    assert client.tenants[-1] == "b"


def test_a_prompt_that_draws_its_first_token_lets_the_next_in() -> None:
    admission, client = make()
    admission.enter([job("a", 10_000) for _ in range(NUM_LONG_AHEAD + 2)])
    client.begin(client.jobs[0])
    assert len(client.jobs) == NUM_LONG_AHEAD + 1
    client.end(client.jobs[1])  # before its first token
    assert admission.num_waiting == 0
    for each in client.jobs.copy():
        client.end(each)
    assert (admission.num_jobs, admission.num_tokens) == (0, 0)
    assert not +admission._num_ahead
    assert not admission._num_rows


def test_tenants_take_turns() -> None:
    admission, client = make(max_num_seqs=8, has_tenants=False)
    admission.enter([job("a") for _ in range(12)])
    admission.enter([job("b") for _ in range(3)])
    assert client.tenants == "a" * 9
    for _ in range(4):
        client.end(client.jobs[0])
    assert client.tenants[-4:] in {"abab", "baba"}


def test_a_tenant_leaves_rows_to_others() -> None:
    admission, client = make(max_num_seqs=64)
    admission.enter([job("a") for _ in range(200)])
    for each in client.jobs:
        client.begin(each)
    assert client.tenants == "a" * 56
    admission.enter([job("b") for _ in range(6)])
    assert client.tenants == "a" * 56 + "b" * 6


def test_a_single_tenant_uses_all_rows() -> None:
    admission, client = make(max_num_seqs=64, has_tenants=False)
    admission.enter([job("", 1) for _ in range(200)])
    assert len(client.jobs) == 72


def test_a_request_with_many_answers_is_not_passed_for_ever() -> None:
    admission, client = make(max_num_seqs=16, has_tenants=False)
    admission.enter([job("a") for _ in range(10)])
    admission.enter([job("b", n=12)])
    admission.enter([job("c") for _ in range(10)])
    assert client.tenants == "a" * 10
    for _ in range(4):
        client.end(client.jobs[0])
    assert client.tenants == "aaaaaab"


def test_a_request_that_leaves_makes_place() -> None:
    admission, _ = make(max_num_seqs=8, has_tenants=False)
    jobs = [job("a", 10_000) for _ in range(20)]
    admission.enter(jobs)
    for each in jobs[10:]:
        admission.leave(each)
    assert (admission.num_waiting, admission.num_jobs) == (2, 10)
