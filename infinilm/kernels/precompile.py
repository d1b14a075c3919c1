"""Compiling a model's kernels side by side.

Triton compiles a kernel when it is first launched, and the launch waits for it: about a second for each of the two
dozen, variants counted, that a model has. Five sixths of that are spent in passes of the compiler, in `ptxas` and in
the C compiler that makes the launcher, none of which keeps Python from doing something else. So threads share the work.

Which kernels a model needs only the model can say, by launching them. So it is run with a hook of Triton's that sees
each kernel before it is compiled, hands it to a thread if it is not on disk, and leaves the launch out.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any

import triton
from triton import knobs
from triton.compiler import ASTSource, make_backend
from triton.runtime.driver import driver

logger = logging.getLogger(__name__)


def prepare_compiler() -> None:
    """Do what Triton does once in every process before its first kernel: above all, compute the hash of its own 400 MB.

    For a thread beside something else that takes as long. Nobody has to wait for it, or to know if it fails.
    """
    try:
        from triton.runtime.cache import triton_key

        triton_key()
        # Making it builds what Triton talks to the device with, unless that is on disk.
        logger.debug("kernels are launched by Triton's %s", type(driver.active).__name__)
    except Exception as error:
        logger.debug("Triton is prepared when the first kernel is launched: %s", error, exc_info=True)


def compile_together(work: Callable[[], object]) -> None:
    """Do the `work`, which launches kernels, after those that are not in Triton's cache on disk have been compiled.

    If there are any, the work is done twice, at first without them: it must not mind what is in the memory that they
    would have written. Whatever goes wrong then is logged, and kernels are compiled when they are launched.
    """
    if knobs.runtime.jit_cache_hook is not None:  # another thread is doing the same, or somebody has other plans
        work()
        return
    start_time = perf_counter()
    is_done = False
    with ThreadPoolExecutor(thread_name_prefix="compile") as pool:
        compiler = _Compiler(pool)
        knobs.runtime.jit_cache_hook = compiler
        try:
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
    """Triton's hook: it is called before a kernel is compiled, and prevents that, and the launch, by saying True."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.compiling: dict[tuple[str, str], Future[None]] = {}
        self._pool = pool
        self._thread = threading.get_ident()

    def __call__(self, *, key: str, fn: Any, compile: Any, **_: object) -> bool:
        if threading.get_ident() != self._thread:  # somebody else, who needs what is launched
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
    """A kernel to be compiled for the current device, as Triton's hook describes it."""

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
        """Whether Triton will find it in its cache; looked up the way it does that itself."""
        # Triton's own affair, and so imported where it does no harm if it is no longer there.
        from triton._C.libtriton import get_cache_invalidating_env_vars
        from triton.runtime.cache import get_cache_key, get_cache_manager

        environment = get_cache_invalidating_env_vars()
        key = get_cache_key(self._source, self._backend, self._options, env_vars=environment)
        name = f"{self._source.name}.json"
        return name in (get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(name) or {})

    def compile(self) -> None:
        """Put it on disk, and what passes its arguments, which takes a C compiler."""
        compiled = triton.compile(self._source, target=self._target, options=vars(self._options))
        driver.active.launcher_cls(compiled.src, compiled.metadata)
