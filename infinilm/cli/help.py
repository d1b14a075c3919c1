"""Help pages: plain text at the terminal's width, with the options in groups."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

CONTEXT = {"help_option_names": ["-h", "--help"]}
_DECIMAL = re.compile(r"[0-9]+(\.[0-9]+)?")


class _PlainParameters:
    """Converts plain values without Typer, which would import a library that validates data for them."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if not isinstance(parameter.process_value, partial):
                parameter.process_value = partial(_process, parameter, parameter.process_value)
        return parameters


class HelpCommand(_PlainParameters, TyperCommand):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self.get_params(ctx), formatter)


class HelpGroup(_PlainParameters, TyperGroup):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self.get_params(ctx), formatter)
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [(name, (command.help or "").partition("\n")[0]) for name, command in commands.items() if command]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def make_app(**settings: Any) -> typer.Typer:
    """An app with this kind of help. Its commands need `cls=HelpCommand`."""
    return typer.Typer(
        cls=HelpGroup,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings=CONTEXT,
        **settings,
    )


def help_of(command: Callable[..., None]) -> str:
    """A command's docstring with each paragraph on one line, which the terminal's width wraps."""
    paragraphs = (command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def option(panel: str, kind: Any, help: str, *names: str, show_default: bool = False) -> Any:
    """The annotation of an option in a group. The name of its value follows from its type."""
    values = {"float": "X", "int": "N", "Path": "FILE", "str": "TEXT", "bool": None}
    metavar = next(name for part, name in values.items() if part in str(kind))
    return Annotated[
        kind, typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, show_default=show_default)
    ]


def _process(parameter: Any, process: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
    """The value of a parameter, as `process` would convert and check it."""
    described = getattr(parameter, "type_descriptor", None)  # older versions have none, and don't need that library
    if described is None or parameter.required:
        return process(context, value)
    kind, about = described.annotation, described.parameter_info
    is_plain = about.min is None and about.max is None and about.parser is None
    if value is None:
        value = () if parameter.multiple or parameter.nargs == -1 else None
    elif is_plain and kind is int and isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    elif is_plain and kind is float and isinstance(value, str) and _DECIMAL.fullmatch(value):
        value = float(value)
    elif is_plain and kind == list[str] and isinstance(value, list | tuple) and {*map(type, value)} == {str}:
        value = list(value)
    elif not is_plain or kind not in (str, int, float) or type(value) is not kind:
        return process(context, value)
    return value if parameter.callback is None else parameter.callback(context, parameter, value)


def _write_parameters(parameters: Sequence[Any], formatter: Any) -> None:
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}  # a command's own options are first
    for parameter in parameters:
        kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
        title = getattr(parameter, "rich_help_panel", None) or kind
        sections.setdefault(title, []).append((_names(parameter), _meaning(parameter)))
    for title, rows in ((title, rows) for title, rows in sections.items() if rows):
        with formatter.section(title):
            formatter.write_dl(rows)


def _names(parameter: Any) -> str:
    """A parameter's names and value, such as `-n, --max-tokens N`; a flag has no value."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar)
    names = ", ".join([*sorted(parameter.opts, key=len), *parameter.secondary_opts])
    return names if parameter.is_flag else f"{names} {parameter.metavar}"


def _meaning(parameter: Any) -> str:
    is_value = parameter.param_type_name == "option" and not parameter.is_flag
    if not is_value or not parameter.show_default or parameter.default is None:
        return str(parameter.help)
    default = f"{parameter.default:g}" if isinstance(parameter.default, float) else parameter.default
    return f"{parameter.help} Default: {default}."
