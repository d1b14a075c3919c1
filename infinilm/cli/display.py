"""Formats numbers, tables and model output for a terminal."""

import re
import sys
from functools import partial
from typing import IO, TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NONE = "–"
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def console(*, err: bool = False) -> "Console":
    """A console that neither colours numbers nor interprets markup."""
    from rich.console import Console

    return Console(stderr=err, highlight=False, markup=False, emoji=False)


def note(message: str) -> None:
    console(err=True).print(message, style="dim", soft_wrap=True)


def print_error(message: str) -> None:
    typer.secho("error:", fg="red", bold=True, nl=False, err=True)
    typer.echo(f" {message}", err=True)


def make_table(*columns: str, left: int = 1) -> "Table":
    """A table whose first `left` columns are text and the others numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right")
    return table


def make_facts(facts: dict[str, str]) -> "Table":
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, fact in facts.items():
        table.add_row(name, fact)
    return table


def write_text(text: str, stream: IO[str] | None = None) -> None:
    """Write model output unchanged; on a terminal, with control characters replaced."""
    stream = stream or sys.stdout
    stream.write(visible(text) if stream.isatty() else text)
    stream.flush()


visible = partial(_CONTROL_CHARACTERS.sub, "\N{REPLACEMENT CHARACTER}")
"""The text with control characters other than tab and newline replaced, so that it can't move the cursor."""


def head(text: str, width: int) -> str:
    """The beginning of a text, as one line of at most `width` characters."""
    line = " ".join(visible(text[: 4 * width]).split())
    return line if len(line) <= width else line[: width - 1].rstrip() + "…"


def format_seconds(seconds: float | None) -> str:
    """A duration such as `3.1 ms`, `182 ms`, `1.24 s`."""
    if seconds is None:
        return NONE
    if seconds < 0.0995:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


def format_rate(per_second: float | None) -> str:
    if per_second is None:
        return NONE
    return f"{per_second:,.1f}" if per_second < 999.95 else f"{per_second:,.0f}"


def format_count(count: float) -> str:
    """A large number such as `134.5 M`."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f}"
