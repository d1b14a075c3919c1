"""The official client against a real server: it must not notice the difference."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from narrow import present
from server_driver import Server, events, wait_until
from tiny_tokenizer import TEMPLATE

from infinilm import LLM, SamplingParams

MODEL = "tiny-model"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there!"}]
PROMPT = "The meaning of life is"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def offline(long_dir: Path) -> Iterator[LLM]:
    with LLM(long_dir, num_kvcache_blocks=256) as engine:
        yield engine


def test_completion_is_what_the_engine_says(server: Server, offline: LLM) -> None:
    reply = server.openai.completions.create(model=MODEL, prompt=PROMPT, **GREEDY)
    expected = offline.generate(PROMPT, SamplingParams(**GREEDY), use_tqdm=False)[0]
    assert reply.choices[0].text == expected.text
    assert reply.choices[0].finish_reason == expected.finish_reason
    assert reply.usage.completion_tokens == len(expected.token_ids)
    assert reply.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert (reply.object, reply.model) == ("text_completion", MODEL)


def test_replies_say_what_computed_them(server: Server, offline: LLM) -> None:
    """The same weights and kernels as this process's, whatever is asked for, whole or streamed."""
    expected = offline.stats().system_fingerprint
    assert expected.startswith(MODEL)
    asked = {"model": MODEL, "max_tokens": 2}
    assert server.openai.completions.create(prompt=PROMPT, **asked).system_fingerprint == expected
    assert server.openai.chat.completions.create(messages=CHAT, **asked).system_fingerprint == expected
    chunks = list(server.openai.chat.completions.create(messages=CHAT, stream=True, **asked))
    assert {chunk.system_fingerprint for chunk in chunks} == {expected}
    (model,) = server.http.get("/v1/models").json()["data"]
    assert (model["system_fingerprint"], model["deterministic"]) == (expected, offline.stats().guarantee)


def test_chat_is_what_the_engine_says(server: Server, offline: LLM) -> None:
    reply = server.openai.chat.completions.create(model=MODEL, messages=CHAT, **GREEDY)
    expected = offline.chat(CHAT, SamplingParams(**GREEDY), use_tqdm=False)[0]
    message = reply.choices[0].message
    assert (message.role, message.content) == ("assistant", expected.text)
    assert reply.usage.total_tokens == len(expected.prompt_token_ids) + len(expected.token_ids)


