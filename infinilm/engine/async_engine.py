"""The engine for asyncio programs. Steps run in a separate thread; answers are async iterators."""

import asyncio
import atexit
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Self, TypeVar

from infinilm.config import Config
from infinilm.engine.llm_engine import LLMEngine
from infinilm.engine.prompts import Prompt
from infinilm.engine.stats import EngineStats
from infinilm.errors import EngineError
from infinilm.outputs import RequestOutput
from infinilm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from infinilm.debug import HookRegistry

logger = logging.getLogger(__name__)

T = TypeVar("T")


class AsyncLLM:
    """`async for output in engine.generate(prompt, params)`, for any number of callers at once.

    One thread owns the engine. Other threads put functions into its inbox; it runs them between two steps.
    """

    def __init__(self, model: str | Path | Config | None = None, **settings: Any) -> None:
        self.engine = LLMEngine(model, **settings)
        self._inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.engine.end_runs_if.append(partial(_is_filled, self._inbox))
        self._is_stopping = False
        self._thread = Thread(target=self._run, name="infinilm-engine", daemon=True)
        self._thread.start()
        atexit.register(self._stop)  # runs before the engine's own handler, which must not run during a step

    def _run(self) -> None:
        engine = self.engine
        while True:
            # If there is nothing to compute, sleep until a function arrives.
            while engine.is_finished() or not self._inbox.empty():
                letter = self._inbox.get()
                if letter is None:
                    engine.exit()
                    return
                letter()
            try:
                engine.step_deltas()  # returns nothing: every request has a listener
            except BaseException as error:  # the step's requests have ended; go on for the others
                logger.error("a step was broken off: %s: %s", type(error).__name__, error)

    def _call(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function in the engine's thread."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        if self._is_stopping:
            raise EngineError("the engine was stopped; make a new one")
        self._inbox.put(run)
        return future

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yield the request's output each time it has news; the last one is `finished`.

        Leaving the iterator early, by `break`, `aclose` or cancellation, aborts the request.
        """
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()

        def listen(output: RequestOutput) -> None:
            with suppress(RuntimeError):  # the loop is closed, so the output is not needed
                loop.call_soon_threadsafe(outputs.put_nowait, output)

        add = partial(self.engine.add_request, prompt, sampling_params, on_token=listen, request_id=request_id)
        adding = self._call(add)
        is_finished = False
        try:
            await asyncio.wrap_future(adding)
            while not is_finished:
                output = await outputs.get()
                is_finished = output.finished
                if output.error is not None:
                    self.engine.executor.check_health()
                yield output
        finally:
            if not is_finished:
                adding.add_done_callback(self._abort_added)

    def _abort_added(self, adding: "Future[str]") -> None:
        if not adding.cancelled() and adding.exception() is None and not self._is_stopping:
            self._inbox.put(partial(self.engine.abort, adding.result()))

    async def abort(self, request_id: str) -> bool:
        """End a request. Its iterator yields the end. Returns False if it doesn't exist or has ended already."""
        return await asyncio.wrap_future(self._call(partial(self.engine.abort, request_id)))

    async def stats(self) -> EngineStats:
        """The engine's counters."""
        return await asyncio.wrap_future(self._call(self.engine.stats))

    async def set_hook_registry(self, registry: "HookRegistry | None") -> None:
        """Like `LLM.set_hook_registry`. Hooks are called in the engine's thread."""
        await asyncio.wrap_future(self._call(partial(self.engine.set_hook_registry, registry)))

    async def stop(self) -> None:
        """Abort all requests, end the thread and free the memory. Calling it again does nothing."""
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        atexit.unregister(self._stop)
        if not self._is_stopping:
            self._is_stopping = True
            self._inbox.put(None)
        self._thread.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


def _is_filled(inbox: "SimpleQueue[Callable[[], object] | None]") -> bool:
    return not inbox.empty()
