"""`/v1/responses` through the official client, held against chat completions, which it is a translation to."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from server_driver import Server, check_error, wait_until

MODEL = "tiny-model"
INPUT = "Hello there!"
CHAT = [{"role": "user", "content": INPUT}]
GREEDY = {"model": MODEL, "temperature": 0, "max_output_tokens": 12}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
JSON_TEXT = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}


def create(server: Server, **fields: Any) -> Any:
    """The client's `Response`. Any: each of its items may be of thirty classes."""
    return server.openai.responses.create(**{**GREEDY, "input": INPUT, **fields})


def chat_text(server: Server, messages: list[dict[str, Any]], **fields: Any) -> str:
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 12, "messages": messages, **fields}
    return server.openai.chat.completions.create(**asked).choices[0].message.content


def events_of(server: Server, **fields: Any) -> list[Any]:
    """The events of a streamed response, after a look at their order."""
    found = list(server.openai.responses.create(**{**GREEDY, "input": INPUT, **fields}, stream=True))
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert [event.type for event in found[:2]] == ["response.created", "response.in_progress"]
    return found


def without_ids(response: Response) -> dict[str, Any]:
    """What two equal requests have in common."""
    plain = response.model_dump(exclude={"id", "created_at", "timings", "usage"})
    for item in plain["output"]:
        del item["id"]
        item.pop("call_id", None)
    return plain


# --- text ------------------------------------------------------------------------------------------------------


def test_the_answer_is_that_of_a_chat(server: Server) -> None:
    response = create(server)
    assert response.output_text == chat_text(server, CHAT)
    assert (response.object, response.model, response.status) == ("response", MODEL, "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert item.content[0].annotations == []
    usage = response.usage
    assert (usage.output_tokens, usage.total_tokens) == (12, 12 + usage.input_tokens)
    assert usage.input_tokens > 0
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert (response.model_extra["store"], response.temperature, response.top_p) == (False, 0, 1)
    assert response.model_extra["timings"]["ttft_s"] > 0


def test_an_answer_that_ends_is_completed(server: Server) -> None:
    response = create(server, text=JSON_TEXT, max_output_tokens=100)
    assert (response.status, response.incomplete_details, response.error) == ("completed", None, None)
    assert response.output[0].status == "completed"


def test_events_add_up_to_the_response(server: Server) -> None:
    events = events_of(server)
    kinds = [event.type for event in events[2:]]
    start = ["response.output_item.added", "response.content_part.added"]
    end = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 2
    assert kinds == [*start, *(delta.type for delta in deltas), *end, "response.incomplete"]
    whole, last = create(server), events[-1].response
    assert "".join(delta.delta for delta in deltas) == last.output_text == events[-4].text
    assert without_ids(last) == without_ids(whole)
    assert last.usage.model_dump(exclude={"input_tokens_details"}) == whole.usage.model_dump(
        exclude={"input_tokens_details"}
    )
    assert {delta.item_id for delta in deltas} == {last.output[0].id}
    assert events[0].response.status == "in_progress"
    assert events[0].response.id == last.id


def test_the_helper_for_streams_understands_the_events(server: Server) -> None:
    with server.openai.responses.stream(model=MODEL, input=INPUT, text=JSON_TEXT) as stream:
        for event in stream:
            assert event.type.startswith("response.")
        final = stream.get_final_response()
    assert json.loads(final.output_text) in ({"ok": True}, {"ok": False})


def test_instructions_and_roles_are_messages(server: Server) -> None:
    items = [
        {"role": "developer", "content": "Rhyme."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi."}, {"type": "input_text", "text": "You!"}]},
        {"role": "assistant", "content": "Yes?"},
        {"type": "message", "role": "user", "content": INPUT},
    ]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Rhyme."}]},
        {"role": "user", "content": [{"type": "text", "text": "Hi."}, {"type": "text", "text": "You!"}]},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": INPUT},
    ]
    response = create(server, instructions="Be brief.", input=items)
    assert response.output_text == chat_text(server, messages)
    assert response.instructions == "Be brief."


def test_output_can_be_sent_back_as_input(server: Server) -> None:
    first = create(server)
    messages = [*CHAT, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "More."}]
    second = create(server, input=[*CHAT, *first.output, {"role": "user", "content": "More."}])
    assert second.output_text == chat_text(server, messages)


