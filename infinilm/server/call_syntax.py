"""How models write one tool call, and its arguments as JSON.

`write` makes the text of a call from its arguments in JSON. `AnswerParser` reads the same text.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 64


@dataclass(frozen=True)
class JsonCall:
    """`{"name": …, "arguments": {…}}`"""

    arguments_key: str = "arguments"
    name_key: str = "name"
    head = "{"

    def write(self, name: str, arguments: str) -> str:
        return f'{{"{self.name_key}": {json.dumps(name)}, "{self.arguments_key}": {arguments}}}'


@dataclass(frozen=True)
class NamedCall:
    """The name, then the arguments in JSON: `NAME[ARGS]{…}`"""

    head: str
    after_name: str
    tail: str = ""
    filler: str = ""
    """Text to write between the name and `after_name`. When a call is read, any short text is accepted there."""

    def write(self, name: str, arguments: str) -> str:
        return f"{self.head}{name}{self.filler}{self.after_name}{arguments}{self.tail}"


@dataclass(frozen=True)
class TaggedCall:
    """Each argument in tags: `<function=NAME><parameter=KEY>VALUE</parameter></function>`"""

    head: str
    after_name: str
    parameter: str
    """The text before a key; `after_key` is the text before its value, `after_value` the text after that."""
    after_key: str
    after_value: str
    tail: str
    pad: str = ""
    """White space around a value."""

    def write_parameter(self, key: str, value: str) -> str:
        return f"{self.parameter}{key}{self.after_key}{self.pad}{value}{self.pad}{self.after_value}"

    def write(self, name: str, arguments: str) -> str:
        written = [self.write_parameter(key, _spelled(value)) for key, value in json.loads(arguments).items()]
        return "\n".join([f"{self.head}{name}{self.after_name}", *written, self.tail])


@dataclass(frozen=True)
class PythonCall:
    """A call in Python: `NAME(city='Köln', days=[1, None])`"""

    head = ""
    opening, quotes = "(", ("'", '"')

    def write(self, name: str, arguments: str) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in json.loads(arguments).items())})"

    def read_arguments(self, text: str) -> str | None:
        """The text between the parentheses as JSON; None if it does not consist of arguments."""
        return _pairs_in_json(text, _PYTHON_TOKENS, "=")


@dataclass(frozen=True)
class GemmaCall:
    """`call:NAME{city:<|"|>Köln<|"|>,days:[1,null]}`, with a marker as the quote."""

    quote: str
    head = "call:"
    opening = "{"

    @property
    def quotes(self) -> tuple[str, ...]:
        return (self.quote,)

    def write(self, name: str, arguments: str) -> str:
        return f"call:{name}{self._spelled(json.loads(arguments))}"

    def _spelled(self, value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{self._spelled(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(self._spelled, value)) + "]"
        return f"{self.quote}{value}{self.quote}" if isinstance(value, str) else json.dumps(value)

    def read_arguments(self, text: str) -> str | None:
        """The text between the braces as JSON; None if it does not consist of arguments."""
        quote = re.escape(self.quote)
        tokens = re.compile(rf"{quote}(?P<text>(?s:.*?)){quote}|[{{}}\[\]:,]|(?:(?!{quote})[^{{}}\[\]:,])+")
        return _pairs_in_json(text, tokens, ":", bare_is_text=True)


CallSyntax = JsonCall | NamedCall | TaggedCall | PythonCall | GemmaCall

_CDATA = re.compile(r"<!\[CDATA\[(?s:(.*))\]\]>")


def value_in_json(text: str, schema: Mapping[str, Any], is_string: bool | None = None) -> str:
    """An argument that was written between tags, as JSON.

    A parameter's schema says whether it may be a string; otherwise it is read as JSON, then as a Python literal.
    """
    if text.startswith("\n") and text.endswith("\n") and len(text) > 1:
        text = text[1:-1]
    if cdata := _CDATA.fullmatch(text):
        return dump(cdata[1])
    kinds = kinds_of(schema)
    if is_string is None:
        is_string = "string" in kinds and not ("null" in kinds and text in ("null", "None"))
    return dump(text if is_string else _guessed(text))


def parameter_schema(parameters: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The schema of a function's parameter, with the definitions that it refers to; empty if there is none."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(schema, Mapping):
        return {}
    definitions = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
    reference = schema.get("$ref")
    if isinstance(reference, str) and (match := re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", reference)):
        group = definitions.get(match[1])
        target = group.get(match[2]) if isinstance(group, Mapping) else None
        schema = target if isinstance(target, Mapping) else schema
    return {**definitions, **schema}


def kinds_of(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema names, its alternatives included; "string" if one of its values is a text."""
    kinds: set[str] = set()
    for each in (schema, *(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        if isinstance(each, Mapping):
            found = each.get("type")
            kinds |= {found} if isinstance(found, str) else {kind for kind in found or () if isinstance(kind, str)}
            values = each.get("enum")
            if isinstance(values, list) and any(isinstance(value, str) for value in values):
                kinds.add("string")
    return kinds


def _guessed(text: str) -> Any:
    """A value as JSON or as a Python literal, or the text itself."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        try:
            return _Literals(text, _PYTHON_TOKENS).read_all()
        except (ValueError, IndexError):
            return text
    return value


def dump(value: Any) -> str:
    """JSON that can be sent as UTF-8: half a surrogate pair stays an escape."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


_PYTHON_TOKENS = re.compile(
    r"""'(?P<text>(?:[^'\\]|\\(?s:.))*)'|"(?P<other>(?:[^"\\]|\\(?s:.))*)"|[{}\[\](),:=]|[^{}\[\](),:='"]+"""
)
_ESCAPE = re.compile(r"\\(?:([\\'\"/bfnrt])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4}))")
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


def _pairs_in_json(text: str, tokens: re.Pattern[str], separator: str, *, bare_is_text: bool = False) -> str | None:
    try:
        return dump(_Literals(text, tokens, bare_is_text=bare_is_text).read_pairs(separator))
    except (ValueError, IndexError):
        return None


class _Literals:
    """Reads literals of Python or a similar language. Raises `ValueError` or `IndexError` if the text is not one."""

    def __init__(self, text: str, tokens: re.Pattern[str], *, bare_is_text: bool = False) -> None:
        """`tokens` matches brackets, separators, words and quoted texts. `bare_is_text`: unknown words are texts."""
        found = list(tokens.finditer(text))
        if "".join(match[0] for match in found) != text:
            raise ValueError("a quote is open")
        self._bare_is_text = bare_is_text
        self._tokens: list[tuple[str, str | None]] = []
        """From the last to the first: each token, and its text if it is quoted."""
        for match in reversed(found):
            groups = match.groupdict()
            quoted = groups["text"] if groups["text"] is not None else groups.get("other")
            if quoted is not None and not bare_is_text:
                quoted = _ESCAPE.sub(_unescaped, quoted)
            if match[0].strip():
                self._tokens.append((match[0].strip(), quoted))

    def read_all(self) -> Any:
        value = self._read_value(0)
        self._check_end()
        return value

    def read_pairs(self, separator: str) -> dict[str, Any]:
        """The whole text as keys and values."""
        self._tokens.insert(0, ("}", None))
        found = self._read_object(separator, 0)
        self._check_end()
        return found

    def _check_end(self) -> None:
        if self._tokens:
            raise ValueError("more text")

    def _read_object(self, separator: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._accept("}"):
            if found and not self._accept(","):
                raise ValueError("no comma")
            token, quoted = self._tokens.pop()
            if not self._accept(separator):
                raise ValueError("no separator")
            found[token if quoted is None else quoted] = self._read_value(depth + 1)
        return found

    def _read_value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")
        token, quoted = self._tokens.pop()
        if quoted is not None:
            return quoted
        if token == "{":
            return self._read_object(":", depth)
        if token == "[":
            items: list[Any] = []
            while not self._accept("]"):
                if items and not self._accept(","):
                    raise ValueError("no comma")
                items.append(self._read_value(depth + 1))
            return items
        return self._read_word(token)

    def _read_word(self, token: str) -> Any:
        if token in _WORDS:
            return _WORDS[token]
        if token[0] in "-0123456789":
            try:
                value = json.loads(token)
                if math.isfinite(value):
                    return value
            except (ValueError, OverflowError):
                pass  # a text, or an error
        if not self._bare_is_text or token in "{}[]():,=":
            raise ValueError(f"{token!r} is no literal")
        return token

    def _accept(self, token: str) -> bool:
        is_next = self._tokens[-1] == (token, None)
        if is_next:
            self._tokens.pop()
        return is_next


def _unescaped(match: re.Match[str]) -> str:
    simple, byte, unit = match.groups()
    return _ESCAPED.get(simple, simple) if simple else chr(int(byte or unit, 16))


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
