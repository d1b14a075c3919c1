"""The settings of a draw, as kernels take them, and its seed. No torch here."""

import numpy as np
import numpy.typing as npt

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


def scramble(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser: a bijection of 64-bit integers in which every bit affects every other."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def scrambled_seed(seed: int) -> int:
    """The generator's initial state for any integer seed, of which the low 64 bits count."""
    return int(scramble(np.array([seed & MASK64], dtype=np.uint64))[0])