def test_sampling_parameters_are_those_of_a_chat(server: Server) -> None:
    fields = {"temperature": 0.8, "top_p": 0.9, "seed": 3, "top_k": 20}
    extra = {"extra_body": {"seed": 3, "top_k": 20}}
    response = create(server, temperature=0.8, top_p=0.9, **extra)
    own = {name: fields[name] for name in ("temperature", "top_p")}
    assert response.output_text == chat_text(server, CHAT, **own, **extra)
    assert (response.temperature, response.top_p) == (0.8, 0.9)


def test_logprobs(server: Server) -> None:
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 12, "messages": CHAT, "logprobs": True, "top_logprobs": 2}
    expected = server.openai.chat.completions.create(**asked).choices[0].logprobs.content
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (part,) = create(server, **fields).output[0].content
    assert [each.model_dump() for each in part.logprobs] == [each.model_dump() for each in expected]
    events = events_of(server, **fields)
    streamed = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    assert [each.token for each in streamed] == [each.token for each in expected]
    assert len(create(server, top_logprobs=3).output[0].content[0].logprobs[0].top_logprobs) == 3
    assert create(server).output[0].content[0].logprobs == []


# --- tools and structure ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_function_is_called(server: Server, choice: Any) -> None:
    response = create(server, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, max_output_tokens=200)
    (call,) = response.output
    assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    assert response.status == "completed"
    assert (response.tool_choice if isinstance(choice, str) else response.tool_choice.model_dump()) == choice
    assert response.tools[0].name == "get_weather"


def test_a_call_is_streamed(server: Server) -> None:
    fields = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200}
    events = events_of(server, **fields)
    kinds = [event.type.removeprefix("response.") for event in events[2:]]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    end = ["function_call_arguments.done", "output_item.done", "completed"]
    assert kinds == ["output_item.added", *["function_call_arguments.delta"] * len(deltas), *end]
    (call,) = events[-1].response.output
    assert "".join(deltas) == call.arguments == events[-3].arguments
    assert without_ids(events[-1].response) == without_ids(create(server, **fields))
    assert events[2].item.arguments == ""
    assert events[2].item.call_id == call.call_id


def test_calls_and_results_are_part_of_the_conversation(server: Server) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'}
    items = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me see."},
        call,
        {**call, "call_id": "c2", "id": "fc_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
    ]
    function = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    calls = [{"id": name, "type": "function", "function": function} for name in ("c1", "c2")]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "rain"},
    ]
    tool = {"type": "function", "function": {name: WEATHER[name] for name in ("name", "parameters")}}
    response = create(server, input=items, tools=[WEATHER], tool_choice="none")
    assert response.output_text == chat_text(server, messages, tools=[tool], tool_choice="none")


def test_structured_output(server: Server) -> None:
    assert json.loads(create(server, text=JSON_TEXT, max_output_tokens=100).output_text) in (
        {"ok": True},
        {"ok": False},
    )
    response = create(server, text={"format": {"type": "json_object"}}, max_output_tokens=300, temperature=1)
    assert response.output_text.lstrip().startswith("{")
    assert response.text.format.type == "json_object"


