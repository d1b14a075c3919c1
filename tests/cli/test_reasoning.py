"""In the terminal, too, reasoning is kept apart from the answer."""

import pytest
from tiny_tokenizer import TEMPLATE, build_tokenizer

from infinilm.cli.answering import AnswerSplitter
from infinilm.cli.display import ReasoningWriter
from infinilm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from infinilm.sampling_params import SamplingParams
from infinilm.text.tokenizer import Tokenizer

HARMONY = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>"]


def make_tokenizer(template: str, special: list[str]) -> Tokenizer:
    backend = build_tokenizer()
    backend.add_special_tokens(special)
    return Tokenizer(backend, named_tokens={"eos_token": "</s>"}, chat_templates={"default": TEMPLATE + template})


def outputs_of(tokenizer: Tokenizer, text: str) -> list[RequestOutput]:
    """What the engine yields: the answer after each token."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    outputs: list[RequestOutput] = []
    for place, token_id in enumerate(ids):
        is_last = place == len(ids) - 1
        answer = CompletionOutput(0, new_text=tokenizer.decode([token_id]), new_token_ids=[token_id])
        answer.finish_reason = "length" if is_last else None
        outputs.append(RequestOutput("1", None, [], [answer], finished=is_last, metrics=RequestMetrics()))
    return outputs


@pytest.mark.parametrize(
    ("template", "special", "prompt", "text", "expected"),
    [
        ("{# </think> #}", [], "x", "<think>\nhm\n</think>\n\nYes", ("hm", "Yes")),
        ("{# </think> #}", [], "x<think>\n", "hm</think>Yes", ("hm", "Yes")),
        ("{# </think> #}", ["<think>", "</think>"], "x", "<think>hm</think>Yes", ("hm", "Yes")),
        ("", [], "x", "<think>hm</think>Yes", ("", "<think>hm</think>Yes")),
        (
            "{# <|channel|>analysis<|message|> #}",
            HARMONY,
            "<|start|>assistant",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes",
            ("hm", "Yes"),
        ),
    ],
)
def test_reasoning_is_kept_apart(
    template: str, special: list[str], prompt: str, text: str, expected: tuple[str, str]
) -> None:
    tokenizer = make_tokenizer(template, special)
    splitter = AnswerSplitter(tokenizer, tokenizer.encode(prompt, add_special_tokens=False), SamplingParams())
    parts = [splitter.split(output) for output in outputs_of(tokenizer, text)]
    assert tuple("".join(column) for column in zip(*parts, strict=True)) == expected


def test_reasoning_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with ReasoningWriter() as writer:
        writer.write("")
    assert capsys.readouterr() == ("", "")
    with ReasoningWriter() as writer:
        writer.write("hm")
        writer.write(", so")
        writer.end()
    assert capsys.readouterr() == ("", "hm, so\n")
