"""The scanner agrees with Python's json on what is a value, on what may become one, and on where it breaks."""

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinilm.server.json_scanner import JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
CHARS = '{}[],:"\\ \n01e.-+tfnrualsx/\x01é🔥'
UNFINISHED = ["", '"', 'n"', '0"', '00"', '000"', '0000"', "0", '"":0']
UNFINISHED += [word[start:] for word in ("true", "false", "null") for start in range(1, len(word))]
STRING = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?$)', re.DOTALL)


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=lambda name: json.loads(""))
    except ValueError:
        return False
    return True


def can_become_json(text: str) -> bool:
    """Whether some ending makes the text JSON: one that finishes a token, then a member, then all brackets."""
    open_brackets = ""
    for char in STRING.sub("", text):
        if char in "{[":
            open_brackets += char
        elif char in "}]":
            open_brackets = open_brackets[:-1]
    closings = open_brackets[::-1].translate(str.maketrans("{[", "}]"))
    return any(is_json(text + token + member + closings) for token in UNFINISHED for member in ("", ":0"))


def scan(text: str) -> tuple[int, bool]:
    scanner = JsonScanner()
    return scanner.scan(text), scanner.is_done


@settings(max_examples=200, deadline=None)
@given(value=VALUES, is_ascii=st.booleans(), indent=st.sampled_from([None, 1]), rest=st.sampled_from(["", ",", "}x"]))
def test_a_value_is_read_to_its_end_and_no_further(
    value: object, is_ascii: bool, indent: int | None, rest: str
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    end, is_done = scan(text + rest)
    assert end == len(text)
    assert is_done or (not rest and isinstance(value, int | float))  # a number at the end may go on


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_it_breaks_exactly_where_no_ending_could_help(data: st.DataObject) -> None:
    text = json.dumps(data.draw(VALUES), ensure_ascii=data.draw(st.booleans()))
    at = data.draw(st.integers(0, len(text)))
    inserted = data.draw(st.text(alphabet=CHARS, max_size=3))
    text = text[:at] + inserted + text[at + data.draw(st.integers(0, 2)) :]
    end, is_done = scan(text)
    assert can_become_json(text[:end])
    if is_done:
        assert is_json(text[:end])
    elif end < len(text):
        assert not can_become_json(text[: end + 1])


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=CHARS, max_size=12))
def test_arbitrary_text_is_judged_as_json_judges_it(text: str) -> None:
    end, is_done = scan(text)
    if is_json(text):
        assert end == len(text.rstrip(" \n"))
    assert end == len(text) or is_done or not can_become_json(text[: end + 1])


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=CHARS, max_size=20) | VALUES.map(json.dumps), cuts=st.lists(st.integers(0, 40)))
def test_pieces_are_scanned_as_the_whole(text: str, cuts: list[int]) -> None:
    scanner = JsonScanner()
    consumed = 0
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in itertools.pairwise(edges):
        if consumed == start:
            consumed = start + scanner.scan(text[start:end])
    assert (consumed, scanner.is_done) == scan(text)


@pytest.mark.parametrize(
    "text",
    [
        "01",
        "1.",
        "1.e3",
        "-",
        "+1",
        ".5",
        "tru",
        "NaN",
        '"\\x"',
        '"\\u12g4"',
        '"\n"',
        "[1,]",
        '{"a":1,}',
        "{1:2}",
        "[1}",
        '{"a"]',
    ],
)
def test_what_python_and_others_tolerate_is_not_json(text: str) -> None:
    end, is_done = scan(text + " ")
    assert not is_done or end < len(text)


def test_depth_has_no_limit() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    assert scan(deep) == (len(deep), True)
