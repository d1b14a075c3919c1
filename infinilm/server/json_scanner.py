"""Reads one JSON value from text in pieces."""

import re

_SPACE = " \t\n\r"
_DIGITS = "0123456789"
_CLOSING = {"{": "}", "[": "]"}
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')

# Numbers may end in these states, at the first character that does not continue them.
_ENDS_OF_NUMBERS = frozenset({"zero", "integer", "fraction", "exponent"})
# If a step depends on the enclosing value, it is one of these instead of a state.
_OPEN, _CLOSE, _SEPARATE = "(open)", "(close)", "(separate)"
_START_STRING, _END_STRING, _END_VALUE = "(start string)", "(end string)", "(end value)"


def _steps() -> dict[str, dict[str, str]]:
    """Return the next state by state and character. Any other character breaks the value."""
    value = dict.fromkeys("{[", _OPEN) | dict.fromkeys("123456789", "integer")
    value |= {'"': _START_STRING, "-": "minus", "0": "zero", "t": "t", "f": "f", "n": "n"}
    steps = {
        "value": value,
        "first value": value | {"]": _CLOSE},
        "key": {'"': _START_STRING},
        "first key": {'"': _START_STRING, "}": _CLOSE},
        "colon": {":": "value"},
        "after value": {",": _SEPARATE, "}": _CLOSE, "]": _CLOSE},
    }
    for state, step in steps.items():
        steps[state] = step | dict.fromkeys(_SPACE, state)
    steps |= {
        "string": {'"': _END_STRING, "\\": "escape"},  # other characters are passed over in runs
        "escape": dict.fromkeys('"\\/bfnrt', "string") | {"u": "hex 1"},
        "minus": dict.fromkeys("123456789", "integer") | {"0": "zero"},
        "zero": {".": "point", "e": "e", "E": "e"},
        "integer": dict.fromkeys(_DIGITS, "integer") | {".": "point", "e": "e", "E": "e"},
        "point": dict.fromkeys(_DIGITS, "fraction"),
        "fraction": dict.fromkeys(_DIGITS, "fraction") | {"e": "e", "E": "e"},
        "e": dict.fromkeys(_DIGITS, "exponent") | {"+": "sign", "-": "sign"},
        "sign": dict.fromkeys(_DIGITS, "exponent"),
        "exponent": dict.fromkeys(_DIGITS, "exponent"),
    }
    for count, following in enumerate(("hex 2", "hex 3", "hex 4", "string"), start=1):
        steps[f"hex {count}"] = dict.fromkeys("0123456789abcdefABCDEF", following)
    for word in ("true", "false", "null"):
        for end in range(1, len(word)):
            steps[word[:end]] = {word[end]: word[: end + 1] if end + 1 < len(word) else _END_VALUE}
    return steps


_STEPS = _steps()


class JsonScanner:
    """Reads one value of RFC 8259 JSON, of any depth. It reads each character once and keeps none."""

    def __init__(self) -> None:
        self.is_done = False
        """Whether the value is complete."""
        self._state = "value"
        self._expected_closings: list[str] = []
        self._is_key = False

    def scan(self, text: str, start: int = 0) -> int:
        """Continue at `text[start]`; return where the value's part of `text` ends.

        That is `len(text)`, unless the value is complete (`is_done`) or the next character is not valid in it.
        """
        pos = start
        while pos < len(text) and not self.is_done:
            if self._state == "string":
                run = _STRING_RUN.match(text, pos)
                pos = run.end() if run else pos
                if pos == len(text):
                    break
            char = text[pos]
            if self._state in _ENDS_OF_NUMBERS and char not in _STEPS[self._state]:
                self._end_value()
            elif self._advance(char):
                pos += 1
            else:
                break
        return pos

    def _advance(self, char: str) -> bool:
        """Advance by one character. Returns False if it breaks the value."""
        step = _STEPS[self._state].get(char)
        if step is None or (step == _CLOSE and self._expected_closings[-1] != char):
            return False
        if step == _OPEN:
            self._expected_closings.append(_CLOSING[char])
            self._state = "first key" if char == "{" else "first value"
        elif step == _SEPARATE:
            self._state = "key" if self._expected_closings[-1] == "}" else "value"
        elif step == _START_STRING:
            self._is_key = self._state in ("key", "first key")
            self._state = "string"
        elif step == _END_STRING and self._is_key:
            self._state = "colon"
        elif step in (_END_STRING, _END_VALUE):
            self._end_value()
        elif step == _CLOSE:
            self._expected_closings.pop()
            self._end_value()
        else:
            self._state = step
        return True

    def _end_value(self) -> None:
        self._state = "after value"
        self.is_done = not self._expected_closings
