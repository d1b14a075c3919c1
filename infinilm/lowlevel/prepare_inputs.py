"""Converts an `Input` to a `HostBatch`: fills in defaults and checks all fields."""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from infinilm.attention.batch import HostBatch, IntArray
from infinilm.cache import CacheLayout, consecutive_tables
from infinilm.cache.config import check_block_size
from infinilm.checks import check_flag
from infinilm.errors import InvalidValueError
from infinilm.lowlevel.infer_input import TENSOR_FIELDS, Input
from infinilm.lowlevel.ragged_layout import RaggedLayout, divide

_DIMENSIONS = {
    "input_ids": (1, 2),
    "position_ids": (1, 2),
    "cache_lengths": (1,),
    "input_lengths": (1,),
    "input_offsets": (1,),
    "block_tables": (2,),
    "slot_mapping": (1, 2),
}
_TEMPORARY_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class PreparedInput:
    """An `Input` ready to run."""

    batch: HostBatch
    layout: CacheLayout
    """The layout of the cache; if none is configured, of a temporary one for this input alone."""
    shape: tuple[int, ...]
    """The shape of `input_ids`."""
    places: IntArray | None  # [T], indices of the batch's tokens in the flattened input_ids; None: all of them

    @property
    def num_requests(self) -> int:
        """The number of requests; one token is drawn for each."""
        return len(self.batch.query_lens)

    def restore(self, results: Tensor) -> Tensor:
        """Results `[T, d]` of the batch's tokens in the shape of the input, `[*input_ids.shape, d]`; padding gets 0."""
        if self.places is not None:
            padded = results.new_zeros(math.prod(self.shape), results.shape[1])
            results = padded.index_copy_(0, torch.from_numpy(self.places).to(results.device), results)
        return results.reshape(*self.shape, results.shape[1])


def lower(
    given: Input, layout: CacheLayout | None, *, vocab_size: int, max_len: int, block_size: int = _TEMPORARY_BLOCK_SIZE
) -> PreparedInput:
    """Check an input and lay it out for a cache.

    `layout` None: there is no cache, the input attends only to itself, and its temporary blocks have the `block_size`.
    """
    check_flag("return_logits", given.return_logits)
    check_flag("return_hidden_states", given.return_hidden_states)
    fields = {name: _array(name, getattr(given, name)) for name in TENSOR_FIELDS}
    ids = fields["input_ids"]
    if ids is None or ids.size == 0:
        raise InvalidValueError("input_ids is missing or empty; give at least one token, [batch, seq] or [total]")
    if layout is None or not layout.takes_tables:
        _refuse_tables(fields, layout)

    rows = ids.reshape(-1, ids.shape[-1])
    ragged = divide(
        rows.shape,
        input_offsets=fields["input_offsets"],
        input_lengths=fields["input_lengths"],
        cache_lengths=fields["cache_lengths"],
        block_tables=fields["block_tables"],
    )
    _check_limits(ragged, layout, max_len)
    if layout is None:
        layout = _temporary_layout(ragged.context_lens, block_size)
    tables = _block_tables(fields["block_tables"], ragged.context_lens, layout)
    positions = ragged.positions()
    slots = _slots(tables, positions, ragged, layout)
    batch = HostBatch(
        input_ids=_token_ids(rows, ragged, vocab_size),
        positions=_position_ids(fields["position_ids"], positions, rows.shape, ragged, max_len),
        slot_mapping=_slot_mapping(fields["slot_mapping"], slots, rows.shape, ragged, layout),
        block_tables=tables,
        query_lens=ragged.query_lens,
        context_lens=ragged.context_lens,
    )
    return PreparedInput(batch, layout, ids.shape, ragged.places)


