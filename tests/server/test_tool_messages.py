"""What chat templates are given for a conversation with tools."""

import json
from pathlib import Path
from typing import Any

import pytest

from infinilm.errors import InvalidValueError
from infinilm.loading.checkpoint import open_checkpoint
from infinilm.server.answer_parser import parse_answer
from infinilm.server.call_syntax import JsonCall
from infinilm.server.tool_formats import FORMATS, HARMONY, PLAIN, SMOLLM, detect_format, supports_tools
from infinilm.server.tool_request import prepare_messages
from infinilm.text.chat_template import ChatTemplate

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather – today's.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
# As templates see them: without what only concerns the server, and never without parameters.
WEATHER_SHOWN = {
    "type": "function",
    "function": {key: WEATHER["function"][key] for key in ("name", "description", "parameters")},  # type: ignore[index]
}
CLOCK_SHOWN = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


USER = {"role": "user", "content": "Weather?"}
CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [call("a", "get_weather", '{"city": "Köln"}'), call("b", "clock", "{}")],
}
RESULTS: list[dict[str, Any]] = [
    {"role": "tool", "tool_call_id": "b", "content": "noon"},
    {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "rain"}]},
]
TEMPLATE = ChatTemplate(
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}{% for m in messages %}[{{ m.role }}"
    "{% if m.name %}/{{ m.name }}{% endif %}] {{ m.content or '' }}"
    "{% if 'tool_calls' in m %}{% for c in m.tool_calls %}{{ c.function.name }}"
    "({% for key, value in c.function.arguments|items %}{{ key }}={{ value }}{% endfor %}){% endfor %}{% endif %}"
    "{% endfor %}"
)
# Fails for a content that is not text, and for a role that it does not know.
SIMPLE_TEMPLATE = ChatTemplate(
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('who?') }}{% endif %}"
    "{{ '<' + m.role + '>' + m.content }}{% endfor %}"
)


def test_a_template_with_tools_is_given_tools_calls_and_results() -> None:
    messages, kwargs = prepare_messages([USER, CALLING, *RESULTS], [WEATHER, CLOCK], "auto", True)
    assert kwargs == {"tools": [WEATHER_SHOWN, CLOCK_SHOWN]}
    assert TEMPLATE.render(messages, **kwargs) == (
        "get_weather;clock;[user] Weather?[assistant] get_weather(city=Köln)clock()"
        "[tool/clock] noon[tool/get_weather] rain"
    )


def test_what_came_in_is_left_as_it_was() -> None:
    before = json.dumps([USER, CALLING, *RESULTS, WEATHER, CLOCK])
    prepare_messages([USER, CALLING, *RESULTS], [WEATHER, CLOCK], None, True)
    prepare_messages([USER, CALLING, *RESULTS], [WEATHER, CLOCK], None, False)
    assert json.dumps([USER, CALLING, *RESULTS, WEATHER, CLOCK]) == before


def test_the_choice_decides_whether_tools_are_shown() -> None:
    named = {"type": "function", "function": {"name": "clock"}}
    shown = {"tools": [WEATHER_SHOWN, CLOCK_SHOWN]}
    for choice, expected in ((None, shown), ("auto", shown), ("required", shown), (named, shown), ("none", {})):
        assert prepare_messages([USER], [WEATHER, CLOCK], choice, True) == ([USER], expected)
    written = [prepare_messages([USER], [WEATHER], choice, False) for choice in (None, "auto", "required")]
    assert written[0] == written[1] == written[2]
    assert prepare_messages([USER], [WEATHER], "none", False) == ([USER], {})
    assert prepare_messages([USER], None, None, False) == prepare_messages([USER], None, "none", True) == ([USER], {})


def test_a_message_without_calls_has_no_such_key() -> None:
    messages, _ = prepare_messages([{**USER, "tool_calls": None}, {**CALLING, "content": "No.", "tool_calls": []}])
    assert messages == [USER, {"role": "assistant", "content": "No."}]


def test_a_template_without_tools_is_given_text() -> None:
    system = {"role": "system", "content": "Be brief."}
    messages, kwargs = prepare_messages([system, USER, CALLING, *RESULTS, USER], [WEATHER, CLOCK], "auto", False)
    assert kwargs == {}
    assert SIMPLE_TEMPLATE.render(messages) == (
        f"""<system>Be brief.

# Tools

You can call these functions:
<tools>
{json.dumps(WEATHER_SHOWN, ensure_ascii=False)}
{json.dumps(CLOCK_SHOWN)}
</tools>

To call a function, write its name and an object with its arguments in exactly this form:
<tool_call>
{{"name": "<function name>", "arguments": <object with the arguments>}}
</tool_call>
You can make several calls in one answer.
Results will be given to you within <tool_response></tool_response> tags.<user>Weather?<assistant><tool_call>
{{"name": "get_weather", "arguments": {{"city": "Köln"}}}}
</tool_call>
<tool_call>
{{"name": "clock", "arguments": {{}}}}
</tool_call><user><tool_response>
noon
</tool_response>
<tool_response>
rain
</tool_response><user>Weather?"""
    )


