"""Formats numbers, tables and model output for a terminal."""

import re
import sys
from functools import partial
from shutil import get_terminal_size
from typing import IO, TYPE_CHECKING, Self

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
    if not sys.stderr.isatty():
        print(message, file=sys.stderr)  # saves the time of importing the console
        return
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


class AnswerWriter:
    """Writes a streamed answer: on a terminal wrapped at words, elsewhere unchanged.

    On a terminal, a word is written when it is complete, and control characters are replaced.
    """

    def __init__(self, stream: IO[str] | None = None, width: int | None = None) -> None:
        self._stream = stream or sys.stdout
        self._is_terminal = self._stream.isatty()
        self._width = width or get_terminal_size().columns
        self._column = 0
        self._spaces = self._word = ""

    def write(self, text: str) -> None:
        if self._is_terminal:
            text = "".join(map(self._add, visible(text)))
        self._stream.write(text)
        self._stream.flush()

    def end(self) -> None:
        """Write the rest, and end the line."""
        self._stream.write(self._end_word() + "\n")
        self._stream.flush()

    def _add(self, character: str) -> str:
        """Add a character. Returns the text that can be written now."""
        if character == "\n":
            text = self._end_word() + "\n"
            self._column, self._spaces = 0, ""
            return text
        if character.isspace():
            text = self._end_word()
            self._spaces += " " * 4 if character == "\t" else character
            return text
        from rich.cells import cell_len

        is_wide = cell_len(character) > 1  # a line may end before and after it
        text = self._end_word() if is_wide else ""
        self._word += character
        return text + self._end_word() if is_wide or len(self._word) >= self._width else text

    def _end_word(self) -> str:
        if not self._word:
            return ""
        from rich.cells import cell_len

        size = cell_len(self._word)
        is_next_line = self._column > 0 and self._column + len(self._spaces) + size > self._width
        text = f"\n{self._word}" if is_next_line else self._spaces + self._word
        self._column = size if is_next_line else self._column + len(self._spaces) + size
        self._spaces = self._word = ""
        return text


class ReasoningWriter:
    """Writes a model's reasoning to stderr, faint on a terminal; nothing, if there is none."""

    def __init__(self) -> None:
        self._writer: AnswerWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def write(self, text: str) -> None:
        if text and self._writer is None:
            self._writer = AnswerWriter(sys.stderr)
            self._style("\033[2m")
        if self._writer is not None:
            self._writer.write(text)

    def end(self) -> None:
        """End the reasoning."""
        if self._writer is not None:
            self._writer.end()
            self._style("\033[0m\n")
        self._writer = None

    def _style(self, code: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(code)
            sys.stderr.flush()


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
