"""Streaming a text gives what parsing it whole gives, wherever it is cut, for every format and any text."""

import itertools
import json
import sys
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infinilm.errors import InvalidValueError
from infinilm.server.answer_events import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallStart,
    add_up,
)
from infinilm.server.answer_parser import AnswerParser, parse_answer
from infinilm.server.call_syntax import JsonCall, NamedCall, TaggedCall
from infinilm.server.harmony import HarmonyParser
from infinilm.server.tool_formats import (
    DEEPSEEK,
    DEEPSEEK_4,
    DEEPSEEK_R1,
    FORMATS,
    FUNCTIONARY,
    GEMMA,
    GLM,
    HARMONY,
    HERMES,
    KIMI,
    LFM,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    PLAIN,
    PYTHONIC,
    QWEN_CODER,
    SMOLLM,
    ToolFormat,
)
from infinilm.text import reasoning

NAMES = ["f", "get_weather", "Größe"]
PARSED = [each for each in FORMATS.values() if each not in (PLAIN, HARMONY)]
WITH_JSON = [each for each in PARSED if isinstance(each.syntax, JsonCall | NamedCall)]
WITHOUT_JSON = [each for each in PARSED if each not in WITH_JSON]
Result = tuple[str, list[tuple[str, str]]]

FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool", "_call>", "[TOOL_CALLS]", "[TOOL_", "<|python_tag|>", "<|py", "<", "["),
    *('{"name": "f", "arguments": ', '{"name":"get_weather","parameters":', '{"name": "nobody", "arguments": '),
    *('{"arguments": {"a": 1}, "name": "f"', '{"id": 7, "name": "Gr\\u00f6\\u00dfe", "arguments": ', '"name"', '"f"'),
    *(
        '{"city": "Köln 🔥", "n": [1, {}]}',
        '{"s": "}]</tool_call>\\"{\\\\"}',
        '{"a": tru',
        '{"a": "',
        "{}",
        '{"x": -1.5e3}',
    ),
    *(
        "<function=",
        "<function=f>",
        "<parameter=",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        "<arg_key>a</arg_key>",
    ),
    *(
        "<arg_value>",
        "</arg_value>",
        "f(",
        "a='",
        "call:f{",
        '<|"|>',
        "<|tool_call>",
        "<｜tool▁sep｜>",
        "[ARGS]",
        "```",
    ),
    *(
        "<think>",
        "</think>",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|start|>",
        "assistant",
        "analysis",
        "final",
        "to=",
    ),
    *("{", "}", "]", ",", ":", '"', "\\", "\\u00", " ", "\n", ";", "word", "True", "é", "日本", "\u2028"),
]


def run(pieces: Iterable[str], tool_format: ToolFormat, names: list[str] | None, is_parallel: bool) -> list[Event]:
    parser = AnswerParser(tool_format, names, is_parallel=is_parallel)
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def summarise(events: Iterable[Event]) -> Result:
    answer = add_up(events)
    return answer.content, [(call.name, call.arguments) for call in answer.calls]


def parse(text: str, tool_format: ToolFormat, is_parallel: bool = True) -> Result:
    return summarise(run([text], tool_format, NAMES, is_parallel))


def cut(text: str, places: Iterable[int]) -> list[str]:
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def check_order(events: list[Event]) -> None:
    """Calls are numbered in order, arguments belong to the last call, and content ends it."""
    num_calls, is_open = 0, False
    for event in events:
        match event:
            case ToolCallStart():
                assert event.index == num_calls
                assert len(event.id) == 9
                assert event.id.isalnum()
                num_calls, is_open = num_calls + 1, True
            case ArgumentsDelta():
                assert is_open
                assert event.index == num_calls - 1
                assert event.text
            case ContentDelta():
                is_open = False
                assert event.text


def check_cuts(text: str, tool_format: ToolFormat, is_parallel: bool, cuts: Iterable[Iterable[int]]) -> None:
    """Compare the whole text with its characters one by one, and with each of the ways to cut it."""
    whole = run([text], tool_format, NAMES, is_parallel)
    check_order(whole)
    for pieces in (text, *(cut(text, places) for places in cuts)):
        events = run(pieces, tool_format, NAMES, is_parallel)
        check_order(events)
        assert summarise(events) == summarise(whole)


ARGUMENTS = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.none() | st.integers() | st.sampled_from(FRAGMENTS) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=3,
    ),
    max_size=3,
)


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, str]:
    separators = draw(st.sampled_from([(", ", ": "), (",", ":")]))
    arguments = json.dumps(draw(ARGUMENTS), ensure_ascii=draw(st.booleans()), separators=separators)
    return draw(st.sampled_from(NAMES)), arguments


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=lambda each: each.name)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), places=st.lists(st.integers(0, 200), max_size=8), is_parallel=st.booleans())
def test_any_text_cut_anyhow(
    tool_format: ToolFormat, data: st.DataObject, places: list[int], is_parallel: bool
) -> None:
    bare_call = calls().map(lambda call: tool_format.write_call(*call))
    answer = st.lists(bare_call, min_size=1, max_size=2).map(tool_format.write_answer)
    fragments = data.draw(st.lists(st.sampled_from(FRAGMENTS) | bare_call | answer, max_size=8))
    check_cuts("".join(fragments), tool_format, is_parallel, [places, places[:1], places[1:2]])


