"""Render chat templates: Jinja programs from a checkpoint, run in a sandbox.

The result equals transformers' `apply_chat_template(tokenize=False)`.

The sandbox refuses attributes that lead to Python's internals, methods that change their arguments, and files. It
bounds the template's length, `range` (100 000 items), the values that `*` and `**` build, the rendered text, and the
time for rendering. It does not bound the memory that padding takes (`center`, format widths): a template is trusted
not to waste memory, like the weights beside it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from time import perf_counter
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from infinilm.errors import CheckpointError, InvalidTypeError, InvalidValueError
from infinilm.text.control_tokens import scrub, without_marks

MAX_TEMPLATE_CHARS = 256 * 1024
MAX_OUTPUT_CHARS = 16 * 1024 * 1024
MAX_SECONDS = 2.0
_MAX_DEPTH = 64
_TIME_CHECK = "_check_time"


class ChatTemplate:
    """A compiled chat template; rendering is thread-safe."""

    def __init__(
        self, source: str, *, max_seconds: float = MAX_SECONDS, mark: Callable[[str], str] | None = None
    ) -> None:
        """Compile `source`; a template that is too long or does not compile is a `CheckpointError`.

        Rendering stops after `max_seconds`. `mark` changes the literals that may be part of the rendered text (see
        `ControlTokens`).
        """
        if len(source) > MAX_TEMPLATE_CHARS:
            raise CheckpointError(
                f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are allowed"
            )
        self.source = source
        self._max_seconds = max_seconds
        self._is_marked = mark is not None
        environment = _make_environment()
        try:
            syntax = environment.parse(source)
            _refuse_private_names(syntax)
            names = jinja2.meta.find_undeclared_variables(syntax)
            _add_time_checks(syntax)
            if mark is not None:
                _mark_literals(syntax, mark)
            self._template = environment.from_string(syntax)
        except TemplateSyntaxError as error:
            raise CheckpointError(
                f"the chat template does not compile: line {error.lineno}: {error.message}"
            ) from error
        except Exception as error:  # constant expressions are evaluated here and may raise anything
            raise CheckpointError(f"the chat template does not compile: {_describe(error)}") from error
        self._variable_names = frozenset(names - set(environment.globals))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        special_tokens: Mapping[str, str] | None = None,
        **variables: Any,
    ) -> str:
        """Render a conversation into a prompt.

        `messages` are dicts with a `role` and a `content`: a string, or a list of text parts, joined by
        newlines. `special_tokens` (such as `bos_token`) and `variables` are visible to the template by name.
        Tools or variables that the template never reads are an error.
        """
        if tools and "tools" not in self._variable_names:
            raise InvalidValueError("the model's chat template has no place for tools; call it without them")
        unknown = sorted(variables.keys() - self._variable_names)
        if unknown:
            raise InvalidTypeError(
                f"the chat template does not use {', '.join(map(repr, unknown))}; it reads "
                f"{', '.join(sorted(self._variable_names)) or 'no variables'}"
            )
        values = {
            "documents": None,
            **(special_tokens or {}),
            **self._clean({name: _plain(value, name) for name, value in variables.items()}),
            "messages": self._clean(_checked_messages(messages)),
            "tools": self._clean(_checked_tools(tools)),
            "add_generation_prompt": add_generation_prompt,
            _TIME_CHECK: _time_check(self._max_seconds),
        }
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(values):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_OUTPUT_CHARS:
                    raise SecurityError(f"more than {MAX_OUTPUT_CHARS} characters were rendered")
        except Exception as error:  # the template is a program: it may raise anything
            raise InvalidValueError(f"the chat template failed: {without_marks(_describe(error))}") from error
        return "".join(pieces)

    def _clean(self, value: Any) -> Any:
        """The value without marks, if literals are marked: no other text may hold marks."""
        return scrub(value) if self._is_marked else value


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with errors instead of empty output for refused attributes, and with bounded products."""

    intercepted_binops = frozenset({"*", "**"})

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is not allowed")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _result_size(operator, left, right) > MAX_OUTPUT_CHARS:
            raise SecurityError(f"the result of {operator!r} is too large")
        return super().call_binop(context, operator, left, right)


def _result_size(operator: str, left: Any, right: Any) -> int:
    """About how many bits a power of integers has, or items a repeated sequence; otherwise 0."""
    if operator == "**":
        return left.bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(count, int):
            return len(sequence) * count
    return 0


class _GenerationTag(Extension):
    """`{% generation %}` marks the model's output, for training; here its body is rendered as is."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _make_environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_make_dict, namespace=_make_namespace
    )
    del environment.globals["lipsum"]  # it writes unbounded text
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialise as transformers does: Jinja's own filter escapes HTML, which models do not expect."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _make_namespace(*args: Any, **kwargs: Any) -> Namespace:
    attributes = dict(*args, **kwargs)
    for name in attributes:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace may not hold the private name {name!r}")
    return Namespace(attributes)


def _refuse_private_names(syntax: nodes.Template) -> None:
    """Refuse `{% set ns._x = ... %}`: a namespace resolves Python's own lookups from its items."""
    for node in syntax.find_all(nodes.NSRef):
        if node.attr.startswith("_"):
            raise SecurityError(f"a namespace may not hold the private name {node.attr!r}")


