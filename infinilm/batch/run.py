"""`infinilm.batch.run`."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infinilm.batch.job import BatchSummary, Job, run_job
from infinilm.checks import check_integer
from infinilm.config import Config
from infinilm.errors import EngineError


def run(
    input: str | Path,
    output: str | Path,
    model: str | Path | Config | None = None,
    *,
    sampling: Mapping[str, Any] | None = None,
    chat: bool = False,
    model_name: str | None = None,
    tool_call_parser: str | None = None,
    cluster: bool = False,
    engines: int = 1,
    restart: bool = False,
    show_progress: bool = True,
    **settings: Any,
) -> BatchSummary:
    """Answer the rows of a file. A job that was killed is resumed.

    `input` is a `.txt`, `.jsonl` or `.parquet` file. `output` is a file of JSON lines in the order of the input, in the
    form of OpenAI's batch output. `sampling` has request fields for rows that do not set them. With `chat`, prompts are
    messages of a user. With `cluster`, the job runs on Ray with that many `engines`, and `output` is a folder of parts.
    `model` and `settings` are those of `LLM`.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise EngineError("an event loop is running here; use: await asyncio.to_thread(infinilm.batch.run, …)")
    check_integer("engines", engines, low=1)
    job = Job(
        config=model.replace(**settings) if isinstance(model, Config) else Config.from_kwargs(model=model, **settings),
        source=Path(input).absolute(),
        output=Path(output).absolute(),
        sampling=dict(sampling or {}) if sampling is None or isinstance(sampling, Mapping) else sampling,
        as_chat=chat,
        model_name=model_name,
        tool_call_parser=tool_call_parser,
    )
    if cluster:
        from infinilm.batch.ray_job import RayParts

        return run_job(job, restart=restart, show_progress=show_progress, parts=RayParts(engines))
    if engines != 1:
        raise EngineError(f"engines={engines} needs cluster=True (--cluster); on one machine alone there is one engine")
    return run_job(job, restart=restart, show_progress=show_progress)
