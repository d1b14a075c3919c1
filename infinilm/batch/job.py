"""A batch job: its files, the check of its manifest, and running it on this machine."""

import asyncio
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol, Self

from tqdm import tqdm

from infinilm.batch.answer_log import AnswerLog, lock
from infinilm.batch.answering import Answer, RowAnswerer, RowOptions, answer_all, check_sampling, num_rows_at_work
from infinilm.batch.manifest import Manifest, collect_facts
from infinilm.batch.rows import Row, Scan, Source
from infinilm.config import Config
from infinilm.errors import InvalidValueError
from infinilm.loading.sources import resolve
from infinilm.server.direct import DirectService

NO_ERROR = b'"error":null}\n'
"""The end of an answer's line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSummary:
    """The result of a job."""

    num_rows: int
    num_errors: int
    """Rows whose answer is an error, in the whole output."""
    num_new_rows: int
    """Rows that this run answered; earlier runs answered the others."""
    num_tokens: int
    """Tokens that this run generated."""
    seconds: float
    """The time of this run, without loading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job's arguments. They can be sent to other machines."""

    config: Config
    source: Path
    output: Path
    sampling: Mapping[str, Any] = field(default_factory=dict)
    as_chat: bool = False
    model_name: str | None = None
    tool_call_parser: str | None = None

    @property
    def progress(self) -> Path:
        """The folder for unfinished work. It is removed at the end."""
        return self.output.with_name(f"{self.output.name}.progress")

    @property
    def manifest(self) -> Path:
        return self.output.with_name(f"{self.output.name}.manifest.json")

    @property
    def row_options(self) -> RowOptions:
        is_text = Source(self.source).format == "text"
        return RowOptions(sampling=self.sampling, as_chat=self.as_chat, is_text=is_text, seed=self.config.seed)

    def open_service(self) -> DirectService:
        return DirectService(self.config, model_name=self.model_name, tool_call_parser=self.tool_call_parser)

    def check(self) -> None:
        """Make the checks that need no file to be read."""
        Source(self.source)
        check_sampling(self.sampling)
        if self.output.suffix.lower() == ".parquet":
            raise InvalidValueError(f"OUTPUT {self.output} would be JSON lines, not Parquet; use the ending .jsonl")
        if not self.output.parent.is_dir():
            raise InvalidValueError(f"OUTPUT {self.output}: there is no folder {self.output.parent}; make it first")