@pytest.mark.parametrize("tool_format", PARSED, ids=lambda each: each.name)
@settings(max_examples=4, deadline=None)
@given(data=st.data(), found=st.lists(calls(), min_size=1, max_size=3), places=st.lists(st.integers(0, 200)))
def test_answers_cut_short_or_damaged(
    tool_format: ToolFormat, data: st.DataObject, found: list[tuple[str, str]], places: list[int]
) -> None:
    text = tool_format.write_answer([tool_format.write_call(*call) for call in found])
    at = data.draw(st.integers(0, len(text)))
    inserted = data.draw(st.none() | st.sampled_from(FRAGMENTS))
    text = text[:at] if inserted is None else text[:at] + inserted + text[at + 1 :]
    check_cuts(text, tool_format, True, [places, *([place] for place in range(len(text)))])


@pytest.mark.parametrize("tool_format", WITH_JSON, ids=lambda each: each.name)
@settings(max_examples=20, deadline=None)
@given(found=st.lists(calls(), min_size=1, max_size=3), before=st.text(max_size=5), after=st.text(max_size=5))
@example(found=[("f", "{}")], before="a\n", after="\nb")
def test_calls_come_out_as_they_were_written(
    tool_format: ToolFormat, found: list[tuple[str, str]], before: str, after: str
) -> None:
    found = found if tool_format.is_parallel else found[:1]
    before = "" if tool_format.may_be_bare else before.replace(tool_format.opening[0], "")
    after = after.replace("{", "").replace("[", "").replace("<", "")
    text = before + tool_format.write_answer([tool_format.write_call(*call) for call in found]) + after
    content, parsed = parse(text, tool_format)
    assert parsed == found
    if tool_format.is_parallel:
        assert content == before.rstrip(" \t\n\r") + ("" if not after.strip(" \t\n\r") else after.rstrip(" \t\n\r"))


