"""The sampler's operations on logits in the host's memory: NumPy and the native library, no torch."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.kernels import native
from infinilm.kernels.native import load_library
from infinilm.kernels.penalties import IN_PROMPT
from infinilm.platforms import require_torch

Floats = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class HostArrays:
    """The operations of `DeviceArrays`, for NumPy arrays."""

    upload = staticmethod(native.keep_arrays)
    draw = staticmethod(native.draw_arrays)

    def empty(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        return np.empty(shape, dtype)

    def join(self, parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        return np.concatenate(parts)

    def to_float32(self, logits: Floats) -> Floats:
        return np.ascontiguousarray(logits, dtype=np.float32)

    def copy(self, logits: Floats) -> Floats:
        return logits.copy()

    def add(self, target: npt.NDArray[Any], indices: IntArray, values: npt.NDArray[Any]) -> None:
        np.add.at(target.reshape(-1), indices, values)

    def forbid(self, logits: Floats, indices: IntArray) -> None:
        logits.reshape(-1)[indices] = -np.inf

    def forbid_masked(self, logits: Floats, indices: IntArray, masks: npt.NDArray[np.int32]) -> None:
        bits = np.unpackbits(masks.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
        for index, allowed in zip(indices, bits, strict=True):
            logits[index][allowed == 0] = -np.inf

    def penalize(
        self, logits: Floats, places: IntArray, slots: IntArray, counts: npt.NDArray[np.int32], penalties: Floats
    ) -> None:
        for place, slot in zip(places, slots, strict=True):
            repetition, frequency, presence = penalties[slot]
            (tokens,) = np.nonzero(counts[slot])
            values, count = logits[place, tokens], counts[slot, tokens]
            values = np.where(values > 0, values / repetition, values * repetition)
            num_drawn = (count & (IN_PROMPT - 1)).astype(np.float32)
            values -= frequency * num_drawn
            values -= presence * np.minimum(num_drawn, np.float32(1))
            logits[place, tokens] = values

    def logprobs(self, logits: Floats, targets: IntArray, num_top: int) -> tuple[IntArray, Floats]:
        ids, values = np.empty((len(logits), 2 + num_top), np.int64), np.empty((len(logits), 1 + num_top), np.float32)
        found = np.empty(values.shape, dtype=np.int64)
        load_library().logprobs(np.ascontiguousarray(logits), targets, found, values)
        ids[:, 0], ids[:, 1:] = targets, found
        return ids, values

    def reader(self, token_ids: IntArray) -> Callable[[], list[int]]:
        return token_ids.tolist

    def tensor(self, logits: Floats) -> Any:
        with require_torch("logits_processors"):
            import torch
        return torch.from_numpy(logits)