class Progress:
    """Rows done, rows and tokens per second, and the time left, on stderr."""

    def __init__(self, num_rows: int, num_done: int, *, is_shown: bool) -> None:
        self.num_rows = self.num_tokens = 0
        self.seconds = 0.0
        self._start_time = perf_counter()
        is_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=num_rows,
            initial=num_done,
            desc="Answering",
            unit="row",
            disable=not is_shown,
            dynamic_ncols=is_terminal,
            mininterval=0.3 if is_terminal else 10.0,
        )

    def note(self, num_rows: int, num_tokens: int) -> None:
        self.num_rows += num_rows
        self.num_tokens += num_tokens
        rate = self.num_tokens / max(perf_counter() - self._start_time, 1e-9)
        self._bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
        self._bar.update(num_rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = perf_counter() - self._start_time
        self._bar.close()


def run_job(job: Job, *, restart: bool, show_progress: bool, parts: "RunParts | None" = None) -> BatchSummary:
    """Run a job, or resume it. `parts` runs it elsewhere, with a folder of parts as output."""
    job.check()
    with ExitStack() as stack:
        _hold(job, stack)
        if restart:
            _remove_output(job)
        manifest = Manifest(job.manifest)
        if not manifest.exists:
            _clear(job.progress)  # without a manifest it is not known what these answers belong to
            if job.output.exists():
                raise InvalidValueError(
                    f"OUTPUT {job.output} exists, and has no {job.manifest.name} beside it; remove it, or use another "
                    "name"
                )
        scan = Source(job.source).scan()
        service = job.open_service()
        part_rows = parts.choose_rows(scan.num_rows) if parts is not None else None
        _check_manifest(job, manifest, service, scan, part_rows)
        progress = None
        if parts is not None:
            progress = parts.run(job, manifest, scan, show_progress)
        elif not job.output.exists():
            progress = _run_here(job, service, scan, show_progress)
        shutil.rmtree(job.progress)
        return BatchSummary(
            num_rows=scan.num_rows,
            num_errors=_count_errors(job.output),
            num_new_rows=progress.num_rows if progress else 0,
            num_tokens=progress.num_tokens if progress else 0,
            seconds=progress.seconds if progress else 0.0,
        )


class RunParts(Protocol):
    """Runs a job in parts, elsewhere: `ray_job.RayParts`."""

    def choose_rows(self, num_rows: int) -> int:
        """The number of rows in a part."""

    def run(self, job: Job, manifest: Manifest, scan: Scan, show_progress: bool) -> Progress | None:
        """Make the parts that are missing; None if none is missing."""


def _hold(job: Job, stack: ExitStack) -> None:
    """Lock the job against other processes."""
    job.progress.mkdir(exist_ok=True)
    path = job.progress / "lock"
    lock(stack.enter_context(path.open("ab")), path)
    stack.callback(_remove_if_empty, job.progress)


def _remove_if_empty(progress: Path) -> None:
    """Remove the folder of a job that was refused before it had an answer."""
    if [path.name for path in progress.glob("*")] == ["lock"]:
        shutil.rmtree(progress)


def _remove_output(job: Job) -> None:
    """Remove the output of an earlier run. Output without a manifest is not ours and stays."""
    if job.manifest.exists():
        if job.output.is_dir():
            for part in job.output.glob("part-*.jsonl"):
                part.unlink()
            job.output.rmdir()
        else:
            job.output.unlink(missing_ok=True)
        job.manifest.unlink()
    _clear(job.progress)


def _clear(progress: Path) -> None:
    for path in progress.iterdir():
        if path.name != "lock":
            path.unlink()


def _check_manifest(job: Job, manifest: Manifest, service: DirectService, scan: Scan, part_rows: int | None) -> None:
    """Refuse a job that differs from the one that was begun; write the manifest of a new one."""
    own = {
        "input": scan.digest,
        "input format": Source(job.source).format,
        "sampling": dict(job.sampling),
        "use of the chat template (--chat)": job.as_chat,
    }
    facts = collect_facts(manifest, job.config, resolve(job.config.model), service.service, own)
    if manifest.exists:
        if (manifest.part_rows is None) != (part_rows is None):
            how = "without" if manifest.part_rows is None else "with"
            raise InvalidValueError(
                f"{job.output} was begun {how} --cluster; go on {how} it, or start over with --restart"
            )
        manifest.check(facts, job.output)
    else:
        manifest.facts, manifest.part_rows = facts, part_rows
    manifest.save()


def _run_here(job: Job, service: DirectService, scan: Scan, show_progress: bool) -> Progress | None:
    progress = None
    with AnswerLog(job.progress / "answers.log", 0, scan.num_rows) as log:
        if log.num_done < scan.num_rows:
            progress = asyncio.run(_answer(job, service, scan, log, show_progress))
        log.write_sorted(job.output)
    return progress


def missing_rows(rows: Iterator[Row], log: AnswerLog) -> Iterator[Row]:
    return (row for row in rows if row.index not in log)


async def _answer(job: Job, service: DirectService, scan: Scan, log: AnswerLog, show_progress: bool) -> Progress:
    try:
        ready = await service.start()
        answerer = RowAnswerer(service, job.row_options)
        with Progress(scan.num_rows, log.num_done, is_shown=show_progress) as progress:
            rows = missing_rows(Source(job.source).read(), log)
            keep = keep_in(log, progress.note)
            await answer_all(answerer, rows, num_rows_at_work(ready), keep, scan.duplicates)
        return progress
    finally:
        await service.stop()


def keep_in(log: AnswerLog, note: Callable[[int, int], None]) -> Callable[[Answer], None]:
    """A function that keeps answers in a log, and then passes the numbers of rows and of tokens to `note`."""

    def keep(answer: Answer) -> None:
        log.append(answer.row, answer.line)
        note(1, answer.num_tokens)

    return keep


def _count_errors(output: Path) -> int:
    num_errors = 0
    for path in sorted(output.glob("part-*.jsonl")) if output.is_dir() else [output]:
        with path.open("rb") as file:
            num_errors += sum(not line.endswith(NO_ERROR) for line in file)
    return num_errors