PLAIN_TEXT = st.text(alphabet="ab é日\n'\"\\\\{}[](),:=1")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-9, 9) | PLAIN_TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b_1"]), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize("tool_format", WITHOUT_JSON, ids=lambda each: each.name)
@settings(max_examples=25, deadline=None)
@given(found=st.lists(st.dictionaries(st.sampled_from(["x", "y_2", "z"]), VALUES, max_size=3), min_size=1, max_size=2))
def test_arguments_that_are_not_json_become_json(tool_format: ToolFormat, found: list[dict[str, Any]]) -> None:
    """Between tags only the schema tells texts from other values."""
    names = ["f", "get_weather"][: len(found)]
    schemas = {
        name: {"properties": {key: {"type": "string"} for key, value in each.items() if isinstance(value, str)}}
        for name, each in zip(names, found, strict=True)
    }
    written = [tool_format.write_call(name, json.dumps(each)) for name, each in zip(names, found, strict=True)]
    parsed = parse_answer(
        "Yes. " * (not tool_format.may_be_bare) + tool_format.write_answer(written), tool_format, names, schemas=schemas
    )
    if isinstance(tool_format.syntax, TaggedCall) and not tool_format.syntax.pad:
        found = [{key: _without_ends(value) for key, value in each.items()} for each in found]
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == list(zip(names, found, strict=True))


def _without_ends(value: Any) -> Any:
    """Line breaks at both ends of a value are layout."""
    is_layout = isinstance(value, str) and len(value) > 1 and value[0] == value[-1] == "\n"
    return value[1:-1] if is_layout else value


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet='ab {}":,[]\n\\é日', max_size=30), places=st.lists(st.integers(0, 30)))
def test_text_without_a_marker_is_content_to_the_last_character(text: str, places: list[int]) -> None:
    assert summarise(run(cut(text, places), HERMES, None, True)) == (text, [])


