"""Ctrl-C, kept away from where it would leave something half done.

Python raises `KeyboardInterrupt` between any two lines of the main thread. Engines do their bookkeeping with it held
back, and let it through where they compute or wait for others, which they can recover from.

These are classes because a generator that is interrupted on its way out would go on when it is collected.
"""

import signal
from collections.abc import Callable
from contextlib import ContextDecorator
from threading import current_thread, main_thread
from typing import Any


class interrupts_held(ContextDecorator):  # noqa: N801 - it is used as a function is
    """Let interrupts wait until the end of the block, or until they are allowed within it."""

    def __enter__(self) -> None:
        if current_thread() is not main_thread():
            return  # others are never interrupted
        handler = signal.getsignal(signal.SIGINT)
        if isinstance(handler, _Holder):
            handler.depth += 1
        elif callable(handler):
            signal.signal(signal.SIGINT, _Holder(handler))

    def __exit__(self, *_: object) -> None:
        holder = _current_holder()
        if holder is not None:
            holder.depth -= 1
            if holder.depth == 0:
                signal.signal(signal.SIGINT, holder.handler)
                holder.deliver()


class interrupts_allowed:  # noqa: N801
    """Let interrupts through in this part of a block that holds them."""

    def __enter__(self) -> None:
        self._holder = _current_holder()
        if self._holder is not None:
            signal.signal(signal.SIGINT, self._holder.handler)
            try:
                self._holder.deliver()
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *_: object) -> None:
        if self._holder is not None:
            signal.signal(signal.SIGINT, self._holder)


class _Holder:
    """A handler of interrupts that keeps them for the one in whose place it is."""

    def __init__(self, handler: Callable[..., object]) -> None:
        self.handler = handler
        self.depth = 1
        """How many blocks, each within the one before, hold interrupts."""
        self._held: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        self._held.append(arguments)

    def deliver(self) -> None:
        """Give the handler what was kept; several interrupts are as good as one."""
        if self._held:
            arguments = self._held[0]
            self._held.clear()
            self.handler(*arguments)


def _current_holder() -> _Holder | None:
    handler = signal.getsignal(signal.SIGINT)
    return handler if isinstance(handler, _Holder) and current_thread() is main_thread() else None
