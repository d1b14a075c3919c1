"""Answers drawn from random logits: every token that a grammar lets through will come up."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from infinilm.sampling import Sampler
from infinilm.sampling_params import RowStart, SamplingParams
from infinilm.structured.compiler import GrammarCompiler
from infinilm.structured_output import StructuredOutput
from infinilm.text.detokenizer import Detokenizer
from infinilm.text.tokenizer import Tokenizer

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Answer:
    """What one row drew. `text` is None if it did not come to an end."""

    text: str | None
    token_ids: list[int]
    error: Exception | None


@dataclass(frozen=True)
class Source:
    """A tokenizer with what is needed to draw answers of a given form."""

    tokenizer: Tokenizer
    vocab_size: int
    eos_id: int
    compiler: GrammarCompiler
    closing: torch.Tensor
    """More for tokens that close something, less for those that open it, [vocab]."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int | None = None) -> "Source":
        assert tokenizer.eos_token_id is not None
        vocab_size = vocab_size or tokenizer.vocab_size
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        closing = torch.tensor([_closing(token) for token in tokens]) * (math.log(vocab_size) - 4)
        return cls(tokenizer, vocab_size, tokenizer.eos_token_id, GrammarCompiler(tokenizer, vocab_size), closing)

    def answers(
        self,
        form: dict[str, Any],
        *,
        seeds: int = 4,
        max_tokens: int = 300,
        stop_ids: tuple[int, ...] = (),
        **params: Any,
    ) -> list[Answer]:
        """One answer per seed, all drawn together, from logits that like to come to an end."""
        sampler = Sampler(self.vocab_size, CPU)
        settings = SamplingParams(structured=StructuredOutput(**form), max_tokens=max_tokens, **params)
        stop_ids = stop_ids or (self.eos_id,)
        for row in range(seeds):
            grammar = self.compiler.grammar_of(settings, stop_ids)
            sampler.start_row(RowStart(row, settings, row, stop_ids, [1], [], grammar))
        generator = torch.Generator().manual_seed(5)
        drawn: list[list[int]] = [[] for _ in range(seeds)]
        answers: dict[int, Answer] = {}
        for position in range(max_tokens):
            rows = [row for row in range(seeds) if row not in answers]
            if not rows:
                break
            logits = torch.randn(len(rows), self.vocab_size, generator=generator) * 2 + self.closing
            for row, token in zip(rows, sampler.sample(logits, rows, [position] * len(rows)).to_host(), strict=True):
                drawn[row].append(token.token_id)
                if token.error is not None:
                    answers[row] = Answer(None, drawn[row], token.error)
                elif token.token_id in stop_ids:
                    answers[row] = Answer(self.text(drawn[row][:-1]), drawn[row], None)
        return [answers.get(row, Answer(None, drawn[row], None)) for row in range(seeds)]

    def texts(self, form: dict[str, Any], **settings: Any) -> list[str]:
        """The answers that came to an end; none may fail, and some must end."""
        answers = self.answers(form, **settings)
        errors = [answer.error for answer in answers if answer.error]
        assert not errors, errors
        texts = [answer.text for answer in answers if answer.text is not None]
        assert texts, [self.text(answer.token_ids)[:200] for answer in answers]
        return texts

    def text(self, token_ids: list[int]) -> str:
        """As the engine would show it."""
        detokenizer = Detokenizer(self.tokenizer)
        return detokenizer.feed(token_ids) + detokenizer.finish()


def _closing(token: bytes) -> float:
    if set(token) & set(b"[{("):
        return -1.0
    return 1.0 if set(token) & set(b'"]})') else 0.0
