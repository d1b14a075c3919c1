"""Turns a stream of token ids into text incrementally, and detects stop strings in it."""

import codecs
from collections.abc import Collection, Sequence

from infinilm.errors import InvalidTypeError, InvalidValueError
from infinilm.text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes ids incrementally.

    However the ids are split into calls, the pieces add up to `tokenizer.decode(ids, skip_special_tokens)`, and
    returned text never changes: the bytes of an unfinished character are held back. Special tokens among `kept_ids` are
    never skipped.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, kept_ids: Collection[int] = ()
    ) -> None:
        skipped_ids = tokenizer.special_ids.difference(kept_ids) if skip_special_tokens else frozenset[int]()
        self._stream = (_ByteStream if tokenizer.is_byte_level else _WindowStream)(tokenizer, skipped_ids)

    def feed(self, ids: Sequence[int]) -> str:
        """Decode the next ids; return the text that is now final."""
        return self._stream.feed(ids)

    def finish(self) -> str:
        """Return the rest of the text and reset."""
        return self._stream.finish()


class _ByteStream:
    """For byte-level tokenizers: every token is a byte string, and the text is the UTF-8 decoding of all."""

    def __init__(self, tokenizer: Tokenizer, skipped_ids: frozenset[int]) -> None:
        self._bytes_by_id = tokenizer.bytes_by_id
        self._skipped_ids = skipped_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Sequence[int]) -> str:
        found, skipped_ids = self._bytes_by_id, self._skipped_ids
        return self._utf8.decode(b"".join([found[token_id] for token_id in ids if token_id not in skipped_ids]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """For all other tokenizers: decode a short window of ids again and return what is new.

        earlier ids  |  window: a token of context, then new ids  |  run: byte tokens
        forgotten    |  the context's text was returned before    |  held back

    The context is there because decoders treat a text's first token specially (they strip its space). A run
    of byte tokens is decoded as a whole, to characters if all of it is valid UTF-8 and to U+FFFD otherwise,
    so nothing of it is final before it ends.
    """

    def __init__(self, tokenizer: Tokenizer, skipped_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = skipped_ids
        self._start_over()

    def feed(self, ids: Sequence[int]) -> str:
        tokenizer = self._tokenizer
        has_grown = False
        for token_id in ids:
            if token_id in self._skipped_ids or tokenizer.content(token_id) is None:
                continue
            if tokenizer.is_byte_token(token_id):
                self._run.append(token_id)
            else:
                self._window += [*self._run, token_id]
                self._run.clear()
                has_grown = True
        if not has_grown:
            return ""
        text = tokenizer.decode(self._window, skip_special_tokens=False)
        if tokenizer.can_split_characters and text.endswith("\ufffd"):
            return ""
        piece = text[self._num_returned :]
        self._keep_context()
        return piece

    def finish(self) -> str:
        text = self._tokenizer.decode([*self._window, *self._run], skip_special_tokens=False)
        rest = text[self._num_returned :]
        self._start_over()
        return rest

    def _start_over(self) -> None:
        self._window: list[int] = []
        self._run: list[int] = []
        self._num_returned = 0  # characters of the window's text

    def _keep_context(self) -> None:
        """Shrink the window to its last token that is not empty: only that one is a first token to decoders.

        One empty token after it stays, because it separates runs of byte tokens.
        """
        start = len(self._window) - 1
        while start > 0 and not self._tokenizer.content(self._window[start]):
            start -= 1
        self._window = self._window[start : start + 2]
        self._num_returned = len(self._tokenizer.decode(self._window, skip_special_tokens=False))


class StopStrings:
    """Detects stop strings in text that arrives in pieces.

    The match that starts earliest counts. Text that may still become part of a match is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise InvalidTypeError(f"stops must be a list of strings, not the string {stops!r}")
        for index, stop in enumerate(stops):
            if not isinstance(stop, str):
                raise InvalidTypeError(f"stops[{index}] must be a string, not {type(stop).__name__}")
            if not stop:
                raise InvalidValueError(f"stops[{index}] is empty; an empty string would stop at once")
        self._stops = tuple(dict.fromkeys(stops))
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._max_held_chars = max(map(len, self._stops), default=1) - 1
        self._held = ""
        self.matched: str | None = None  # the stop string that was found

    def feed(self, text: str) -> tuple[str, bool]:
        """Add the next piece; return the text that can be shown, and whether a stop string ended it."""
        if self.matched is not None:
            return "", True
        if not self._stops:
            return text, False
        text = self._held + text
        match_start, stop = self._find(text)
        held_start = self._find_held(text, match_start)
        if stop is not None and held_start == match_start:
            self._held, self.matched = "", stop
            return text[:match_start], True
        self._held = text[held_start:]
        return text[:held_start], False

    def finish(self) -> str:
        """Return the text held back, up to a stop string if it holds one (then `matched` is that string)."""
        if self.matched is not None:
            return ""
        text, self._held = self._held, ""
        match_start, self.matched = self._find(text)
        return text[:match_start]

    def _find(self, text: str) -> tuple[int, str | None]:
        """The start of the earliest match and its stop string, or the text's length and None."""
        matches = [(start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(matches, default=(len(text), None))

    def _find_held(self, text: str, end: int) -> int:
        """The first index before `end` from which the text may grow into a stop string, or `end`."""
        for start in range(max(0, len(text) - self._max_held_chars), end):
            if text[start] in self._first_chars:
                tail = text[start:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return start
        return end
