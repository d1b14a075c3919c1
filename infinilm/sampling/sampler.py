"""The sampler: settings of every live row, and one batched pass from logits to tokens. It needs no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from infinilm.errors import EngineError, InvalidValueError
from infinilm.outputs import TokenLogprobs
from infinilm.sampling.host_arrays import HostArrays
from infinilm.sampling.logits_processors import LogitsProcessors
from infinilm.sampling.logprobs import Logprobs
from infinilm.sampling.masks import TokenMasks
from infinilm.sampling.settings import DRAW_SETTINGS, scrambled_seed
from infinilm.sampling_params import RowStart

if TYPE_CHECKING:
    import torch

LOWEST_TEMPERATURE = 1e-30  # float32 can divide by this; lower values draw the same


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The result of one row. With an `error` the token is undefined."""

    token_id: int
    logprobs: TokenLogprobs | None
    error: Exception | None


@dataclass(frozen=True, slots=True)
class Samples:
    """The results of n rows, where they were drawn: tensors or arrays."""

    token_ids: Any  # [n] int64
    is_finite: Any  # [n] bool: the greatest logit was finite
    logprobs: Logprobs | None = None  # of the rows that asked, in their order
    # By index in this batch: how many log-probabilities a row asked for, and errors that affect no other row.
    num_logprobs: dict[int, int] = field(default_factory=dict)
    processor_errors: dict[int, Exception] = field(default_factory=dict)

    def to_pinned(self) -> "Samples":
        from infinilm.kernels.copies import to_pinned

        logprobs = self.logprobs and self.logprobs.to_pinned()
        return replace(
            self, token_ids=to_pinned(self.token_ids), is_finite=to_pinned(self.is_finite), logprobs=logprobs
        )

    def read(self) -> tuple[list[int], dict[int, TokenLogprobs], dict[int, Exception]]:
        """The tokens, and by index the log-probabilities asked for and the errors. Waits for the device."""
        logprobs: dict[int, TokenLogprobs] = {}
        if self.logprobs is not None:
            entries = self.logprobs.to_host(list(self.num_logprobs.values()))
            logprobs = dict(zip(self.num_logprobs, entries, strict=True))
        errors = dict(self.processor_errors)
        is_finite = self.is_finite if isinstance(self.is_finite, np.ndarray) else self.is_finite.numpy(force=True)
        for i in np.flatnonzero(~is_finite).tolist():
            message = (
                "no token can be drawn: the logits hold NaN or +inf, or all are -inf; "
                "check the checkpoint's weights and the dtype it runs in"
            )
            errors.setdefault(i, EngineError(message))
        return self.token_ids.tolist(), logprobs, errors

    def to_host(self) -> list[SampledToken]:
        token_ids, logprobs, errors = self.read()
        return [SampledToken(token_id, logprobs.get(i), errors.get(i)) for i, token_id in enumerate(token_ids)]