F, G = ("f", '{"a": 1}'), ("get_weather", "{}")
CALL_F, CALL_G = '{"name": "f", "arguments": {"a": 1}}', '{"name": "get_weather", "arguments": {}}'
CASES: list[tuple[ToolFormat, str, str | None, list[tuple[str, str]]]] = [
    # What models write, in and a little beside the documented ways.
    (HERMES, 'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "Let me see.", [F]),
    (HERMES, '<tool_call>{"name":"f","arguments":{"a": 1}}</tool_call>\n', "", [F]),
    (HERMES, '<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>', "", [F]),
    (HERMES, '<tool_call>{"id": [1, "{"], "name": "f", "parameters": {"a": 1}, "y": 2}</tool_call>', "", [F]),
    (HERMES, f"<tool_call>{CALL_F}\n{CALL_G}</tool_call>", "", [F, G]),
    (HERMES, f"<tool_call>[{CALL_F}, {CALL_G}]</tool_call>", "", [F, G]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> So.', " So.", [F]),
    (HERMES, '<tool_call>{"name": "Gr\\u00f6\\u00dfe", "arguments": {}}</tool_call>', "", [("Größe", "{}")]),
    (SMOLLM, '<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>', "", [F]),
    (SMOLLM, '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "", [F]),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', "", [F]),
    (LLAMA, '\n{"name": "f", "arguments": {"a": 1}}', "", [F]),
    (LLAMA, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [F]),
    (LLAMA, 'Well: <|python_tag|>{"name": "f", "parameters": {"a": 1}}', "Well:", [F]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]', "", [F]),
    (MISTRAL, '[1] [TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}', "[1]", [F]),
    # Families with forms of their own.
    (MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]x1[ARGS]{}', "", [F, G]),
    (
        DEEPSEEK,
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "",
        [F],
    ),
    (DEEPSEEK_R1, DEEPSEEK_R1.write_answer([DEEPSEEK_R1.write_call(*F), DEEPSEEK_R1.write_call(*G)]), "", [F, G]),
    (
        KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{}',
        "",
        [F, G],
    ),
    (FUNCTIONARY, '<function=f>{"a": 1}</function><function=get_weather>{}</function>', "", [F, G]),
    (QWEN_CODER, "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", "", [F]),
    (QWEN_CODER, "So <tool_call><function=get_weather></function></tool_call>.", "So.", [G]),
    (
        GLM,
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n<tool_call>get_weather</tool_call>",
        "",
        [F, G],
    ),
    (DEEPSEEK_4, DEEPSEEK_4.write_answer([DEEPSEEK_4.write_call(*F), DEEPSEEK_4.write_call(*G)]), "", [F, G]),
    (
        DEEPSEEK_4,
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">1'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        "",
        [("f", '{"a": "1"}')],
    ),
    (LFM, "<|tool_call_start|>[f(a=1), get_weather()]<|tool_call_end|>", "", [F, G]),
    (PYTHONIC, "[f(a=1), get_weather()]", "", [F, G]),
    (PYTHONIC, "[1] is a list, [f(a=1)] no call", None, []),
    (GEMMA, "<|tool_call>call:f{a:1}<tool_call|><|tool_call>call:get_weather{}<tool_call|>", "", [F, G]),
    (GEMMA, '<|tool_call>call:f{a:<|"|>}{,:<|"|>}<tool_call|>', "", [("f", '{"a": "}{,:"}')]),
    # Tags that break off: what is complete has been passed on.
    (
        QWEN_CODER,
        "<tool_call><function=f><parameter=a>1</parameter><parameter=b>2",
        "<parameter=b>2",
        [("f", '{"a": 1')],
    ),
    (QWEN_CODER, "<tool_call><function=f><parameter=a>1", None, []),
    (QWEN_CODER, "<tool_call><function=nobody></function></tool_call>", None, []),
    (QWEN_CODER, "<tool_call>" + CALL_F + "</tool_call>", None, []),
    (GLM, "<tool_call>f is a function", None, []),
    (LFM, "<|tool_call_start|>[f(a=g(1))]<|tool_call_end|>", None, []),
    (LFM, "<|tool_call_start|>[f(a='x", None, []),
    (GEMMA, "<|tool_call>call:f{a}<tool_call|>", None, []),
    (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS]no", None, []),
    # Calls that lack something at the end.
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [F]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "", [F]),
    (MISTRAL, f"[TOOL_CALLS][{CALL_F}, {CALL_G}", "", [F, G]),
    # Arguments that break off.
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x', "", [("f", '{"a": "x')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": {}</tool_call>.', ".", [("f", '{"a": {}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": True}}</tool_call>', "True}}</tool_call>", [("f", '{"a": ')]),
    # What is no call.
    (HERMES, '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', None, []),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', None, []),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', None, []),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, []),
    (HERMES, '<tool_call>{"name": 1, "arguments": {}}</tool_call>', None, []),
    (HERMES, "<tool_call>\n{'name': 'f', 'arguments': {}}\n</tool_call>", None, []),
    (HERMES, "Write <tool_call> or </tool_call> \n", None, []),
    (HERMES, '<tool_call>\n{"name": "f", "argum', None, []),
    (HERMES, '{"name": "f", "arguments": {}}', None, []),
    (LLAMA, 'Sure: {"name": "f", "parameters": {}}', None, []),
    (LLAMA, '{"name": "Bob", "age": 3}', None, []),
    (LLAMA, '<|python_tag|>brave_search.call(query="x")', None, []),
    (MISTRAL, "[TOOL_CALLS][]", None, []),
    (PLAIN, '<tool_call>{"name": "f", "arguments": {}}</tool_call> ', None, []),
    # A call among things that are none.
    (HERMES, '<tool_call><tool_call>{"name": "f", "arguments": {"a": 1}}', "<tool_call>", [F]),
    (HERMES, f'<tool_call>{{"name": "no"}}\n<tool_call>{CALL_F}', '<tool_call>{"name": "no"}', [F]),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "no"}]', ', {"name": "no"}]', [F]),
]


@pytest.mark.parametrize(("tool_format", "text", "content", "expected"), CASES)
def test_cases(tool_format: ToolFormat, text: str, content: str | None, expected: list[tuple[str, str]]) -> None:
    assert parse(text, tool_format) == (text if content is None else content, expected)
    check_cuts(text, tool_format, True, ([place] for place in range(len(text))))


# --- reasoning ------------------------------------------------------------------------------------------------

