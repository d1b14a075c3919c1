"""Reasoning in front of an answer: limited to a number of tokens, and free of the answer's structure."""

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from narrow import present
from structured.structured_helpers import Source

from infinilm import LLM, Reasoning, SamplingParams, StructuredOutput
from infinilm.errors import InvalidTypeError, InvalidValueError
from infinilm.structured.matcher import token_mask

OPEN = Reasoning(closing="</think>", max_tokens=5)
TAGGED = Reasoning(opening="<think>", closing="</think>", max_tokens=5)
CHANNELS = Reasoning(
    opening="<a>think", closing="<e><s>", max_tokens=4, forced_closing="<e><s><f>", header="<f>", repeats=True
)
DATE = StructuredOutput(regex="[0-9]{4}-[0-9]{2}-[0-9]{2}")
YES = StructuredOutput(choice=["<yes>", "<apple>", "no"])  # begins like the opening
PROMPTS = ["The north", "an ion", "to", "In another nation on the moon"]


def params(reasoning: Reasoning = OPEN, **settings: Any) -> SamplingParams:
    return SamplingParams(**{"reasoning": reasoning, "max_tokens": 40, "seed": 3, **settings})


def test_reasoning_is_closed_when_its_tokens_are_used_up(llm: LLM) -> None:
    closing = present(llm.tokenizer).encode("</think>", add_special_tokens=False)
    for prompt in PROMPTS:
        [free] = llm.generate(prompt, SamplingParams(seed=3, max_tokens=40, ignore_eos=True), use_tqdm=False)
        [limited] = llm.generate(prompt, params(ignore_eos=True), use_tqdm=False)
        assert limited.token_ids[:5] == free.token_ids[:5]
        assert limited.token_ids[5 : 5 + len(closing)] == closing
        assert len(limited.token_ids) == 40
        [none] = llm.generate(prompt, params(Reasoning(max_tokens=0)), use_tqdm=False)
        assert none.token_ids[: len(closing)] == closing


def test_reasoning_without_a_limit_and_without_structure_changes_nothing(llm: LLM) -> None:
    free = llm.generate(PROMPTS, SamplingParams(seed=3, max_tokens=20), use_tqdm=False)
    same = llm.generate(PROMPTS, params(Reasoning(opening="<think>"), max_tokens=20), use_tqdm=False)
    assert [each.token_ids for each in same] == [each.token_ids for each in free]


def test_reasoning_that_never_begins_is_not_closed(llm: LLM) -> None:
    for output in llm.generate(PROMPTS, params(TAGGED), use_tqdm=False):
        assert "</think>" not in output.text


def test_structure_begins_behind_the_reasoning(llm: LLM) -> None:
    for output in llm.generate(PROMPTS, params(structured=DATE, max_tokens=60), use_tqdm=False):
        assert output.finish_reason == "stop"
        assert re.fullmatch(r"(.|\n)*</think>[0-9]{4}-[0-9]{2}-[0-9]{2}", output.text)
    bias = dict.fromkeys(present(llm.tokenizer).encode("<think>", add_special_tokens=False)[:1], 100.0)
    for output in llm.generate(PROMPTS, params(TAGGED, structured=DATE, max_tokens=60, logit_bias=bias)):
        assert re.fullmatch(r"<think>(.|\n)*</think>[0-9]{4}-[0-9]{2}-[0-9]{2}", output.text)
    for output in llm.generate(PROMPTS, params(TAGGED, structured=DATE, max_tokens=60), use_tqdm=False):
        assert re.fullmatch(r"(<think>(.|\n)*</think>)?[0-9]{4}-[0-9]{2}-[0-9]{2}", output.text)


def test_answers_do_not_depend_on_company_chunks_or_preemption(llm: LLM, tiny_dir: Any) -> None:
    kinds = [
        params(),
        params(structured=DATE, n=2),
        params(CHANNELS, structured=YES),
        SamplingParams(seed=3, max_tokens=40),
    ]

    def ids(outputs: Any) -> list[list[list[int]]]:
        return [[answer.token_ids for answer in output.outputs] for output in outputs]

    together = ids(llm.generate(PROMPTS, kinds, use_tqdm=False))
    alone = [ids(llm.generate(*pair, use_tqdm=False))[0] for pair in zip(PROMPTS, kinds, strict=True)]
    assert together == alone
    with LLM(tiny_dir, num_kvcache_blocks=7, max_num_batched_tokens=7) as tight:
        again = ids(tight.generate(PROMPTS * 3, kinds * 3, use_tqdm=False))
        assert tight.stats().num_preemptions > 0
    assert again == alone * 3


