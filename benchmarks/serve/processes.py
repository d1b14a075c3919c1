"""Runs a plan in this process, or in several if one can't read all streams fast enough.

A child process gets its plan and the start time on stdin. On stdout it reports that it is ready, and at the end its
measurements, all as JSON. It stops when its stdin is closed.
"""

import asyncio
import json
import os
import signal
import sys
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from time import perf_counter
from typing import Any

from benchmarks.serve.client import LoadRun, Measured, Plan
from benchmarks.serve.events import Trace
from benchmarks.serve.http_connection import Endpoint
from benchmarks.serve.work import Load, Work
from infinilm.errors import EngineError

LEAD_SECONDS = 0.05
"""The time between the moment when all processes are ready and their start."""


async def measure(plan: Plan, num_processes: int, on_look: Callable[[LoadRun], None] | None = None) -> Measured:
    """Run the plan. Ctrl-C ends it early, with the measurements so far."""
    if num_processes > 1:
        return await _measure_shared(plan, num_processes)
    run = LoadRun(plan)
    await run.prepare()
    _on_interrupt(run.stop)
    return await run.run(perf_counter(), on_look)


def _on_interrupt(stop: Callable[[], None]) -> None:
    """Let the first Ctrl-C stop the run; a second one ends the program as usual."""
    loop = asyncio.get_running_loop()

    def handle() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stop()

    loop.add_signal_handler(signal.SIGINT, handle)


async def _measure_shared(plan: Plan, num_processes: int) -> Measured:
    processes = [await _start_process() for _ in range(num_processes)]

    def stop() -> None:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()  # tells it to stop

    try:
        for share, process in enumerate(processes):
            _write_line(process, {"plan": asdict(plan), "share": share, "num_shares": num_processes})
        for process in processes:
            await _read_line(process)
        _on_interrupt(stop)
        begin = perf_counter() + LEAD_SECONDS
        for process in processes:
            _write_line(process, begin)
        parts = [_decode(await _read_line(process)) for process in processes]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return Measured(
        traces=[trace for part in parts for trace in part.traces],
        cpu_share=max(part.cpu_share for part in parts),
        peak_cpu_share=max(part.peak_cpu_share for part in parts),
        is_interrupted=any(part.is_interrupted for part in parts),
    )


async def _start_process() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.serve.processes",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for this process
    )


def _write_line(process: asyncio.subprocess.Process, message: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")


async def _read_line(process: asyncio.subprocess.Process) -> Any:
    """The next line, which may be very long."""
    assert process.stdout is not None
    pieces = []
    while True:
        pieces.append(await process.stdout.read(1 << 20))
        if not pieces[-1]:
            raise EngineError(f"a process of the client ended with exit code {await process.wait()}")
        if pieces[-1].endswith(b"\n"):
            return json.loads(b"".join(pieces))


def _encode(measured: Measured) -> dict[str, Any]:
    return {
        "traces": [
            asdict(trace) | {"times": trace.times.tolist(), "counts": trace.counts.tolist()}
            for trace in measured.traces
        ],
        "cpu_share": measured.cpu_share,
        "peak_cpu_share": measured.peak_cpu_share,
        "is_interrupted": measured.is_interrupted,
    }


def _decode(message: dict[str, Any]) -> Measured:
    traces = [
        Trace(**trace | {"times": array("d", trace["times"]), "counts": array("L", trace["counts"])})
        for trace in message["traces"]
    ]
    return Measured(**message | {"traces": traces})


async def _run_share() -> None:
    """Main function of a child process."""
    loop = asyncio.get_running_loop()
    stdin = asyncio.StreamReader(limit=1 << 30)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    told = json.loads(await stdin.readline())
    plan = told["plan"]
    texts = plan["work"]["texts"]
    work = Work(**plan["work"] | {"texts": None if texts is None else tuple(texts)})
    run = LoadRun(
        Plan(Endpoint(**plan["endpoint"]), work, Load(**plan["load"]), plan["timeout"]),
        told["share"],
        told["num_shares"],
    )
    await run.prepare()
    print(json.dumps("ready"), flush=True)
    if not (begin := await stdin.readline()):
        return

    async def stop_at_end() -> None:
        await stdin.read()
        run.stop()

    watch = asyncio.create_task(stop_at_end())
    measured = await run.run(json.loads(begin))
    watch.cancel()
    try:
        print(json.dumps(_encode(measured)), flush=True)
    except BrokenPipeError:
        os._exit(1)  # the parent is gone


if __name__ == "__main__":
    asyncio.run(_run_share())