THINK = reasoning.FORMATS["think"]
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
REASONED = [
    # The answer, whether the prompt has opened the reasoning; reasoning, content, calls.
    ("<think>\nhm, 1 < 2\n</think>\n\nHello <b>", False, "hm, 1 < 2", "Hello <b>", []),
    ("hm </ think> so\n </think>Hello", True, "hm </ think> so", "Hello", []),
    (f"<think>I call f</think>\n{CALL}", False, "I call f", "", [F]),
    (f"<think>{CALL}</think>ok", False, CALL, "ok", []),
    ("\n<think>never closed \n", False, "never closed", "", []),
    ("never closed </thin", True, "never closed </thin", "", []),
    (" Hello <think>x</think>", False, "", " Hello <think>x</think>", []),
    ("<think>\n\n</think>\n\nHello", False, "", "Hello", []),
    ("</think>Hello", True, "", "Hello", []),
    ("<thin", False, "", "<thin", []),
    ("", True, "", "", []),
]


def split(pieces: Iterable[str], **settings: Any) -> tuple[str, str, list[tuple[str, str]]]:
    kind = HarmonyParser if settings.get("reasoning") is reasoning.HARMONY else AnswerParser
    parser = kind(settings.pop("tool_format", HERMES), NAMES, **settings)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    check_order([event for event in events if not isinstance(event, ReasoningDelta)])
    answer = add_up(events)
    return answer.reasoning, answer.content, [(call.name, call.arguments) for call in answer.calls]


@pytest.mark.parametrize(("text", "is_open", "thought", "content", "found"), REASONED)
def test_reasoning_is_split_off(text: str, is_open: bool, thought: str, content: str, found: list[Any]) -> None:
    for pieces in ([text], text, *([text[:place], text[place:]] for place in range(len(text)))):
        assert split(pieces, reasoning=THINK, is_reasoning=is_open) == (thought, content, found)


def test_reasoning_without_tools() -> None:
    assert split(["<think>a</think>", CALL], reasoning=THINK, tool_format=None) == ("a", CALL, [])


HARMONY_ANSWERS = [
    (
        "<|channel|>analysis<|message|>hm <b>\n<|end|><|start|>assistant<|channel|>final<|message|>Hello <|x|>",
        ("hm <b>", "Hello <|x|>", []),
    ),
    (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', ("", "", [F])),
    (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}',
        ("hm", "I look.", [F]),
    ),
    (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|return|>",
        ("a\nb", "", []),
    ),
    (
        "<|channel|>commentary to=functions.no<|message|>{}",
        ("", "<|channel|>commentary to=functions.no<|message|>{}", []),
    ),
    ("<|channel|>commentary to=functions.f<|message|>x", ("", "<|channel|>commentary to=functions.f<|message|>x", [])),
    ("plain <text>", ("", "plain <text>", [])),
    ("<|channel|>anal", ("", "", [])),
    ("<|channel|>analysis<|message|>cut <|en", ("cut <|en", "", [])),
]


@pytest.mark.parametrize(("text", "expected"), HARMONY_ANSWERS)
def test_harmony_messages(text: str, expected: tuple[str, str, list[Any]]) -> None:
    for pieces in ([text], text, *([text[:place], text[place:]] for place in range(len(text)))):
        assert split(pieces, reasoning=reasoning.HARMONY, tool_format=HARMONY) == expected


@pytest.mark.parametrize("found", [THINK, reasoning.FORMATS["gemma"], reasoning.HARMONY], ids=lambda each: each.name)
@settings(max_examples=60, deadline=None)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    places=st.lists(st.integers(0, 99)),
    is_open=st.booleans(),
)
def test_any_text_with_reasoning_cut_anyhow(
    found: reasoning.ReasoningFormat, fragments: list[str], places: list[int], is_open: bool
) -> None:
    text = "".join(fragments)
    for start in ("", found.opening):
        whole = split([start + text], reasoning=found, is_reasoning=is_open)
        for pieces in (start + text, cut(start + text, places)):
            assert split(pieces, reasoning=found, is_reasoning=is_open) == whole


