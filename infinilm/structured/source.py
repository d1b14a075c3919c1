"""The grammar text for llguidance, for each kind of structured output."""

import json
import re
from typing import Any

from infinilm.errors import InvalidValueError
from infinilm.structured_output import StructuredOutput

JSON_WHITESPACE = r"( |\r?\n[ \t]{0,32})"
"""Whitespace between the parts of a JSON text: enough to indent it, and bounded."""

_UNHEARD_ATTRIBUTE = re.compile(r"^[ \t]*[?!]?[A-Za-z_][\w-]*[ \t]*\[[^\]\n]*\b(temperature|stop)[ \t]*=", re.MULTILINE)


def grammar_text(structured: StructuredOutput, drops_first_space: bool) -> str:
    """The grammar as JSON; it begins with a space if the tokenizer drops the first one."""
    grammar = _grammar(structured)
    if not drops_first_space:
        return json.dumps({"grammars": [grammar]})
    return json.dumps({"grammars": [{"lark_grammar": 'start: " " @answer'}, {"name": "answer", **grammar}]})


def _grammar(structured: StructuredOutput) -> dict[str, Any]:
    if structured.json_object:
        return _json_grammar({"type": "object"})
    if structured.json_schema is not None:
        assert isinstance(structured.json_schema, str)
        schema = json.loads(structured.json_schema)
        return _json_grammar({} if schema is True else schema)
    if structured.regex is not None:
        return _regex_grammar(structured.regex)
    if structured.choice is not None:
        return _regex_grammar("|".join(map(_escaped, dict.fromkeys(structured.choice))))
    assert structured.grammar is not None
    if found := _UNHEARD_ATTRIBUTE.search(structured.grammar):
        raise InvalidValueError(
            f"grammar uses the attribute {found[1]!r}, which has no effect here; for a temperature use the request's "
            "own, for a stop use 'suffix' or 'lazy'"
        )
    return {"lark_grammar": structured.grammar}


def _json_grammar(schema: dict[str, Any]) -> dict[str, Any]:
    return {"json_schema": {**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}}


def _regex_grammar(regex: str) -> dict[str, Any]:
    from llguidance import LLMatcher

    grammar: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(regex))["grammars"][0]
    return {"lark_grammar": grammar["lark_grammar"]}


def _escaped(text: str) -> str:
    """A regular expression that matches exactly this text."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}" for char in text)