# --- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "send the whole conversation"),
        ({"store": True}, "store", "send false"),
        ({"background": True}, "background", "use stream"),
        ({"prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"max_tokens": 0}, "max_tokens", "max_output_tokens"),
        ({"n": 2}, "n", "several requests"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"service_tier": "flex"}, "service_tier", "'auto' or 'default'"),
        ({"include": ["file_search_call.results"]}, "include", "message.output_text.logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools", "function"),
        ({"tool_choice": "required"}, "tools", "needs tools"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
        ({"wishes": 3}, "wishes", "not known"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": "x " * 20000}, "input", "input has"),
        ({"input": [{"type": "reasoning", "id": "r", "summary": []}]}, "input", "only reasoning"),
        ({"input": [{"type": "item_reference", "id": "r"}]}, "input", "send items whole"),
        ({"input": [{"type": ["message"]}]}, "input", "type must be message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "'input_text'"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input", "'user'"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input", "'x', which is no"),
        (
            {"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "{"}]},
            "input",
            "not valid JSON",
        ),
        ({"text": {"verbosity": "high"}}, "text", "medium"),
        ({"model": "gpt-7"}, "model", "there is no model"),
    ],
)
def test_what_is_not_done_is_refused_by_name(server: Server, fields: Any, param: str, words: str) -> None:
    response = server.post("/v1/responses", **{**GREEDY, "input": INPUT, **fields})
    error = check_error(response, 404 if param == "model" else 400)
    assert error["param"] == param
    assert words in error["message"]


def test_the_cause_is_named_without_the_other_types_of_a_field(server: Server) -> None:
    message = server.error("/v1/responses", 400, input=[{"role": "robot", "content": "x"}])["message"]
    assert message.startswith("input.0.message.role: input should be 'system'")
    assert "; or" not in message


@pytest.mark.parametrize(
    "fields",
    [
        '"metadata": {"a": "\\ud800"}',
        '"text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "null", "title": "\\udfff"}}}',
    ],
)
def test_what_is_repeated_in_the_reply_must_be_utf_8(server: Server, fields: str) -> None:
    content = f'{{"input": "x", "max_output_tokens": 3, {fields}}}'
    response = server.http.post("/v1/responses", content=content, headers={"Content-Type": "application/json"})
    assert "lone surrogate" in check_error(response, 400)["message"]
    wait_until(server.is_empty)


def test_neutral_fields_are_granted(server: Server) -> None:
    neutral: dict[str, Any] = {
        "store": False,
        "metadata": {"topic": "demo"},
        "service_tier": "auto",
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "parallel_tool_calls": True,
        "tool_choice": "auto",
    }
    reply = chat_text(server, CHAT, **neutral, modalities=["text"], reasoning_effort="low", verbosity="medium")
    assert reply == chat_text(server, CHAT)
    response = create(
        server,
        **neutral,
        background=False,
        previous_response_id=None,
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"},
        truncation="disabled",
        tools=[],
        text={"format": {"type": "text"}, "verbosity": "medium"},
        stream_options={"include_obfuscation": False},
        extra_body={"n": 1},
    )
    assert response.output_text == reply
    assert (response.metadata, response.user) == ({"topic": "demo"}, "u")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"verbosity": "low"}, "verbosity"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
)
def test_their_other_values_are_refused_in_chats(server: Server, fields: Any, param: str) -> None:
    assert server.error("/v1/chat/completions", 400, messages=CHAT, **fields)["param"] == param


def test_no_response_is_stored(server: Server) -> None:
    response = create(server)
    with pytest.raises(openai.NotFoundError, match="this server stores none"):
        server.openai.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError, match="this server stores none"):
        server.openai.responses.delete(response.id)


# --- the same path as chats ------------------------------------------------------------------------------------


def test_a_client_that_leaves_frees_the_engine(server: Server) -> None:
    name = 'infinilm_requests_total{outcome="disconnected"}'
    before = server.metrics().get(name, 0)
    stream = server.openai.responses.create(
        model=MODEL, input=INPUT, stream=True, max_output_tokens=8000, extra_body={"ignore_eos": True}
    )
    for _ in range(5):
        next(stream)
    stream.close()
    wait_until(server.is_empty, 20)
    assert server.metrics()[name] == before + 1


def test_a_request_that_takes_too_long_fails_in_the_stream(server: Server) -> None:
    events = events_of(server, max_output_tokens=8000, extra_body={"ignore_eos": True, "timeout": 0.4}, temperature=1)
    last = events[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert "not answered within 0.4 s" in last.response.error.message
    wait_until(server.is_empty, 20)
