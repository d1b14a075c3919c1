"""Random requests as plain data. The same number always gives the same request."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import torch
from narrow import present
from tiny_tokenizer import build_tokenizer

from infinilm import SamplingParams
from infinilm.structured_output import StructuredOutput

MAX_MODEL_LEN = 96
EOS_ID = 1
VOCAB_SIZE = 300
POISON_ID = 5
"""What is computed from this token is NaN. In a prompt, or drawn, it ends its own answer and no other."""
LETTERS = "aeionrth,."
"""Half of the requests prefer these, so that stop strings and stop ids are met."""

BEGINNINGS = (
    "",
    "In another nation ",
    "The ocean and the moon, the north and an ion: ",
    "On the other hand there are no ants in the tent, ",
)
"""Prompts share them, and so their blocks."""

FORMS: tuple[dict[str, Any], ...] = (
    {"regex": "[aeionr]{2,9}"},
    {"choice": ["ant", "another nation", "a"]},
    {"json_schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}},
)


PLAIN = frozenset(
    ("temperature", "seed", "top_k", "top_p", "min_p", "max_tokens", "ignore_eos", "stop", "stop_token_ids", "n")
)
"""Settings that need no more than a draw, so that several steps may be computed at a time."""


@dataclass(frozen=True)
class RequestSpec:
    """What is asked."""

    number: int
    prompt: str | tuple[int, ...]
    settings: dict[str, Any]
    """Of `SamplingParams`."""
    features: frozenset[str]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**self.settings)

    @property
    def num_answers(self) -> int:
        return self.settings.get("n", 1)

    @property
    def engine_prompt(self) -> str | list[int]:
        return self.prompt if isinstance(self.prompt, str) else list(self.prompt)


@dataclass(frozen=True)
class RaiseAt:
    """A logits processor that fails at a given number of tokens."""

    num_tokens: int

    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        if len(token_ids) == self.num_tokens:
            raise RuntimeError(f"processor failed at {self.num_tokens}")
        return logits


def ban_even(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor that lets only odd ids through."""
    banned = logits.clone()
    banned[::2] = float("-inf")
    return banned


@cache
def letter_ids() -> dict[str, int]:
    tokenizer = build_tokenizer()
    return {letter: present(tokenizer.token_to_id(letter)) for letter in LETTERS}


@cache
def make_spec(number: int) -> RequestSpec:
    """Request `number`."""
    random = Random(f"spec {number}")
    settings: dict[str, Any] = {}
    _draw_sampling(random, settings)
    _draw_length(random, settings)
    _draw_stops(random, settings)
    if random.random() < 0.5:
        settings["logprobs"] = random.choice((0, 1, 3))
    if random.random() < 0.25:
        settings["prompt_logprobs"] = random.choice((0, 2))
    if random.random() < 0.45:
        settings["n"] = random.choice((2, 2, 3, 4, 5))
    if random.random() < 0.07 and "stop" not in settings:
        settings["structured"] = StructuredOutput(**random.choice(FORMS))
        settings.pop("ignore_eos", None)
    elif random.random() < 0.1:
        settings["logits_processors"] = (random.choice((ban_even, RaiseAt(random.randrange(6)))),)
    prompt = _draw_prompt(random)
    if number % 3 == 0:
        settings = {name: value for name, value in settings.items() if name in PLAIN}
    return RequestSpec(number, prompt, settings, _features(prompt, settings))


def _draw_prompt(random: Random) -> str | tuple[int, ...]:
    if random.random() < 0.05:
        ids = random.sample(range(20, 60), random.randrange(1, 40))
        ids[random.randrange(len(ids))] = POISON_ID
        return tuple(ids)
    if random.random() < 0.2:
        return tuple(random.randrange(2, VOCAB_SIZE) for _ in range(random.choice((1, 2, 15, 16, 17, 40))))
    words = ("one", "at", "ten", "it is", "no", "heat", "ü", "\n", "rain")
    tail = " ".join(random.choice(words) for _ in range(random.randrange(1, 7)))
    return random.choice(BEGINNINGS) + tail


def _draw_sampling(random: Random, settings: dict[str, Any]) -> None:
    if random.random() < 0.35:
        settings["temperature"] = 0.0
    else:
        settings["temperature"] = random.choice((0.5, 1.0, 1.0, 1.7))
        settings["seed"] = random.randrange(10**6)
        for name, values in (("top_k", (1, 5, 40)), ("top_p", (0.3, 0.9)), ("min_p", (0.02, 0.2))):
            if random.random() < 0.2:
                settings[name] = random.choice(values)
    for name, values in (
        ("repetition_penalty", (0.8, 1.3)),
        ("presence_penalty", (-0.5, 1.5)),
        ("frequency_penalty", (-0.3, 0.7)),
    ):
        if random.random() < 0.15:
            settings[name] = random.choice(values)
    if random.random() < 0.5:
        settings["logit_bias"] = dict.fromkeys(letter_ids().values(), 5.0) | {EOS_ID: random.choice((0.0, 5.0))}


def _draw_length(random: Random, settings: dict[str, Any]) -> None:
    settings["max_tokens"] = random.choice((1, 2, 3, 5, 8, 8, 12, 16, 30, 30, 200))
    if random.random() < 0.2:
        settings["min_tokens"] = random.randrange(1, min(settings["max_tokens"], 10) + 1)
    if random.random() < 0.3:
        settings["ignore_eos"] = True


def _draw_stops(random: Random, settings: dict[str, Any]) -> None:
    if random.random() < 0.3:
        lengths = random.choices((1, 2, 3), k=random.randrange(1, 4))
        settings["stop"] = tuple("".join(random.choices(LETTERS, k=length)) for length in lengths)
    if random.random() < 0.25:
        settings["stop_token_ids"] = tuple(random.sample(sorted(letter_ids().values()), random.randrange(1, 4)))


def _features(prompt: str | tuple[int, ...], settings: dict[str, Any]) -> frozenset[str]:
    names = set(settings) - {"temperature", "seed", "max_tokens"}
    names.add("greedy" if settings["temperature"] == 0 or settings.get("top_k") == 1 else "sampled")
    names.add("text prompt" if isinstance(prompt, str) else "ids prompt")
    if PLAIN.issuperset(settings):
        names.add("plain")
    if settings["max_tokens"] > MAX_MODEL_LEN:
        names.add("context limit")
    if not isinstance(prompt, str) and POISON_ID in prompt:
        names.add("NaN")
    return frozenset(names)
