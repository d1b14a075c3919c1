"""Structured output through the engine: together with every other setting, in any company, offline."""

import json
import math
import os
import re
from typing import Any

import pytest
from processes import children, eventually, script

from infinilm import LLM, AsyncLLM, RequestOutput, SamplingParams, StructuredOutput
from infinilm.errors import InvalidValueError

PERSON = StructuredOutput(
    json_schema={
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 10},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)
DATE = StructuredOutput(regex="[0-9]{4}-[0-9]{2}-[0-9]{2}")
PROMPTS = ["The north", "an ion", "to", "In another nation on the moon"]


def params(structured: StructuredOutput = PERSON, **settings) -> SamplingParams:
    return SamplingParams(**{"structured": structured, "max_tokens": 220, "seed": 3, **settings})


def check(output) -> None:
    """A person, whole if it says so."""
    assert output.error is None
    for answer in output.outputs:
        if answer.finish_reason == "stop":
            person = json.loads(answer.text)
            assert list(person) == ["name", "age", "tags"]
            assert len(person["name"]) <= 10
            assert 0 <= person["age"] <= 150
            assert set(person["tags"]) <= {"a", "b"}


SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 3},
    {"top_p": 0.3},
    {"min_p": 0.5},
    {"repetition_penalty": 3.0},
    {"presence_penalty": 50.0, "frequency_penalty": 50.0},
    {"logit_bias": {65: 100.0, 10: -100.0}},
    {"logits_processors": [lambda _, logits: logits * -3]},
    {"min_tokens": 100},
    {"n": 3},
    {"stop_token_ids": [57, 58]},  # letters, which then can stand in no name
]


@pytest.mark.parametrize("settings", SETTINGS, ids=" ".join)
def test_whatever_else_is_asked_for(llm, settings):
    outputs = llm.generate(PROMPTS, params(**settings), use_tqdm=False)
    for output in outputs:
        check(output)
    assert any(answer.finish_reason == "stop" for output in outputs for answer in output.outputs)


def test_answers_do_not_depend_on_company_chunks_or_preemption(llm, tiny_dir):
    kinds = [
        params(),
        params(DATE),
        params(StructuredOutput(choice=["yes", "no"])),
        SamplingParams(seed=3, max_tokens=60),
    ]
    together = [output.token_ids for output in llm.generate(PROMPTS, kinds, use_tqdm=False)]
    alone = [llm.generate(*pair, use_tqdm=False)[0].token_ids for pair in zip(PROMPTS, kinds, strict=True)]
    assert together == alone
    with LLM(tiny_dir, num_kvcache_blocks=16, max_num_batched_tokens=7) as tight:
        again = [output.token_ids for output in tight.generate(PROMPTS, kinds, use_tqdm=False)]
        many = tight.generate(PROMPTS * 3, params(), use_tqdm=False)
        assert tight.stats().num_preemptions > 0
    assert again == alone
    assert {tuple(output.token_ids) for output in many[::4]} == {tuple(alone[0])}


def test_samples_are_several_and_each_is_whole(llm):
    [output] = llm.generate(PROMPTS[0], params(DATE, n=5, temperature=3.0), use_tqdm=False)
    texts = {answer.text for answer in output.outputs}
    assert len(texts) > 1
    assert all(answer.finish_reason == "stop" for answer in output.outputs)
    assert all(len(text) == 10 and text[4] == text[7] == "-" for text in texts)


def test_logprobs_are_the_models_own(llm):
    """Of all tokens, forbidden ones included."""
    [output] = llm.generate(PROMPTS[0], params(DATE, logprobs=300), use_tqdm=False)
    assert output.finish_reason == "stop"
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert entry.token_id == token_id
        assert len(entry.top) == 300
        assert math.isclose(sum(map(math.exp, entry.top.values())), 1.0, rel_tol=1e-4)
    [free] = llm.generate(PROMPTS[0], SamplingParams(logprobs=300, max_tokens=1), use_tqdm=False)
    assert free.logprobs[0].top == output.logprobs[0].top


def test_too_few_tokens_end_by_length(llm):
    [output] = llm.generate(PROMPTS[0], params(DATE, max_tokens=4), use_tqdm=False)
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 4


def test_min_tokens_gives_way_to_a_complete_answer(llm):
    [output] = llm.generate(PROMPTS[0], params(StructuredOutput(choice=["ab"]), min_tokens=50), use_tqdm=False)
    assert output.text == "ab"
    assert output.finish_reason == "stop"
    assert output.token_ids.count(1) == 1


