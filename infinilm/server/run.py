"""Runs the engine and the HTTP server, and handles signals."""

import asyncio
import gc
import logging
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

import uvicorn

from infinilm.errors import EngineError, InvalidValueError
from infinilm.server.app import create_app
from infinilm.server.connection import NUM_RESERVED, ConnectionPool, LimitedConnection
from infinilm.server.messages import Ready
from infinilm.server.service import Service

logger = logging.getLogger(__name__)

NUM_OTHER_FILES = 128
"""Open files for everything but client connections, including a few for connections that are closing."""
BACKLOG = 2048
"""Connections that the kernel holds until the server accepts them. It accepts excess ones too, to refuse them."""


class Server(uvicorn.Server):
    """A uvicorn server. A first signal makes it refuse new requests and finish the open ones; a second one ends it.

    SIGHUP never counts as the second signal, because a closing terminal may send several. Under nohup it stays ignored.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._drain: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGTERM, SIGINT and SIGHUP in the block. Outside the main thread, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGHUP)
        with super().capture_signals():
            if before is not signal.SIG_IGN:
                signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe(self._begin_drain, sig != signal.SIGHUP)

    def _begin_drain(self, is_final_if_second: bool) -> None:
        if self._drain is not None:
            if is_final_if_second:
                self.should_exit = self.force_exit = True
            return
        logger.info("finishing %d requests; once more to end at once", self._service.admission.num_requests)
        self._drain = asyncio.create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        await self._service.drain()
        self.should_exit = True


def run(service: Service, on_ready: Callable[[Ready, str], None]) -> None:
    """Serve until a signal. `on_ready` gets the model and the address once requests are served."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(service, on_ready))


async def serve(service: Service, on_ready: Callable[[Ready, str], None]) -> None:
    """Serve until a signal, or until `service.client.failed` is set."""
    settings, limits = service.settings, service.limits
    config = uvicorn.Config(
        create_app(service),
        host=settings.host,
        port=settings.port,
        http=partial(  # type: ignore[arg-type]
            LimitedConnection,
            limits=limits,
            metrics=service.metrics,
            pool=ConnectionPool(fit_open_files(limits.max_connections)),
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        # Longer than clients keep idle connections (httpx 5 s, aiohttp 15 s), which may use one just as it is closed.
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
        backlog=BACKLOG,
    )
    try:
        socket = config.bind_socket()
    except SystemExit:
        raise InvalidValueError(
            f"can't listen on {settings.host}:{settings.port}; is another program using it? choose another --port"
        ) from None
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"http://{host}:{socket.getsockname()[1]}"
    server = Server(config, service)
    # The server answers health checks while the model is loaded.
    serving = asyncio.create_task(server.serve(sockets=[socket]))
    loading = asyncio.create_task(service.start())
    try:
        await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            ready = loading.result()
            gc.collect()
            gc.freeze()  # these objects stay, so later collections can skip them
            on_ready(ready, address)
            failing = asyncio.create_task(service.client.failed.wait())
            await asyncio.wait({serving, failing}, return_when=asyncio.FIRST_COMPLETED)
            failing.cancel()
            if service.client.failed.is_set():
                raise EngineError(f"the engine can't be started again: {service.client.cause}")
    finally:
        server.should_exit = True
        loading.cancel()
        await asyncio.wait({serving, loading})
        await service.stop()
        socket.close()


def fit_open_files(max_connections: int) -> int:
    """Raise the limit of open files to what the connections need. Returns how many connections the limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = NUM_RESERVED + NUM_OTHER_FILES
    needed = max_connections + others
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return max_connections
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        num_left = max(1, allowed - others)
        logger.warning(
            "max_connections=%d needs %d open files, and this process may have %d (ulimit -Hn): taking %d connections",
            max_connections,
            needed,
            allowed,
            num_left,
        )
        return num_left
    return max_connections


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop if it is installed: it is about twice as fast."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
