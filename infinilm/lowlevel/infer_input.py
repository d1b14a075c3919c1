"""The input and output of `InferEngine.forward`."""

from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infinilm.attention import HostBatch
from infinilm.errors import InvalidTypeError, InvalidValueError

TensorLike = Tensor | npt.NDArray[np.integer[Any]] | Sequence[Any]
"""Integers in a torch tensor on any device, in a NumPy array, or in lists."""
PerRequest = float | Sequence[float] | npt.NDArray[Any] | Tensor
"""One number for all requests, or one for each."""

TENSOR_FIELDS = (
    "input_ids",
    "position_ids",
    "cache_lengths",
    "input_lengths",
    "input_offsets",
    "block_tables",
    "slot_mapping",
)
_OTHER_FIELDS = ("temperature", "top_k", "top_p", "random_val", "return_logits", "return_hidden_states")
_ALIASES = {
    "past_kv_lengths": "cache_lengths",
    "past_sequence_lengths": "cache_lengths",
    "total_kv_lengths": "input_lengths",
    "total_sequence_lengths": "input_lengths",
}


def _tensor_field(name: str) -> property:
    """An attribute that accepts any `TensorLike` or None, and reads as a tensor or None."""

    def read(owner: "Input") -> Tensor | None:
        return owner._tensors[name]

    def write(owner: "Input", value: TensorLike | None) -> None:
        owner._tensors[name] = None if value is None else as_tensor(name, value)

    return property(read, write)


class Input:
    """One step of some requests: their new tokens, and the tokens' places in the cache.

    `input_ids` has one of two forms: `[batch, seq]`, one request per row, with short rows padded on the right; or the
    concatenated new tokens of all n requests, `[total]` or `[1, total]`. All other fields have defaults:

    - `cache_lengths` `[n]`: tokens in the cache. Default: `input_lengths` minus the new tokens, or 0.
    - `input_lengths` `[n]`: cached and new tokens together. Default: all given tokens are new.
    - `input_offsets` `[n + 1]` or `[n]`: the start of each request in `[total]`. It may be omitted if it follows from
      the lengths.
    - `position_ids`, like `input_ids` or `[seq]` for all rows: positions for the rotary embedding. Default: from the
      lengths.
    - `block_tables` `[n, max_blocks]`, -1 for none: the requests' blocks in a paged cache. Default: an even share.
    - `slot_mapping` `[total]`, `block * block_size + offset`: the slots of the new tokens. Default: from the tables.
      Negative: not stored.

    Each sampling value is one number, or one per request. Torch tensors are kept as they are. NumPy arrays are shared,
    not copied, if torch can share them (it can't share read-only arrays).
    """

    __slots__ = ("_tensors", *_OTHER_FIELDS)

    input_ids = _tensor_field("input_ids")
    position_ids = _tensor_field("position_ids")
    cache_lengths = past_kv_lengths = past_sequence_lengths = _tensor_field("cache_lengths")
    input_lengths = total_kv_lengths = total_sequence_lengths = _tensor_field("input_lengths")
    input_offsets = _tensor_field("input_offsets")
    block_tables = _tensor_field("block_tables")
    slot_mapping = _tensor_field("slot_mapping")

    def __init__(
        self,
        *,
        input_ids: TensorLike | None = None,
        position_ids: TensorLike | None = None,
        cache_lengths: TensorLike | None = None,
        input_lengths: TensorLike | None = None,
        input_offsets: TensorLike | None = None,
        block_tables: TensorLike | None = None,
        slot_mapping: TensorLike | None = None,
        temperature: PerRequest = 1.0,
        top_k: PerRequest = 50,
        top_p: PerRequest = 1.0,
        random_val: PerRequest = 0.1,
        return_logits: bool = False,
        return_hidden_states: bool = False,
        **aliases: TensorLike | None,
    ) -> None:
        self._tensors: dict[str, Tensor | None] = {}
        self.input_ids = input_ids
        self.position_ids = position_ids
        self.cache_lengths = cache_lengths
        self.input_lengths = input_lengths
        self.input_offsets = input_offsets
        self.block_tables = block_tables
        self.slot_mapping = slot_mapping
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.random_val = random_val
        self.return_logits = return_logits
        self.return_hidden_states = return_hidden_states
        for alias, value in aliases.items():
            self._set_alias(alias, value)

    def _set_alias(self, alias: str, value: TensorLike | None) -> None:
        name = _ALIASES.get(alias)
        if name is None:
            known = ", ".join((*TENSOR_FIELDS, *_OTHER_FIELDS, *_ALIASES))
            raise InvalidTypeError(f"unknown keyword {alias!r}; known are: {known}")
        if value is None:
            return
        if self._tensors[name] is not None:
            raise InvalidValueError(f"{name} was given twice, once as {alias}, which is another name for it; give one")
        setattr(self, alias, value)

    def to_model_input(self, block_size: int = 16) -> HostBatch:
        """The batch for an `InfinilmModel`, with defaults filled in and without sampling values.

        Without `block_tables` all tokens must be new, and the requests get blocks from 0 on. Token ids and positions
        are not checked against a model's sizes.
        """
        from infinilm.lowlevel.prepare_inputs import to_batch  # that module imports this one

        return to_batch(self, block_size)

    def __repr__(self) -> str:
        tensors = {name: tensor for name, tensor in self._tensors.items() if tensor is not None}
        parts = [f"{name}={list(tensor.shape)}" for name, tensor in tensors.items()]
        parts += [f"{name}={getattr(self, name)!r}" for name in _OTHER_FIELDS]
        return f"Input({', '.join(parts)})"


