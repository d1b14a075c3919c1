"""The structure an answer must have, and the protocols through which the sampler enforces it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from infinilm.checks import check_flag, check_integer, check_text
from infinilm.errors import InvalidTypeError, InvalidValueError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_SCHEMA_CHARS = 256 * 1024
"""Of a schema's text without spaces between values."""
MAX_SCHEMA_TEXT_CHARS = 2 * 1024 * 1024
"""Of a schema's text as sent; some are indented very deep."""
MAX_SCHEMA_DEPTH = 96
"""Nested objects and lists. llguidance's parser accepts 128 levels, and InfiniLM uses some of them itself."""
MAX_REGEX_CHARS = 16 * 1024
MAX_GRAMMAR_CHARS = 256 * 1024
MAX_CHOICES = 10_000
MAX_MARKER_CHARS = 256
MAX_CHOICE_CHARS = 256 * 1024
"""Of all choices together."""

KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """The structure of an answer, given in one of five ways. Answers with `finish_reason="stop"` have it."""

    json_schema: Mapping[str, Any] | str | bool | None = None
    """A JSON schema (draft 4, 6, 7, 2019-09 or 2020-12), as an object or as text; kept as text. Properties come in the
    schema's order. Keywords that cannot be enforced are refused; nothing is fetched. See docs/structured.md."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression in the syntax of Rust's regex crate. It matches the whole answer."""
    choice: Sequence[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A context-free grammar in llguidance's variant of Lark; its rule `start` is the whole answer."""

    def __post_init__(self) -> None:
        check_flag("json_object", self.json_object)
        given = [name for name in KINDS if self._is_given(name)]
        if len(given) != 1:
            seen = f"has {' and '.join(given)}" if given else "has nothing"
            raise InvalidValueError(f"structured {seen}; give exactly one of {', '.join(KINDS)}")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.regex is not None:
            _check_text("regex", self.regex, MAX_REGEX_CHARS)
            if (len(self.regex) - len(self.regex.rstrip("\\"))) % 2:
                raise InvalidValueError("regex ends with a backslash that escapes nothing; remove it or double it")
        if self.grammar is not None:
            _check_text("grammar", self.grammar, MAX_GRAMMAR_CHARS)
        if self.choice is not None:
            object.__setattr__(self, "choice", _checked_choices(self.choice))

    def _is_given(self, name: str) -> bool:
        return self.json_object if name == "json_object" else getattr(self, name) is not None

    @property
    def kind(self) -> str:
        """The way in which it is given, one of `KINDS`."""
        return next(filter(self._is_given, KINDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """The reasoning before an answer. It need not have the structure of `structured`, and it can be limited."""

    opening: str = ""
    """The text that begins it; empty if the prompt has begun it."""
    closing: str = "</think>"
    """The text that ends it."""
    max_tokens: int | None = None
    """After so many tokens, `forced_closing` is written in place of the model's tokens. None: no limit."""
    forced_closing: str | None = None
    """It must begin with `closing`. None: `closing`. With `structured`, only `closing` is written."""
    header: str = ""
    """The text between the reasoning and the structured part."""
    repeats: bool = False
    """Whether more reasoning may follow it."""

    def __post_init__(self) -> None:
        for name in ("opening", "closing", "forced_closing", "header"):
            if (text := getattr(self, name)) is not None:
                _check_text(f"reasoning.{name}", text, MAX_MARKER_CHARS)
        if not self.closing:
            raise InvalidValueError("reasoning.closing is empty; give the text that ends the reasoning")
        if not (self.forced_closing or self.closing).startswith(self.closing):
            raise InvalidValueError(
                f"reasoning.forced_closing={self.forced_closing!r} must begin with reasoning.closing={self.closing!r}"
            )
        check_flag("reasoning.repeats", self.repeats)
        if self.max_tokens is not None:
            check_integer("reasoning.max_tokens", self.max_tokens, low=0)


class TokenMatcher(Protocol):
    """Follows one answer, token by token."""

    def fill(self, mask: "npt.NDArray[np.int32]") -> None:
        """Set the bits of the allowed next tokens, and no others: token t is bit t % 32 of item t // 32.

        Raises if there are none, or if computing them exceeds the request's time allowance.
        """

    def advance(self, token_id: int) -> None:
        """Advance by the token drawn. An error is raised by the next `fill`."""


class Grammar(Protocol):
    """A compiled structure, for all answers of one request."""

    def matcher(self, output_ids: Sequence[int], stop_ids: Sequence[int], min_tokens: int) -> TokenMatcher:
        """A matcher that has seen `output_ids`. It never raises.

        `stop_ids` are allowed only where the answer is complete, and before `min_tokens` only if nothing else is
        allowed.
        """


def _schema_text(schema: object) -> str:
    """The schema as JSON text, after basic checks."""
    if isinstance(schema, str):
        if len(schema) > MAX_SCHEMA_TEXT_CHARS:
            raise InvalidValueError(
                f"json_schema has {len(schema)} characters; at most {MAX_SCHEMA_TEXT_CHARS} are allowed"
            )
        try:
            schema = json.loads(schema, parse_constant=_refuse_constant)
        except RecursionError:
            raise InvalidValueError(f"json_schema is nested deeper than {MAX_SCHEMA_DEPTH} levels") from None
        except ValueError as error:
            raise InvalidValueError(f"json_schema is not valid JSON: {error}") from None
    if schema is False:
        raise InvalidValueError("json_schema=False permits no answer at all; give a schema that some value satisfies")
    if not isinstance(schema, Mapping) and schema is not True:
        raise InvalidTypeError(
            f"json_schema is of type {type(schema).__name__}; it must be an object, the text of one, or True"
        )
    _check_depth(schema)
    if isinstance(schema, Mapping) and "x-guidance" in schema:
        raise InvalidValueError("json_schema has 'x-guidance', which can make answers that are not JSON; leave it out")
    try:
        text = json.dumps(
            dict(schema) if isinstance(schema, Mapping) else schema, allow_nan=False, separators=(",", ":")
        )
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(f"json_schema can't be written as JSON: {error}") from None
    if len(text) > MAX_SCHEMA_CHARS:
        raise InvalidValueError(
            f"json_schema has {len(text)} characters without spaces; at most {MAX_SCHEMA_CHARS} are allowed"
        )
    return text


def _check_depth(schema: object) -> None:
    """Refuse a schema that is nested too deep or has too many values."""
    level: list[object] = [schema]
    num_seen = 0
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        inner: list[object] = []
        for value in level:
            inner += value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
        num_seen += len(inner)
        if num_seen > MAX_SCHEMA_CHARS:  # each has at least one character
            raise InvalidValueError(f"json_schema has more than {MAX_SCHEMA_CHARS} values; make it smaller")
        level = inner
        if not level:
            return
    raise InvalidValueError(
        f"json_schema is nested deeper than {MAX_SCHEMA_DEPTH} levels; make it flatter, or use $ref"
    )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _checked_choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Sequence):
        raise InvalidTypeError(f"choice is of type {type(choices).__name__}; it must be a list of strings")
    if not 0 < len(choices) <= MAX_CHOICES:
        raise InvalidValueError(f"choice has {len(choices)} texts; give 1 to {MAX_CHOICES}")
    num_chars = 0
    for text in choices:
        _check_text("choice", text, MAX_CHOICE_CHARS)
        num_chars += len(text)
    if num_chars > MAX_CHOICE_CHARS:
        raise InvalidValueError(f"choice has {num_chars} characters in all; at most {MAX_CHOICE_CHARS} are allowed")
    return tuple(choices)


def _check_text(name: str, text: object, max_chars: int) -> None:
    if not isinstance(text, str):
        raise InvalidTypeError(f"{name} has a value of type {type(text).__name__}; it must be a string")
    if len(text) > max_chars:
        raise InvalidValueError(f"{name} has {len(text)} characters; at most {max_chars} are allowed")
    check_text(name, text)
