"""Which format a chat template asks for. The templates are shortened to what gives them away."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from infinilm.errors import InvalidValueError
from infinilm.server import tool_formats
from infinilm.server.tool_formats import (
    FORMATS,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    PLAIN,
    SMOLLM,
    ToolFormat,
    detect_format,
    supports_tools,
)
from infinilm.text import reasoning

QWEN = r"""
{%- if tools %}
    {%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
    {{- "a json object within <tool_call></tool_call> tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\":
    <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- endif %}
"""
HERMES_2 = """{%- for tool in tools %}{{ tool|tojson }}{% endfor %}{{- "<tool_call>
" }}{{- '{"name": <function-name>, "arguments": <args-dict>}
' }}{{- '</tool_call>' }}"""
SMOLLM_LIST = """{% if tools %}{{ tools | tojson }} answer: <tool_call>[
{"name": "func_name1", "arguments": {"argument1": "value1"}}]</tool_call>{% endif %}"""
SMOLLM2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ 'You are a helpful
 AI assistant named SmolLM, trained by Hugging Face' }}{% endif %}{{ message['content'] }}{% endfor %}""".replace(
    "\n", ""
)
LLAMA_3 = """{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}"""
NEMO = """{%- if tools is not none %}{{- "[AVAILABLE_TOOLS][" }}{% for tool in tools %}{{ tool }}{% endfor %}{% endif %}
{{- "[TOOL_CALLS][" }}"""
MISTRAL_7B = """{%- for tool in tools %}{{ tool }}{%- endfor %}{{- "[TOOL_CALLS] [" }}"""
MISTRAL_3_2 = (
    """{%- for tool in tools %}{{ tool }}{% endfor %}{{ '[TOOL_CALLS]' + call.name + '[ARGS]' + call.arguments }}"""
)
QWEN_CODER = """{%- for tool in tools %}{% endfor %}{{ '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
{% for name, value in tool_call.arguments|items %}{{ '<parameter=' + name }}{% endfor %}{{ '</tool_call>' }}"""
GLM = """{% for tool in tools %}{{ tool|tojson }}{% endfor %}<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>"""
# A way to write calls that is not known here.
HY3 = "{% for tool in tools %}{{ tool }}{% endfor %}<tool_call:x>{{ call.name }}<tool_sep:x>{{ call.arguments }}"
CHATML = "{% for message in messages %}{{ message.role + ': ' + message.content }}{% endfor %} No tools here."


@pytest.mark.parametrize(
    ("template", "expected", "is_supported"),
    [
        (QWEN, HERMES, True),
        (HERMES_2, HERMES, True),
        (SMOLLM_LIST, SMOLLM, True),
        (SMOLLM2, SMOLLM, False),
        (LLAMA_3, LLAMA, True),
        (NEMO, MISTRAL, True),
        (MISTRAL_7B, MISTRAL, True),
        (MISTRAL_3_2, MISTRAL_ARGS, True),
        (QWEN_CODER, tool_formats.QWEN_CODER, True),
        (GLM, tool_formats.GLM, True),
        (HY3, HERMES, False),
        (CHATML, HERMES, False),
        (QWEN.replace("tools", "xml_tools"), HERMES, False),
        (None, HERMES, False),
    ],
)
def test_templates_give_their_format_away(template: str | None, expected: ToolFormat, is_supported: bool) -> None:
    assert detect_format(template) is expected
    assert supports_tools(template, expected) is is_supported


def test_the_format_can_be_named() -> None:
    for name, expected in FORMATS.items():
        assert detect_format(QWEN, name) is expected
    assert not supports_tools(QWEN, MISTRAL)
    assert supports_tools(QWEN, SMOLLM)
    assert supports_tools(GLM, PLAIN)
    assert not supports_tools(QWEN_CODER, HERMES)
    with pytest.raises(InvalidValueError, match=r"tool_call_parser='qwen' is unknown.*hermes, smollm, .*mistral"):
        detect_format(QWEN, "qwen")


@pytest.mark.parametrize("word", ["{{ 'no tools' }}", "{# tools #}", "{{ message.tools }}", "tools", "{{ my_tools }}"])
def test_speaking_of_tools_is_not_reading_them(word: str) -> None:
    assert not supports_tools(QWEN.replace("tools", "x") + word, HERMES)


def test_markers() -> None:
    assert HERMES.markers == ("<tool_call>", "</tool_call>")
    assert MISTRAL.markers == ("[TOOL_CALLS]",)


def test_it_is_text_logic_that_needs_no_torch() -> None:
    code = (
        "import sys, infinilm.server.answer_parser, infinilm.server.tool_request; "
        "print('torch' in sys.modules or 'fastapi' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_the_document_lists_all_formats() -> None:
    document = (Path(__file__).parents[2] / "docs/chat_formats.md").read_text(encoding="utf-8")
    listed = [re.findall(r"^\| `([a-z][\w.-]*)` \|", table, re.MULTILINE) for table in document.split("## Tool calls")]
    assert set(listed[0]) == {*reasoning.FORMATS, reasoning.NO_REASONING}
    assert set(listed[1]) == set(FORMATS)
