"""The sampler: the settings of every live row, and one batched pass from logits to tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from infinilm.errors import EngineError, InvalidValueError
from infinilm.outputs import TokenLogprobs
from infinilm.sampling.edits import RowEdits
from infinilm.sampling.leading import first_max, leading
from infinilm.sampling.logprobs import Logprobs, logprobs_of, pinned
from infinilm.sampling.masks import TokenMasks
from infinilm.sampling.noise import draw_keys, race, scrambled_seed, token_parts
from infinilm.sampling.scale import Scale
from infinilm.sampling.truncation import Limits, find_cutoffs, sorted_descending, total_weights
from infinilm.sampling_params import RowStart

Settings = npt.NDArray[np.void]
"""Rows of `SETTINGS`."""

LOWEST_TEMPERATURE = 1e-30
"""Float32 can divide by this; anything lower would draw the same."""

NUM_LEADERS = 256
"""Most truncated distributions have fewer tokens left."""

SETTINGS = np.dtype(
    [
        ("is_live", np.bool_),
        ("is_greedy", np.bool_),
        ("is_truncated", np.bool_),
        ("is_edited", np.bool_),
        ("temperature", np.float32),
        ("top_k", np.int64),  # vocab_size: no limit
        ("top_p", np.float64),  # 1: no limit
        ("log_min_p", np.float32),  # -inf: no limit
        ("scrambled_seed", np.uint64),
        ("num_logprobs", np.int32),  # -1: none asked for
    ]
)

NUM_DEVICE_SETTINGS = 5
"""What `infinilm.kernels.sampling` reads of a row, 64 bits each."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What one row drew. With an `error` the token means nothing."""

    token_id: int
    logprobs: TokenLogprobs | None
    error: Exception | None


@dataclass(frozen=True, slots=True)
class Samples:
    """What n rows drew, still on the device."""

    token_ids: torch.Tensor  # [n] int64
    is_sound: torch.Tensor  # [n] bool: the greatest logit was finite
    logprobs: Logprobs | None  # of the rows that asked
    num_logprobs: tuple[int, ...]  # [n], -1: this row did not ask
    processor_errors: dict[int, Exception]
    """By index in this batch; the other rows are unharmed."""

    def to_pinned(self) -> "Samples":
        """The same on the host, once the device has come to it: copies that are under way."""
        logprobs = self.logprobs and self.logprobs.to_pinned()
        return replace(self, token_ids=pinned(self.token_ids), is_sound=pinned(self.is_sound), logprobs=logprobs)

    def read(self) -> tuple[list[int], dict[int, TokenLogprobs], dict[int, Exception]]:
        """The tokens, and by index the log-probabilities asked for and what went wrong. Waits for the device."""
        logprobs: dict[int, TokenLogprobs] = {}
        if self.logprobs is not None:
            asked = [i for i, num_top in enumerate(self.num_logprobs) if num_top >= 0]
            entries = self.logprobs.to_host([self.num_logprobs[i] for i in asked])
            logprobs = dict(zip(asked, entries, strict=True))
        errors = dict(self.processor_errors)
        for i in np.flatnonzero(~self.is_sound.numpy(force=True)).tolist():
            errors.setdefault(
                i,
                EngineError(
                    "no token can be drawn: the logits hold NaN or +inf, or all are -inf; "
                    "check the checkpoint's weights and the dtype it runs in"
                ),
            )
        return self.token_ids.tolist(), logprobs, errors

    def to_host(self) -> list[SampledToken]:
        """One entry per row. Waits for the device."""
        token_ids, logprobs, errors = self.read()
        return [SampledToken(token_id, logprobs.get(i), errors.get(i)) for i, token_id in enumerate(token_ids)]


