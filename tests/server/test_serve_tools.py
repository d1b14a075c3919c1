"""A model whose marker for calls is a special token, and which has a chat template of its own for tools."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_reference, save
from server_driver import Server, events, serving
from tiny_tokenizer import TEMPLATE, build_tokenizer

from infinilm.text.tokenizer import Tokenizer

MARKER, OTHER = "[TOOL_CALLS]", "[OTHER]"
TOOL_TEMPLATE = "{{ tools | tojson }}{# [TOOL_CALLS] [{...}] #}" + TEMPLATE
MESSAGES = [{"role": "user", "content": "Rome?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
ASKED = {"messages": MESSAGES, "tools": TOOLS, "temperature": 0, "max_tokens": 100}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tools")
    save(make_reference("llama-gqa", vocab_size=302, eos_token_id=1, bos_token_id=0), directory)
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens([MARKER, OTHER])
    tokenizer.save(str(directory / "tokenizer.json"))
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": TOOL_TEMPLATE}]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": templates}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Server]:
    with serving(directory, "--model-name", "served", "--num-kvcache-blocks", "256") as running:
        yield running


def chat(server: Server, **settings: Any) -> Any:
    return server.openai.chat.completions.create(
        model=server.http.get("/v1/models").json()["data"][0]["id"], **settings
    )


def test_a_marker_that_is_a_special_token_is_found(server: Server) -> None:
    whole = chat(server, **ASKED, tool_choice="required", parallel_tool_calls=False).choices[0]
    (call,) = whole.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
    assert (whole.message.content, whole.finish_reason) == (None, "tool_calls")
    arguments = ""
    for chunk in chat(server, **ASKED, tool_choice="required", parallel_tool_calls=False, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            arguments += part.function.arguments
    assert arguments == call.function.arguments


@pytest.mark.parametrize(
    ("settings", "text"), [({}, MARKER * 3), ({"tool_choice": "none"}, ""), ({"tools": None}, "")], ids=str
)
def test_markers_are_text_only_where_tools_may_be_called(server: Server, settings: dict, text: str) -> None:
    asked = {**ASKED, "max_tokens": 3, "logit_bias": {"300": 100}, **settings}
    assert server.post("/v1/chat/completions", **asked).json()["choices"][0]["message"]["content"] == text
    streamed = events(server.post("/v1/chat/completions", **asked, stream=True))
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in streamed) == text


def test_other_special_tokens_are_never_text(server: Server) -> None:
    reply = chat(server, **{**ASKED, "max_tokens": 3}, logit_bias={"301": 100}).choices[0]
    assert (reply.message.content, reply.finish_reason) == ("", "length")


@pytest.mark.parametrize(("tools", "template"), [(TOOLS, TOOL_TEMPLATE), (None, TEMPLATE)], ids=["tools", "none"])
def test_the_template_for_tools_renders_requests_with_tools(
    server: Server, directory: Path, tools: list | None, template: str
) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer is not None
    assert (tokenizer.tool_template, tokenizer.chat_template) == (TOOL_TEMPLATE, TEMPLATE)
    text = Tokenizer(tokenizer.backend, chat_templates={"default": template}).apply_chat_template(MESSAGES, tools=tools)
    assert ("weather" in text) is (tools is not None)
    usage = server.post("/v1/chat/completions", **{**ASKED, "tools": tools, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == len(tokenizer.encode(text, add_special_tokens=False))
