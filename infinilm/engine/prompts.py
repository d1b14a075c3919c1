"""Converts the prompts that users pass to checked token ids."""

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import index
from reprlib import repr as short_repr
from typing import TYPE_CHECKING, Any, TypeAlias, Union, cast

import numpy as np
import numpy.typing as npt

from infinilm.checks import check_text, plain_number
from infinilm.errors import InvalidTypeError, InvalidValueError
from infinilm.sampling_params import SamplingParams
from infinilm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

Prompt: TypeAlias = Union[str, Sequence[int], npt.NDArray[np.integer[Any]], "Tensor"]


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; a single prompt becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    items = _as_list("prompts", prompts)
    if items and not any(isinstance(plain_number(item), (str, Iterable)) for item in items):
        return [cast(list[int], items)]
    return cast(list[Prompt], items)


def _as_list(name: str, values: object) -> list[Any]:
    """The items of a list, tuple, array or tensor. Numbers of arrays and tensors become Python numbers."""
    items: Any = None
    if isinstance(values, list):
        return values
    if isinstance(values, np.ndarray):
        items = values.tolist()
    elif any(base.__module__ == "torch" for base in type(values).__mro__):  # a tensor, or a subclass of it
        try:
            items = cast(Any, values).tolist()
        except (RuntimeError, TypeError, AttributeError) as error:  # sparse, nested and meta tensors
            raise InvalidTypeError(f"{name} is a tensor that has no list of numbers: {error}") from error
    elif isinstance(values, (Sequence, array)) and not isinstance(values, (str, bytes, bytearray, memoryview)):
        items = list(values)
    if not isinstance(items, list):
        raise InvalidTypeError(
            f"{name}={short_repr(values)} must be a string, a list of token ids, or a list of either"
        )
    return items


def as_conversations(messages: object) -> list[Any]:
    """A list of conversations; a single conversation becomes a list of one."""
    if not isinstance(messages, (list, tuple)):
        raise InvalidTypeError(
            f"messages={short_repr(messages)} must be a list of messages, each with a role and a content, or a list of "
            "such lists"
        )
    if any(isinstance(item, Mapping) for item in messages):
        return [messages]
    return list(messages)


def pair_params(sampling_params: SamplingParams | Sequence[SamplingParams], num_prompts: int) -> list[SamplingParams]:
    """One set of parameters per prompt."""
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
        token_ids = tokenizer.encode(prompt)
        if not token_ids:
            raise InvalidValueError(f"the tokenizer makes no tokens of the prompt {short_repr(prompt)}; give more text")
        return check_ids(token_ids, vocab_size, "prompt")
    if isinstance(plain_number(prompt), (int, float)) or prompt is None:
        raise InvalidTypeError(f"a prompt of type {type(prompt).__name__} must be a string or a list of token ids")
    token_ids = _as_list("prompt", prompt)
    if list(map(type, token_ids)).count(int) != len(token_ids):  # checks thousands of ids without a Python loop
        token_ids = [_as_token_id(token_id) for token_id in token_ids]
    if not token_ids:
        raise InvalidValueError("the prompt is empty; give at least one token id")
    return check_ids(token_ids, vocab_size)


def _as_token_id(value: object) -> int:
    number = plain_number(value)
    if isinstance(number, bool):
        raise InvalidTypeError(f"a prompt's token ids must be integers, not {number!r}")
    try:
        return index(number)
    except TypeError as error:
        raise InvalidTypeError(f"a prompt's token ids must be integers: {error}") from error


def check_ids(token_ids: list[int], vocab_size: int, source: str | None = None) -> list[int]:
    """Refuse ids that the model has no embedding for. `source` names the text that was encoded, if there is one."""
    # An array is faster than the list's min and max. It refuses negative numbers and numbers of more than 32 bits.
    with suppress(OverflowError):
        if np.array(array("I", token_ids)).max(initial=0) < vocab_size:
            return token_ids
    position, token_id = next(
        (position, token_id) for position, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size
    )
    if source is not None:
        raise InvalidValueError(
            f"token {position} of the {source} is {token_id}, but the model has only {vocab_size} tokens: the "
            "checkpoint's tokenizer knows more than the model; leave that token out"
        )
    raise InvalidValueError(
        f"token id {token_id} at position {position} of the prompt is outside the vocabulary; use 0 to {vocab_size - 1}"
    )


def check_names(request_id: object, cache_salt: object, on_token: object) -> None:
    """Check the optional arguments of `add_request`; None: not given."""
    if request_id is not None:
        check_text("request_id", request_id)
    if cache_salt is not None:
        check_text("cache_salt", cache_salt)
    if on_token is not None and not callable(on_token):
        raise InvalidTypeError(f"on_token={short_repr(on_token)} must be a function of a RequestOutput")


def check_params(params: SamplingParams, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
    """Check parameters against the model: their token ids are in the vocabulary, and some token can be drawn."""
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
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    if params.min_tokens > 0 and params.structured is None and len(ends) >= vocab_size:
        raise InvalidValueError(
            f"stop_token_ids covers the whole vocabulary, so that min_tokens={params.min_tokens} leaves no token to "
            "draw; give fewer stop_token_ids, or min_tokens=0"
        )
