"""Delays Ctrl-C where it would leave state inconsistent, and lets one thread at a time change an engine.

Python raises `KeyboardInterrupt` between any two lines of the main thread. Engines hold interrupts while they update
their state. They allow interrupts where they compute or wait, because they can recover from that.

These are classes because an interrupted generator-based context manager would resume when it is collected.
"""

import signal

# signal.getsignal looks the handler up in an enum, which takes longer than all other work of a step in this module.
from _signal import getsignal  # type: ignore[import-not-found]
from collections import deque
from collections.abc import Callable
from contextlib import ContextDecorator
from threading import Lock, current_thread, get_ident, main_thread
from typing import Any


class interrupts_held(ContextDecorator):  # noqa: N801 - used like a function
    """Delay interrupts until the end of the block, or until they are allowed within it."""

    def __enter__(self) -> None:
        if current_thread() is not main_thread():
            return  # other threads are never interrupted
        handler = getsignal(signal.SIGINT)
        if isinstance(handler, _Holder):
            handler.close()
        elif callable(handler):
            signal.signal(signal.SIGINT, _Holder(handler))

    def __exit__(self, *_: object) -> None:
        holder = _current_holder()
        if holder is not None:
            holder.reopen()


class interrupts_allowed:  # noqa: N801
    """Deliver interrupts in this part of a block that holds them."""

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
    """A SIGINT handler that wraps another one and passes interrupts on while it is open.

    It stays installed for the whole outermost block, because changing a signal handler is a system call.
    """

    def __init__(self, handler: Callable[..., object]) -> None:
        self.is_open = False
        self._handler = handler
        self._held: list[tuple[Any, ...]] = []
        self._outer: list[bool] = []
        """For each nested block, whether interrupts were allowed where it began."""

    def __call__(self, *arguments: Any) -> None:
        self._held.append(arguments)
        if self.is_open:
            self.deliver()

    def deliver(self) -> None:
        """Call the handler once for all held interrupts."""
        if self._held:
            arguments = self._held[0]
            self._held.clear()
            self._handler(*arguments)

    def close(self) -> None:
        """Begin a nested block."""
        was_open = self.is_open
        self.is_open = False  # first, so that the rest is not interrupted
        self._outer.append(was_open)

    def reopen(self) -> None:
        if not self._outer:
            signal.signal(signal.SIGINT, self._handler)
            self.deliver()
        elif self._outer.pop():
            self.is_open = True
            self.deliver()
        else:
            self.is_open = False  # also after an interrupt


def _current_holder() -> _Holder | None:
    handler = getsignal(signal.SIGINT)
    return handler if isinstance(handler, _Holder) and current_thread() is main_thread() else None


class Turns:
    """A lock that threads get in the order in which they asked.

    `with interrupts_held(), turns:` takes a turn. A thread that has the turn may take it again. Interrupts must be
    held: one might keep the turn from being given back.
    """

    def __init__(self) -> None:
        self._guard = Lock()
        self._owner: int | None = None
        self._depth = 0
        """How often the owner has taken the turn."""
        self._waiting: deque[tuple[int, Lock]] = deque()

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the turn."""
        return self._owner == get_ident()

    def is_awaited(self) -> bool:
        """Whether another thread waits for its turn."""
        return bool(self._waiting)

    def take(self, *, interruptible: bool = False) -> None:
        """Wait for the turn. An interrupt during an `interruptible` wait is raised, and the turn is not taken."""
        thread = get_ident()
        ticket = Lock()
        with self._guard:
            if self._owner is None or self._owner == thread:
                self._owner = thread
                self._depth += 1
                return
            ticket.acquire()
            self._waiting.append((thread, ticket))
        try:
            with interrupts_allowed() if interruptible else interrupts_held():
                ticket.acquire()
        except BaseException:
            with self._guard:
                if self._owner == thread:
                    self._pass_on()
                else:
                    self._waiting.remove((thread, ticket))
            raise

    def give_back(self) -> None:
        """End the turn that was taken last."""
        with self._guard:
            self._depth -= 1
            if not self._depth:
                self._pass_on()

    def _pass_on(self) -> None:
        self._owner, self._depth = None, 0
        if self._waiting:
            self._owner, ticket = self._waiting.popleft()
            self._depth = 1
            ticket.release()

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.give_back()
