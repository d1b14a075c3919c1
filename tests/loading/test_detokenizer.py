"""Streaming text: pieces add up to decoding at once, and stop strings are found wherever the cuts fall."""

from collections.abc import Sequence
from functools import cache

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from narrow import present
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from infinilm.errors import InvalidTypeError, InvalidValueError
from infinilm.text.detokenizer import Detokenizer, StopStrings
from infinilm.text.tokenizer import Tokenizer

KINDS = ["byte-level", "sentencepiece", "metaspace", "wordpiece", "word-level", "byte-level-and-more"]


@cache
def make_tokenizer(kind: str) -> Tokenizer:
    """Vocabularies whose ids, in any order, meet every case: bytes, specials, empty tokens, parts of all."""
    if kind.startswith("byte-level"):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        pieces = [*alphabet, "he", "Ġhe", "ðŁ", "Ķ¥", "ðŁĶ¥", "âĤ", "¬Ġ", ""]
        backend = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(pieces)}, merges=[]))
        steps = [decoders.ByteLevel()] if kind == "byte-level" else [decoders.ByteLevel(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(steps)
    elif kind == "sentencepiece":
        pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁▁", "▁hello", "lo", "�", "日", ""]
        backend = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(pieces)}, merges=[]))
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        pieces = ["▁", "▁hello", "▁▁a▁", "##ing", "word", "<0x41>", "日", ".", "", "[UNK]"]
        backend = tokenizers.Tokenizer(models.WordLevel({t: i for i, t in enumerate(pieces)}, unk_token="[UNK]"))
        if kind == "metaspace":
            backend.decoder = decoders.Metaspace()
        elif kind == "wordpiece":
            backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<é>", special=True)])
    backend.add_tokens([AddedToken("<think> x", special=False)])
    return Tokenizer(backend)


@st.composite
def streams(draw: st.DrawFn, kind: str) -> tuple[list[int], list[list[int]]]:
    """Random ids (two of which have no token) and the same ids cut into feeds, empty ones among them."""
    tokenizer = make_tokenizer(kind)
    size = tokenizer.vocab_size
    euro = [f"<0x{byte:02X}>" for byte in "€".encode()]
    favourites = map(tokenizer.backend.token_to_id, ["", "</s>", "▁hello", "▁", *euro])
    favourite_ids = [size + 1, *(token_id for token_id in favourites if token_id is not None)]
    ids = draw(st.lists(st.sampled_from(favourite_ids) | st.integers(0, size + 1)))
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)))))
    return ids, [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def check_stream(tokenizer: Tokenizer, ids: list[int], feeds: list[list[int]], skip: bool) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    text = ""
    for count in range(len(feeds)):
        text += detokenizer.feed(feeds[count])
        fed = [token_id for feed in feeds[: count + 1] for token_id in feed]
        assert tokenizer.decode(fed, skip).startswith(text)
    text += detokenizer.finish()
    assert text == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_any_ids_cut_anyhow_add_up_to_decoding_at_once(kind: str, data: st.DataObject, skip: bool) -> None:
    ids, feeds = data.draw(streams(kind))
    check_stream(make_tokenizer(kind), ids, feeds, skip)


@pytest.mark.parametrize("kind", ["byte-level", "byte-level-and-more", "sentencepiece"])
@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="ab €日🔥\u0301�", max_size=20), cut=st.integers(0, 3))
def test_real_text_never_shows_part_of_a_character(kind: str, text: str, cut: int) -> None:
    tokenizer = make_tokenizer(kind)
    if kind == "sentencepiece":
        ids = [present(tokenizer.backend.token_to_id(f"<0x{byte:02X}>")) for byte in text.encode()]
    else:
        ids = [bytes_to_id(tokenizer)[byte] for byte in text.encode()]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.feed(ids[at : at + cut + 1]) for at in range(0, len(ids), cut + 1)]
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "".join(pieces).count("�") == text.count("�")


@cache
def bytes_to_id(tokenizer: Tokenizer) -> dict[int, int]:
    return {tokenizer.token_bytes(i)[0]: i for i in range(256)}


def test_an_emoji_appears_with_its_last_byte() -> None:
    tokenizer = make_tokenizer("byte-level")
    ids = [bytes_to_id(tokenizer)[byte] for byte in "a🔥b".encode()]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.feed([i]) for i in ids] == ["a", "", "", "", "🔥", "b"]
    assert detokenizer.finish() == ""


def test_a_run_of_byte_tokens_appears_when_it_ends() -> None:
    tokenizer = make_tokenizer("sentencepiece")

    def token_id(token: str) -> int:
        return present(tokenizer.backend.token_to_id(token))

    euro = [token_id(f"<0x{byte:02X}>") for byte in "€".encode()]
    detokenizer = Detokenizer(tokenizer)
    # A skipped special token does not end a run; the broken second run is one U+FFFD for each byte.
    stream = [
        token_id("▁hello"),
        *euro[:2],
        token_id("</s>"),
        euro[2],
        token_id("▁"),
        euro[0],
        token_id("日"),
    ]
    assert [detokenizer.feed([i]) for i in stream] == ["hello", "", "", "", "", "€ ", "", "�日"]
    assert detokenizer.feed(euro[:2]) == ""
    assert detokenizer.finish() == "��"