def test_a_streamed_chat_adds_up_to_the_whole(server: Server) -> None:
    asked = {"model": MODEL, "messages": CHAT, "temperature": 0.8, "seed": 5, "max_tokens": 40, "n": 2}
    whole = server.openai.chat.completions.create(**asked)
    chunks = list(server.openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    texts, ends = ["", ""], [None, None]
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        assert ends[choice.index] is None
        ends[choice.index] = choice.finish_reason
        assert chunk.usage is None
    assert chunks[0].choices[0].delta.role == "assistant"
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert texts[0] != texts[1]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_streamed_completion_adds_up_to_the_whole(server: Server) -> None:
    asked = {"model": MODEL, "prompt": [PROMPT, "Once upon"], "temperature": 0, "max_tokens": 20, "echo": True}
    whole = server.openai.completions.create(**asked)
    texts = ["", ""]
    for chunk in server.openai.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert texts[0].startswith(PROMPT)
    assert texts[1].startswith("Once upon")


def test_prompts_can_be_ids(server: Server) -> None:
    ids = server.post("/tokenize", prompt=PROMPT).json()["tokens"]
    by_text = server.openai.completions.create(model=MODEL, prompt=PROMPT, **GREEDY).choices[0].text
    one, two = server.openai.completions.create(model=MODEL, prompt=[ids, ids], **GREEDY).choices
    assert server.openai.completions.create(model=MODEL, prompt=ids, **GREEDY).choices[0].text == by_text
    assert one.text == two.text == by_text
    assert server.post("/detokenize", tokens=ids).json() == {"prompt": PROMPT}


def test_chat_logprobs(server: Server, offline: LLM) -> None:
    asked = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    found = server.openai.chat.completions.create(**asked).choices[0].logprobs.content
    expected = offline.chat(CHAT, SamplingParams(temperature=0, max_tokens=6, logprobs=3), use_tqdm=False)[0].logprobs
    assert expected is not None
    assert [each.logprob for each in found] == pytest.approx([each.logprob for each in expected])
    for each, right in zip(found, expected, strict=True):
        assert [top.logprob for top in each.top_logprobs] == pytest.approx(list(right.top.values()))
        assert each.top_logprobs[0].token == each.token
        assert bytes(each.bytes).decode(errors="backslashreplace") == each.token
    streamed = [
        position
        for chunk in server.openai.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs
        for position in chunk.choices[0].logprobs.content
    ]
    assert [each.token for each in streamed] == [each.token for each in found]


def test_echo_scores_the_prompt(server: Server, offline: LLM) -> None:
    reply = server.openai.completions.create(model=MODEL, prompt=PROMPT, echo=True, logprobs=2, max_tokens=0)
    choice = reply.choices[0]
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    expected = present(offline.generate(PROMPT, params, use_tqdm=False)[0].prompt_logprobs)
    assert choice.text == PROMPT
    assert "".join(choice.logprobs.tokens) == PROMPT
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx([present(each).logprob for each in expected[1:]])
    assert choice.logprobs.text_offset[:3] == [0, 1, 3]
    found = choice.logprobs
    for token, own, top in zip(found.tokens[1:], found.token_logprobs[1:], found.top_logprobs[1:], strict=True):
        assert top[token] == own
        assert len(top) in (2, 3)
    one_more = server.openai.completions.create(model=MODEL, prompt=PROMPT, echo=True, logprobs=2, max_tokens=1)
    assert len(one_more.choices[0].logprobs.tokens) == len(choice.logprobs.tokens) + 1
    assert one_more.choices[0].logprobs.tokens[:-1] == choice.logprobs.tokens


def test_echo_and_logprobs_streamed_add_up_to_the_whole(server: Server) -> None:
    asked = {
        "model": MODEL,
        "prompt": [PROMPT, "Once"],
        "echo": True,
        "logprobs": 1,
        "max_tokens": 5,
        "n": 2,
        "seed": 1,
    }
    whole = server.openai.completions.create(**asked)
    lists: list[list[list[Any]]] = [[[] for _ in range(4)] for _ in range(3)]
    texts, tokens, offsets = lists
    for chunk in server.openai.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        texts[choice.index].append(choice.text)
        if choice.logprobs:
            tokens[choice.index] += choice.logprobs.tokens
            offsets[choice.index] += choice.logprobs.text_offset
    for index, choice in enumerate(whole.choices):
        assert "".join(texts[index]) == choice.text
        assert tokens[index] == choice.logprobs.tokens
        assert offsets[index] == choice.logprobs.text_offset
        assert choice.text.startswith((PROMPT, "Once")[index // 2])
        assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens)


def test_a_stop_string_is_cut_off(server: Server) -> None:
    asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 100}
    free = server.post("/v1/completions", **asked).json()["choices"][0]["text"]
    stop = free[10:13]
    reply = server.post("/v1/completions", **asked, stop=[stop, "never to be seen"]).json()
    choice = reply["choices"][0]
    assert choice["text"] == free[: free.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert reply["usage"]["completion_tokens"] < 100
    streamed = events(server.post("/v1/completions", **asked, stop=stop, stream=True))
    assert "".join(event["choices"][0]["text"] for event in streamed) == choice["text"]


def test_an_answer_that_a_stop_string_has_ended_is_not_computed_any_further(server: Server) -> None:
    def num_computed() -> int:
        wait_until(server.is_empty)
        return server.http.get("/health").json()["engine"]["num_decode_tokens"]

    asked = {"prompt": PROMPT, "seed": 3, "max_tokens": 300, "ignore_eos": True, "n": 2}
    first, second = (choice["text"] for choice in server.post("/v1/completions", **asked).json()["choices"])
    stop = next(first[at : at + 2] for at in range(5, 50) if first[at : at + 2] not in second)
    before = num_computed()
    cut, full = server.post("/v1/completions", **asked, stop=stop).json()["choices"]
    assert (cut["text"], cut["finish_reason"]) == (first[: first.index(stop)], "stop")
    assert (full["text"], full["finish_reason"]) == (second, "length")
    assert 300 < num_computed() - before < 400


def test_sampling_parameters_reach_the_engine(server: Server, offline: LLM) -> None:
    def complete(**settings: object) -> dict:
        return server.post("/v1/completions", prompt=PROMPT, **{**GREEDY, **settings}).json()["choices"][0]

    best = complete()
    token = offline.generate(PROMPT, SamplingParams(**GREEDY), use_tqdm=False)[0].token_ids[0]
    assert complete(logit_bias={str(token): -100})["text"] != best["text"]
    assert complete(temperature=1.5, seed=3)["text"] == complete(temperature=1.5, seed=3)["text"] != best["text"]
    assert complete(temperature=1.5, top_k=1)["text"] == best["text"]
    assert complete(temperature=1.5, top_p=1e-6)["text"] == best["text"]
    assert complete(temperature=1.5, min_p=1.0)["text"] == best["text"]
    assert complete(repetition_penalty=50.0)["text"] != best["text"]
    stopped = complete(stop_token_ids=[token])
    assert (stopped["text"], stopped["stop_reason"], stopped["finish_reason"]) == ("", token, "stop")
    assert complete(stop_token_ids=[token], min_tokens=5, max_tokens=5)["finish_reason"] == "length"


def test_timings_and_cached_tokens(server: Server) -> None:
    prompt = "x" * 200
    asked = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    first = server.post("/v1/completions", **asked).json()
    again = events(server.post("/v1/completions", **asked, stream=True))[-1]
    for timings in (first["timings"], again["timings"]):
        assert 0 <= timings["queue_s"] <= timings["ttft_s"]
        assert 0 < timings["itl_s"] < 5
        assert timings["tokens_per_second"] > 0
    assert first["timings"]["cached_tokens"] == 0
    assert again["timings"]["cached_tokens"] == 192
    usage = server.post("/v1/completions", **asked).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 192}


def test_what_is_known_of_the_tokenizer(server: Server) -> None:
    """Clients that count tokens themselves, such as lm-eval, ask for it."""
    info = server.http.get("/tokenizer_info").json()
    assert info == {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE, "vocab_size": 300}
    assert server.post("/tokenize", prompt=info["eos_token"], add_special_tokens=False).json()["tokens"] == [1]


def test_models(server: Server) -> None:
    (model,) = server.openai.models.list().data
    assert model.id == MODEL
    assert server.openai.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-7' here; use 'tiny-model'"):
        server.openai.models.retrieve("gpt-7")


def test_errors_are_those_that_the_client_knows(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as no_model:
        server.openai.chat.completions.create(model="gpt-7", messages=CHAT)
    assert (no_model.value.code, no_model.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as too_long:
        server.openai.completions.create(model=MODEL, prompt="a b" * 5000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        server.openai.completions.create(model=MODEL, prompt="a", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="generates text"):
        server.openai.embeddings.create(model=MODEL, input="a")


def test_tools_are_parsed(server: Server) -> None:
    """A random model calls nothing of its own; what it is made to write is a call."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    reply = server.openai.chat.completions.create(
        model=MODEL, messages=CHAT, tools=tools, tool_choice="required", max_tokens=200, temperature=0
    )
    (call,) = reply.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("f", {})
    assert reply.choices[0].finish_reason == "tool_calls"
