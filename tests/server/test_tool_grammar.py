"""Grammars for tool calls, tried with llguidance itself: what they allow, what they refuse, and that it is parsed."""

import json
import random
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer
from narrow import present
from tiny_tokenizer import build_tokenizer

from infinilm.errors import InvalidValueError
from infinilm.server import tool_formats
from infinilm.server.answer_parser import parse_answer
from infinilm.server.call_syntax import JsonCall, NamedCall, TaggedCall
from infinilm.server.tool_formats import GEMMA, HARMONY, HERMES, LFM, LLAMA, MISTRAL, PLAIN, SMOLLM, ToolFormat
from infinilm.server.tool_request import call_grammar

ALL = [each for each in tool_formats.FORMATS.values() if each not in (PLAIN, HARMONY)]
FORMATS = [each for each in ALL if isinstance(each.syntax, JsonCall | NamedCall)]
TAGGED = [each for each in ALL if isinstance(each.syntax, TaggedCall)]
EOS = 1
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Köln", 'a "b" </tool_call>']}},
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "get", "parameters": {"properties": {}, "additionalProperties": False}},
}
TOOLS = [WEATHER, CLOCK]
STRICT = [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}, CLOCK]  # type: ignore[dict-item]
COLOGNE, CHECK = ("get_weather", '{"city": "Köln", "days": 3}'), ("get", "{}")


