"""Changes to logits before truncation: bias, penalties, `min_tokens` and the request's own functions.

All but the functions are operations over all rows of a step that use them (`HostArrays`, `DeviceArrays`). Their indices
are computed once and reused as long as the step's rows stay the same (`_Batch`). Needs no torch.
"""

import math
from collections.abc import KeysView, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from infinilm.errors import InvalidTypeError, InvalidValueError
from infinilm.kernels.penalties import IN_PROMPT
from infinilm.sampling_params import LogitsProcessor, RowStart

if TYPE_CHECKING:
    from torch import Tensor

    from infinilm.sampling.device_arrays import DeviceArrays
    from infinilm.sampling.host_arrays import HostArrays


class TokenCounts:
    """Counts and penalties by slot. A slot belongs to one row; the table doubles when all are used."""

    def __init__(self, vocab_size: int, arrays: "HostArrays | DeviceArrays") -> None:
        self._vocab_size = vocab_size
        self._arrays: Any = arrays
        self._counts = self._arrays.empty((0, vocab_size), "int32")  # [slots, vocab]
        self._penalties = self._arrays.empty((0, 3), "float32")  # [slots, 3]: repetition, frequency, presence
        self._free: list[int] = []

    def start(self, penalties: Sequence[float], prompt_ids: Sequence[int], output_ids: Sequence[int]) -> int:
        """Allocate a slot for a row with these three penalties and this text."""
        if not self._free:
            num_slots = len(self._counts)
            num_new = max(num_slots, 1)
            new = self._arrays.empty((num_new, self._vocab_size), "int32"), self._arrays.empty((num_new, 3), "float32")
            self._counts = self._arrays.join((self._counts, new[0]))
            self._penalties = self._arrays.join((self._penalties, new[1]))
            self._free = list(range(num_slots, num_slots + num_new))
        slot = self._free.pop()
        (self._penalties[slot],) = self._arrays.upload(np.array(penalties, dtype=np.float32))
        texts = (np.array(prompt_ids, dtype=np.int64), np.array(output_ids, dtype=np.int64))
        in_prompt, drawn, ones = self._arrays.upload(*texts, np.ones_like(texts[1]))
        self._counts[slot] = 0
        self._counts[slot, in_prompt] = IN_PROMPT
        self._arrays.add(self._counts[slot], drawn, ones)
        return slot

    def end(self, slot: int) -> None:
        self._free.append(slot)

    def penalize(self, logits: Any, places: Any, slots: Any) -> None:
        """Penalise the rows `places` [k] of `logits` [n, vocab] float32, which have `slots` [k], in place."""
        self._arrays.penalize(logits, places, slots, self._counts, self._penalties)

    def record(self, slots: Any, token_ids: Any) -> None:
        (ones,) = self._arrays.upload(np.ones(len(token_ids), dtype=np.int64))
        self._arrays.add(self._counts, slots * self._vocab_size + token_ids, ones)


IntArray = npt.NDArray[np.int64]
_NO_IDS = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class _RowRules:
    bias_ids: IntArray  # [b]
    biases: npt.NDArray[np.float32]  # [b]
    stop_ids: IntArray  # [s], must not be drawn before `first_stop`
    first_stop: int  # the first position at which `stop_ids` may be drawn
    slot: int | None  # of `TokenCounts`
    functions: tuple[LogitsProcessor, ...]
    output_ids: list[int]  # the answer so far, kept only for `functions`


@dataclass(frozen=True, slots=True)
class _Batch:
    """The rules of a step's rows. A logit's index is `index of the row in the step * vocab + token id`."""

    rows: tuple[int, ...]
    bias_indices: Any  # [b] int64, or None; this and the next three are on the logits' device
    biases: Any  # [b] float32, or None
    penalized: Any  # [k] int64, places of rows with penalties, or None
    slots: Any  # [k] int64, or None
    stop_indices: IntArray  # [s]
    stop_places: IntArray  # [s]
    first_stops: IntArray  # [s]
    with_functions: tuple[int, ...]  # places