def follow(source: Source, settings: SamplingParams, seed: int) -> list[int]:
    """Draw from the masks. At each step a matcher that sees the tokens again allows the same."""
    stop_ids = (source.eos_id,)
    grammar = source.compiler.grammar_of(settings, stop_ids)
    assert grammar is not None
    rng = random.Random(seed)
    favourites = {
        token_id for text in ("<think>", "</think>", "<a>think", "<e><s>") for token_id in encode(source, text)
    }
    matcher = grammar.matcher((), stop_ids, settings.min_tokens)
    drawn: list[int] = []
    while len(drawn) < settings.max_tokens and source.eos_id not in drawn:
        mask, again = (token_mask((), source.vocab_size) for _ in range(2))
        matcher.fill(mask)
        grammar.matcher(drawn, stop_ids, settings.min_tokens).fill(again)
        assert np.array_equal(mask, again)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: source.vocab_size]).tolist()
        liked = [token_id for token_id in allowed if token_id in favourites]
        drawn.append(rng.choice(liked if liked and rng.random() < 0.7 else allowed))
        matcher.advance(drawn[-1])
    return drawn


def encode(source: Source, text: str) -> list[int]:
    return source.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("structured", [None, DATE, YES], ids=["free", "date", "yes"])
@pytest.mark.parametrize("reasoning", [OPEN, TAGGED, CHANNELS], ids=["open", "tagged", "channels"])
def test_a_matcher_that_sees_the_answer_again_goes_on_alike(
    tiny: Source, reasoning: Reasoning, structured: StructuredOutput | None
) -> None:
    """As after preemption, in the middle of a marker, too."""
    settings = params(reasoning, structured=structured, max_tokens=60, min_tokens=3)
    texts = [tiny.text(follow(tiny, settings, seed)) for seed in range(8)]
    if structured is not None:
        header = re.escape(reasoning.header)
        answer = {DATE: r"[0-9]{4}-[0-9]{2}-[0-9]{2}", YES: "<yes>|<apple>|no"}[structured]
        ended = [text for text in texts if re.search(rf"{header}({answer})$", text)]
        assert len(ended) >= 4, texts


@pytest.mark.parametrize(
    ("begun", "forced"),
    [("abcde", "</think>"), ("abcd<", "/think>"), ("abc</", "think>"), ("</thi", "nk>"), ("ab<</", "think>")],
)
def test_a_closing_that_the_model_has_begun_is_completed(tiny: Source, begun: str, forced: str) -> None:
    grammar = tiny.compiler.grammar_of(params(), (tiny.eos_id,))
    assert grammar is not None
    drawn = [tiny.tokenizer.encode(char, add_special_tokens=False)[0] for char in begun]
    expected = encode(tiny, forced)
    for place, token_id in enumerate(expected):
        mask = token_mask((), tiny.vocab_size)
        grammar.matcher(drawn + expected[:place], (tiny.eos_id,), 0).fill(mask)
        assert np.array_equal(mask, token_mask([token_id], tiny.vocab_size))


def test_the_engine_s_reasoning_crosses_processes() -> None:
    from infinilm.server.messages import params_from_wire, params_to_wire

    settings = params(CHANNELS, structured=DATE)
    assert params_from_wire(json.loads(json.dumps(params_to_wire(settings)))) == settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"closing": ""}, "reasoning.closing is empty"),
        ({"max_tokens": -1}, "reasoning.max_tokens"),
        ({"opening": "x" * 300}, "reasoning.opening has 300 characters"),
        ({"forced_closing": "stop"}, "must begin with reasoning.closing='</think>'"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        Reasoning(**values)
    with pytest.raises(InvalidTypeError, match="must be a Reasoning"):
        SamplingParams(reasoning=5)  # type: ignore[arg-type]