def _add_time_checks(syntax: nodes.Template) -> None:
    """Check the time in each iteration of a loop and in each macro, so that rendering always ends."""
    for node in syntax.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
        check = nodes.Call(nodes.Name(_TIME_CHECK, "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(check, lineno=node.lineno))


_NEEDLE_METHODS = {
    *("count", "endswith", "find", "get", "index", "lstrip", "partition", "removeprefix", "removesuffix", "replace"),
    *("rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "startswith", "strip", "trim"),
}
"""Methods and filters whose first argument is searched for and not rendered."""
_TESTING_FILTERS = {"select", "reject", "selectattr", "rejectattr", "map", "groupby", "sort", "unique"}


def _mark_literals(node: nodes.Node, mark: Callable[[str], str]) -> None:
    """Mark the literals below `node`, except those that are only compared with other text."""
    compared = _compared_nodes(node)
    for child in node.iter_child_nodes():
        if any(child is other for other in compared):
            continue
        if isinstance(child, nodes.TemplateData):
            child.data = mark(child.data)
        elif isinstance(child, nodes.Const):
            if isinstance(child.value, str):
                child.value = mark(child.value)
        elif not isinstance(child, nodes.Compare | nodes.Test):
            _mark_literals(child, mark)


def _compared_nodes(node: nodes.Node) -> Sequence[nodes.Node]:
    """Children of `node` whose text is compared and not rendered."""
    if isinstance(node, nodes.If | nodes.CondExpr):
        return [node.test]
    if isinstance(node, nodes.For):
        return [node.test] if node.test is not None else []
    if isinstance(node, nodes.Getitem):
        return [node.arg]
    if isinstance(node, nodes.Filter) and node.name in _TESTING_FILTERS:
        return [*node.args, *node.kwargs]
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
        return node.args[:1] if node.node.attr in _NEEDLE_METHODS else []
    return node.args[:1] if isinstance(node, nodes.Filter) and node.name in _NEEDLE_METHODS else []


def _time_check(max_seconds: float) -> Callable[[], None]:
    deadline = perf_counter() + max_seconds

    def check() -> None:
        if perf_counter() > deadline:
            raise SecurityError(f"it takes more than {max_seconds:g} s")

    return check


def _describe(error: Exception) -> str:
    """The template's own message unchanged; other errors with their type."""
    if isinstance(error, TemplateError):
        return error.message or type(error).__name__
    return f"{type(error).__name__}: {error}"


def _require(value: object, kind: type | tuple[type, ...], path: str, expected: str) -> None:
    if not isinstance(value, kind):
        raise InvalidTypeError(f"{path} must be {expected}, not {type(value).__name__}")


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    _require(messages, (list, tuple), "messages", "a list of dicts")
    if not messages:
        raise InvalidValueError("messages is empty; give at least one message")
    return [_checked_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""Names of an answer's reasoning. Most templates read the first one, GPT-OSS's templates the second."""


def _checked_message(message: Any, path: str) -> dict[str, Any]:
    _require(message, Mapping, path, "a dict with 'role' and 'content'")
    if "role" not in message:
        raise InvalidValueError(f"{path} has no 'role'")
    _require(message["role"], str, f"{path}['role']", "a string")
    checked: dict[str, Any] = _plain(message, path)
    reasoning = next((checked[name] for name in _REASONING_NAMES if checked.get(name) is not None), None)
    if reasoning is not None:
        checked = {"thinking": reasoning, **checked, "reasoning_content": reasoning}
    content = checked.get("content")
    if isinstance(content, list):
        parts = [_part_text(part, f"{path}['content'][{index}]") for index, part in enumerate(content)]
        checked["content"] = "\n".join(parts)
    elif content is not None:
        _require(content, str, f"{path}['content']", "a string or a list of text parts")
    elif not checked.get("tool_calls"):
        raise InvalidValueError(f"{path} has no 'content'")
    return checked


def _part_text(part: Any, path: str) -> str:
    _require(part, dict, path, "a dict such as {'type': 'text', 'text': '...'}")
    if part.get("type", "text") != "text":
        raise InvalidValueError(f"{path} has type {part['type']!r}; only 'text' parts are supported")
    text = part.get("text")
    _require(text, str, f"{path}['text']", "a string")
    return str(text)


def _checked_tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    _require(tools, (list, tuple), "tools", "a list of JSON schemas")
    for index, tool in enumerate(tools):
        _require(tool, Mapping, f"tools[{index}]", "a JSON schema (a dict)")
    return [_plain(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


_SCALARS: tuple[tuple[type, Callable[[Any], Any]], ...] = ((str, str.__str__), (int, int), (float, float))


def _plain(value: Any, path: str, depth: int = 0) -> Any:
    """Copy JSON-like data into exact built-in types, so that a template can call no other methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > _MAX_DEPTH:
        raise InvalidValueError(f"{path} is nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidTypeError(f"{path} has the key {key!r}; keys must be strings")
        return {str.__str__(key): _plain(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    for kind, convert in _SCALARS:
        if isinstance(value, kind):
            return convert(value)
    raise InvalidTypeError(
        f"{path} is a {type(value).__name__}; chat templates take strings, numbers, booleans, lists and dicts"
    )