def test_history_is_written_out_even_if_this_request_has_no_tools() -> None:
    messages, _ = prepare_messages([USER, {**CALLING, "content": "Hm."}, RESULTS[0]], template_supports_tools=False)
    assert SIMPLE_TEMPLATE.render(messages).startswith('<user>Weather?<assistant>Hm.\n<tool_call>\n{"name": "get_')


@pytest.mark.parametrize(
    "tool_format", [each for each in FORMATS.values() if each not in (PLAIN, HARMONY)], ids=lambda each: each.name
)
def test_the_section_shows_the_format_and_history_follows_it(tool_format: Any) -> None:
    one_call = {**CALLING, "tool_calls": CALLING["tool_calls"][:1]}  # type: ignore[index]
    messages, _ = prepare_messages([USER, one_call], [WEATHER], "auto", False, tool_format=tool_format)
    if isinstance(tool_format.syntax, JsonCall):
        assert f'"{tool_format.syntax.arguments_key}": <object' in messages[0]["content"]
    assert tool_format.opening in messages[0]["content"] or tool_format.may_be_bare
    assert ("several" in messages[0]["content"]) is tool_format.is_parallel
    answer = parse_answer(messages[2]["content"][0]["text"], tool_format, ["get_weather"])
    assert [(each.name, json.loads(each.arguments)) for each in answer.calls] == [("get_weather", {"city": "Köln"})]


def test_one_call_at_a_time_is_said() -> None:
    messages, _ = prepare_messages([USER], [WEATHER], "auto", False, parallel_tool_calls=False)
    assert "Make at most one call in an answer." in messages[0]["content"]


def test_the_embedded_model_is_told_of_tools(smollm2: Path) -> None:
    tokenizer = open_checkpoint(smollm2).tokenizer()
    assert tokenizer is not None
    tool_format = detect_format(tokenizer.chat_template)
    assert tool_format is SMOLLM
    is_supported = supports_tools(tokenizer.chat_template, tool_format)
    messages, kwargs = prepare_messages([USER, CALLING, *RESULTS], [CLOCK], None, is_supported, tool_format=tool_format)
    prompt = tokenizer.apply_chat_template(messages, **kwargs)
    assert prompt.startswith("<|im_start|>system\n# Tools\n")
    assert '<tool_call>[{"name": "<function name>", "arguments": <object with the arguments>}]</tool_call>' in prompt
    assert (
        "<|im_start|>assistant\n"
        '<tool_call>[{"name": "get_weather", "arguments": {"city": "Köln"}}, {"name": "clock", "arguments": {}}]'
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nnoon\n</tool_response>" in prompt
    )


DEEP: Any = {}
for _ in range(5000):
    DEEP = {"properties": {"a": DEEP}}


@pytest.mark.parametrize(
    ("messages", "tools", "choice", "parallel", "error"),
    [
        ([USER], [], None, None, "tools is empty"),
        ([USER], None, "required", None, "tool_choice needs tools"),
        ([USER], None, {"type": "function", "function": {"name": "f"}}, None, "tool_choice needs tools"),
        ([USER], [WEATHER], "always", None, "tool_choice='always' is unknown"),
        ([USER], [WEATHER], {"type": "function", "function": {"name": "f"}}, None, "'f', which is not among the tools"),
        ([USER], [WEATHER, WEATHER], None, None, "two functions with the name 'get_weather'"),
        ([USER], [{"function": {"name": "f", "parameters": {"type": "array"}}}], None, None, "is 'array'; arguments"),
        ([USER], [{"function": {"name": "f", "parameters": DEEP}}], None, None, "tools is nested too deeply"),
        ([{**CALLING, "role": "user"}], None, None, None, r"messages\[0\] has tool_calls"),
        ([USER, *RESULTS], None, None, None, r"messages\[1\]\['tool_call_id'\] is 'b'"),
        ([{"role": "tool", "content": "x"}], None, None, None, "is None, which is no earlier"),
    ],
)
def test_bad_requests_are_refused(messages: Any, tools: Any, choice: Any, parallel: Any, error: str) -> None:
    with pytest.raises(InvalidValueError, match=error):
        prepare_messages(messages, tools, choice, False, parallel_tool_calls=parallel)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ('{"city": "K', "is not valid JSON: Unterminated string"),
        ("", "is not valid JSON"),
        ("[1]", "must hold an object, not list"),
        ('{"a": NaN}', "NaN is not JSON"),
        ("[" * 100_000, "is not valid JSON"),
        (f'{{"a": {"1" * 5000}}}', "is not valid JSON"),
    ],
)
@pytest.mark.parametrize("is_supported", [True, False])
def test_arguments_must_be_json(arguments: str, error: str, is_supported: bool) -> None:
    with pytest.raises(
        InvalidValueError, match=rf"messages\[1\]\['tool_calls'\]\[0\]\['function'\]\['arguments'\] {error}|{error}"
    ):
        prepare_messages(
            [USER, {**CALLING, "tool_calls": [call("a", "f", arguments)]}], template_supports_tools=is_supported
        )
