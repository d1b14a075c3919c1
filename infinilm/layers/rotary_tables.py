"""The angles of rotary position embedding, for every position. This module needs no torch.

`rope` is Hugging Face's `rope_parameters`, checked and with its defaults filled in: `rope_type`, `rope_theta` and the
other values that the type needs. Angles depend only on the position, so a text may be computed in any chunks. They are
rounded to float32 where the models' own code rounds them. Everything else is computed in float64, so that results are
equal on every machine.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_FILLED_ROWS = 1024  # rows filled at a time: few enough for the CPU's caches


class RotaryTable:
    """`array` `[max_len, dim]`: for positions 0 to `max_len` - 1 first `dim / 2` cosines, then `dim / 2` sines.

    `fill` computes rows. Tables of long contexts have tens of megabytes, but rows that are not filled take no memory.
    """

    def __init__(self, head_dim: int, rope: Mapping[str, Any], max_len: int, max_position_embeddings: int) -> None:
        frequencies = inverse_frequencies(rotary_dim(head_dim, rope), rope, max_len, max_position_embeddings)
        self._frequencies = frequencies.astype(np.float32)
        self._factor = np.float32(attention_factor(rope))
        self._num_filled = 0
        self.array = np.empty((max_len, 2 * frequencies.shape[-1]), dtype=np.float32)

    def fill(self, num_positions: int) -> None:
        """Compute the rows of the first `num_positions` positions, unless they are there already."""
        while self._num_filled < min(num_positions, len(self.array)):
            rows = slice(self._num_filled, min(self._num_filled + _FILLED_ROWS, len(self.array)))
            frequencies = self._frequencies if self._frequencies.ndim == 1 else self._frequencies[rows]
            angles = (np.arange(rows.start, rows.stop, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
            self.array[rows] = np.concatenate((np.cos(angles), np.sin(angles)), axis=1)
            self.array[rows] *= self._factor
            self._num_filled = rows.stop


def rotary_table(
    head_dim: int, rope: Mapping[str, Any], max_len: int, max_position_embeddings: int
) -> npt.NDArray[np.float32]:
    """All rows of a `RotaryTable`."""
    table = RotaryTable(head_dim, rope, max_len, max_position_embeddings)
    table.fill(max_len)
    return table.array


def query_scales(rope: Mapping[str, Any], max_len: int) -> npt.NDArray[np.float32] | None:
    """The factor of queries at each position, `[max_len]`; None: queries are not scaled."""
    if (beta := rope.get("llama_4_scaling_beta")) is None:
        return None
    periods = np.arange(max_len) // rope["original_max_position_embeddings"]
    return np.asarray(1 + beta * np.log(1 + periods), dtype=np.float32)


def rotary_dim(head_dim: int, rope: Mapping[str, Any]) -> int:
    """The number of a head's numbers that are rotated. The rope type `proportional` rotates the others by angle 0."""
    if rope["rope_type"] == "proportional":
        return head_dim
    return int(head_dim * (rope.get("partial_rotary_factor") or 1.0))


def inverse_frequencies(head_dim: int, rope: Mapping[str, Any], max_len: int, max_position_embeddings: int) -> Floats:
    """Angle per position for each pair of a head: `[head_dim / 2]`, or `[max_len, head_dim / 2]` if it varies."""
    theta: float = rope["rope_theta"]
    exponents = np.arange(0, head_dim, 2) / head_dim
    plain = 1.0 / np.power(theta, exponents)
    divisors: Floats | float = 1.0
    match rope["rope_type"]:
        case "none":
            return np.zeros_like(plain)
        case "proportional":
            is_turned = np.arange(len(plain)) < int((rope.get("partial_rotary_factor") or 1.0) * head_dim // 2)
            return np.asarray(np.where(is_turned, plain, 0.0) / (rope.get("factor") or 1.0))
        case "linear":
            divisors = rope["factor"]
        case "dynamic":
            # Each token is rotated as if it ended the text, and keys are cached after rotation.
            lengths = np.maximum(np.arange(1, max_len + 1), max_position_embeddings)
            stretch = rope["factor"] * lengths / max_position_embeddings - (rope["factor"] - 1)
            bases = theta * np.power(stretch, head_dim / (head_dim - 2))
            return np.asarray(1.0 / np.power(bases[:, None], exponents))
        case "yarn":
            return _yarn(plain, head_dim, rope)
        case "llama3":
            return _llama3(plain, rope)
        case "longrope":
            is_long = max_len > rope["original_max_position_embeddings"]
            divisors = np.array(rope["long_factor" if is_long else "short_factor"], dtype=np.float64)
    return plain / divisors


def _yarn(plain: Floats, head_dim: int, rope: Mapping[str, Any]) -> Floats:
    """Stretch slow pairs by `factor`, keep fast pairs, and interpolate linearly between them."""

    def pair_turning(times: float) -> float:
        """The index (with a fraction) of the pair that turns this many times over the original length."""
        wavelength = rope["original_max_position_embeddings"] / (times * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope["rope_theta"]))

    low, high = pair_turning(rope.get("beta_fast") or 32), pair_turning(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    slowness = np.clip((np.arange(head_dim // 2) - low) / (high - low or 0.001), 0, 1)
    return np.asarray(plain + slowness * (plain / rope["factor"] - plain))


def _llama3(plain: Floats, rope: Mapping[str, Any]) -> Floats:
    """Stretch pairs that turn fewer than `low_freq_factor` times over the original length; keep pairs that turn more
    than `high_freq_factor` times; interpolate between them."""
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    fastness = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(plain / rope["factor"] + fastness * (plain - plain / rope["factor"]))


def attention_factor(rope: Mapping[str, Any]) -> float:
    """The factor of cosines and sines that keeps attention as sharp on a longer text."""
    if rope["rope_type"] not in ("yarn", "longrope"):
        return 1.0
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    factor = rope["factor"]
    if factor <= 1:
        return 1.0
    if rope["rope_type"] == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(rope["original_max_position_embeddings"]))
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all_dim)
    return yarn_scale(factor, 1.0)


def yarn_scale(factor: float, weight: float) -> float:
    """The factor by which YaRN sharpens attention, for positions stretched by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0
