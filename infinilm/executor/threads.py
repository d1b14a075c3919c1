"""How many threads compute, and whose they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from infinilm.kernels import native


@dataclass(frozen=True, slots=True)
class ThreadUsers:
    """Who has enough to compute in a step to need threads for it."""

    torch: bool = True
    native: bool = False
    """The native library."""


def share_of_threads(device: torch.device, num_ranks: int) -> int:
    """The threads of each rank: as many as torch has, one per core unless it was told otherwise. Ranks on a CPU share
    them."""
    num_threads = torch.get_num_threads()
    return max(1, num_threads // num_ranks) if device.type == "cpu" else num_threads


@contextmanager
def computing_threads(num_threads: int, users: ThreadUsers) -> Iterator[None]:
    """Compute with this many threads, of whoever needs them.

    Torch has only one where it has little to do: its threads wait for work by spinning, on cores that those of the
    native library need. Afterwards it has as many as before.
    """
    library = native.load() if users.native else None
    if library is not None and library.num_threads() != num_threads:
        library.set_num_threads(num_threads)
    before, wanted = torch.get_num_threads(), num_threads if users.torch else 1
    if wanted != before:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        if wanted != before:
            torch.set_num_threads(before)
