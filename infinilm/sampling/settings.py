"""The settings of a draw in the form that kernels take, and its seed. Needs no torch."""

from typing import Any

import numpy as np

MASK64 = 2**64 - 1
# The settings of a row, 64 bits each.
DRAW_SETTINGS = np.dtype(
    [
        ("scrambled_seed", np.uint64),
        ("temperature", np.float64),  # 0: greedily; a float32's value
        ("top_k", np.int64),  # at least the vocabulary: no limit
        ("top_p", np.float64),  # 1: no limit
        ("log_min_p", np.float64),  # -inf: no limit; a float32's value
    ]
)


def scramble(values: Any) -> Any:
    """SplitMix64's finaliser: a bijection of 64-bit integers in which every bit affects every other.

    Takes a Python integer or an array of uint64.
    """
    values = ((values ^ (values >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    values = ((values ^ (values >> 27)) * 0x94D049BB133111EB) & MASK64
    return values ^ (values >> 31)


def scrambled_seed(seed: int) -> int:
    """The generator's initial state for any integer seed. Only the low 64 bits of the seed count."""
    return int(scramble(seed & MASK64))