@cache
def make_tokenizer(markers: tuple[str, ...], is_special: bool = True) -> tuple[tokenizers.Tokenizer, LLTokenizer]:
    """A byte-level tokenizer, in which `markers` are tokens of their own."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([tokenizers.AddedToken(marker, special=is_special) for marker in markers])
    return tokenizer, LLTokenizer(tokenizer.to_str(), eos_token=EOS)


def make_matcher(grammar: str | None, tokenizer: LLTokenizer) -> LLMatcher:
    assert grammar is not None
    assert LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(grammar), tokenizer) == (False, [])
    return LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar))


def allows(grammar: str | None, text: str, markers: tuple[str, ...] = (), is_special: bool = True) -> bool:
    return allows_pieces(grammar, [text], markers, is_special)


def allows_pieces(grammar: str | None, pieces: Iterable[str], markers: tuple[str, ...], is_special: bool) -> bool:
    tokenizer, guide = make_tokenizer(markers, is_special)
    matcher = make_matcher(grammar, guide)
    token_ids = [token_id for piece in pieces for token_id in tokenizer.encode(piece, add_special_tokens=False).ids]
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def write(tool_format: ToolFormat, *calls: tuple[str, str]) -> str:
    return tool_format.write_answer([tool_format.write_call(*call) for call in calls])


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda each: each.name)
def test_required_allows_valid_calls_and_nothing_else(tool_format: ToolFormat) -> None:
    grammar = call_grammar(tool_format, TOOLS, "required")
    assert allows(grammar, write(tool_format, COLOGNE))
    assert allows(grammar, write(tool_format, CHECK))
    assert allows(grammar, write(tool_format, CHECK, COLOGNE, CHECK)) is tool_format.is_parallel
    good = write(tool_format, COLOGNE)
    bad_calls = [
        ("nobody", "{}"),
        ("get_weather", "{}"),
        ("get_weather", '{"city": "Bonn"}'),
        ("get_weather", '{"city": "Köln", "days": 10}'),
        ("get_weather", '{"city": "Köln", "x": 1}'),
        ("get", '{"city": "Köln"}'),
        ("get", "[]"),
        ("get", "null"),
    ]
    for text in ("", "Hello", f"Well: {good}", f"{good} Done.", good[:-1], f" {good}", f"\n{good}"):
        assert not allows(grammar, text)
    for call in bad_calls:
        assert not allows(grammar, write(tool_format, call))


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda each: each.name)
def test_one_call_of_the_function_that_is_named(tool_format: ToolFormat) -> None:
    grammar = call_grammar(tool_format, TOOLS, {"type": "function", "function": {"name": "get_weather"}})
    assert allows(grammar, write(tool_format, COLOGNE))
    assert not allows(grammar, write(tool_format, CHECK))
    assert not allows(grammar, write(tool_format, COLOGNE, COLOGNE))
    one_call = call_grammar(tool_format, TOOLS, "required", False)
    assert allows(one_call, write(tool_format, CHECK))
    assert not allows(one_call, write(tool_format, CHECK, CHECK))


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("tool_format", [HERMES, SMOLLM, MISTRAL], ids=lambda each: each.name)
def test_markers_that_are_tokens_are_asked_for_by_id(tool_format: ToolFormat, is_special: bool) -> None:
    tokenizer, _ = make_tokenizer(tool_format.markers, is_special)
    ids = {marker: present(tokenizer.token_to_id(marker)) for marker in tool_format.markers}
    good, bad = write(tool_format, CHECK, COLOGNE), write(tool_format, ("get", "[]"))
    for tools, choice in ((TOOLS, "required"), (STRICT, "auto")):
        grammar = call_grammar(tool_format, tools, choice, special_tokens=ids)
        assert allows(grammar, good, tool_format.markers, is_special)
        assert not allows(grammar, bad, tool_format.markers, is_special)
        spelled_out = [*tool_format.opening, good.removeprefix(tool_format.opening)]
        assert allows_pieces(grammar, spelled_out, tool_format.markers, is_special) is (choice == "auto")
        assert not allows_pieces(grammar, bad, tool_format.markers, is_special)


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda each: each.name)
def test_a_strict_function_binds_even_a_model_that_is_free_to_call(tool_format: ToolFormat) -> None:
    grammar = call_grammar(tool_format, STRICT, "auto")
    good, bad = write(tool_format, COLOGNE), write(tool_format, ("get_weather", '{"city": "Bonn"}'))
    for text in ("", "Hello {<[ you", " \n", good):
        assert allows(grammar, text)
    for text in (bad, f"\n{bad}", good[:-1] if tool_format.closing else good[:-4]):
        assert not allows(grammar, text)
    if tool_format.may_be_bare:
        assert allows(grammar, f"Yes: {tool_format.opening}{good}")
        assert not allows(grammar, f"Yes: {tool_format.opening}{bad}")
    else:
        assert allows(grammar, f"Yes: {good} and\n{good}.")
        assert allows(grammar, f"Yes: {good} and\n{bad}.") is not tool_format.is_parallel  # then the first one ends it
        only_one = call_grammar(tool_format, STRICT, "auto", False)
        assert allows(only_one, f"Yes: {good}")


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("tool_format", [HERMES, LLAMA, PLAIN], ids=lambda each: each.name)
def test_a_model_that_is_free_needs_no_grammar(tool_format: ToolFormat, tools: Any) -> None:
    assert call_grammar(tool_format, tools) is None
    assert call_grammar(tool_format, tools, "none") is None
    assert call_grammar(tool_format, STRICT, "none") is None


def test_calls_that_are_not_parsed_cannot_be_required() -> None:
    for tools, choice in ((TOOLS, "required"), (STRICT, None)):
        for tool_format in (GEMMA, LFM):
            with pytest.raises(InvalidValueError, match="can't be enforced, so they cannot be required"):
                call_grammar(tool_format, tools, choice)
        with pytest.raises(InvalidValueError, match="tool_call_parser='plain' leaves calls in the text"):
            call_grammar(PLAIN, tools, choice)


def test_half_a_surrogate_pair_is_the_librarys_to_refuse_and_breaks_nothing() -> None:
    parameters = {"type": "object", "properties": {"a": {"enum": ["\ud800"]}}}
    grammar = call_grammar(
        HERMES, [{"type": "function", "function": {"name": "f", "parameters": parameters}}], "required"
    )
    assert grammar is not None
    is_error, (message,) = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(grammar))
    assert is_error
    assert "surrogate" in message or "hex escape" in message


def test_a_schema_beyond_the_library_binds_only_where_it_is_strict() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}

    def validate(is_strict: bool) -> bool:
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": is_strict}}
        grammar = call_grammar(HERMES, [tool], "required")
        assert grammar is not None
        is_error, _ = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(grammar))
        return not is_error

    assert validate(is_strict=False)
    assert not validate(is_strict=True)


TEXTS = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "properties": {
                "text": {"type": "string"},
                "to": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
            },
            "required": ["text"],
        },
    },
}
NOTE = ("note", '{"text": "12 <b>\\n\\"x\\"", "tags": ["a"]}')


@pytest.mark.parametrize("tool_format", TAGGED, ids=lambda each: each.name)
def test_arguments_in_tags_follow_the_schema(tool_format: ToolFormat) -> None:
    grammar = call_grammar(tool_format, [*TOOLS, TEXTS], "required")
    is_dsml = "DSML" in tool_format.opening

    def allowed(*calls: tuple[str, str]) -> bool:
        text = write(tool_format, *calls)
        if is_dsml:  # each argument says whether it is a text
            for key, is_text in (("city", "true"), ("text", "true"), ("days", "false"), ("tags", "false")):
                text = text.replace(f'name="{key}"', f'name="{key}" string="{is_text}"')
        return allows(grammar, text)

    for good in (COLOGNE, CHECK, NOTE):
        assert allowed(good)
    assert allowed(CHECK, COLOGNE)
    for bad in (
        ("nobody", "{}"),
        ("get_weather", "{}"),
        ("get_weather", '{"city": "Bonn"}'),
        ("get_weather", '{"city": "Köln", "days": 10}'),
        ("get", '{"city": "Köln"}'),
        ("note", '{"text": "x", "tags": ["c"]}'),
    ):
        assert not allowed(bad)
    strict = call_grammar(tool_format, STRICT, "auto")
    assert allows(strict, "Hello <you")
    assert allows(strict, f"Yes: {write(tool_format, CHECK)} and\n{write(tool_format, CHECK)}.")
    assert not allows(strict, write(tool_format, ("get_weather", '{"city": "Bonn"}')))


@pytest.mark.parametrize("marker", ["</parameter>", "parameter>", "<｜tool▁sep｜>"])
def test_tags_may_be_special_tokens(marker: str) -> None:
    tool_format = tool_formats.DEEPSEEK if "sep" in marker else tool_formats.QWEN_CODER
    tokenizer, _ = make_tokenizer((marker,))
    ids = {marker: present(tokenizer.token_to_id(marker))}
    grammar = call_grammar(tool_format, [*TOOLS, TEXTS], "required", special_tokens=ids)
    for call in (CHECK, NOTE):
        assert allows(grammar, write(tool_format, call), (marker,))
    assert not allows(grammar, write(tool_format, ("get_weather", "{}")), (marker,))


def test_messages_to_functions() -> None:
    """GPT-OSS: the model answers in its final channel, or calls."""
    markers = ("<|channel|>", "<|message|>", "<|constrain|>", "<|call|>")
    tokenizer, _ = make_tokenizer(markers)
    ids = {marker: present(tokenizer.token_to_id(marker)) for marker in markers}
    header = "<|channel|>final<|message|>"
    call, bad = write(HARMONY, COLOGNE), write(HARMONY, ("get_weather", "{}"))
    required = call_grammar(HARMONY, TOOLS, "required", special_tokens=ids, answer_header=header)
    free = call_grammar(HARMONY, STRICT, "auto", special_tokens=ids, answer_header=header)
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    either = call_grammar(HARMONY, TOOLS, "auto", special_tokens=ids, answer_schema=schema, answer_header=header)
    for grammar in (required, free, either):
        assert allows(grammar, call, markers)
        assert not allows(grammar, bad, markers)
    assert not allows(required, f"{header}Hello", markers)
    assert allows(free, f"{header}Hello", markers)
    assert allows(either, header + "{}", markers)
    assert not allows(either, f"{header}Hello", markers)


@pytest.mark.parametrize("tool_format", [*FORMATS, *TAGGED], ids=lambda each: each.name)
def test_whatever_the_grammar_lets_a_model_write_is_parsed(tool_format: ToolFormat) -> None:
    tokenizer, guide = make_tokenizer(())
    generator = random.Random(0)
    num_calls = 0
    for _ in range(12):
        matcher = make_matcher(call_grammar(tool_format, TOOLS, "required"), guide)
        token_ids: list[int] = []
        while len(token_ids) < 2000:
            biases = matcher.compute_logit_bias()
            token_id = generator.choice([index for index, bias in enumerate(biases) if bias])
            if token_id == EOS:
                break
            assert matcher.consume_token(token_id)
            token_ids.append(token_id)
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}  # type: ignore[index]
        answer = parse_answer(tokenizer.decode(token_ids), tool_format, list(schemas), schemas=schemas)
        assert answer.content == ""
        assert answer.calls
        num_calls += len(answer.calls)
        for call in answer.calls:
            assert json.loads(call.arguments).keys() <= ({"city", "days"} if call.name == "get_weather" else set())
    assert num_calls > 12 or not tool_format.is_parallel
