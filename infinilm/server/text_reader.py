"""Reads text that arrives in pieces, with generators that pause until the next piece."""

import re
from collections.abc import Callable, Generator

from infinilm.server.json_scanner import JsonScanner

SPACE = re.compile(r"[ \t\n\r]*")
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


class Source:
    """Text in pieces, with a position to read from and a mark to return to.

        earlier pieces | text: ... mark ... pos ...

    Text before the mark is dropped; the mark may be at the beginning of the earlier pieces.
    """

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.is_finished = False
        self._mark = 0
        self._earlier: list[str] = []

    def append(self, text: str) -> None:
        """Add a piece; all before it must have been read."""
        if self._mark < len(self.text):
            self._earlier.append(self.text[self._mark :])
        self.text, self.pos, self._mark = text, 0, 0

    def mark(self) -> None:
        self._earlier.clear()
        self._mark = self.pos

    def rewind(self) -> None:
        if self._earlier:
            self.text = "".join([*self._earlier, self.text])
            self._earlier.clear()
        self.pos = self._mark

    def cut(self) -> str:
        """Return the text from the mark to the position, and move the mark to the position."""
        taken = "".join([*self._earlier, self.text[self._mark : self.pos]])
        self.mark()
        return taken


class TextReader:
    """Steps of reading. Each pauses (`yield`) when it needs more text. After a failed one the position is undefined."""

    def __init__(self) -> None:
        self._source = Source()

    def _has_more(self) -> Generator[None, None, bool]:
        """Wait for text; False at the end."""
        source = self._source
        while source.pos == len(source.text):
            if source.is_finished:
                return False
            yield
        return True

    def _is_next(self, char: str) -> Generator[None, None, bool]:
        return (yield from self._has_more()) and self._source.text[self._source.pos] == char

    def _accept(self, char: str) -> Generator[None, None, bool]:
        is_next = yield from self._is_next(char)
        self._source.pos += is_next
        return is_next

    def _accept_all(self, chars: str) -> Generator[None, None, bool]:
        for char in chars:
            if not (yield from self._accept(char)):
                return False
        return True

    def _accept_any(self, *options: str) -> Generator[None, None, str | None]:
        """Read one of several texts, none of which begins with another."""
        read = ""
        while read not in options:
            if not (yield from self._has_more()):
                return None
            read += self._source.text[self._source.pos]
            if not any(option.startswith(read) for option in options):
                return None
            self._source.pos += 1
        return read

    def _skip_space(self) -> Generator[None, None, None]:
        yield from self._read_run(SPACE)

    def _read_run(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Read all characters that match `pattern`, a repeated class of characters."""
        source = self._source
        pieces: list[str] = []
        while (yield from self._has_more()):
            start = source.pos
            source.pos = end_of_match(pattern, source.text, start)
            pieces.append(source.text[start : source.pos])
            if source.pos < len(source.text):
                break
        return "".join(pieces)

    def _read_until(self, end: str, max_chars: int | None = None) -> Generator[None, None, str | None]:
        """Read up to and including `end`. Returns the text before it; None if over `max_chars`, or without an `end`."""
        source = self._source
        pieces: list[str] = []
        num_chars = 0
        tail = ""
        while (yield from self._has_more()):
            piece = source.text[source.pos :]
            window = tail + piece
            if (place := window.find(end)) >= 0:
                num_used = place + len(end) - len(tail)
                source.pos += num_used
                text = "".join([*pieces, piece[:num_used]])[: -len(end)]
                return None if max_chars is not None and len(text) > max_chars else text
            source.pos = len(source.text)
            pieces.append(piece)
            num_chars += len(piece)
            if max_chars is not None and num_chars > max_chars + len(end):
                return None
            tail = window[1 - len(end) :] if len(end) > 1 else ""
        return None

    def _pass_on_until(
        self, ends: tuple[str, ...], pass_on: Callable[[str], None], *, is_stripped: bool
    ) -> Generator[None, None, str | None]:
        """Pass on the text before one of `ends`, and read that end. Returns the end; None if the text has none.

        `is_stripped`: the white space before the end is dropped.
        """
        source = self._source
        space = r"[ \t\n\r]*+" if is_stripped else ""
        firsts = "".join({re.escape(end[0]) for end in ends})
        plain_text = re.compile(rf"(?:{space}[^{firsts}])*+")
        source.mark()
        while (yield from self._has_more()):
            end = end_of_match(plain_text, source.text, source.pos)
            if end > source.pos:
                source.pos = end
                pass_on(source.cut())
                continue
            if is_stripped:
                yield from self._skip_space()
            if found := (yield from self._accept_any(*ends)):
                source.mark()
                return found
            source.rewind()
            if is_stripped:
                yield from self._skip_space()
            if (yield from self._has_more()):
                source.pos += 1
                pass_on(source.cut())
        source.mark()
        return None

    def _read_value(self, pass_on: Callable[[str], None] | None = None) -> Generator[None, None, bool]:
        """Read a JSON value and pass on its text piece by piece. Returns False if it breaks off."""
        source = self._source
        scanner = JsonScanner()
        while not scanner.is_done and (yield from self._has_more()):
            start = source.pos
            source.pos = scanner.scan(source.text, start)
            if pass_on is not None and source.pos > start:
                pass_on(source.text[start : source.pos])
            if source.pos < len(source.text):
                break
        return scanner.is_done

    def _read_brackets(self, quotes: tuple[str, ...]) -> Generator[None, None, str | None]:
        """Read up to the bracket that closes the one read before. Returns the text between; None if it stays open.

        Brackets between `quotes` do not count. Quotes of one character may be escaped.
        """
        source = self._source
        read: list[str] = []
        depth, quote, is_escaped = 1, "", False
        while (yield from self._has_more()):
            char = source.text[source.pos]
            source.pos += 1
            read.append(char)
            if is_escaped:
                is_escaped = False
            elif quote:
                is_escaped = char == "\\" and len(quote) == 1
                if char == quote[-1] and "".join(read[-len(quote) :]) == quote:
                    quote = ""
            elif begun := [each for each in quotes if char == each[-1] and "".join(read[-len(each) :]) == each]:
                quote = begun[0]
            else:
                depth += _BRACKETS.get(char, 0)
                if not depth:
                    return "".join(read[:-1])
        return None


def end_of_match(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    return match.end() if match else start
