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
            handler.close()
        elif callable(handler):
            signal.signal(signal.SIGINT, _Holder(handler))

    def __exit__(self, *_: object) -> None:
        holder = _current_holder()
        if holder is not None:
            holder.reopen()


class interrupts_allowed:  # noqa: N801
    """Let interrupts through in this part of a block that holds them."""

    def __enter__(self) -> None:
        self._holder = _current_holder()
        if self._holder is not None:
            self._holder.is_open = True
            try:
                self._holder.deliver()
            except BaseException:
                self._holder.is_open = False
                raise

    def __exit__(self, *_: object) -> None:
        if self._holder is not None:
            self._holder.is_open = False


class _Holder:
    """A handler of interrupts in the place of another, which gets them while this one is open.

    It stays there for the whole of the outermost block: to change a signal's handler is a call of the system.
    """

    def __init__(self, handler: Callable[..., object]) -> None:
        self.is_open = False
        self._handler = handler
        self._held: list[tuple[Any, ...]] = []
        self._outer: list[bool] = []
        """For each block within the outermost, whether interrupts were let through where it began."""

    def __call__(self, *arguments: Any) -> None:
        self._held.append(arguments)
        if self.is_open:
            self.deliver()

    def deliver(self) -> None:
        """Give the handler what was kept; several interrupts are as good as one."""
        if self._held:
            arguments = self._held[0]
            self._held.clear()
            self._handler(*arguments)

    def close(self) -> None:
        """Begin a block within another."""
        was_open = self.is_open
        self.is_open = False  # first: what comes next must not be interrupted
        self._outer.append(was_open)

    def reopen(self) -> None:
        """End a block."""
        if not self._outer:
            signal.signal(signal.SIGINT, self._handler)
            self.deliver()
        elif self._outer.pop():
            self.is_open = True
            self.deliver()
        else:
            self.is_open = False  # even if it was interrupted on its way there


def _current_holder() -> _Holder | None:
    handler = signal.getsignal(signal.SIGINT)
    return handler if isinstance(handler, _Holder) and current_thread() is main_thread() else None
