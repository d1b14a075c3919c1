"""Tiny checkpoints that can be shared out over 1 to 4 ranks, and what transformers computes with them."""

import random
from functools import cache
from typing import Any

import torch
from checkpoints import make_reference, reference_logits
from narrow import present
from transformers import PreTrainedModel

VOCAB_SIZE = 161  # shared out evenly over 1 rank only
SHAPES: dict[str, Any] = {
    "num_attention_heads": 12,
    "hidden_size": 96,
    "intermediate_size": 96,
    "vocab_size": VOCAB_SIZE,
    "eos_token_id": None,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mha": ("llama-mha", {"num_key_value_heads": 12}),
    "bias": ("llama-bias", {"num_key_value_heads": 4}),
    "window": ("mistral", {"num_key_value_heads": 1}),
    "norms": ("qwen3", {"num_key_value_heads": 2}),
    "tied": ("llama-tied", {"num_key_value_heads": 4}),
}


@cache
def reference_of(kind: str) -> PreTrainedModel:
    architecture, settings = KINDS[kind]
    return make_reference(architecture, **SHAPES, **settings)


@cache
def text(length: int) -> tuple[int, ...]:
    """The same tokens for the same length."""
    generator = random.Random(length)
    return tuple(generator.randrange(VOCAB_SIZE) for _ in range(length))


@cache
def expected_logits(kind: str, tokens: tuple[int, ...]) -> torch.Tensor:
    """`[tokens, vocab]`."""
    return reference_logits(reference_of(kind), list(tokens))


def greedy(kind: str, prompts: list[tuple[int, ...]], num_new: int) -> list[list[int]]:
    """How transformers goes on with prompts of one length."""
    return _greedy(kind, tuple(prompts), num_new)


@cache
@torch.inference_mode()
def _greedy(kind: str, prompts: tuple[tuple[int, ...], ...], num_new: int) -> list[list[int]]:
    output = reference_of(kind).generate(torch.tensor(prompts), max_new_tokens=num_new, do_sample=False)
    return output[:, len(prompts[0]) :].tolist()


def assert_greedy(kind: str, prompt: tuple[int, ...], answer: list[int]) -> None:
    """Whether transformers, reading the answer, would have drawn each of its tokens."""
    logits = reference_logits(reference_of(kind), [*prompt, *answer[:-1]])
    assert answer == logits[len(prompt) - 1 :].argmax(-1).tolist()


def assert_near(logits: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    torch.testing.assert_close(present(logits), present(expected), atol=1e-4, rtol=0)
