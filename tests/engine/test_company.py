"""What a request gets must not depend on its neighbours: each answer in company equals the answer alone."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from narrow import present

from infinilm import LLM, RequestOutput, SamplingParams
from infinilm.errors import EngineError, InvalidValueError, WorkerDiedError
from infinilm.outputs import AnswerDelta, TokenLogprobs

PLAIN = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(seed=3, max_tokens=8, ignore_eos=True, logprobs=1)
PROMPTS = [f"The {word} of another nation" for word in ("north", "ocean", "moon", "ion", "rain", "tin")]


@pytest.fixture(params=[1, 2], ids=["one-in-flight", "two-in-flight"])
def llm(request, tiny_dir) -> Iterator[LLM]:
    """A GPU keeps two steps in flight; the bookkeeping is the same on a CPU."""
    with LLM(tiny_dir, num_kvcache_blocks=128) as llm:
        llm._max_in_flight = request.param
        yield llm
        assert llm.is_finished()
        assert not llm._requests
        llm.scheduler.blocks.check_integrity([])


def run(llm: LLM) -> dict[str, RequestOutput]:
    """Step until nothing is left: the last output of each request."""
    last: dict[str, RequestOutput] = {}
    while not llm.is_finished():
        last |= {output.request_id: output for output in llm.step()}
    return last


def alone(llm: LLM, prompt: str, params: SamplingParams) -> RequestOutput:
    return llm.generate(prompt, params, use_tqdm=False)[0]


def assert_same(output: RequestOutput, expected: RequestOutput) -> None:
    assert output.finished
    assert output.error is None
    for answer, wanted in zip(output.outputs, expected.outputs, strict=True):
        assert (answer.token_ids, answer.text) == (wanted.token_ids, wanted.text)
        assert (answer.finish_reason, answer.stop_reason) == (wanted.finish_reason, wanted.stop_reason)
        assert (answer.logprobs is None) == (wanted.logprobs is None)
        if answer.logprobs is not None and wanted.logprobs is not None:
            assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
            values = [entry.logprob for entry in wanted.logprobs]
            assert [entry.logprob for entry in answer.logprobs] == pytest.approx(values, abs=1e-5)


def assert_company_changes_nothing(llm: LLM, requests: Mapping[str, tuple[str, SamplingParams]]) -> None:
    expected = {name: alone(llm, *request) for name, request in requests.items()}
    for name, request in requests.items():
        llm.add_request(*request, request_id=name)
    outputs = run(llm)
    assert outputs.keys() == requests.keys()
    for name, output in outputs.items():
        assert_same(output, expected[name])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_neighbours_of_a_request_with_several_answers_finish(llm, n) -> None:
    several = replace(SAMPLED, n=n, max_tokens=5)
    requests = {f"before-{i}": (prompt, SAMPLED) for i, prompt in enumerate(PROMPTS)}
    requests["several"] = (PROMPTS[0], several)
    requests |= {f"after-{i}": (prompt, replace(SAMPLED, max_tokens=5)) for i, prompt in enumerate(PROMPTS)}
    assert_company_changes_nothing(llm, requests)


def test_answers_that_end_at_stop_ids_in_one_step(llm) -> None:
    first = alone(llm, PROMPTS[0], PLAIN).token_ids[2]
    several = replace(PLAIN, n=3, stop_token_ids=[first])
    assert_company_changes_nothing(llm, {"several": (PROMPTS[0], several), "other": (PROMPTS[1], SAMPLED)})


def test_a_listener_may_abort_a_neighbour(llm) -> None:
    expected = [alone(llm, prompt, SAMPLED) for prompt in PROMPTS]

    def abort_next(output: RequestOutput) -> None:
        if len(output.token_ids) == 3:
            llm.abort("1")
            llm.abort("4")

    for index, prompt in enumerate(PROMPTS):
        llm.add_request(prompt, SAMPLED, request_id=str(index), on_token=abort_next if index == 2 else None)
    outputs = run(llm)
    assert len(outputs) == len(PROMPTS)
    for name, output in outputs.items():
        if name in "14":
            assert output.finish_reason == "abort"
            assert output.token_ids == expected[int(name)].token_ids[: len(output.token_ids)]
            assert len(present(output.logprobs)) == len(output.token_ids) == 3
        else:
            assert_same(output, expected[int(name)])


def test_a_listener_that_aborts_its_own_request_is_told_once(llm) -> None:
    told: list[RequestOutput] = []

    def stop_at_three(output: RequestOutput) -> None:
        told.append(output)
        if len(output.token_ids) == 3:
            assert llm.abort("own")

    llm.add_request(PROMPTS[0], PLAIN, request_id="own", on_token=stop_at_three)
    outputs = run(llm)
    assert [output.finished for output in told] == [False] * 3 + [True]
    assert outputs["own"].finish_reason == "abort"


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("at", [1, 8], ids=["first-token", "last-token"])
def test_a_listener_that_raises_ends_only_its_own_request(llm, n, at) -> None:
    expected = [alone(llm, prompt, SAMPLED) for prompt in PROMPTS]

    def fail(output: RequestOutput) -> None:
        if len(output.outputs[-1].token_ids) == at:
            raise RuntimeError("no more")

    llm.add_request(PROMPTS[0], replace(PLAIN, n=n), request_id="bad", on_token=fail)
    for index, prompt in enumerate(PROMPTS):
        llm.add_request(prompt, SAMPLED, request_id=str(index))
    outputs = run(llm)
    bad = outputs.pop("bad")
    assert bad.error == "on_token failed: RuntimeError: no more"
    assert bad.finish_reason == ("abort" if at == 1 else "length")
    for name, output in outputs.items():
        assert_same(output, expected[int(name)])


def test_an_exit_raised_by_a_listener_harms_no_neighbour(llm) -> None:
    expected = alone(llm, PROMPTS[1], SAMPLED)

    def leave(output: RequestOutput) -> None:
        raise SystemExit(3)

    llm.add_request(PROMPTS[0], PLAIN, request_id="leaving", on_token=leave)
    llm.add_request(PROMPTS[1], SAMPLED, request_id="other")
    with pytest.raises(SystemExit):
        run(llm)
    outputs = run(llm)
    assert "SystemExit" in present(outputs["leaving"].error)
    assert_same(outputs["other"], expected)


def test_listeners_of_several_answers_see_whole_outputs(llm) -> None:
    free = alone(llm, PROMPTS[0], replace(SAMPLED, n=3))
    stop = free.outputs[1].text[2:5]
    params = replace(SAMPLED, n=3, stop=[stop])
    expected = alone(llm, PROMPTS[0], params)
    assert "stop" in [answer.finish_reason for answer in expected.outputs]
    told: list[RequestOutput] = []
    llm.add_request(PROMPTS[0], params, request_id="told", on_token=told.append)
    assert_same(run(llm)["told"], expected)
    assert_same(told[-1], expected)
    for output in told:
        for answer in output.outputs:
            assert len(present(answer.logprobs)) == len(answer.token_ids)
    for index, answer in enumerate(expected.outputs):
        assert "".join(output.outputs[index].new_text for output in told) == answer.text
        assert [token for output in told for token in output.outputs[index].new_token_ids] == answer.token_ids


# --- interfaces mix ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", ["step", "step_deltas", "generate", "stream"])
def test_streams_lose_nothing_when_others_step_the_engine(llm, between) -> None:
    expected = [alone(llm, prompt, PLAIN) for prompt in PROMPTS[:2]]
    pieces = []
    for piece in llm.stream(PROMPTS[0], PLAIN):
        pieces.append(piece)
        if between == "generate":
            assert_same(alone(llm, PROMPTS[1], PLAIN), expected[1])
        elif between == "stream":
            assert "".join(llm.stream(PROMPTS[1], PLAIN)) == expected[1].text
        else:
            assert getattr(llm, between)() == [], "a stream's request is reported to its stream only"
    assert "".join(pieces) == expected[0].text


def test_steps_report_everything_once_though_others_step_the_engine(llm) -> None:
    expected = [alone(llm, prompt, SAMPLED) for prompt in PROMPTS]
    told: list[RequestOutput] = []
    llm.add_request(PROMPTS[0], SAMPLED, request_id="heard", on_token=told.append)
    llm.add_request(PROMPTS[1], SAMPLED, request_id="stepped")
    reported: dict[str, list[RequestOutput]] = {"heard": [], "stepped": []}
    for prompt in PROMPTS:
        for output in llm.step():
            reported[output.request_id].append(output)
        next(stream := llm.stream(prompt, PLAIN))
        stream.close()
    while not llm.is_finished():
        for output in llm.step():
            reported[output.request_id].append(output)
    for outputs, wanted in ((told, 0), (reported["heard"], 0), (reported["stepped"], 1)):
        assert_same(outputs[-1], expected[wanted])
        assert "".join(output.outputs[0].new_text for output in outputs) == expected[wanted].text
        assert [token for output in outputs for token in output.outputs[0].new_token_ids] == expected[wanted].token_ids


# --- ids and aborts ---------------------------------------------------------------------------------------


def test_automatic_ids_never_collide_with_given_ones(llm) -> None:
    given = [llm.add_request(prompt, PLAIN, request_id=str(index)) for index, prompt in enumerate(PROMPTS)]
    made = [llm.add_request(prompt, PLAIN) for prompt in PROMPTS]
    assert len({*given, *made}) == 2 * len(PROMPTS)
    assert run(llm).keys() == {*given, *made}
    with pytest.raises(InvalidValueError, match=f"request_id='{made[0]}'.*automatic"):
        llm.add_request(PROMPTS[0], PLAIN, request_id=made[0])


def test_an_aborted_id_may_be_used_again_at_once(llm) -> None:
    expected = alone(llm, PROMPTS[1], PLAIN)
    llm.add_request(PROMPTS[0], PLAIN, request_id="again")
    llm.step()
    assert llm.abort("again")
    llm.add_request(PROMPTS[1], PLAIN, request_id="again")
    outputs = []
    while not llm.is_finished():
        outputs += llm.step()
    assert [output.finish_reason for output in outputs if output.finished] == ["abort", "length"]
    assert_same(outputs[-1], expected)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4, 6])
def test_prompt_logprobs_are_whole_though_the_first_answer_is_aborted(tiny_dir, num_steps) -> None:
    prompt = "In another nation on the moon " * 2
    params = SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True, prompt_logprobs=1, logprobs=0)
    with LLM(tiny_dir, num_kvcache_blocks=64, max_num_batched_tokens=16) as llm:
        [expected] = llm.generate(prompt, params, use_tqdm=False)
        llm.add_request(prompt, params, request_id="x")
        for _ in range(num_steps):
            llm.step()
        is_early = llm.abort("x", answer=0)
        output = run(llm)["x"]
    assert is_early
    assert output.outputs[0].finish_reason == "abort"
    found, exact = present(output.prompt_logprobs), present(expected.prompt_logprobs)
    for entry, wanted in zip(map(present, found[1:]), map(present, exact[1:]), strict=True):
        assert entry.token_id == wanted.token_id
        assert entry.logprob == pytest.approx(wanted.logprob, abs=1e-5)
    for answer, same in zip(output.outputs[1:], expected.outputs[1:], strict=True):
        assert answer.token_ids == same.token_ids


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4, 6])
def test_deltas_bring_prompt_logprobs_once_and_whole(tiny_dir, num_steps) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    with LLM(tiny_dir, num_kvcache_blocks=64, max_num_batched_tokens=8) as llm:
        llm.add_request(list(range(2, 32)), params, request_id="x")
        found: list[list[TokenLogprobs | None]] = []

        def step() -> None:  # copies, as a reader in another process has them
            found.extend(list(delta.prompt_logprobs) for delta in llm.step_deltas() if delta.prompt_logprobs)

        for _ in range(num_steps):
            step()
        assert llm.abort("x", 0)
        while not llm.is_finished():
            step()
    assert len(found) == 1
    assert [entry is None for entry in found[0]] == [True] + [False] * 29


def test_deltas_of_a_request_add_up_to_its_answer(llm) -> None:
    params = replace(SAMPLED, n=3, prompt_logprobs=0)
    expected = alone(llm, PROMPTS[0], params)
    llm.add_request(PROMPTS[0], params, request_id="x")
    llm.add_request(PROMPTS[1], PLAIN, on_token=lambda output: None)
    deltas: list[AnswerDelta] = []
    while not llm.is_finished():
        deltas += llm.step_deltas()
    for index, answer in enumerate(expected.outputs):
        own = [delta for delta in deltas if delta.index == index]
        assert [token for delta in own for token in delta.token_ids] == answer.token_ids
        assert len([entry for delta in own for entry in present(delta.logprobs)]) == len(answer.token_ids)
        assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + ["length"]


def test_listeners_can_not_step_the_engine(llm) -> None:
    expected = alone(llm, PROMPTS[1], SAMPLED)
    llm.add_request(PROMPTS[0], PLAIN, request_id="bad", on_token=lambda output: llm.step())
    llm.add_request(PROMPTS[1], SAMPLED, request_id="good")
    outputs = run(llm)
    assert EngineError.__name__ in present(outputs["bad"].error)
    assert_same(outputs["good"], expected)


def test_a_dead_worker_ends_all_requests_and_leaves_nothing_to_report(tiny_dir, monkeypatch) -> None:
    told: list[RequestOutput] = []
    with LLM(tiny_dir, num_kvcache_blocks=64) as llm:
        llm.add_request(PROMPTS[0], PLAIN, on_token=told.append)
        for prompt in PROMPTS[1:]:
            llm.add_request(prompt, PLAIN)
        llm.step()

        def die() -> None:
            raise WorkerDiedError("rank 1 died")

        monkeypatch.setattr(llm.executor, "check_health", die)
        with pytest.raises(WorkerDiedError, match="rank 1 died"):
            llm.step()
        assert told[-1].error == "WorkerDiedError: rank 1 died"
        assert llm.is_finished(), "a loop of steps would never end"
        llm.scheduler.blocks.check_integrity([])
