"""An engine for Ray actors. Its event loop has its own thread, because Ray calls an actor in any thread."""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from threading import Thread
from typing import Any, TypeVar

from infinilm.batch.answering import RowAnswerer, RowOptions, num_rows_at_work
from infinilm.errors import WorkerDiedError
from infinilm.server.direct import DirectService

T = TypeVar("T")
EXIT_CODE = 1


class EngineHost:
    """Loads a model and answers rows.

    The engine's own process is restarted if it dies. If that fails, this process ends, so that Ray replaces the actor.
    After a mere error, Ray would call the same actor again.
    """

    def __init__(self, open_service: Callable[[], DirectService], options: RowOptions) -> None:
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, name="engine-host", daemon=True).start()

        async def start() -> None:
            self.service = open_service()
            self.num_at_work = num_rows_at_work(await self.service.start())
            self.answerer = RowAnswerer(self.service, options)

        asyncio.run_coroutine_threadsafe(start(), self._loop).result()

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the engine's loop. Can be called from any other loop."""
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        except WorkerDiedError as error:
            sys.stderr.write(f"{error}; this actor ends, so that Ray replaces it\n")
            sys.stderr.flush()
            os._exit(EXIT_CODE)