def test_streams_and_steps(llm):
    assert len("".join(llm.stream(PROMPTS[0], params(DATE)))) == 10
    llm.add_request(PROMPTS[0], params(DATE), request_id="a")
    llm.add_request(PROMPTS[0], params(DATE, seed=4), request_id="b")
    outputs: dict[str, RequestOutput] = {}
    while not llm.is_finished():
        outputs |= {output.request_id: output for output in llm.step()}
    assert all(output.finish_reason == "stop" and len(output.text) == 10 for output in outputs.values())


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json_schema": {"type": "strange"}}, 'this json_schema is refused: type is "strange"'),
        ({"regex": "("}, "this regex is refused: .*unclosed group"),
        ({"grammar": "start: x"}, "this grammar is refused: .*unknown name"),
    ],
)
def test_a_refused_form_leaves_nothing_behind(llm, form, message):
    bad = params(StructuredOutput(**form))
    with pytest.raises(InvalidValueError, match=message):
        llm.generate(PROMPTS[:2], [params(DATE), bad], use_tqdm=False)
    with pytest.raises(InvalidValueError, match=message):
        llm.add_request(PROMPTS[0], bad)
    assert llm.is_finished()
    check(llm.generate(PROMPTS[0], params(), use_tqdm=False)[0])


def test_a_grammar_that_fails_at_work_fails_alone(llm):
    """Its rows grow with every token, until they are too long."""
    slow = params(
        StructuredOutput(grammar="start: s\ns: s s s s s s | A |\nA: /[a-z]/"), temperature=1.0, min_tokens=200
    )
    failed, fine, free = llm.generate(PROMPTS[:3], [slow, params(DATE), SamplingParams(max_tokens=5)], use_tqdm=False)
    assert failed.finish_reason == "abort"
    assert "can't continue with this grammar" in failed.error
    assert fine.error is None
    assert fine.finish_reason == "stop"
    assert free.error is None
    stats = llm.stats()
    assert stats.num_free_blocks == stats.num_blocks
    check(llm.generate(PROMPTS[0], params(), use_tqdm=False)[0])


def test_a_processor_that_leaves_only_forbidden_tokens_fails_its_request(llm):
    def letters_only(_, logits):
        logits[:60] = -math.inf
        return logits

    digits = StructuredOutput(regex="[0-9]+")
    [output] = llm.generate(PROMPTS[0], params(digits, logits_processors=[letters_only]), use_tqdm=False)
    assert output.finish_reason == "abort"
    assert "no token can be drawn" in output.error


async def answer_of(engine: AsyncLLM, structured: StructuredOutput) -> str:
    async for output in engine.generate(PROMPTS[0], params(structured)):
        last = output
    assert last.finish_reason == "stop"
    return last.text


def test_asynchronously(tiny_dir):
    import asyncio

    async def run() -> list[str]:
        engine = AsyncLLM(tiny_dir, num_kvcache_blocks=64)
        try:
            forms = [DATE, StructuredOutput(choice=["yes"]), StructuredOutput(regex="a{7}")]
            return await asyncio.gather(*(answer_of(engine, form) for form in forms))
        finally:
            await engine.stop()

    date, choice, letters = asyncio.run(run())
    assert (len(date), choice, letters) == (10, "yes", "aaaaaaa")


def test_processes_end_with_the_engine(tiny_dir):
    before = set(children(os.getpid()))
    with LLM(tiny_dir, num_kvcache_blocks=32) as engine:
        engine.generate(PROMPTS[0], params(DATE), use_tqdm=False)
        assert set(children(os.getpid())) > before
    assert eventually(lambda: set(children(os.getpid())) <= before)


WITHOUT = """
import sys
sys.modules["llguidance"] = None
from infinilm import LLM, SamplingParams, StructuredOutput
with LLM(sys.argv[1], num_kvcache_blocks=16) as llm:
    try:
        llm.generate("to", SamplingParams(structured=StructuredOutput(json_object=True)), use_tqdm=False)
    except ValueError as error:
        print(error)
    print(llm.generate("to", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)[0].finish_reason)
"""


def test_without_llguidance_the_request_is_refused_and_others_are_served(tiny_dir):
    with script(WITHOUT, tiny_dir) as run:
        code, printed, errors = run.end()
    assert code == 0, errors
    refusal, reason = printed.splitlines()
    assert refusal == ("structured output needs llguidance, which is not installed; pip install 'infinilm[structured]'")
    assert reason == "length"


def test_the_embedded_model(smollm2):
    """A real model says sensible things in the form it is given."""
    question = [{"role": "user", "content": "What is the capital of France? Answer as JSON with city and country."}]
    place = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "country": {"enum": ["France", "Spain", "Italy"]}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    forms: list[dict[str, Any]] = [
        {"json_schema": place},
        {"choice": ["London", "Paris", "Rome"]},
        {"regex": "The city of [A-Z][a-z]+\\."},
    ]
    kinds = [SamplingParams(temperature=0, max_tokens=40, structured=StructuredOutput(**form)) for form in forms]
    with LLM(smollm2, max_model_len=256) as llm:
        answers = llm.chat([question] * 3, kinds, use_tqdm=False)
    assert json.loads(answers[0].text) == {"city": "Paris", "country": "France"}
    assert answers[1].text in {"London", "Paris", "Rome"}
    assert re.fullmatch(forms[2]["regex"], answers[2].text)
    assert [answer.finish_reason for answer in answers] == ["stop"] * 3
