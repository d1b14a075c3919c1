"""The embedded model behind the official client: answers that make sense."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clients.run_clients import run_client
from server_driver import Server, serving, wait_until

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    }
]
WEATHER = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Server]:
    with serving(smollm2, "--max-model-len", "2048", "--model-name", "smollm2-135m") as running:
        yield running


def test_chat(server: Server) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    reply = server.openai.chat.completions.create(model="smollm2-135m", messages=messages, temperature=0, max_tokens=30)
    assert "Paris" in reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "stop"
    chunks = server.openai.chat.completions.create(
        model="smollm2-135m", messages=messages, temperature=0, max_tokens=30, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == reply.choices[0].message.content


def test_tools(server: Server) -> None:
    asked = {"model": "smollm2-135m", "messages": WEATHER, "tools": TOOLS, "temperature": 0, "max_tokens": 60}
    asked |= {"tool_choice": "required", "parallel_tool_calls": False}
    reply = server.openai.chat.completions.create(**asked).choices[0]
    (call,) = reply.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["unit"] in ("celsius", "fahrenheit")
    assert reply.finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    after = server.openai.chat.completions.create(
        **{**asked, "messages": [*WEATHER, reply.message, result], "tool_choice": "auto", "max_tokens": 10}
    )
    assert after.choices[0].message.content


def test_a_streamed_call_of_a_named_tool_is_the_same(server: Server) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    asked = {"model": "smollm2-135m", "messages": WEATHER, "tools": TOOLS, "temperature": 0, "max_tokens": 60}
    whole = server.openai.chat.completions.create(**asked, tool_choice=named).choices[0]
    name, text, last = "", "", None
    for chunk in server.openai.chat.completions.create(**asked, tool_choice=named, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            name += part.function.name or ""
            text += part.function.arguments
        last = chunk.choices[0].finish_reason
    assert (name, text, last) == ("get_weather", whole.message.tool_calls[0].function.arguments, "tool_calls")


def test_json_schema(server: Server) -> None:
    reply = server.openai.chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": "Describe a person as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
        temperature=0.7,
        seed=2,
        max_tokens=200,
    )
    person = json.loads(reply.choices[0].message.content)
    assert set(person) == {"name", "age"}
    assert 0 <= person["age"] <= 150
    assert reply.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("guide", "check"),
    [
        ({"guided_regex": r"[0-9]{3}-[0-9]{2}"}, lambda text: len(text) == 6 and text[3] == "-"),
        ({"guided_choice": ["red", "green"]}, lambda text: text in ("red", "green")),
        ({"guided_grammar": 'start: "yes" | "no"'}, lambda text: text in ("yes", "no")),
        ({"guided_json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}}, json.loads),
    ],
    ids=["regex", "choice", "grammar", "json"],
)
def test_guided_completions(server: Server, guide: dict, check: Callable[[str], object]) -> None:
    reply = server.post("/v1/completions", prompt="Answer:", max_tokens=60, temperature=0.5, seed=1, **guide).json()
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert check(reply["choices"][0]["text"]) is not False


@pytest.mark.parametrize(
    "guide",
    [
        {"guided_regex": "("},
        {"guided_grammar": "start: nothing_here"},
        {"guided_regex": "((a{1,1000}){1,1000}){1,1000}"},
        {"guided_json": {"$ref": "#/nowhere"}},
    ],
    ids=["broken", "undefined", "bomb", "reference"],
)
def test_bad_guides_are_refused(server: Server, guide: dict) -> None:
    error = server.error("/v1/completions", 400, prompt="a", max_tokens=5, **guide)
    assert error["message"]
    wait_until(server.is_empty)


def test_structured_output_beside_tools_is_for_the_text(server: Server) -> None:
    """Some clients send both. A required call leaves no text; otherwise the answer is a call or JSON."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    asked = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    body = {"model": "smollm2-135m", "messages": WEATHER, "tools": TOOLS, "response_format": asked, "max_tokens": 200}
    called = server.openai.chat.completions.create(**body, tool_choice="required", parallel_tool_calls=False)
    assert called.choices[0].message.tool_calls[0].function.name == TOOLS[0]["function"]["name"]
    for choice in ("none", "auto"):
        message = server.openai.chat.completions.create(**body, tool_choice=choice, temperature=0).choices[0].message
        assert message.tool_calls if message.content is None else json.loads(message.content) == {"a": 1}
    error = server.error("/v1/chat/completions", 400, **body, tool_choice="required", guided_json=schema)
    assert "guided_json and tool_choice can't be combined" in error["message"]


# --- what the README says can be typed in -----------------------------------------------------------------


def readme_block(beginning: str, server: Server) -> str:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (found,) = (text for text in re.findall(r"^```\w+\n(.*?)^```$", readme, re.M | re.S) if text.startswith(beginning))
    return found.replace("http://127.0.0.1:8000", server.url)


def test_curl_as_in_the_readme(server: Server) -> None:
    done = subprocess.run(["bash", "-c", readme_block("curl", server)], capture_output=True, text=True, check=True)
    (choice,) = json.loads(done.stdout)["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]


def test_the_openai_client_as_in_the_readme(server: Server, tmp_path: Path) -> None:
    script = tmp_path / "client.py"
    script.write_text(readme_block("# client.py", server), encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) > 5


def test_the_openai_client_makes_all_its_calls(server: Server) -> None:
    """`make test-clients` does the same with other clients, in an environment of their own."""
    rows = run_client(sys.executable, "openai", server.url, "smollm2-135m")
    assert [row for row in rows if row[3] != "ok"] == []
    assert len(rows) == 10


def test_a_client_that_is_not_installed_is_skipped(server: Server) -> None:
    (row,) = run_client(sys.executable, "langchain-openai", server.url, "smollm2-135m")
    assert row[3] == f"skipped: not installed for {sys.executable}"
