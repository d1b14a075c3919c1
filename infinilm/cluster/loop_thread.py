"""An event loop in its own thread."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """A loop in its own thread. Ray Serve calls a deployment's methods in other loops; tokens pass through this one."""

    def __init__(self, name: str, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None) -> None:
        self._loop = (loop_factory or asyncio.new_event_loop)()
        self._thread = Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread's loop, and wait for it in the caller's loop."""
        return await asyncio.wrap_future(self.start(work))
