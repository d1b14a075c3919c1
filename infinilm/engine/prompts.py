"""From what users pass as prompts to checked token ids."""

from collections.abc import Iterable, Sequence
from operator import index
from typing import cast

from infinilm.errors import InvalidTypeError, InvalidValueError
from infinilm.loading.tokenizer import Tokenizer
from infinilm.sampling_params import SamplingParams

Prompt = str | Sequence[int]


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt becomes a list of one; a list of prompts stays one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, dict)):
        raise InvalidTypeError(f"prompts={prompts!r} must be a string, a list of token ids, or a list of either")
    items = list(prompts)
    if items and not any(isinstance(item, (str, Iterable)) for item in items):
        return [cast(list[int], items)]
    return cast(list[Prompt], items)


def pair_params(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """One set of parameters per prompt."""
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if not isinstance(sampling_params, Sequence):
        raise InvalidTypeError(f"sampling_params={sampling_params!r} must be SamplingParams, or a list of them")
    if len(sampling_params) != num_prompts:
        raise InvalidValueError(
            f"{len(sampling_params)} sampling_params were given for {num_prompts} prompts; give one, or one for each"
        )
    return list(sampling_params)


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """The prompt's token ids, each within the vocabulary."""
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidValueError("the prompt is empty; give at least one character")
        if tokenizer is None:
            raise InvalidValueError(
                "the checkpoint has no tokenizer, so the prompt can't be text; give a list of token ids"
            )
        return tokenizer.encode(prompt)
    if not isinstance(prompt, Iterable):
        raise InvalidTypeError(f"a prompt of type {type(prompt).__name__} must be a string or a list of token ids")
    try:
        token_ids = [index(token_id) for token_id in prompt]
    except TypeError as error:
        raise InvalidTypeError(f"a prompt's token ids must be integers: {error}") from error
    if not token_ids:
        raise InvalidValueError("the prompt is empty; give at least one token id")
    for position, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidValueError(
                f"token id {token_id} at position {position} of the prompt is outside the vocabulary; "
                f"use 0 to {vocab_size - 1}"
            )
    return token_ids


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Check what only the model can tell: that the token ids named are in the vocabulary."""
    if not isinstance(params, SamplingParams):
        raise InvalidTypeError(f"sampling_params={params!r} must be SamplingParams")
    for name, token_ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias or ()),
    ):
        for token_id in token_ids:
            if token_id >= vocab_size:
                raise InvalidValueError(
                    f"{name} names token id {token_id}, which is outside the vocabulary; use 0 to {vocab_size - 1}"
                )
