"""Chat templates render what transformers renders, and reach nothing but their input."""

from collections import UserDict
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from infinilm.errors import CheckpointError, InvalidTypeError, InvalidValueError
from infinilm.loading.gguf import GGUFFile
from infinilm.loading.sources import resolve
from infinilm.text.chat_template import MAX_OUTPUT_CHARS, MAX_TEMPLATE_CHARS, ChatTemplate
from infinilm.text.tokenizer import Tokenizer

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("Only one tool call at a time is supported.") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if tools is not none %}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "system" and not loop.first or message.role == "user" %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content if message.content is string else '' %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- generation %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "tool" %}{% continue %}{% endif %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" and message["content"] %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] not in ["assistant"] %}
        {{- raise_exception("Only user and assistant roles are supported, not " + message["role"] + "!") }}
    {%- endif %}
{%- endfor %}
"""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The weather <now> & "later" – für Köln\'s',
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Köln", "東京"]}}},
    },
}
USER = {"role": "user", "content": "Hi there! <b>&amp; 'quotes' ünïcödé 🙂\n  indented"}
TOOL_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "東京", "days": 3}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [{"role": "system", "content": " Be brief. "}, USER],
    "turns": [
        {"role": "system", "content": "S"},
        USER,
        {"role": "assistant", "content": "<think>hm</think>\n\nHello."},
        {"role": "user", "content": "And?"},
    ],
    "tools": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]},
        {"role": "tool", "content": '{"degrees": 20}', "name": "weather"},
        {"role": "assistant", "content": "20 degrees."},
        {"role": "user", "content": "Thanks"},
    ],
}


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def render(source: str, messages: Any = None, **kwargs: Any) -> str:
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(source).render(messages or [USER], special_tokens=special_tokens, **kwargs)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [], [WEATHER], [WEATHER, WEATHER]])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("source", [LLAMA3, QWEN, MISTRAL], ids=["llama3", "qwen", "mistral"])
def test_templates_equal_transformers(
    source: str,
    conversation: str,
    tools: list[Any] | None,
    add_generation_prompt: bool,
    reference: PreTrainedTokenizerFast,
) -> None:
    messages = CONVERSATIONS[conversation]
    expected = reference.apply_chat_template(
        messages, tools=tools, chat_template=source, add_generation_prompt=add_generation_prompt, tokenize=False
    )
    assert render(source, messages, tools=tools, add_generation_prompt=add_generation_prompt) == expected
    assert "Hi there! <b>&amp;" in expected


def test_template_variables_equal_transformers(reference: PreTrainedTokenizerFast) -> None:
    for source, variables in ((QWEN, {"enable_thinking": False}), (LLAMA3, {"date_string": "1 May"})):
        expected = reference.apply_chat_template(
            [USER], chat_template=source, tokenize=False, add_generation_prompt=True, **variables
        )
        assert render(source, **variables) == expected != render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}\n  {% if true %}\n    x\n  {% endif %}\n{% endfor %}\ny\n",
        "{{ {'a': [1, 2.5, none, true], 'é<': '\"'} | tojson }}{{ 'é' | tojson(ensure_ascii=true) }}",
        "{{ {'b': 1, 'a': {'c': []}} | tojson(indent=2, sort_keys=true, separators=(',', ':')) }}",
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i > 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "{% for m in messages %}{% generation %}{% set x = 1 %}{{ loop.index }}{% endgeneration %}{{ x }}b{% endfor %}",
        "{{ missing }}{{ missing is defined }}{{ documents is none }}{{ pad_token is defined }}{{ tools }}",
        "{% macro f(a, b=2) %}{{ a }}-{{ b }}{% endmacro %}{{ f(1) }}{{ f(1, b=3) }}{{ dict(a=1, b=[]) }}",
        "{% set ns = namespace(x=0) %}{% for m in messages %}{% set ns.x = ns.x + 1 %}{% endfor %}{{ ns.x * 'ab' }}",
        "{{ messages[0].content | upper | length }}{{ 'a,b'.split(',') }}{{ '%s-%d' % ('x', 3) }}{{ 7 // 2 * 2 ** 9 }}",
    ],
)
def test_language_features_equal_transformers(source: str, reference: PreTrainedTokenizerFast) -> None:
    messages = CONVERSATIONS["turns"]
    expected = reference.apply_chat_template(messages, chat_template=source, tokenize=False)
    assert render(source, messages, add_generation_prompt=False) == expected


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_smollm2_equals_transformers(add_generation_prompt: bool, reference: PreTrainedTokenizerFast) -> None:
    tokenizer = Tokenizer.from_gguf(GGUFFile(Path(resolve(None))).metadata)
    assert tokenizer is not None
    for name in ("user", "system", "turns"):
        expected = reference.apply_chat_template(
            CONVERSATIONS[name],
            chat_template=tokenizer.chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
        rendered = tokenizer.apply_chat_template(CONVERSATIONS[name], add_generation_prompt=add_generation_prompt)
        assert rendered == expected
        assert rendered.endswith("<|im_start|>assistant\n") == add_generation_prompt


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__",
        "''.__class__.__mro__[1].__subclasses__()",
        "messages.__class__.__base__",
        "().__getitem__.__self__",
        "''['__class__']",
        "'' | attr('__class__')",
        "['']|map(attribute='__class__')|list",
        "messages|selectattr('__class__')|list",
        "'{0.__class__}'.format('')",
        "'{0.__class__.__mro__}'.format_map({'0': ''})",
        "('%s' % ''.__class__)",
        "namespace.__init__.__globals__",
        "raise_exception.__globals__",
        "strftime_now.__builtins__",
        "cycler.__init__.__globals__['os']",
        "joiner.mro()",
        "dict.__subclasses__()",
        "self._TemplateReference__context",
        "self.__init__.__globals__",
        "range.__globals__",
        "(messages|groupby('role')).__class__",
        "lipsum(n=10)",
        "messages.append({})",
        "messages.clear()",
        "messages[0].update(role='system')",
        "messages[0].pop('role')",
        "messages[0].setdefault('x', 1)",
        "tools.extend([1])",
        "tools.sort()",
        "namespace(__class__=1)",
        "namespace({'_x': 1})",
    ],
)
def test_python_is_out_of_reach(expression: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    tools = [{"type": "function"}]
    template = ChatTemplate("{% if tools %}{{ " + expression + " }}{% endif %}")
    with pytest.raises(InvalidValueError, match="the chat template failed"):
        template.render(messages, tools=tools)
    assert messages == [{"role": "user", "content": "x"}]
    assert tools == [{"type": "function"}]


@pytest.mark.parametrize(
    "source",
    [
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends 'x' %}",
        "{% set messages[0].role = 'x' %}{% set messages.role = 'x' %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    ],
)
def test_statements_reach_no_files_and_no_objects(source: str) -> None:
    with pytest.raises((InvalidValueError, CheckpointError)):
        render(source)


def test_the_caller_s_objects_are_never_seen() -> None:
    """A template gets plain copies: no method of a caller's class can be called from it."""

    class Role(StrEnum):
        USER = "user"

    class Loud(str):
        def shout(self) -> str:
            return "called"

    message = UserDict(role=Role.USER, content=Loud("x"), tags=("a", "b"), rank=True)
    assert render("{{ messages[0].content.shout is defined }}{{ messages[0] }}", [message]) == (
        "False{'role': 'user', 'content': 'x', 'tags': ['a', 'b'], 'rank': True}"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** 9 * [1] }}",
        "{% set n = 10 ** 9 %}{{ n * 'a' }}",
        "{{ 10 ** (10 ** 10) }}",
        "{% for i in range(10 ** 6) %}{% endfor %}",
        "{% for i in range(10 ** 5) %}{{ 'a' * 1000 }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_bombs_are_refused(source: str) -> None:
    with pytest.raises((InvalidValueError, CheckpointError)):
        render(source)