def test_only_the_first_space_of_a_text_is_stripped() -> None:
    tokenizer = make_tokenizer("sentencepiece")
    end, hello, empty = (present(tokenizer.backend.token_to_id(token)) for token in ("</s>", "▁hello", ""))
    detokenizer = Detokenizer(tokenizer)
    stream = [end, hello, end, hello, empty, hello]
    assert [detokenizer.feed([i]) for i in stream] == ["", "hello", "", " hello", "", " hello"]


def test_finish_starts_over() -> None:
    for kind in KINDS:
        tokenizer = make_tokenizer(kind)
        detokenizer = Detokenizer(tokenizer)
        ids = list(range(min(tokenizer.vocab_size, 300)))
        first = detokenizer.feed(ids) + detokenizer.finish()
        assert first == detokenizer.feed(ids) + detokenizer.finish() == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_the_window_stays_short_in_a_long_stream(kind: str) -> None:
    """Decoding again what was returned long ago would make long answers quadratic."""
    tokenizer = make_tokenizer(kind)
    decoded_lengths = []
    decode = tokenizer.decode

    class Counting(Tokenizer):
        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            decoded_lengths.append(len(ids))
            return decode(ids, skip_special_tokens)

    counting = Counting(tokenizer.backend)
    detokenizer = Detokenizer(counting)
    # Every token but single bytes, whose runs must be kept.
    ids = [i for i in range(tokenizer.vocab_size) if not tokenizer.is_byte_token(i)]
    ids = [i for i in ids if "�" not in tokenizer.decode([i])] * 5
    text = "".join([detokenizer.feed([i]) for i in ids] + [detokenizer.finish()])
    assert text == decode(ids)
    assert max(decoded_lengths, default=0) <= 4


def plain_search(text: str, stops: list[str]) -> tuple[str, bool]:
    starts = [text.find(stop) for stop in stops if stop in text]
    return (text[: min(starts)], True) if starts else (text, False)


@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_stop_strings_equal_a_plain_search_however_the_text_is_cut(data: st.DataObject) -> None:
    text = data.draw(st.text(alphabet="abc", max_size=24))
    stops = data.draw(st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    watcher = StopStrings(stops)
    shown = ""
    stopped = False
    for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True):
        piece, stopped = watcher.feed(text[a:b])
        shown += piece
        assert plain_search(text, stops)[0].startswith(shown)
    if not stopped:
        shown += watcher.finish()
    assert (shown, watcher.matched is not None) == plain_search(text, stops)
    assert watcher.matched is None or text[len(shown) :].startswith(watcher.matched)


def test_text_is_held_only_while_it_may_become_a_stop_string() -> None:
    watcher = StopStrings(["</end>", "STOP"])
    assert watcher.feed("a<") == ("a", False)
    assert watcher.feed("/e") == ("", False)
    assert watcher.feed("x ST") == ("</ex ", False)
    assert watcher.feed("O") == ("", False)
    assert watcher.feed("P and more") == ("", True)
    assert watcher.matched == "STOP"
    assert watcher.feed("ignored") == ("", True)
    assert watcher.finish() == ""


def test_a_match_waits_for_one_that_began_earlier() -> None:
    watcher = StopStrings(["abcd", "b"])
    assert watcher.feed("xabc") == ("x", False)
    assert watcher.feed("d") == ("", True)
    assert watcher.matched == "abcd"
    watcher = StopStrings(["abcd", "b"])
    assert watcher.feed("xabc") == ("x", False)
    assert watcher.feed("e") == ("a", True)
    assert watcher.matched == "b"


def test_finish_flushes_what_was_held_and_settles_a_waiting_match() -> None:
    watcher = StopStrings(["</end>"])
    assert watcher.feed("a</en") == ("a", False)
    assert watcher.finish() == "</en"
    assert watcher.matched is None
    watcher = StopStrings(["abcd", "b"])
    assert watcher.feed("abc") == ("", False)
    assert (watcher.finish(), watcher.matched) == ("a", "b")


def test_without_stop_strings_text_passes() -> None:
    watcher = StopStrings([])
    assert watcher.feed("abc") == ("abc", False)
    assert watcher.finish() == ""


@pytest.mark.parametrize(
    ("stops", "error", "message"),
    [
        ("abc", InvalidTypeError, "not the string 'abc'"),
        (["a", ""], InvalidValueError, r"stops\[1\] is empty"),
        (["a", 5], InvalidTypeError, r"stops\[1\] must be a string, not int"),
    ],
)
def test_bad_stop_strings_are_refused(stops: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        StopStrings(stops)
