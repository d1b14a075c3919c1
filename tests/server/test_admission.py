"""The order in which the engine is given requests, without an engine."""

from infinilm.sampling_params import SamplingParams
from infinilm.server.admission import NUM_LONG_AHEAD, NUM_STEPS_AHEAD, Admission
from infinilm.server.engine_request import DeltaQueue, EngineRequest
from infinilm.server.settings import Limits

STEP_TOKENS = 100


class FakeClient:
    """Submits requests as `EngineClient` does, to no engine."""

    def __init__(self, admission: Admission, max_num_seqs: int) -> None:
        self.admission = admission
        self.requests: list[EngineRequest] = []
        admission.set_capacity(max_num_seqs, STEP_TOKENS)

    def enter(self, requests: list[EngineRequest]) -> None:
        self.admission.enter(requests)
        self._submit_ready()

    def _submit_ready(self) -> None:
        while (request := self.admission.pop_ready()) is not None:
            request.submit_time = 0.0
            self.requests.append(request)

    def begin(self, request: EngineRequest) -> None:
        request.first_time = 0.0
        self.admission.note_first_token(request)
        self._submit_ready()

    def end(self, request: EngineRequest) -> None:
        self.requests.remove(request)
        self.admission.note_end(request)
        self._submit_ready()

    @property
    def tenants(self) -> str:
        return "".join(request.tenant for request in self.requests)


def make(max_num_seqs: int = 64, *, has_tenants: bool = True, **limits: int) -> tuple[Admission, FakeClient]:
    admission = Admission(Limits(**limits), has_tenants=has_tenants)
    return admission, FakeClient(admission, max_num_seqs)


def make_request(tenant: str, num_tokens: int = 10, n: int = 1) -> EngineRequest:
    return EngineRequest(tenant, [1] * num_tokens, SamplingParams(n=n, max_tokens=5), DeltaQueue(), tenant, 0.0)


def test_long_prompts_of_one_tenant_hold_up_no_other() -> None:
    _, client = make()
    client.enter([make_request("a", 10_000) for _ in range(30)])
    assert client.tenants == "a" * NUM_LONG_AHEAD
    client.enter([make_request("b", 10)])
    client.enter([make_request("c", 10_000)])
    assert client.tenants == "a" * NUM_LONG_AHEAD + "bc"


def test_nor_short_ones_of_the_same_tenant() -> None:
    _, client = make(has_tenants=False)
    client.enter([make_request("", 10_000) for _ in range(30)])
    client.enter([make_request("", 10)])
    assert len(client.requests[-1].prompt_token_ids) == 10


def test_short_prompts_of_one_tenant_hold_up_no_other() -> None:
    _, client = make()
    client.enter([make_request("a", 50) for _ in range(30)])
    assert client.tenants == "a" * (NUM_STEPS_AHEAD * 2)
    client.enter([make_request("b", 50)])
    assert client.tenants[-1] == "b"


def test_a_prompt_that_draws_its_first_token_lets_the_next_in() -> None:
    admission, client = make()
    client.enter([make_request("a", 10_000) for _ in range(NUM_LONG_AHEAD + 2)])
    client.begin(client.requests[0])
    assert len(client.requests) == NUM_LONG_AHEAD + 1
    client.end(client.requests[1])  # before its first token
    assert admission.num_waiting == 0
    for each in client.requests.copy():
        client.end(each)
    assert (admission.num_requests, admission.num_tokens) == (0, 0)
    assert not +admission._num_ahead
    assert not admission._num_rows


def test_tenants_take_turns() -> None:
    _, client = make(max_num_seqs=8, has_tenants=False)
    client.enter([make_request("a") for _ in range(12)])
    client.enter([make_request("b") for _ in range(3)])
    assert client.tenants == "a" * 9
    for _ in range(4):
        client.end(client.requests[0])
    assert client.tenants[-4:] in {"abab", "baba"}


def test_a_tenant_leaves_rows_to_others() -> None:
    _, client = make(max_num_seqs=64)
    client.enter([make_request("a") for _ in range(200)])
    for each in client.requests:
        client.begin(each)
    assert client.tenants == "a" * 56
    client.enter([make_request("b") for _ in range(6)])
    assert client.tenants == "a" * 56 + "b" * 6


def test_a_single_tenant_uses_all_rows() -> None:
    _, client = make(max_num_seqs=64, has_tenants=False)
    client.enter([make_request("", 1) for _ in range(200)])
    assert len(client.requests) == 72


def test_a_request_with_many_answers_is_not_passed_for_ever() -> None:
    _, client = make(max_num_seqs=16, has_tenants=False)
    client.enter([make_request("a") for _ in range(10)])
    client.enter([make_request("b", n=12)])
    client.enter([make_request("c") for _ in range(10)])
    assert client.tenants == "a" * 10
    for _ in range(4):
        client.end(client.requests[0])
    assert client.tenants == "aaaaaab"


def test_a_request_that_leaves_makes_place() -> None:
    admission, client = make(max_num_seqs=8, has_tenants=False)
    requests = [make_request("a", 10_000) for _ in range(20)]
    client.enter(requests)
    for each in requests[10:]:
        admission.remove(each)
    assert (admission.num_waiting, admission.num_requests) == (2, 10)
