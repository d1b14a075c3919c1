"""The high-level API on a tiny random checkpoint: everything a caller can ask for, and what it must give."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import reference_logits
from narrow import present, worker_of

from infinilm import LLM, Config, RequestOutput, SamplingParams
from infinilm.engine.llm_engine import NUM_LOOKED_AT, LLMEngine
from infinilm.errors import EngineError, InvalidValueError
from infinilm.executor.step_io import StepInput

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["The north", "an ion", "to", "In another nation on the moon " * 3]


@pytest.fixture(scope="module")
def reference(tiny_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32).eval()


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def is_idle(llm: LLM) -> bool:
    stats = llm.stats()
    llm.scheduler.blocks.check_integrity([])
    return llm.is_finished() and stats.num_free_blocks == stats.num_blocks and not stats.num_running + stats.num_waiting


def test_greedy_tokens_are_transformers(llm, reference) -> None:
    for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False):
        text = output.prompt_token_ids + output.token_ids
        best = reference_logits(reference, text).argmax(-1).tolist()
        start = len(output.prompt_token_ids)
        assert output.token_ids == best[start - 1 : -1]
        assert len(output.token_ids) == 12
        assert output.finish_reason == "length"


def test_outputs_carry_prompt_text_ids_and_metrics(llm) -> None:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        assert output.prompt_token_ids == llm.tokenizer.encode(output.prompt)
        assert output["text"] == output.text == llm.tokenizer.decode(output.token_ids)
        assert output["token_ids"] == output.token_ids == output.outputs[0].token_ids
        metrics = output.metrics
        assert 0 <= metrics.queue_time <= metrics.ttft
        assert metrics.itl > 0
        assert metrics.tokens_per_second > 0
    with pytest.raises(KeyError, match="prompt_text"):
        outputs[0]["prompt_text"]
    assert is_idle(llm)


def test_one_prompt_several_prompts_ids_and_mixed(llm) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    one = tokens(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False))
    assert tokens(llm.generate(ids, GREEDY, use_tqdm=False)) == one
    assert tokens(llm.generate([ids, PROMPTS[0]], GREEDY, use_tqdm=False)) == one * 2
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_parameters_per_prompt(llm) -> None:
    lengths = [5, 9, 1]  # they don't end in the order of the prompts
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(PROMPTS[:3], params, use_tqdm=False)
    assert [output.prompt for output in outputs] == PROMPTS[:3]
    assert [len(output.token_ids) for output in outputs] == lengths
    with pytest.raises(InvalidValueError, match="2 sampling_params were given for 3 prompts"):
        llm.generate(PROMPTS[:3], params[:2], use_tqdm=False)


@pytest.mark.parametrize("max_num_batched_tokens", [1, 7, 64])
@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_chunks_and_rows_change_nothing(tiny_dir, llm, max_num_batched_tokens, max_num_seqs) -> None:
    params = [GREEDY, SamplingParams(seed=5, max_tokens=12), SamplingParams(seed=6, top_p=0.8, max_tokens=12), GREEDY]
    expected = tokens(llm.generate(PROMPTS, params, use_tqdm=False))
    with LLM(
        tiny_dir, num_kvcache_blocks=64, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs
    ) as small:
        assert tokens(small.generate(PROMPTS, params, use_tqdm=False)) == expected


def test_preemption_changes_nothing(tiny_dir, llm) -> None:
    params = [SamplingParams(seed=i, max_tokens=60, ignore_eos=True, repetition_penalty=1.2) for i in range(4)]
    expected = tokens(llm.generate(PROMPTS, params, use_tqdm=False))
    with LLM(tiny_dir, num_kvcache_blocks=12) as tight:
        assert tokens(tight.generate(PROMPTS, params, use_tqdm=False)) == expected
        assert tight.stats().num_preemptions > 0
        assert is_idle(tight)


def test_prefix_hits_change_nothing(tiny_dir) -> None:
    shared = "In the nation of another moon, the north and the ocean are one. "
    prompts = [shared + tail for tail in ("One", "Two", "three")]
    params = SamplingParams(temperature=0, max_tokens=10, logprobs=0, ignore_eos=True)
    with LLM(tiny_dir, num_kvcache_blocks=64, enable_prefix_caching=False) as cold:
        expected = cold.generate(prompts, params, use_tqdm=False)
        assert cold.generate(prompts, params, use_tqdm=False)[0].metrics.num_cached_tokens == 0
    with LLM(tiny_dir, num_kvcache_blocks=64) as llm:
        first = llm.generate(prompts[0], params, use_tqdm=False)
        warm = llm.generate(prompts, params, use_tqdm=False)
        assert first[0].metrics.num_cached_tokens == 0
        assert warm[0].metrics.num_cached_tokens == (len(warm[0].prompt_token_ids) - 1) // 16 * 16
        assert warm[1].metrics.num_cached_tokens >= 16
    assert tokens(warm) == tokens(expected)
    for hit, miss in zip(warm, expected, strict=True):
        for a, b in zip(present(hit.logprobs), present(miss.logprobs), strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_seeds(llm) -> None:
    def draw(**kwargs) -> list[int]:
        return llm.generate(PROMPTS[0], SamplingParams(max_tokens=16, ignore_eos=True, **kwargs), use_tqdm=False)[0][
            "token_ids"
        ]

    assert draw(seed=1) == draw(seed=1)
    assert draw(seed=1) != draw(seed=2)
    assert draw() != draw(), "requests without a seed must not all draw the same"


def test_engine_seed_makes_a_run_repeatable(tiny_dir) -> None:
    runs = []
    for seed in (3, 3, 4):
        with LLM(tiny_dir, num_kvcache_blocks=64, seed=seed) as llm:
            runs.append(tokens(llm.generate(PROMPTS, SamplingParams(max_tokens=8), use_tqdm=False)))
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_samples_share_the_prompt(tiny_dir, enable_prefix_caching) -> None:
    prompt = "In another nation on the moon " * 4
    params = SamplingParams(n=3, seed=9, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    with LLM(tiny_dir, num_kvcache_blocks=64, enable_prefix_caching=enable_prefix_caching) as llm:
        [output] = llm.generate(prompt, params, use_tqdm=False)
        num_prompt = len(output.prompt_token_ids)
        assert llm.stats().num_prefill_tokens < num_prompt + 3 * 16 + 3
        alone = llm.generate(prompt, SamplingParams(seed=9, max_tokens=8, ignore_eos=True), use_tqdm=False)
        assert is_idle(llm)
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert output.outputs[0].token_ids == alone[0].token_ids
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
    assert len(present(output.prompt_logprobs)) == num_prompt


def test_logprobs_are_the_models_own(llm, reference) -> None:
    params = SamplingParams(temperature=0.5, top_k=5, seed=1, max_tokens=6, logprobs=3, prompt_logprobs=2)
    [output] = llm.generate(PROMPTS[3], params, use_tqdm=False)
    text = output.prompt_token_ids + output.token_ids
    expected = torch.log_softmax(reference_logits(reference, text), -1)
    assert output.prompt_logprobs[0] is None
    entries = output.prompt_logprobs[1:] + output.logprobs
    assert len(entries) == len(text) - 1
    for position, entry in enumerate(entries, start=1):
        row = expected[position - 1]
        assert entry.token_id == text[position]
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
        num_top = 2 if position < len(output.prompt_token_ids) else 3
        assert list(entry.top) == row.topk(num_top).indices.tolist()


def test_prompt_logprobs_are_whole_with_chunks_prefix_hits_and_preemption(tiny_dir, llm) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, prompt_logprobs=0)
    [expected] = llm.generate(PROMPTS[3], params, use_tqdm=False)
    with LLM(tiny_dir, num_kvcache_blocks=9, max_num_batched_tokens=5) as tight:
        for outputs in (tight.generate(PROMPTS[3], params, use_tqdm=False) for _ in range(2)):
            values = prompt_scores(outputs[0])
            assert values == pytest.approx(prompt_scores(expected), abs=1e-4)


# --- endings ----------------------------------------------------------------------------------------------


def test_end_of_sequence_and_ignore_eos(llm) -> None:
    bias = {1: 100.0}
    [output] = llm.generate("to", SamplingParams(max_tokens=5, logit_bias=bias), use_tqdm=False)
    assert (output.token_ids, output.text, output.finish_reason) == ([1], "", "stop")
    [output] = llm.generate("to", SamplingParams(max_tokens=5, logit_bias=bias, ignore_eos=True), use_tqdm=False)
    assert (output.token_ids, output.finish_reason) == ([1] * 5, "length")
    [output] = llm.generate("to", SamplingParams(max_tokens=5, logit_bias=bias, min_tokens=3), use_tqdm=False)
    assert len(output.token_ids) == 4
    assert output.token_ids[-1] == 1


def test_stop_token_ids(llm) -> None:
    [free] = llm.generate("to", GREEDY, use_tqdm=False)
    stop = free.token_ids[4]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
    [output] = llm.generate("to", params, use_tqdm=False)
    end = free.token_ids.index(stop) + 1
    assert output.token_ids == free.token_ids[:end]
    assert output.text == llm.tokenizer.decode(free.token_ids[: end - 1])
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_stop_strings_cut_the_text_across_token_borders(llm) -> None:
    letters = {llm.tokenizer.encode(c)[0]: 0.0 for c in "abcd"}
    force = [llm.tokenizer.encode(c)[0] for c in "abcdabcd"]

    def spell(output_ids, logits):
        logits[:] = -100.0
        logits[force[len(output_ids)]] = 0.0
        return logits

    assert len(letters) == 4
    params = SamplingParams(max_tokens=8, stop=["cda", "x"], logits_processors=[spell])
    [output] = llm.generate("to", params, use_tqdm=False)
    assert output.text == "ab"
    assert output.token_ids == force[:5]
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", "cda")
    assert "".join(llm.stream("to", params)) == "ab"
    # On the very token that also reaches the limit, the stop string is still why it ended.
    [output] = llm.generate("to", SamplingParams(max_tokens=5, stop="cda", logits_processors=[spell]), use_tqdm=False)
    assert (output.text, output.finish_reason) == ("ab", "stop")
    [output] = llm.generate(
        "to", SamplingParams(max_tokens=8, min_tokens=6, stop="cda", logits_processors=[spell]), use_tqdm=False
    )
    assert output.text == "abcdabcd"


def test_length_limit_of_the_model(tiny_dir) -> None:
    with LLM(tiny_dir, max_model_len=20, num_kvcache_blocks=8) as llm:
        [output] = llm.generate([5] * 15, SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
        assert len(output.token_ids) == 5
        assert output.finish_reason == "length"
        assert len(llm.generate([5] * 19, GREEDY, use_tqdm=False)[0].token_ids) == 1


# --- step by step -----------------------------------------------------------------------------------------


def test_steps_streams_and_generate_agree_and_can_be_mixed(llm) -> None:
    expected = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    heard: list[str] = []
    by_hand = llm.add_request(PROMPTS[0], GREEDY, request_id="mine")
    listening = llm.add_request(PROMPTS[1], GREEDY, on_token=lambda out: heard.append(out.outputs[0].new_text))
    assert by_hand == "mine"
    assert not llm.is_finished()
    assert "".join(llm.stream(PROMPTS[2], GREEDY)) == expected[2].text
    assert tokens(llm.generate(PROMPTS[3], GREEDY, use_tqdm=False)) == [expected[3].token_ids]

    finished = {}
    while not llm.is_finished():
        for output in llm.step():
            if output.finished:
                finished[output.request_id] = output
    assert set(finished) == {by_hand, listening}, "what others drove to its end is still told by step"
    assert finished[by_hand].text == expected[0].text
    assert finished[listening].text == "".join(heard) == expected[1].text
    assert is_idle(llm)


def test_each_step_reports_what_is_new(llm) -> None:
    llm.add_request(PROMPTS[0], GREEDY)
    pieces, ids = [], []
    while not llm.is_finished():
        [output] = llm.step()
        pieces.append(output.outputs[0].new_text)
        ids += output.outputs[0].new_token_ids
        assert output.text == "".join(pieces)
        assert output.token_ids == ids
    assert len(pieces) == 12


def test_abort_waiting_running_and_gone(llm) -> None:
    ids = [llm.add_request("to " * 5, SamplingParams(max_tokens=50, ignore_eos=True, n=n)) for n in (1, 2, 1)]
    assert llm.abort(ids[2]), "still waiting"
    llm.step()
    assert llm.abort(ids[1]), "two sequences, one running and one held"
    reports = {output.request_id: output for output in llm.step()}
    assert reports[ids[1]].finished
    assert reports[ids[1]].finish_reason == "abort"
    assert llm.abort(ids[0])
    assert not llm.abort(ids[0])
    assert not llm.abort("nobody")
    assert [output.request_id for output in llm.step()] == [ids[0]]
    assert is_idle(llm)


def test_aborting_one_answer_leaves_the_others(llm) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, n=3, seed=5)
    [whole] = llm.generate("to " * 5, params, use_tqdm=False)
    request_id = llm.add_request("to " * 5, params)
    assert llm.abort(request_id, answer=1), "it waits for the first answer's prompt"
    llm.step()
    llm.step()
    assert llm.abort(request_id, answer=0)
    assert not llm.abort(request_id, answer=0)
    with pytest.raises(InvalidValueError, match="answer=3 is out of range; use 0 to 2"):
        llm.abort(request_id, answer=3)
    while not llm.is_finished():
        [output] = llm.step()
        assert llm.stats().num_running <= 1
    assert [answer.finish_reason for answer in output.outputs] == ["abort", "abort", "length"]
    assert output.outputs[2].token_ids == whole.outputs[2].token_ids
    assert output.outputs[1].token_ids == []
    assert is_idle(llm)


def test_closing_a_stream_early_frees_its_blocks(llm) -> None:
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    assert llm.stats().num_running == 1
    stream.close()
    assert is_idle(llm)


def test_request_ids_are_unique_while_in_use(llm) -> None:
    llm.add_request("to", GREEDY, request_id="a")
    with pytest.raises(InvalidValueError, match="request_id='a' is in use"):
        llm.add_request("to", GREEDY, request_id="a")
    llm.abort("a")
    llm.step()
    llm.generate("to", GREEDY, use_tqdm=False)
    assert is_idle(llm)


# --- one bad request harms nobody else --------------------------------------------------------------------


def broken(output_ids, logits):
    if len(output_ids) == 2:
        raise RuntimeError("no more")
    return logits


def poisoned(output_ids, logits):
    return logits * float("nan")


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (broken, "RuntimeError: no more"),
        (poisoned, "greatest is nan"),
        (lambda ids, logits: logits[:3], "InvalidValueError"),
    ],
)
def test_a_failing_logits_processor_ends_its_own_request_only(llm, processor, message) -> None:
    bad = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logits_processors=[processor])
    expected = tokens(llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False))
    outputs = llm.generate([PROMPTS[0], PROMPTS[2], PROMPTS[1]], [GREEDY, bad, GREEDY], use_tqdm=False)
    assert tokens([outputs[0], outputs[2]]) == expected
    assert outputs[1].finish_reason == "abort"
    assert message in outputs[1].error
    assert is_idle(llm)


def test_a_failing_listener_ends_its_own_request_only(llm) -> None:
    def fail(output: RequestOutput) -> None:
        raise ValueError("deaf")

    bad = llm.add_request(PROMPTS[1], GREEDY, on_token=fail)
    good = llm.add_request(PROMPTS[0], GREEDY)
    finished: dict[str, RequestOutput] = {}
    while not llm.is_finished():
        finished |= {output.request_id: output for output in llm.step() if output.finished}
    assert finished[bad].error == "on_token failed: ValueError: deaf"
    assert finished[bad].finish_reason == "abort"
    assert len(finished[good].token_ids) == 12
    assert is_idle(llm)


def test_a_failing_step_ends_the_requests_in_it_and_no_others(llm, monkeypatch) -> None:
    submit = llm.executor.submit

    def fail(step: StepInput):
        raise OSError("no room")

    doomed = llm.add_request(PROMPTS[0], GREEDY)
    monkeypatch.setattr(llm.executor, "submit", fail)
    [output] = llm.step()
    monkeypatch.setattr(llm.executor, "submit", submit)
    assert (output.request_id, output.finish_reason, output.error) == (doomed, "abort", "OSError: no room")
    assert is_idle(llm)
    assert len(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].token_ids) == 12


# --- chat, settings, life ---------------------------------------------------------------------------------


def test_chat_renders_the_template(llm) -> None:
    messages = [{"role": "user", "content": "an ion"}]
    [output] = llm.chat(messages, GREEDY, use_tqdm=False)
    rendered = llm.tokenizer.encode("<user>an ion\n<assistant>", add_special_tokens=False)
    assert output.prompt_token_ids == rendered == llm.chat_prompt(messages)
    assert tokens(llm.chat([messages, messages], GREEDY, use_tqdm=False)) == [output.token_ids] * 2


def test_configs_and_presets_build_engines(tiny_dir) -> None:
    with LLM(Config.preset("cpu", model=tiny_dir), num_kvcache_blocks=8, kvcache_block_size=256) as llm:
        assert llm.config.max_num_seqs == 32
        assert llm.memory.num_blocks == 8
        assert len(llm.generate("to", GREEDY, use_tqdm=False)[0].token_ids) == 12


def prompt_scores(output: RequestOutput) -> list[float]:
    return [present(entry).logprob for entry in present(output.prompt_logprobs)[1:]]


def test_bfloat16(tiny_dir) -> None:
    with LLM(tiny_dir, num_kvcache_blocks=8, dtype="bfloat16") as llm:
        assert present(worker_of(llm.executor).cache).layers[0].dtype == torch.bfloat16
        assert len(llm.generate("to", GREEDY, use_tqdm=False)[0].token_ids) == 12


def test_exit_ends_requests_frees_memory_and_can_be_repeated(tiny_dir) -> None:
    llm = LLM(tiny_dir, num_kvcache_blocks=8)
    llm.add_request("to", GREEDY)
    llm.step()
    cache = worker_of(llm.executor).cache
    llm.exit()
    llm.exit()
    assert len(gc.get_referrers(cache)) <= 1, "the engine must let go of its cache"
    with pytest.raises(EngineError, match="closed"):
        llm.generate("to")
    with pytest.raises(EngineError, match="closed"):
        llm.step()


def test_two_thousand_requests_leave_nothing_behind(llm) -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    for round_ in range(20):
        prompts = [[2 + (round_ * 100 + i) % 250, 7, 8 + i % 90] for i in range(100)]
        llm.generate(prompts, params, use_tqdm=False)
    assert is_idle(llm)
    assert not llm._requests
    assert not llm._unreported


def test_all_that_have_ended_are_collected_however_many() -> None:
    class Ended:
        is_finished = True

        def output(self):
            return self

    class Open(Ended):
        is_finished = False

    engine: Any = SimpleNamespace(config=SimpleNamespace(max_num_seqs=1))
    ended: list[Any] = [Ended() for _ in range(3 * NUM_LOOKED_AT)]
    outputs: dict[Any, Any] = {}
    pending = dict.fromkeys([Open(), *ended])
    LLMEngine._collect_outputs(engine, pending, outputs)
    assert list(outputs) == ended
    assert len(pending) == 1
