"""Answers built from tokens: text, stop strings and ends, however many tokens a step brings."""

import pytest
from narrow import present
from tiny_tokenizer import save_tokenizer

from infinilm.outputs import FinishReason
from infinilm.text.answer import Answer
from infinilm.text.tokenizer import Tokenizer

EOS = 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return present(Tokenizer.from_directory(directory))


@pytest.fixture
def ids(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode("abcdefgh", add_special_tokens=False)


def build(answer: Answer, token_ids: list[int], num_per_step: int, finish_reason: FinishReason) -> str:
    """Append tokens in steps, as an engine does that knows no stop strings."""
    text = ""
    for start in range(0, len(token_ids), num_per_step):
        is_last = start + num_per_step >= len(token_ids)
        text += answer.append(token_ids[start : start + num_per_step], finish_reason if is_last else None)
        if answer.is_done:
            break
    assert text == answer.text
    return text


@pytest.mark.parametrize("num_per_step", [1, 2, 3, 9])
def test_a_stop_string_ends_the_answer_at_the_same_token(
    tokenizer: Tokenizer, ids: list[int], num_per_step: int
) -> None:
    answer = Answer(tokenizer, stops=["def", "fgh"])
    assert build(answer, [*ids, EOS], num_per_step, "stop") == "abc"
    assert (answer.finish_reason, answer.stop_reason, answer.num_tokens) == ("stop", "def", 6)
    assert not answer.ends_with_token


@pytest.mark.parametrize("num_per_step", [1, 2, 3, 9])
def test_stop_strings_count_from_the_least_number_of_tokens_on(
    tokenizer: Tokenizer, ids: list[int], num_per_step: int
) -> None:
    answer = Answer(tokenizer, stops=["bc", "fg"], min_tokens=4)
    assert build(answer, ids, num_per_step, "length") == "abcde"
    assert (answer.finish_reason, answer.stop_reason, answer.num_tokens) == ("stop", "fg", 7)


@pytest.mark.parametrize("num_per_step", [1, 2, 9])
def test_the_token_that_ends_an_answer_is_not_text(tokenizer: Tokenizer, ids: list[int], num_per_step: int) -> None:
    answer = Answer(tokenizer, stops=["x"])
    assert build(answer, [*ids, ids[0]], num_per_step, "stop") == "abcdefgh"
    assert (answer.ends_with_token, answer.num_tokens) == (True, 9)
    answer = Answer(tokenizer)
    assert build(answer, [*ids, ids[0]], num_per_step, "length") == "abcdefgha"
    assert not answer.ends_with_token


def test_text_that_may_become_a_stop_string_is_held_back(tokenizer: Tokenizer, ids: list[int]) -> None:
    answer = Answer(tokenizer, stops=["cdx"])
    assert [answer.append([token_id]) for token_id in ids[:5]] == ["a", "b", "", "", "cde"]
    answer = Answer(tokenizer, stops=["cdx"])
    assert answer.append(ids[:4], "length") == "abcd"


def test_special_tokens_are_kept_if_asked_for(tokenizer: Tokenizer) -> None:
    assert Answer(tokenizer, kept_ids=[EOS]).append([EOS]) == "</s>"
    assert Answer(tokenizer).append([EOS]) == ""


def test_without_a_tokenizer_there_is_no_text() -> None:
    answer = Answer(None)
    assert answer.append([5, 6], "length") == ""
    assert (answer.num_tokens, answer.finish_reason) == (2, "length")
