"""How numbers, tables and a model's words are shown."""

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
    """A console that neither colours numbers nor reads markup in what it is given."""
    from rich.console import Console

    return Console(stderr=err, highlight=False, markup=False, emoji=False)


def note(message: str) -> None:
    """Say something beside the answers: dim, on stderr."""
    console(err=True).print(message, style="dim", soft_wrap=True)


def print_error(message: str) -> None:
    """Say on stderr, in a line, what went wrong."""
    typer.secho("error:", fg="red", bold=True, nl=False, err=True)
    typer.echo(f" {message}", err=True)


def make_table(*columns: str, left: int = 1) -> "Table":
    """A calm table; the first `left` columns are text, the others numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right")
    return table


def make_facts(facts: dict[str, str]) -> "Table":
    """Names and what is to be said of them, in two columns."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, fact in facts.items():
        table.add_row(name, fact)
    return table


def write_text(text: str, stream: IO[str] | None = None) -> None:
    """Write a model's words as they are; to a terminal without what would control it."""
    stream = stream or sys.stdout
    stream.write(visible(text) if stream.isatty() else text)
    stream.flush()


visible = partial(_CONTROL_CHARACTERS.sub, "\N{REPLACEMENT CHARACTER}")
"""The text with each control character but tab and newline replaced: it can't move the cursor or the like."""


def head(text: str, width: int) -> str:
    """A text's beginning in one line of at most `width` characters."""
    line = " ".join(visible(text[: 4 * width]).split())
    return line if len(line) <= width else line[: width - 1].rstrip() + "…"


def format_seconds(seconds: float | None) -> str:
    """A duration for people: `3.1 ms`, `182 ms`, `1.24 s`."""
    if seconds is None:
        return NONE
    if seconds < 0.0995:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


def format_rate(per_second: float | None) -> str:
    """A number of tokens per second, with as many digits as mean something."""
    if per_second is None:
        return NONE
    return f"{per_second:,.1f}" if per_second < 999.95 else f"{per_second:,.0f}"


def format_count(count: float) -> str:
    """A large number: `134.5 M`."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f}"