@dataclass(frozen=True, slots=True)
class Output:
    """The result of an `Input` of n requests."""

    output_ids: Tensor  # [n] int64 on the host: the token after each request's last one
    logits: Tensor | None = None  # [*input_ids.shape, vocab], if requested
    hidden_states: Tensor | None = None  # [*input_ids.shape, hidden] after the final norm, if requested


def as_tensor(name: str, value: TensorLike) -> Tensor:
    """Integers as a tensor, sharing their memory if possible."""
    if isinstance(value, Tensor):
        is_plain = value.layout is torch.strided and not (value.is_meta or value.is_quantized or value.is_nested)
        if not is_plain or value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
            raise InvalidTypeError(
                f"{name} is a tensor of {value.dtype} ({value.layout}, {value.device}"
                f"{', nested' if value.is_nested else ''}); give a dense tensor of integers"
            )
        if value.dtype is torch.uint64:
            _check_int64(name, value.cpu().numpy())
        return value
    if isinstance(value, np.ndarray):
        return _from_numpy(name, value)
    if not isinstance(value, Sequence):
        raise InvalidTypeError(
            f"{name}={short_repr(value)} must be a torch tensor, a NumPy array or a list of integers"
        )
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InvalidValueError(
            f"{name}={short_repr(value)} can't be made an array: {error}; give rows of equal length, padding short ones"
        ) from error
    # NumPy makes a float array of an empty list.
    return _from_numpy(name, array if array.size else array.astype(np.int64))


def _from_numpy(name: str, array: npt.NDArray[Any]) -> Tensor:
    if array.dtype.kind not in "iu":
        raise InvalidTypeError(
            f"{name}={short_repr(array.tolist())} holds {array.dtype}; give integers of 64 bits at most"
        )
    _check_int64(name, array)
    return share_array(array)


def _check_int64(name: str, array: npt.NDArray[Any]) -> None:
    """Refuse numbers that int64 can't hold."""
    if array.dtype == np.uint64 and array.size and (most := array.max()) >= 2**63:
        raise InvalidValueError(f"{name} holds {most}; numbers must be below 2**63")


def share_array(array: npt.NDArray[Any]) -> Tensor:
    """An array as a tensor, with the same memory, or with a copy if torch can't share it."""
    steps = [stride % array.itemsize == 0 and stride >= 0 for stride in array.strides]
    if not (array.flags.writeable and array.dtype.isnative and all(steps)):
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(array)