class Sampler:
    """Draws tokens for rows that start and end at any step. `infinilm.sampling` lists the rules and their order.

    The settings of draws are on the device, for kernels that a CUDA graph can capture (`sample_rows`). A graph stays
    valid while all rows ever started are below `max_rows`; a greater row reallocates the settings. Without a device
    logits and results are arrays, and the native library draws.
    """

    def __init__(self, vocab_size: int, device: "torch.device | None", max_rows: int = 16) -> None:
        self._vocab_size = vocab_size
        self._arrays: Any = HostArrays() if device is None else _device_arrays(device)
        self._draw_settings = np.zeros(max_rows, dtype=DRAW_SETTINGS)  # by row
        self._device_settings: Any = self._arrays.upload(self._packed(slice(None)))[0]
        self._changed: set[int] = set()  # rows whose settings are not on the device yet
        self._live: set[int] = set()  # rows
        self._special: set[int] = set()  # live rows with logits processors, a grammar or log-probabilities
        self._num_logprobs: dict[int, int] = {}  # by row, only those that asked
        self._processors = LogitsProcessors(vocab_size, self._arrays)
        self._masks = TokenMasks(vocab_size, self._arrays)

    def start_row(self, start: RowStart) -> None:
        """Add a request. On an error nothing is changed."""
        row, params = start.row, start.params
        while row >= len(self._draw_settings):
            self._draw_settings = np.concatenate([self._draw_settings, np.zeros_like(self._draw_settings)])
            self._device_settings = self._arrays.upload(self._packed(slice(None)))[0]
        if row in self._live:
            raise EngineError(f"row {row} is taken; end it before starting it again")
        self._processors.start(start)
        try:
            self._masks.start(start)
        except BaseException:
            self._processors.end(row)
            raise
        self._live.add(row)
        if params.logprobs is not None:
            self._num_logprobs[row] = params.logprobs
        if any(row in rows for rows in (self._processors.rows, self._masks.rows, self._num_logprobs)):
            self._special.add(row)
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        self._draw_settings[row] = (
            scrambled_seed(start.seed),
            0 if params.is_greedy else np.float32(max(params.temperature, LOWEST_TEMPERATURE)),
            top_k,
            params.top_p,
            np.float32(math.log(params.min_p)) if params.min_p > 0 else -math.inf,
        )
        self._changed.add(row)

    def end_row(self, row: int) -> None:
        """Remove a row's request, if it has one; the row may be started again."""
        self._live.discard(row)
        self._special.discard(row)
        self._num_logprobs.pop(row, None)
        self._processors.end(row)
        self._masks.end(row)

    def sample(self, logits: Any, rows: Sequence[int], positions: Sequence[int]) -> Samples:
        """Draw one token per row from its raw `logits` [n, vocab] of any floating type.

        Logits in float32 may be overwritten. `rows` must be live. `positions` count the tokens before each drawn one.
        Waits for the device only if a row has logits processors, or for its previous draw if a row has a grammar.
        """
        if not self._live.issuperset(rows):
            raise EngineError(f"rows {list(rows)} are not all started")
        if tuple(logits.shape) != (len(rows), self._vocab_size):
            raise InvalidValueError(f"logits of shape {list(logits.shape)} must be [{len(rows)}, {self._vocab_size}]")
        self.upload()
        (places,) = self._arrays.upload(np.array([rows, positions], dtype=np.int64))
        if self._special.isdisjoint(rows):
            return Samples(*self.sample_rows(logits, *places))
        num_logprobs: dict[int, int] = {}
        asked: Any = slice(None)
        if self._num_logprobs:
            num_logprobs = {i: self._num_logprobs[row] for i, row in enumerate(rows) if row in self._num_logprobs}
            if len(num_logprobs) < len(rows):
                (asked,) = self._arrays.upload(np.array(list(num_logprobs), dtype=np.int64))
        masked = self._masks.places(rows)
        is_edited = bool(masked) or not self._processors.rows.isdisjoint(rows)
        raw_logits = logits[asked] if num_logprobs else logits
        if is_edited and not str(logits.dtype).endswith("float32"):
            logits = self._arrays.to_float32(logits)
        elif is_edited and len(num_logprobs) == len(rows):
            raw_logits = self._arrays.copy(raw_logits)
        errors = self._processors.apply(logits, rows, positions) if is_edited else {}
        errors |= self._masks.apply(logits, rows, [i for i in masked if i not in errors])
        token_ids, is_finite = self.sample_rows(logits, *places)
        if is_edited:
            self._processors.record(token_ids, rows)
        self._masks.record(token_ids, rows, masked)
        logprobs = None
        if num_logprobs:
            num_top = min(max(num_logprobs.values()), self._vocab_size)
            logprobs = Logprobs(*self._arrays.logprobs(raw_logits, token_ids[asked], num_top))
        return Samples(token_ids, is_finite, logprobs, num_logprobs, errors)

    def plain_settings(self, rows: Sequence[int]) -> Any | None:
        """The settings of all rows, for a caller that draws by itself; None if one of `rows` needs more than a draw."""
        if not self._live.issuperset(rows):
            raise EngineError(f"rows {list(rows)} are not all started")
        self.upload()
        return self._device_settings if self._special.isdisjoint(rows) else None

    def upload(self) -> None:
        """Copy the settings of rows started since the last call to the device, in one copy, without waiting."""
        if self._changed:
            changed = slice(min(self._changed), max(self._changed) + 1)
            self._device_settings[changed] = self._arrays.upload(self._packed(changed))[0]
            self._changed.clear()

    def sample_rows(self, logits: Any, rows: Any, positions: Any) -> tuple[Any, Any]:
        """`sample` in a form that a CUDA graph can capture, for rows that don't need the host: everything is on the
        device.

        `logits` are [n, vocab] of any floating type, `rows` and `positions` [n] int64, on a GPU of any integer type;
        there, row -1 is padding. Returns the token ids [n] int64, and whether each row's greatest logit was finite, [n]
        bool. Settings are those at the last `upload`.
        """
        drawn: tuple[Any, Any] = self._arrays.draw(logits, self._device_settings, rows, positions)
        return drawn

    def warm_up(self, logits: "torch.Tensor") -> None:
        (padding,) = self._arrays.upload(np.full(len(logits), -1, dtype=np.int64))
        self.sample_rows(logits, padding, padding)

    def _packed(self, rows: slice) -> npt.NDArray[np.int64]:
        """The settings of some rows, [n, 5], as a view."""
        return self._draw_settings[rows].view(np.int64).reshape(-1, DRAW_SETTINGS.itemsize // 8)


def _device_arrays(device: "torch.device") -> Any:
    from infinilm.sampling.device_arrays import DeviceArrays  # which needs torch

    return DeviceArrays(device)
