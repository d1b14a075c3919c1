"""The chat templates of real models render what transformers renders, and fail where it fails."""

import copy
from pathlib import Path
from typing import Any

import pytest
from llama_cpp_data import llama_cpp_models
from transformers.utils.chat_template_utils import render_jinja_template

from infinilm.errors import InvalidValueError
from infinilm.text.chat_template import ChatTemplate

NUM_TEMPLATES = 70
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name"},
                "days": {"type": "integer", "enum": [1, 2], "description": "How many"},
                "range": {
                    "type": "object",
                    "description": "Temperatures",
                    "properties": {"low": {"type": ["string", "null"]}},
                    "required": ["low"],
                    "additionalProperties": {"type": "string"},
                },
                "hours": {"type": "array", "items": {"type": "number"}, "description": "Which"},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}},
}


def call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def said(role: str, content: str | None, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


USER, HELLO, SYSTEM = said("user", "Hi \n"), said("assistant", "Hello"), said("system", "Be brief.")
FIRST = call("abcdefgh1", "get_weather", {"city": "Köln <&>", "hours": [1.5, True, None], "range": {"low": "x\n"}})
SECOND = call("abcdefgh2", "now", {})
SUNNY = said("tool", "sunny", name="get_weather", tool_call_id="abcdefgh1")
NOON = said("tool", '{"hour": 12}', name="now", tool_call_id="abcdefgh2")
CONVERSATIONS = {
    "plain": [USER],
    "turns": [SYSTEM, USER, HELLO, USER],
    "written reasoning": [USER, said("assistant", "<think>\nhm\n</think>\n\nHello"), USER],
    "reasoning_content": [SYSTEM, USER, said("assistant", "Hello", reasoning_content="let me see"), USER],
    "reasoning": [USER, said("assistant", "Hello", reasoning="let me see"), USER],
    "thinking": [USER, said("assistant", "Hello", thinking="let me see"), USER],
    "call": [USER, said("assistant", "", tool_calls=[FIRST]), SUNNY],
    "call without content": [USER, said("assistant", None, tool_calls=[FIRST]), SUNNY],
    "reasoned call": [USER, said("assistant", "", reasoning_content="hm", tool_calls=[FIRST]), SUNNY, HELLO, USER],
    "call with text": [USER, said("assistant", "I look.", reasoning_content="hm", tool_calls=[FIRST]), SUNNY],
    "calls": [SYSTEM, USER, said("assistant", "", tool_calls=[FIRST, SECOND]), SUNNY, NOON],
    "developer": [said("developer", "Be brief."), USER],
    "wrong order": [HELLO, SYSTEM],
}
VARIABLES: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {"reasoning_effort": "high"}]

NEEDED = {"functions": "[]", "datetime": "noon"}
"""Variables without which a template of these fails."""


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    folder: Path = llama_cpp_models() / "templates"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


def test_real_templates_equal_transformers(sources: dict[str, str]) -> None:
    assert len(sources) == NUM_TEMPLATES
    for name, source in sources.items():
        template = ChatTemplate(source)
        known = template._variable_names
        own = {key: value for key, value in NEEDED.items() if key in known}
        num_rendered = 0
        for key, messages in CONVERSATIONS.items():
            for tools in (None, [WEATHER, CLOCK]) if "tools" in known else (None,):
                for more in VARIABLES if key in ("plain", "reasoning_content") else VARIABLES[:1]:
                    if more.keys() <= known:
                        case = f"{name}: {key} {more} {bool(tools)}"
                        num_rendered += check_equal(template, messages, tools, {**own, **more}, case)
        assert num_rendered >= 4, name


def check_equal(
    template: ChatTemplate, messages: list[Any], tools: list[Any] | None, variables: dict[str, Any], case: str
) -> bool:
    """Whether both render. If transformers fails, so must we, with a message that says what is wrong."""
    given = {"tools": tools, "add_generation_prompt": messages[-1]["role"] != "assistant", **variables}
    copies = copy.deepcopy([messages])
    try:
        (expected,), _ = render_jinja_template(copies, chat_template=template.source, **given, **SPECIAL_TOKENS)
    except Exception:
        with pytest.raises(InvalidValueError, match=r"the chat template failed: .{8}"):
            template.render(messages, special_tokens=SPECIAL_TOKENS, **given)
        return False
    assert template.render(messages, special_tokens=SPECIAL_TOKENS, **given) == expected, case
    return True


# --- templates of our own, with what the real ones use --------------------------------------------------------

FEATURES = {
    "namespace and reversed loop": """\
{%- set found = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and found.last < 0 %}{% set found.last = loop.revindex0 %}{% endif %}
{%- endfor %}
{{- found.last }}""",
    "macro with recursion and type tests": """\
{%- macro show(value, depth=0) %}
    {%- if value is mapping %}{%- for key, item in value | dictsort %}{{ key }}={{ show(item, depth + 1) }};{% endfor %}
    {%- elif value is string %}"{{ value }}"
    {%- elif value is sequence %}[{% for item in value %}{{ show(item) }}{{ "," if not loop.last }}{% endfor %}]
    {%- elif value is boolean %}{{ "true" if value else "false" }}
    {%- else %}{{ value | string | upper }}{% endif %}
{%- endmacro %}
{{- show(tools) }}""",
    "reasoning under either name": """\
{%- for m in messages %}{{ m.reasoning_content or '-' }}/{{ m.thinking if 'thinking' in m else '-' }};{% endfor %}""",
    "split and strip": """\
{%- for m in messages if m.content is string %}
{{- m.content.split('</think>')[-1].lstrip('\\n') ~ '|' ~ (m.content | trim).startswith('<think>') }}
{%- endfor %}""",
    "call block, filters and slices": """\
{%- macro turn(role) %}<{{ role }}>{{ caller() }}</{{ role }}>{% endmacro %}
{%- for m in messages %}
    {%- call turn(m['role']) %}{{ m.content | default('', true) | replace('l', 'L') | title }}{% endcall %}
{%- endfor %}
{{- messages | map(attribute="role") | join(",") }}
{{- messages | selectattr('role', 'equalto', 'user') | list | length }}
{{- tools | tojson(indent=2) }}{{ (tools or []) | map(attribute='function.name') | join('-') }}""",
    "arguments": """\
{%- for m in messages if m.tool_calls %}{% for call in m.tool_calls %}
    {%- for key, value in call.function.arguments.items() %}
        {{- key }}:{{ value if value is string else value | tojson }}{{ ' ' if not loop.last }}
    {%- endfor %}
{%- endfor %}{% endfor %}""",
    "its own error": "{{ raise_exception('roles: ' ~ messages | length) if messages | length > 2 else 'ok' }}",
}


@pytest.mark.parametrize("feature", FEATURES)
def test_features_of_real_templates_equal_transformers(feature: str) -> None:
    template = ChatTemplate(FEATURES[feature])
    tools = [WEATHER, CLOCK] if "tools" in template._variable_names else None
    rendered = [check_equal(template, messages, tools, {}, key) for key, messages in CONVERSATIONS.items()]
    assert all(rendered) == (feature != "its own error")
    assert any(rendered)
