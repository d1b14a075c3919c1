"""Cases through `AsyncLLM`: a task for each request; its reader acts on what it reads."""

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from narrow import present

from fuzz.cases import Arrival, Case
from fuzz.compare import Outcome
from fuzz.engines import check_empty, count_engine, prepare
from fuzz.session import Record, take_output
from infinilm import AsyncLLM

T = TypeVar("T")

TIME_LIMIT_S = 20


def run_async(
    case: Case, model: Path, settings: dict[str, Any], facts: Counter[str]
) -> tuple[list[Outcome], list[str]]:
    """What came of each request, and what was wrong on the way."""
    return asyncio.run(_run(case, model, settings, facts))


async def _run(
    case: Case, model: Path, settings: dict[str, Any], facts: Counter[str]
) -> tuple[list[Outcome], list[str]]:
    records = {arrival.name: Record(arrival) for arrival in case.arrivals}
    async with AsyncLLM(model, **settings) as llm:
        fault = prepare(llm.engine, case)
        readers = [asyncio.create_task(_read(llm, case, records, record)) for record in records.values()]
        problems = []
        try:
            await asyncio.wait_for(asyncio.gather(*readers), TIME_LIMIT_S)
        except TimeoutError:
            problems.append(f"not finished after {TIME_LIMIT_S} s")
        # The requests of readers who left are aborted soon.
        for _ in range(TIME_LIMIT_S * 100):
            if await _call(llm, llm.engine.is_finished):
                break
            await asyncio.sleep(0.01)
        problems += await _call(llm, partial(check_empty, llm.engine))
        count_engine(facts, llm.engine)
    for record in records.values() if fault is not None else ():
        record.request_id = record.arrival.request_id and record.arrival.name
        present(fault).note(record)
    problems += [problem for record in records.values() for problem in record.heard.problems]
    return [record.outcome for record in records.values()], problems


async def _call(llm: AsyncLLM, function: Callable[[], T]) -> T:
    """Look at the engine between two steps."""
    return await asyncio.wrap_future(llm._call(function))


async def _read(llm: AsyncLLM, case: Case, records: dict[str, Record], record: Record) -> None:
    arrival = record.arrival
    for _ in range(arrival.tick):
        await asyncio.sleep(0.001)
    plans = _plan(case, arrival)
    outputs = llm.generate(
        arrival.spec.engine_prompt, arrival.spec.params, request_id=arrival.request_id and arrival.name
    )
    num_read = 0
    async for output in outputs:
        record.heard.take(output)
        take_output(record.outcome, output)
        num_read += 1
        for target in plans.get(num_read, ()):
            if target == "leave":
                record.outcome.was_left = True
                await outputs.aclose()  # type: ignore[attr-defined]
                return
            if records[target].arrival.request_id is None:  # which is not told
                continue
            records[target].note_abort(None, has_ended=False)
            await llm.abort(target)


def _plan(case: Case, arrival: Arrival) -> dict[int, list[str]]:
    """Whom to abort after so many outputs; "leave": to stop reading."""
    plans: dict[int, list[str]] = {}
    if callback := arrival.callback:
        target = {"raise": "leave", "abort_self": arrival.name, "abort_other": callback.target}.get(callback.action)
        if target:
            plans.setdefault(callback.at_call, []).append(target)
    for abort in case.aborts:
        if abort.target == arrival.name:
            plans.setdefault(abort.tick - arrival.tick + 1, []).append(arrival.name)
    return plans
