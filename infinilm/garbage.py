"""Python's garbage collector, kept out of the way."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[Callable[[], None]]:
    """Collect nothing meanwhile, but what is new when the function is called that this gives.

    A full collection looks at every object of every library, for some 0.2 s in which a GPU has nothing to do; one
    follows whenever the number of objects has grown by a quarter. What steps leave behind has no cycles and goes
    without it. Requests have cycles, and long lists: they are looked at in the end, or before, while a GPU is busy.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield _collect_young if was_enabled else lambda: None
    finally:
        if was_enabled:
            gc.enable()


def _collect_young() -> None:
    """Look at the objects made since the last time if they are as many as Python waits for."""
    if gc.get_count()[0] > gc.get_threshold()[0] > 0:
        gc.collect(0)