class Sampler:
    """Draws tokens for rows that come and go. `infinilm.sampling` lists the rules and their order.

    On a GPU a row's settings are there, too, for kernels that a captured graph can hold (`sample_rows`). A graph stays
    valid while all rows ever started are below `max_rows`; with others the sampler makes room by moving them.
    """

    def __init__(self, vocab_size: int, device: torch.device, max_rows: int = 16) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._settings = np.zeros(max_rows, dtype=SETTINGS)  # by row
        self._device_settings = self._empty_device_settings()
        self._changed: set[int] = set()  # the rows whose settings the device does not know
        self._edits: dict[int, RowEdits] = {}  # by row, only those that have any, or a mask
        self._masks = TokenMasks(vocab_size, device)
        self._token_parts = token_parts(vocab_size, device)

    def start_row(self, start: RowStart) -> None:
        """Take on a request. On an error nothing is changed."""
        row, params = start.row, start.params
        while row >= len(self._settings):
            self._settings = np.concatenate([self._settings, np.zeros_like(self._settings)])
            self._device_settings = self._empty_device_settings()
            self._changed.update(range(len(self._settings)))
        if self._settings[row]["is_live"]:
            raise EngineError(f"row {row} is taken; end it before starting it again")
        edits = RowEdits.of(start, self._vocab_size, self._device)
        self._masks.start(start)
        is_edited = bool(edits.edits) or row in self._masks
        if is_edited:
            self._edits[row] = edits
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        settings = self._settings[row]
        settings["is_live"] = True
        settings["is_greedy"] = params.is_greedy
        settings["is_truncated"] = top_k < self._vocab_size or params.top_p < 1 or params.min_p > 0
        settings["is_edited"] = is_edited
        settings["temperature"] = max(params.temperature, LOWEST_TEMPERATURE)
        settings["top_k"] = top_k
        settings["top_p"] = params.top_p
        settings["log_min_p"] = math.log(params.min_p) if params.min_p > 0 else -math.inf
        settings["scrambled_seed"] = scrambled_seed(start.seed)
        settings["num_logprobs"] = -1 if params.logprobs is None else params.logprobs
        self._changed.add(row)

    def end_row(self, row: int) -> None:
        """Forget a row's request, if it has one; the row may be started again."""
        if row < len(self._settings):
            self._settings[row] = np.zeros((), dtype=SETTINGS)
        self._edits.pop(row, None)
        self._masks.end(row)

    def sample(self, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]) -> Samples:
        """Draw one token per row from its raw `logits` [n, vocab] float32, which may be overwritten.

        `rows` are live rows; `positions` say how many tokens come before each drawn one. Waits for the device
        only if a row has logits processors, or for its previous draw if a row has a grammar.
        """
        settings = self._settings_of(rows)
        if tuple(logits.shape) != (len(settings), self._vocab_size):
            raise InvalidValueError(
                f"logits of shape {list(logits.shape)} must be [{len(settings)}, {self._vocab_size}]"
            )
        has_logprobs = settings["num_logprobs"] >= 0
        edited = np.flatnonzero(settings["is_edited"]).tolist()
        masked = [i for i in edited if rows[i] in self._masks]
        raw_logits = logits
        if edited and has_logprobs.any():
            logits = logits.clone()
        errors: dict[int, Exception] = {}
        for i in edited:
            try:
                self._edits[rows[i]].apply(logits[i], positions[i])
            except Exception as error:  # whatever the request's own code raises is that request's error
                errors[i] = error
        errors |= self._masks.apply(logits, rows, [i for i in masked if i not in errors])
        if self._device.type == "cuda":
            self.upload()
            places = self._on_device(np.array([rows, positions], dtype=np.int64))
            token_ids, is_sound = self.sample_rows(logits, *places)
        else:
            token_ids, is_sound = self._choose(logits, settings, np.asarray(positions, dtype=np.int64))
        for i in edited:
            self._edits[rows[i]].record(token_ids[i : i + 1])
        self._masks.record(token_ids, rows, masked)
        logprobs = None
        if has_logprobs.any():
            asked = self._on_device(np.flatnonzero(has_logprobs))
            num_top = int(settings["num_logprobs"].max())
            logprobs = logprobs_of(raw_logits[asked], token_ids[asked], num_top)
        return Samples(token_ids, is_sound, logprobs, tuple(settings["num_logprobs"].tolist()), errors)

    def needs_host(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> bool:
        """Whether any of these live rows has edits or asks for log-probabilities, which is work for `sample`."""
        settings = self._settings[np.asarray(rows, dtype=np.int64)]
        return bool((settings["is_edited"] | (settings["num_logprobs"] >= 0)).any())

    def upload(self) -> None:
        """Tell the device, in one copy and without waiting for it, the settings of rows started since the last time."""
        if not self._changed:
            return
        changed = slice(min(self._changed), max(self._changed) + 1)
        settings = self._settings[changed]
        temperature = np.where(settings["is_greedy"], 0, settings["temperature"])
        columns = (
            settings["scrambled_seed"],
            temperature.astype(np.float64),
            settings["top_k"],
            settings["top_p"],
            settings["log_min_p"].astype(np.float64),
        )
        packed = np.stack([column.view(np.int64) for column in columns], axis=1)
        self._device_settings[changed].copy_(self._on_host(packed), non_blocking=True)
        self._changed.clear()

    def sample_rows(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`sample` in a form that a CUDA graph can hold, for rows that don't need the host: all is on the device.

        `logits` are [n, vocab] of any floating type, `rows` and `positions` [n] of any integer type; row -1 is padding.
        Returns the token ids [n] int64, and whether each row's greatest logit was finite, [n] bool. Settings are those
        at the last `upload`.
        """
        from infinilm.kernels.sampling import draw  # Triton is for GPUs

        return draw(logits, self._device_settings, rows, positions)

    def warm_up(self, logits: torch.Tensor) -> None:
        """Have the kernels for such `logits` ready."""
        padding = torch.full((len(logits),), -1, dtype=torch.int64, device=self._device)
        self.sample_rows(logits, padding, padding)

    def _settings_of(self, rows: Sequence[int]) -> Settings:
        """The settings of live rows, [n]."""
        indices = np.asarray(rows, dtype=np.int64)
        known = indices[(indices >= 0) & (indices < len(self._settings))]
        settings = self._settings[known]
        if len(known) < len(indices) or not settings["is_live"].all():
            raise EngineError(f"rows {list(rows)} are not all started")
        return settings

    def _choose(
        self, logits: torch.Tensor, settings: Settings, positions: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and soundness, both [n], each kind of row in its own way."""
        is_greedy = settings["is_greedy"]
        is_truncated = settings["is_truncated"] & ~is_greedy
        is_free = ~(is_greedy | is_truncated)
        token_ids = torch.empty(len(settings), dtype=torch.int64, device=self._device)
        scores = torch.empty(len(settings), device=self._device)
        for draw, is_member in (
            (self._draw_greedily, is_greedy),
            (self._draw_freely, is_free),
            (self._draw_truncated, is_truncated),
        ):
            members = np.flatnonzero(is_member)
            if len(members) == 0:
                continue
            if len(members) == len(settings):
                scores, token_ids = draw(logits, settings, positions)
            else:
                indices = self._on_device(members)
                drawn = draw(logits[indices], settings[members], positions[members])
                scores[indices], token_ids[indices] = drawn
        return token_ids, scores.isfinite()

    def _draw_greedily(self, logits: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        """The greatest logits and their tokens, both [n]."""
        return first_max(logits)

    def _draw_freely(
        self, logits: torch.Tensor, settings: Settings, positions: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores and tokens, both [n], drawn from whole distributions."""
        keys = self._on_device(draw_keys(settings["scrambled_seed"], positions))
        scale = Scale.of(logits, self._column(settings["temperature"]))
        return race(logits, scale, None, self._token_parts, keys)

    def _draw_truncated(
        self, logits: torch.Tensor, settings: Settings, positions: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores and tokens, both [n], drawn from what top-k, top-p and min-p leave."""
        keys = self._on_device(draw_keys(settings["scrambled_seed"], positions))
        scale = Scale.of(logits, self._column(settings["temperature"]))
        limits = self._limits_of(settings)
        leaders, leader_ids = leading(logits, min(NUM_LEADERS, self._vocab_size))
        totals = self._totals_of(logits, scale, settings)
        cutoffs, is_enough = find_cutoffs(leaders, self._vocab_size, scale, limits, totals)
        scores, columns = race(leaders, scale, cutoffs, self._token_parts[leader_ids], keys)
        token_ids = leader_ids.gather(1, columns.unsqueeze(1)).squeeze(1)
        if not is_enough.all():
            rest = (~is_enough).nonzero().squeeze(1)
            scores[rest], token_ids[rest] = self._draw_from_sorted(
                logits[rest], scale.select(rest), limits.select(rest), keys[rest]
            )
        return scores, token_ids

    def _draw_from_sorted(
        self, logits: torch.Tensor, scale: Scale, limits: Limits, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores and tokens, both [n], however many tokens are left to draw from."""
        cutoffs, _ = find_cutoffs(sorted_descending(logits), self._vocab_size, scale, limits, None)
        return race(logits, scale, cutoffs, self._token_parts, keys)

    def _totals_of(self, logits: torch.Tensor, scale: Scale, settings: Settings) -> torch.Tensor:
        """The weights [n, 1] of whole rows, summed up where top-p has to know them."""
        rows = np.flatnonzero((settings["top_p"] < 1) & (settings["top_k"] == self._vocab_size))
        if len(rows) == len(settings):
            return total_weights(logits, scale)
        totals = torch.zeros(len(settings), 1, dtype=torch.int64, device=self._device)
        if len(rows):
            indices = self._on_device(rows)
            totals[indices] = total_weights(logits[indices], scale.select(indices))
        return totals

    def _limits_of(self, settings: Settings) -> Limits:
        top_k, top_p, log_min_p = settings["top_k"], settings["top_p"], settings["log_min_p"]
        return Limits(
            top_k=self._column(top_k) if (top_k < self._vocab_size).any() else None,
            top_p=self._column(top_p) if (top_p < 1).any() else None,
            log_min_p=self._column(log_min_p) if (log_min_p > -np.inf).any() else None,
        )

    def _column(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """`values` [n] as [n, 1] on the device."""
        return self._on_device(values).unsqueeze(1)

    def _empty_device_settings(self) -> torch.Tensor:
        """Room for all rows, [rows, 5] int64."""
        return torch.zeros(len(self._settings), NUM_DEVICE_SETTINGS, dtype=torch.int64, device=self._device)

    def _on_device(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """The same values on the device, without waiting for it."""
        return self._on_host(values).to(self._device, non_blocking=True)

    def _on_host(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """The same values as a tensor on the host that the device can copy when it comes to it."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return tensor.pin_memory() if self._device.type == "cuda" else tensor
