"""Compiles a model's kernels in parallel.

Triton compiles a kernel when it is first launched, and the launch waits for it: about a second for each of a model's
two dozen kernels and variants. Five sixths of that are spent in compiler passes, in `ptxas` and in the C compiler that
builds the launcher, all without the GIL. So threads share the work.

The set of kernels is only known when they are launched. So the model runs once with a Triton hook that sees each kernel
before it is compiled, submits it to a thread if it is not on disk, and skips the launch. From then on all launches are
skipped, even of compiled kernels: they might use memory that a skipped kernel has not written as addresses.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Thread
from time import perf_counter
from typing import Any

import triton
from triton import knobs
from triton.compiler import ASTSource, make_backend
from triton.runtime import JITFunction
from triton.runtime.driver import driver

logger = logging.getLogger(__name__)


@cache
def preparing_compiler() -> Thread:
    """The thread that does Triton's one-time work per process before the first kernel, mainly hashing its own 400 MB.

    The first call starts the thread, in parallel to other start-up work.
    """
    thread = Thread(target=_prepare_compiler, name="prepare-compiler", daemon=True)
    thread.start()
    return thread


def _prepare_compiler() -> None:
    """Do Triton's one-time work. A failure is only logged: Triton tries again later."""
    try:
        from triton.runtime.cache import triton_key

        triton_key()
        # Creating the driver builds Triton's launcher utilities, unless they are on disk.
        logger.debug("kernels are launched by Triton's %s", type(driver.active).__name__)
    except Exception as error:
        logger.debug("Triton is prepared when the first kernel is launched: %s", error, exc_info=True)


def compile_together(work: Callable[[], object]) -> None:
    """Run `work`, which launches kernels, after compiling those that are not in Triton's cache on disk.

    If there are any, `work` runs twice, the first time without these kernels. It must not depend on the memory that
    they would write. Errors of the first run are logged, and kernels are then compiled when they are launched.
    """
    if knobs.runtime.jit_cache_hook is not None:  # another thread compiles, or another hook is set
        work()
        return
    preparing_compiler().join()  # otherwise this thread would do the same work
    start_time = perf_counter()
    is_done = False
    with ThreadPoolExecutor(thread_name_prefix="compile") as pool:
        compiler = _Compiler(pool)
        knobs.runtime.jit_cache_hook = compiler
        try:
            with compiler.skipping():
                work()
            is_done = not compiler.compiling
        except Exception as error:
            logger.debug("kernels are compiled when they are launched: %s", error, exc_info=True)
        finally:
            if knobs.runtime.jit_cache_hook is compiler:
                knobs.runtime.jit_cache_hook = None
    if is_done:
        return
    for (name, _), compiling in compiler.compiling.items():
        if (failure := compiling.exception()) is not None:
            logger.debug("%s is compiled when it is launched: %s", name, failure)
    logger.debug("compiled %d kernels in %.1f s", len(compiler.compiling), perf_counter() - start_time)
    work()


class _Compiler:
    """Triton's hook, called before a kernel is compiled; returning True skips the compilation and the launch."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.compiling: dict[tuple[str, str], Future[None]] = {}
        self._pool = pool
        self._thread = threading.get_ident()

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Skip this thread's launches, from the first one that is skipped because its kernel is being compiled."""
        launch = JITFunction.run

        def run(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
            skips = bool(self.compiling) and threading.get_ident() == self._thread
            return launch(kernel, *args, warmup=warmup or skips, **options)

        JITFunction.run = run
        try:
            yield
        finally:
            JITFunction.run = launch

    def __call__(self, *, key: str, fn: Any, compile: Any, **_: object) -> bool:
        if threading.get_ident() != self._thread:  # another thread needs its launch
            return False
        variant = (fn.name, key)
        if variant not in self.compiling:
            try:
                kernel = _Kernel(fn.jit_function, compile)
                if kernel.is_on_disk():
                    return False
                self.compiling[variant] = self._pool.submit(kernel.compile)
            except Exception as error:
                logger.debug("%s is compiled when it is launched: %s", fn.name, error, exc_info=True)
                return False
        return True


class _Kernel:
    """A kernel to compile for the current device, as Triton's hook describes it."""

    def __init__(self, function: Any, description: Any) -> None:
        options = json.loads(description["specialization_data"])["options"]
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        self._source = ASTSource(
            function, description["signature"], description["constants"], description["configs"][0]
        )
        self._target = driver.active.get_current_target()
        self._backend = make_backend(self._target)
        self._options = self._backend.parse_options(options)

    def is_on_disk(self) -> bool:
        """Whether Triton's cache has the kernel; looked up in the same way as Triton does."""
        # Internals of Triton: imported here, where a missing one is caught.
        from triton._C.libtriton import get_cache_invalidating_env_vars
        from triton.runtime.cache import get_cache_key, get_cache_manager

        environment = get_cache_invalidating_env_vars()
        key = get_cache_key(self._source, self._backend, self._options, env_vars=environment)
        name = f"{self._source.name}.json"
        return name in (get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(name) or {})

    def compile(self) -> None:
        """Compile the kernel and its launcher, which needs a C compiler, into the cache."""
        compiled = triton.compile(self._source, target=self._target, options=vars(self._options))
        driver.active.launcher_cls(compiled.src, compiled.metadata)