class LogitsProcessors:
    """The rules of all live rows that have any."""

    def __init__(self, vocab_size: int, arrays: "HostArrays | DeviceArrays") -> None:
        self._vocab_size = vocab_size
        self._arrays: Any = arrays
        self._rules: dict[int, _RowRules] = {}  # by row
        self._counts = TokenCounts(vocab_size, arrays)
        self._batch: _Batch | None = None

    @property
    def rows(self) -> KeysView[int]:
        return self._rules.keys()

    def start(self, start: RowStart) -> None:
        """Add a row's rules. On an error nothing is changed."""
        params, output_ids = start.params, start.output_token_ids
        bias = params.logit_bias or {}
        if outside := [token_id for token_id in bias if token_id >= self._vocab_size]:
            raise InvalidValueError(
                f"logit_bias names token {outside[0]}; this model's token ids go from 0 to {self._vocab_size - 1}"
            )
        stop_ids, first_stop = _NO_IDS, 0
        if params.min_tokens > len(output_ids) and start.grammar is None:  # a grammar handles stop ids itself
            # Ids past the vocabulary can't be drawn.
            stop_ids = np.array([each for each in start.stop_ids if each < self._vocab_size], dtype=np.int64)
            first_stop = len(start.prompt_token_ids) + params.min_tokens
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        has_penalties = penalties != (1.0, 0.0, 0.0)
        if not (bias or has_penalties or len(stop_ids) or params.logits_processors):
            return
        self._batch = None
        self._rules[start.row] = _RowRules(
            bias_ids=np.array(list(bias), dtype=np.int64),
            biases=np.array(list(bias.values()), dtype=np.float32),
            stop_ids=stop_ids,
            first_stop=first_stop,
            slot=self._counts.start(penalties, start.prompt_token_ids, output_ids) if has_penalties else None,
            functions=tuple(params.logits_processors),
            output_ids=list(output_ids) if params.logits_processors else [],
        )

    def end(self, row: int) -> None:
        rules = self._rules.pop(row, None)
        if rules is not None:
            self._batch = None
            if rules.slot is not None:
                self._counts.end(rules.slot)

    def apply(self, logits: Any, rows: Sequence[int], positions: Sequence[int]) -> dict[int, Exception]:
        """Change the `logits` [n, vocab] float32 of `rows` [n], which draw tokens at `positions` [n], in place.

        Returns the errors of functions, by index. Waits for the device only if a row has functions.
        """
        batch = self._gather(rows)
        if batch.bias_indices is not None:
            self._arrays.add(logits, batch.bias_indices, batch.biases)
        if batch.penalized is not None:
            self._counts.penalize(logits, batch.penalized, batch.slots)
        if len(batch.stop_indices):
            is_early = np.asarray(positions)[batch.stop_places] < batch.first_stops
            if is_early.any():
                self._arrays.forbid(logits, batch.stop_indices[is_early])
        errors: dict[int, Exception] = {}
        for place in batch.with_functions:
            try:
                _call_functions(self._rules[rows[place]], self._arrays.tensor(logits[place]))
            except Exception as error:  # raised by the request's own code: an error of that request only
                errors[place] = error
        return errors

    def record(self, token_ids: Any, rows: Sequence[int]) -> None:
        """Count the tokens drawn: `token_ids` [n] on the device."""
        batch = self._gather(rows)
        if batch.penalized is not None:
            self._counts.record(batch.slots, token_ids[batch.penalized])
        for place in batch.with_functions:
            self._rules[rows[place]].output_ids.append(int(token_ids[place]))

    def _gather(self, rows: Sequence[int]) -> _Batch:
        """The rules of these rows, cached while the rows stay the same."""
        if self._batch is not None and self._batch.rows == tuple(rows):
            return self._batch
        found = [(place, self._rules[row]) for place, row in enumerate(rows) if row in self._rules]
        bias_indices = _joined([place * self._vocab_size + rules.bias_ids for place, rules in found])
        biases = np.concatenate([np.empty(0, dtype=np.float32), *(rules.biases for _, rules in found)])
        slots = [(place, rules.slot) for place, rules in found if rules.slot is not None]
        stops = [(place, rules) for place, rules in found if len(rules.stop_ids)]
        upload = self._arrays.upload
        penalized, held = upload(*np.array(slots, dtype=np.int64).T.copy()) if slots else (None, None)
        self._batch = _Batch(
            tuple(rows),
            upload(bias_indices)[0] if len(bias_indices) else None,
            upload(biases)[0] if len(biases) else None,
            penalized,
            held,
            _joined([place * self._vocab_size + rules.stop_ids for place, rules in stops]),
            _joined([np.full_like(rules.stop_ids, place) for place, rules in stops]),
            _joined([np.full_like(rules.stop_ids, rules.first_stop) for _, rules in stops]),
            tuple(place for place, rules in found if rules.functions),
        )
        return self._batch


def _joined(arrays: Sequence[IntArray]) -> IntArray:
    return np.concatenate([_NO_IDS, *arrays])


def _call_functions(rules: _RowRules, logits: "Tensor") -> None:
    """Apply a row's own functions to its `logits` [vocab]. Raises what they raise, or an error for a bad result."""
    for function in rules.functions:
        if not math.isfinite(logits.max()):
            return  # reported by the sampler
        # Copies, so that a function can't change the list or keep the logits' memory.
        result = function(list(rules.output_ids), logits.clone())
        _check_processed(function, result, logits)
        logits.copy_(result.detach())


def _check_processed(processor: LogitsProcessor, result: object, logits: "Tensor") -> None:
    """Refuse a processor's result that can't replace `logits` [vocab]."""
    import torch

    name = f"logits processor {getattr(processor, '__qualname__', repr(processor))}"
    if not isinstance(result, torch.Tensor):
        raise InvalidTypeError(f"{name} returned {type(result).__name__}; it must return the logits, a tensor")
    if result.dtype != logits.dtype or result.device != logits.device:
        raise InvalidTypeError(
            f"{name} returned {result.dtype} on {result.device}; it must return {logits.dtype} on {logits.device}"
        )
    if result.shape != logits.shape:
        raise InvalidValueError(
            f"{name} returned logits of shape {list(result.shape)}; it must return {list(logits.shape)}"
        )
    if not math.isfinite(greatest := result.max().item()):
        raise InvalidValueError(
            f"{name} returned logits whose greatest is {greatest}; use -inf to forbid tokens, "
            "no other value that is not finite, and leave at least one token"
        )
