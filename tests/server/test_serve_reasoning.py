"""Reasoning through the service: split off, limited, counted, and the same streamed and whole."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from checkpoints import make_reference, save
from server_driver import Server, check_error, events, serving
from tiny_tokenizer import TEMPLATE, build_tokenizer

OPENING = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>\n{% endif %}"
EARLIER = "{{ message.reasoning_content or '' }}</think>{{ message.content }}"
THINKING = TEMPLATE.replace("<assistant>", f"<assistant>{OPENING}").replace("{{ message.content }}", EARLIER)
MESSAGES = [{"role": "user", "content": "Rome?"}]
ASKED: dict[str, Any] = {"messages": MESSAGES, "temperature": 1.5, "max_tokens": 40, "seed": 3, "ignore_eos": True}
BUDGET = {"thinking_token_budget": 6}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("thinking")
    save(
        make_reference("llama-gqa", vocab_size=302, eos_token_id=1, bos_token_id=0, max_position_embeddings=1024),
        directory,
    )
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": THINKING}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    with serving(directory, "--num-kvcache-blocks", "256") as running:
        yield running


def chat(server: Server, **settings: Any) -> Any:
    response = server.post("/v1/chat/completions", **{**ASKED, **settings})
    assert response.status_code == 200, response.text
    return response.json()


def streamed(server: Server, **settings: Any) -> tuple[str, str]:
    """The reasoning and the content of a stream's deltas."""
    response = server.post("/v1/chat/completions", **{**ASKED, **settings}, stream=True)
    deltas = [event["choices"][0]["delta"] for event in events(response) if event["choices"]]
    return tuple("".join(delta.get(key) or "" for delta in deltas) for key in ("reasoning_content", "content"))  # type: ignore[return-value]


def test_reasoning_is_split_off_counted_and_limited(server: Server) -> None:
    whole = chat(server, **BUDGET)
    message = whole["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["content"]
    assert "think>" not in message["content"] + message["reasoning_content"]
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    assert streamed(server, **BUDGET) == (message["reasoning_content"], message["content"])


def test_reasoning_that_is_not_closed_is_all_there_is(server: Server) -> None:
    whole = chat(server, max_tokens=8)
    message = whole["choices"][0]["message"]
    assert message["content"] is None
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 8}
    assert streamed(server, max_tokens=8) == (message["reasoning_content"], "")


def test_without_reasoning_all_is_content(server: Server) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    message = chat(server, **off, **BUDGET)["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert message["content"]
    assert streamed(server, **off)[0] == ""


def test_the_answer_s_structure_begins_behind_the_reasoning(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    whole = chat(server, response_format=form, ignore_eos=False, **BUDGET, n=3)
    for choice in whole["choices"]:
        assert json.loads(choice["message"]["content"])["ok"] in (True, False)
        assert choice["message"]["reasoning_content"]
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    called = {"tools": [tool], "tool_choice": "required", "ignore_eos": False, "max_tokens": 150}
    forced = chat(server, **called, **BUDGET)["choices"][0]["message"]
    assert forced["tool_calls"][0]["function"]["name"] == "f"
    assert forced["reasoning_content"]


def test_neighbours_are_not_affected(server: Server) -> None:
    alone = chat(server, max_tokens=30)["choices"][0]["message"]
    for _ in range(2):
        assert chat(server, max_tokens=30)["choices"][0]["message"] == alone
        chat(server, **BUDGET)


def test_earlier_reasoning_reaches_the_template(server: Server) -> None:
    def num_tokens(**more: Any) -> int:
        answer = {"role": "assistant", "content": "Yes", **more}
        whole = chat(server, messages=[*MESSAGES, answer, *MESSAGES], max_tokens=1)
        return int(whole["usage"]["prompt_tokens"])

    assert num_tokens(reasoning_content="0123") == num_tokens() + 4


def test_responses_have_reasoning_items(server: Server) -> None:
    asked = {"input": "Rome?", "temperature": 1.5, "max_output_tokens": 40, "seed": 3, "ignore_eos": True, **BUDGET}
    whole = server.post("/v1/responses", **asked).json()
    reasoning, message = whole["output"]
    assert (reasoning["type"], reasoning["summary"], message["type"]) == ("reasoning", [], "message")
    text = reasoning["content"][0]["text"]
    assert text == chat(server, **BUDGET)["choices"][0]["message"]["reasoning_content"]
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 6}
    lines = server.post("/v1/responses", **asked, stream=True).text.splitlines()
    sent = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert "".join(each["delta"] for each in sent if each["type"] == "response.reasoning_text.delta") == text
    assert [each["text"] for each in sent if each["type"] == "response.reasoning_text.done"] == [text]
    kinds = [each["item"]["type"] for each in sent if each["type"] == "response.output_item.added"]
    assert kinds == ["reasoning", "message"]
    conversation = [{"role": "user", "content": "Rome?"}, reasoning, message, {"role": "user", "content": "And?"}]
    again = server.post("/v1/responses", **{**asked, "input": conversation, "max_output_tokens": 1})
    assert again.status_code == 200, again.text


def test_a_budget_is_a_number_of_tokens(server: Server) -> None:
    for budget in (-1, 1.5, "6"):
        response = server.post("/v1/chat/completions", **ASKED, thinking_token_budget=budget)
        assert check_error(response, 400)["param"] == "thinking_token_budget"
