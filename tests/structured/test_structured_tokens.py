"""Which tokens are let through: those that are text as its reader will see it, and stop ids where it may end."""

import re
from typing import Any

import numpy as np
import pytest
from narrow import present
from structured.structured_helpers import Source

from infinilm.errors import InvalidValueError
from infinilm.sampling_params import SamplingParams
from infinilm.structured.matcher import token_mask
from infinilm.structured.vocabulary import Vocabulary
from infinilm.structured_output import StructuredOutput, TokenMatcher
from infinilm.text.tokenizer import Tokenizer


def allowed(source: Source, matcher: TokenMatcher) -> list[int]:
    mask = np.zeros(-(-source.vocab_size // 32), dtype=np.int32)
    matcher.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def tokens_after(
    source: Source, form: dict, text: str, *, stop_ids: list[int] | None = None, min_tokens: int = 0
) -> set[str]:
    """The tokens that may follow `text`, spelled by the model's tokenizer; stop ids as numbers."""
    stop_ids = [source.eos_id] if stop_ids is None else stop_ids
    grammar = source.compiler.compile(StructuredOutput(**form))
    output_ids = source.tokenizer.encode(text, add_special_tokens=False)
    token_ids = allowed(source, grammar.matcher(output_ids, stop_ids, min_tokens))
    return {str(token_id) if token_id in stop_ids else source.tokenizer.token(token_id) for token_id in token_ids}


@pytest.fixture(scope="module")
def sentencepiece():
    """Pieces that carry their space, and a decoder that drops the first one."""
    pieces = ["▁", "▁a", "▁b", "▁{", "a", "b", "ab", "{", "}", '"', ":", '"}', "▁▁", "1"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    tokenizer = Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }
    )
    source = Source.of(present(tokenizer))
    yield source
    source.compiler.close()


@pytest.mark.parametrize(
    "form",
    [
        {"choice": ["a", " a", "  a", "", " "]},
        {"choice": ["ab{}", "é", "日本"]},
        {"regex": " ?[ab]{1,4}"},
        {"json_object": True},
        {
            "json_schema": {
                "type": "object",
                "properties": {"a": {"const": 1}},
                "required": ["a"],
                "additionalProperties": False,
            }
        },
        {"grammar": 'start: " " A\nA: /[ab]/'},
    ],
    ids=str,
)
def test_the_first_space_that_is_dropped_is_no_part_of_the_answer(form, sentencepiece):
    texts = sentencepiece.texts(form, seeds=20)
    if "choice" in form:
        assert set(texts) <= set(form["choice"])
        assert len(set(texts)) > 1
    regex = {"regex": form.get("regex"), "grammar": " [ab]", "json_schema": r'\{\s*"a"\s*:\s*1\s*\}'}.get(
        next(iter(form))
    )
    if regex is not None:
        assert [text for text in texts if not re.fullmatch(regex, text)] == []


def test_tokens_that_are_no_text_are_never_allowed(tiny):
    """331 logits for 300 tokens: the rest is padding."""
    forms: list[dict[str, Any]] = [{"regex": "(?s:.*)"}, {"grammar": "start: <[0-330]>"}, {"grammar": "start: <[^5]>"}]
    for form in forms:
        matcher = tiny.compiler.compile(StructuredOutput(**form)).matcher([], [1], 0)
        token_ids = allowed(tiny, matcher)
        assert max(token_ids) < 300
        assert len(token_ids) > 100
    assert 0 not in allowed(tiny, tiny.compiler.compile(StructuredOutput(regex="(?s:.*)")).matcher([], [1], 0))


def test_masks_of_tokens():
    assert token_mask([0, 31, 32], 33).tolist() == [1 - 2**31, 1]
    assert token_mask([], 64).tolist() == [0, 0]


def test_the_vocabulary_spells_what_the_detokenizer_shows(real, tiny):
    for source in (real, tiny):
        vocabulary = Vocabulary.of(source.tokenizer, source.vocab_size)
        assert not vocabulary.drops_first_space
        text = 'The "quick" brown fox: é 日本 🙂\n\t{}'
        token_ids = source.tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(vocabulary.tokens[token_id] for token_id in token_ids).decode() == text
        assert source.eos_id in vocabulary.special_ids


def test_forced_text_is_spelled_as_the_model_would(real, sentencepiece):
    """Where there is no choice of text there is none of tokens either."""
    text = "The quick brown fox jumps over it"
    for source, choice in ((real, text), (sentencepiece, "ab" * 3)):
        [answer] = source.answers({"choice": [choice]}, seeds=1)
        assert answer.text == choice
        assert answer.token_ids[:-1] == source.tokenizer.encode(choice, add_special_tokens=False)


def test_the_end_is_allowed_where_the_answer_is_complete(real):
    form = {"regex": "a(bc?)?"}
    end = str(real.eos_id)
    assert end in tokens_after(real, form, "a")
    assert end in tokens_after(real, form, "ab")
    assert end not in tokens_after(real, form, "")
    assert tokens_after(real, form, "abc") == {end}


def test_stop_ids_end_an_answer_only_where_it_is_complete(real):
    brace = real.tokenizer.encode("}", add_special_tokens=False)
    assert len(brace) == 1
    stop_ids = [*brace, 7]
    form = {"json_schema": {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False}}
    # The stop id is cut off, so it can't be the brace that the text needs; other tokens have it too.
    assert "}" not in tokens_after(real, form, "{", stop_ids=stop_ids)
    assert tokens_after(real, form, "{}", stop_ids=stop_ids) == {"7", str(brace[0])}
    with pytest.raises(InvalidValueError, match="no token is left but one of stop_token_ids"):
        tokens_after(real, {"regex": "a\\}"}, "a", stop_ids=stop_ids)


def test_a_grammar_may_name_the_special_token_that_ends_it(real):
    end = str(real.eos_id)
    form = {"grammar": 'start: "ab" <|im_end|>'}
    assert tokens_after(real, form, "ab") == {end}
    assert end not in tokens_after(real, form, "")
    assert end not in tokens_after(real, {"grammar": 'start: "ab" <|im_end|> "c"'}, "a")
    assert real.texts(form) == ["ab"] * 4


def test_special_tokens_are_text_to_nobody_but_a_grammar_that_names_them(real):
    first = real.answers({"grammar": 'start: <|im_start|> "a"'}, seeds=1)[0]
    assert first.token_ids[0] == real.tokenizer.backend.token_to_id("<|im_start|>")
    assert first.text == "a"
    assert set(real.texts({"choice": ["<|im_start|>"]})) == {"<|im_start|>"}


def test_min_tokens_puts_off_the_end_as_long_as_something_else_may_come(real):
    end = str(real.eos_id)
    assert end not in tokens_after(real, {"regex": "a+"}, "a", min_tokens=2)
    assert end in tokens_after(real, {"regex": "a+"}, "a", min_tokens=1)
    assert tokens_after(real, {"regex": "a"}, "a", min_tokens=5) == {end}
    lengths = [len(answer.token_ids) for answer in real.answers({"regex": "[a-z ]*"}, min_tokens=20)]
    assert min(lengths) > 20
    assert [len(answer.token_ids) for answer in real.answers({"choice": ["yes"]}, min_tokens=20)] == [2] * 4


def test_a_matcher_that_resumes_allows_what_one_that_went_on_allows(real):
    form = StructuredOutput(json_schema={"type": "array", "items": {"enum": ["one", "two", 3]}, "minItems": 3})
    output_ids = real.tokenizer.encode('["one", 3, "two", "two"]', add_special_tokens=False)
    grammar = real.compiler.compile(form)
    steady = grammar.matcher([], [real.eos_id], 0)
    for number, token_id in enumerate(output_ids):
        assert allowed(real, grammar.matcher(output_ids[:number], [real.eos_id], 0)) == allowed(real, steady)
        steady.advance(token_id)
    assert allowed(real, steady) == [real.eos_id]
    steady.advance(real.eos_id)
    assert allowed(real, steady) == [real.eos_id]


def test_a_token_that_does_not_belong_is_told_with_the_next_mask(real):
    matcher = real.compiler.compile(StructuredOutput(regex="[0-9]+")).matcher([], [real.eos_id], 0)
    matcher.advance(real.tokenizer.encode("x", add_special_tokens=False)[0])
    with pytest.raises(InvalidValueError, match="can't continue with this regex"):
        allowed(real, matcher)
    # Others are not concerned.
    assert real.texts({"regex": "[0-9]+"})


def test_no_tokenizer_and_no_end(real):
    from infinilm.structured.compiler import GrammarCompiler

    params = SamplingParams(structured=StructuredOutput(json_object=True))
    with pytest.raises(InvalidValueError, match="the checkpoint has no tokenizer"):
        GrammarCompiler(None, 100).grammar_of(params, [1])
    with pytest.raises(InvalidValueError, match="give stop_token_ids"):
        real.compiler.grammar_of(params, [])
    assert real.compiler.grammar_of(SamplingParams(), []) is None