def test_long_texts_are_rendered_up_to_the_limit() -> None:
    text = "x" * (MAX_OUTPUT_CHARS - 1)
    assert len(render("{{ messages[0].content }}!", [{"role": "user", "content": text}])) == MAX_OUTPUT_CHARS
    with pytest.raises(InvalidValueError, match=f"more than {MAX_OUTPUT_CHARS} characters"):
        render("{{ messages[0].content }}!!", [{"role": "user", "content": text}])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "does not compile: line 1"),
        ("a\n{{ x", "does not compile: line 2"),
        ("{% unknown %}", "unknown tag 'unknown'"),
        ("{{ x | nofilter }}", "nofilter"),
        ("{% generation %}", "does not compile"),
        ("x" * (MAX_TEMPLATE_CHARS + 1), f"at most {MAX_TEMPLATE_CHARS}"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "does not compile"),
        ("{% if true %}" * 5000 + "{% endif %}" * 5000, "does not compile"),
    ],
)
def test_bad_templates_are_refused(source: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ChatTemplate(source)


def test_a_template_s_own_error_is_shown() -> None:
    with pytest.raises(InvalidValueError, match=r"failed: Only user and assistant roles are supported, not bot!$"):
        render(MISTRAL, [{"role": "bot", "content": "x"}])


def test_errors_while_rendering_leave_the_template_usable() -> None:
    template = ChatTemplate("{{ 1 // (messages | length - 1) }}")
    with pytest.raises(InvalidValueError, match="ZeroDivisionError"):
        template.render([USER])
    assert template.render([USER, USER]) == "1"


def test_unused_variables_are_refused() -> None:
    with pytest.raises(InvalidTypeError, match=r"does not use 'enable_thinkin', 'range'; it reads .*enable_thinking"):
        render(QWEN, enable_thinkin=False, range=5)


def test_tools_need_a_template_that_reads_them() -> None:
    assert render("{{ messages[0].role }}", tools=[]) == "user"
    with pytest.raises(InvalidValueError, match="no place for tools"):
        render("{{ messages[0].role }}", tools=[WEATHER])


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"


def test_content_may_be_missing_beside_tool_calls() -> None:
    source = "{{ messages[0].content is none or messages[0].content is not defined }}"
    assert render(source, [{"role": "assistant", "tool_calls": [TOOL_CALL]}]) == "True"
    assert render(source, [{"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}]) == "True"


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ("hi", InvalidTypeError, "messages must be a list of dicts, not str"),
        ({"role": "user"}, InvalidTypeError, "messages must be a list of dicts, not dict"),
        ([], InvalidValueError, "messages is empty"),
        (["hi"], InvalidTypeError, r"messages\[0\] must be a dict .* not str"),
        ([USER, {"content": "x"}], InvalidValueError, r"messages\[1\] has no 'role'"),
        ([{"role": 5, "content": "x"}], InvalidTypeError, r"messages\[0\]\['role'\] must be a string, not int"),
        ([USER, {"role": "user"}], InvalidValueError, r"messages\[1\] has no 'content'"),
        ([{"role": "user", "content": None}], InvalidValueError, r"messages\[0\] has no 'content'"),
        ([{"role": "user", "content": 5}], InvalidTypeError, r"messages\[0\]\['content'\] .* not int"),
        ([{"role": "user", "content": ["x"]}], InvalidTypeError, r"\['content'\]\[0\] must be a dict .* not str"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}],
            InvalidValueError,
            r"\['content'\]\[1\] has type 'image_url'; only 'text'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], InvalidTypeError, r"\[0\]\['text'\] must be a string"),
        ([{"role": "user", "content": "x", "extra": object()}], InvalidTypeError, r"\['extra'\] is a object"),
        ([{"role": "user", "content": "x", 5: "y"}], InvalidTypeError, r"messages\[0\] has the key 5"),
    ],
)
def test_bad_messages_are_refused(messages: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ChatTemplate("{{ messages }}").render(messages)


def test_nesting_is_bounded() -> None:
    nested: dict[str, Any] = {}
    nested["self"] = nested
    with pytest.raises(InvalidValueError, match="more than 64 levels"):
        render("{{ messages }}", [{"role": "user", "content": "x", "nested": nested}])


@pytest.mark.parametrize(
    ("tools", "message"),
    [({"name": "f"}, "tools must be a list"), ([len], r"tools\[0\] must be a JSON schema")],
)
def test_bad_tools_are_refused(tools: Any, message: str) -> None:
    with pytest.raises(InvalidTypeError, match=message):
        render("{{ tools }}", tools=tools)
