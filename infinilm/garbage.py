"""Python's garbage collector, kept out of the way."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Collect nothing meanwhile.

    A full collection looks at every object of every library, for some 0.2 s in which a GPU has nothing to do; one
    follows whenever the number of objects has grown by a quarter. What steps leave behind has no cycles and goes
    without it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