def to_batch(given: Input, block_size: int) -> HostBatch:
    """See `Input.to_model_input`."""
    check_block_size("block_size", block_size)
    layout = None
    if given.block_tables is not None:
        last_slot = -1 if given.slot_mapping is None else int(given.slot_mapping.max())
        num_blocks = max(int(given.block_tables.max()), last_slot // block_size, 0) + 1
        layout = CacheLayout(num_blocks, block_size, partial(consecutive_tables, blocks_each=num_blocks))
    elif given.cache_lengths is not None and bool(given.cache_lengths.any()):
        raise InvalidValueError("cache_lengths says that tokens are cached, but not where; give block_tables")
    limit = np.iinfo(np.int64).max
    return lower(given, layout, vocab_size=limit, max_len=limit, block_size=block_size).batch


def _array(name: str, tensor: Tensor | None) -> IntArray | None:
    """A field on the host, without a copy if it is there as int64 already."""
    if tensor is None:
        return None
    if tensor.dim() not in _DIMENSIONS[name]:
        wanted = " or ".join(map(str, _DIMENSIONS[name]))
        raise InvalidValueError(f"{name} of shape {list(tensor.shape)} has {tensor.dim()} dimensions; give {wanted}")
    return np.ascontiguousarray(tensor.cpu().numpy(), dtype=np.int64)


def _refuse_tables(fields: dict[str, IntArray | None], layout: CacheLayout | None) -> None:
    for name in ("block_tables", "slot_mapping"):
        if fields[name] is not None:
            reason = "no cache is configured" if layout is None else "the rows of this cache have blocks of their own"
            raise InvalidValueError(f"{name} was given, but {reason}; leave it out, or use a PagedKVCacheConfig")


def _check_limits(ragged: RaggedLayout, layout: CacheLayout | None, max_len: int) -> None:
    num_requests = len(ragged.query_lens)
    if layout is None and ragged.cached_lens.any():
        i = int((ragged.cached_lens > 0).argmax())
        raise InvalidValueError(
            f"{ragged.cached_lens[i]} tokens of request {i} are said to be cached (cache_lengths or input_lengths), "
            "but no cache is configured; give the whole text, or configure a cache with reset_cache"
        )
    if layout is not None and layout.max_batch_size is not None and num_requests > layout.max_batch_size:
        raise InvalidValueError(
            f"input_ids holds {num_requests} requests, but the cache has max_batch_size={layout.max_batch_size}; "
            "give fewer, or a larger cache with reset_cache"
        )
    limits = {"the model takes": max_len}
    if layout is not None and layout.max_cache_len is not None:
        limits["the cache has max_cache_len ="] = layout.max_cache_len
    for source, limit in limits.items():
        too_long = ragged.cached_lens > limit - ragged.query_lens  # a sum might overflow
        if too_long.any():
            i = int(too_long.argmax())
            raise InvalidValueError(
                f"request {i} has {ragged.context_lens[i]} tokens, {ragged.cached_lens[i]} cached (cache_lengths) "
                f"and {ragged.query_lens[i]} new (input_ids), but {source} {limit}; give fewer"
            )


def _temporary_layout(context_lens: IntArray, block_size: int) -> CacheLayout:
    """Just enough blocks for one input."""
    needed = -(-context_lens // block_size)
    first_blocks = np.cumsum(needed) - needed
    tables = first_blocks[:, None] + np.arange(needed.max())
    return CacheLayout(int(needed.sum()), block_size, lambda _: tables, takes_tables=False)


def _block_tables(given: IntArray | None, context_lens: IntArray, layout: CacheLayout) -> IntArray:
    """Only the blocks that each request needs, `[n, max_blocks]`."""
    tables = layout.tables(len(context_lens)) if given is None else given
    needed = -(-context_lens // layout.block_size)
    if (needed > tables.shape[1]).any():
        i = int((needed > tables.shape[1]).argmax())
        remedy = "give block_tables, or a larger cache" if given is None else "add columns to it"
        raise InvalidValueError(
            f"request {i} needs {needed[i]} blocks of {layout.block_size} for its {context_lens[i]} tokens, but "
            f"{'the cache' if given is None else 'block_tables'} gives each request {tables.shape[1]}; {remedy}"
        )
    tables = tables[:, : needed.max()]
    is_needed = np.arange(tables.shape[1]) < needed[:, None]
    wrong = is_needed & ((tables < 0) | (tables >= layout.num_blocks))
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        raise InvalidValueError(
            f"block_tables[{i}, {j}]={tables[i, j]} is no block, and request {i} needs {needed[i]} of them for its "
            f"{context_lens[i]} tokens; use 0 to {layout.num_blocks - 1}"
        )
    return np.where(is_needed, tables, -1)


def _select(array: IntArray, ragged: RaggedLayout) -> IntArray:
    """The tokens' entries `[T]` of an array with one entry for every place in `input_ids`."""
    flat = array.reshape(-1)
    return flat if ragged.places is None else flat[ragged.places]


def _token_ids(rows: IntArray, ragged: RaggedLayout, vocab_size: int) -> IntArray:
    ids = _select(rows, ragged)
    wrong = (ids < 0) | (ids >= vocab_size)
    if wrong.any():
        place = int(wrong.argmax())
        row, column = divmod(place if ragged.places is None else int(ragged.places[place]), rows.shape[1])
        raise InvalidValueError(
            f"input_ids holds {ids[place]} in row {row}, column {column}, which is outside the vocabulary; "
            f"use 0 to {vocab_size - 1}"
        )
    return ids


def _position_ids(
    given: IntArray | None, derived: IntArray, shape: tuple[int, ...], ragged: RaggedLayout, max_len: int
) -> IntArray:
    if given is None:
        return derived
    batch, seq = shape
    if given.shape not in ((batch, seq), (1, seq), (seq,)):
        raise InvalidValueError(
            f"position_ids of shape {list(given.shape)} does not go with input_ids of {list(shape)}; "
            f"give {list(shape)}, or [{seq}] for all rows"
        )
    positions = _select(np.tile(given.reshape(-1), batch * seq // given.size), ragged)
    wrong = (positions < 0) | (positions >= max_len)
    if wrong.any():
        raise InvalidValueError(f"position_ids holds {positions[wrong.argmax()]}; use 0 to {max_len - 1}")
    return positions


def _slots(tables: IntArray, positions: IntArray, ragged: RaggedLayout, layout: CacheLayout) -> IntArray:
    """The tokens' slots in the cache, `[T]`."""
    owners = np.repeat(np.arange(len(tables)), ragged.query_lens)
    blocks, offsets = np.divmod(positions, layout.block_size)
    return tables[owners, blocks] * layout.block_size + offsets


def _slot_mapping(
    given: IntArray | None, derived: IntArray, shape: tuple[int, ...], ragged: RaggedLayout, layout: CacheLayout
) -> IntArray:
    if given is None:
        slots = derived
    elif given.shape == derived.shape:
        slots = given
    elif given.shape == shape or (shape[0] == 1 and given.shape == shape[1:]):
        slots = _select(given, ragged)
    else:
        raise InvalidValueError(
            f"slot_mapping of shape {list(given.shape)} does not go with input_ids of {list(shape)}; give one slot "
            f"for each of the {len(derived)} new tokens"
        )
    num_slots = layout.num_blocks * layout.block_size
    if slots.max() >= num_slots:
        raise InvalidValueError(
            f"slot_mapping holds {slots.max()}, but the cache has {num_slots} slots; use 0 to {num_slots - 1}, or a "
            "negative number for a token that is not to be written"
        )
    found, counts = np.unique(slots[slots >= 0], return_counts=True)
    if (counts > 1).any():
        raise InvalidValueError(
            f"slot {found[counts.argmax()]} of the cache would be written by {counts.max()} tokens; give requests "
            "blocks of their own in block_tables, or in slot_mapping a negative slot to all but one"
        )
    return slots