def test_without_parallel_calls_the_answer_ends_with_the_first() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert parse(f"Yes.{call}{call} more", HERMES, is_parallel=False) == ("Yes.", [F])
    assert parse('{"name": "f", "parameters": {"a": 1}}; {"name": "f"', LLAMA) == ("", [F])
    parser = AnswerParser(HERMES, NAMES, is_parallel=False)
    parser.feed(call[: call.index("}}") + 1])
    is_done = [parser.is_done]
    parser.feed("}")
    is_done.append(parser.is_done)
    assert is_done == [False, True]
    assert [*parser.feed(call), *parser.finish()] == []


def test_any_name_is_known_without_a_list_of_names_if_it_can_be_said() -> None:
    def names(spelled: str) -> list[str]:
        answer = parse_answer(f'<tool_call>{{"name": {spelled}, "arguments": {{}}}}', HERMES)
        return [call.name for call in answer.calls]

    assert names('"whatever"') == ["whatever"]
    assert names('""') == names('"\\ud800"') == names('"a\\u0000"') == []


def test_text_is_passed_on_as_soon_as_it_is_certain() -> None:
    parser = AnswerParser(HERMES, NAMES)

    def fed(text: str) -> list[Any]:
        return [event.name if isinstance(event, ToolCallStart) else event.text for event in parser.feed(text)]

    assert fed("Hello") == ["Hello"]
    assert fed(" <b>wor") == [" <b>wor"]
    assert fed("ld\n<tool_") == ["ld"]
    assert fed('call>{"name": "f", ') == []
    assert fed('"arguments": {"ci') == ["f", '{"ci']
    assert fed('ty": "K') == ['ty": "K']
    assert fed('\\u00f6ln"}}\n</tool_') == ['\\u00f6ln"}']
    assert fed("call>\n\nDone") == ["\n\nDone"]
    assert parser.finish() == []


def test_a_parser_is_for_one_answer() -> None:
    parser = AnswerParser(HERMES)
    parser.finish()
    with pytest.raises(InvalidValueError, match="finished"):
        parser.feed("x")


LONG_TEXTS = {
    "content": lambda n: "word " * (n // 5),
    "arguments": lambda n: '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * n,
    "structure": lambda n: '<tool_call>{"name": "f", "arguments": {"a": [' + "1,{}," * (n // 5),
    "held back": lambda n: '<tool_call>{"arguments": {"a": "' + "x" * n + '"}, "name": "nobody"}',
    "markers": lambda n: "<tool_call>{" * (n // 12),
    "markers in strings": lambda n: '<tool_call>{"a":"' * (n // 17),
    "overlapping": lambda n: '<tool_call>{"<tool_call>{' + '":":",","' * (n // 8),
    "white space": lambda n: "<tool_call>" + " " * n,
    "half markers": lambda n: "<" * n,
}


def count_calls(text: str, num_pieces: int) -> int:
    """Count the calls and returns of Python and C functions while a text is parsed."""
    count = 0

    def on_event(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += 1

    pieces = cut(text, [len(text) * index // num_pieces for index in range(1, num_pieces)])
    sys.setprofile(on_event)
    try:
        run(pieces, HERMES, NAMES, True)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("kind", LONG_TEXTS)
def test_work_grows_with_the_text_and_not_with_its_square(kind: str) -> None:
    short, long = LONG_TEXTS[kind](2_000), LONG_TEXTS[kind](8_000)
    assert count_calls(long, len(long)) < 5 * count_calls(short, len(short))
    assert count_calls(long, 1) < 5 * count_calls(short, 1) + 100


@pytest.mark.parametrize("kind", ["content", "arguments", "held back", "overlapping"])
def test_a_hundred_thousand_characters_one_by_one(kind: str) -> None:
    text = LONG_TEXTS[kind](100_000)
    assert summarise(run(text, HERMES, NAMES, True)) == parse(text, HERMES)
