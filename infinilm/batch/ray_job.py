"""A batch job on Ray: Ray Data gives parts of the input to engines, each of which is an actor.

Only the places of parts in the input pass through Ray. An engine reads a part's rows from the input, keeps their
answers in a log, and writes the part when it is complete. A part's file appears atomically and never changes. So a
resumed job computes only the missing parts, and of a part only the rows that its log does not have.
"""

import asyncio
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infinilm import __version__
from infinilm.batch.answer_log import LOCK_WAIT_S, AnswerLog
from infinilm.batch.answering import answer_all
from infinilm.batch.engine_host import EngineHost
from infinilm.batch.job import Job, Progress, keep_in, missing_rows
from infinilm.batch.manifest import Manifest
from infinilm.batch.rows import Scan, Source
from infinilm.distributed.config import DistConfig
from infinilm.errors import EngineError, InvalidValueError

MAX_PART_ROWS = 1000
PARTS_PER_ENGINE = 8
"""The least number of parts per engine, so that engines end at about the same time."""
MAX_PARTS_AT_WORK = 32
"""The most parts that one engine computes at a time."""
CONNECT_S = 5.0


def import_ray() -> Any:
    try:
        import ray.data
    except ImportError as error:
        raise InvalidValueError(
            f"a cluster needs {error.name}; install it with: pip install 'infinilm[cluster]'"
        ) from None
    return ray


class RayParts:
    """Runs a job in parts on `num_engines` engines."""

    def __init__(self, num_engines: int) -> None:
        self._ray = import_ray()
        self._num_engines = num_engines

    def choose_rows(self, num_rows: int) -> int:
        return min(max(1, -(-num_rows // (self._num_engines * PARTS_PER_ENGINE))), MAX_PART_ROWS)

    def run(self, job: Job, manifest: Manifest, scan: Scan, show_progress: bool) -> Progress | None:
        assert manifest.part_rows is not None
        job.output.mkdir(exist_ok=True)
        missing = [part for part in make_parts(scan, manifest.part_rows) if not part_path(job, part["part"]).exists()]
        if not missing:
            return None
        num_missing = sum(part["num"] for part in missing)
        num_done = scan.num_rows - num_missing
        with self._connected(job) as needs, Progress(scan.num_rows, num_done, is_shown=show_progress) as bar:
            for done in self._answers(job, missing, manifest.part_rows, needs):
                bar.note(done["num_rows"] + done["num_earlier"], done["num_tokens"])
                bar.num_rows -= done["num_earlier"]
        return bar

    def _answers(
        self, job: Job, parts: list[dict[str, Any]], part_rows: int, needs: dict[str, float]
    ) -> Iterator[dict[str, int]]:
        """Make parts, and yield the counts of each."""
        data = self._ray.data
        context = data.DataContext.get_current()
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        num_at_work = min(-(-job.config.max_num_seqs // part_rows) + 1, MAX_PARTS_AT_WORK)
        engines = data.ActorPoolStrategy(
            size=min(self._num_engines, len(parts)),
            max_tasks_in_flight_per_actor=num_at_work,
            max_concurrent_calls_per_actor=num_at_work,
        )
        size = job.source.stat().st_size
        try:
            yield from (
                data.from_items(parts, override_num_blocks=len(parts))
                .map_batches(
                    PartEngine, batch_size=1, compute=engines, fn_constructor_args=(job, size, __version__), **needs
                )
                .iter_rows()
            )
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            raise EngineError(f"the job stopped on the cluster: {cause}; what is answered is kept") from error

    @contextmanager
    def _connected(self, job: Job) -> Iterator[dict[str, float]]:
        """Connect to `RAY_ADDRESS`, or run a cluster on this machine in the block. Yields the needs of an engine."""
        ray = self._ray
        is_own = not ray.is_initialized()
        if is_own:
            address = os.environ.get("RAY_ADDRESS")
            options: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
            if not address:
                num_cpus = max(os.cpu_count() or 1, self._num_engines)
                options |= {"num_cpus": num_cpus, "include_dashboard": False}
            try:
                if address and ":" in address:  # Ray itself would retry for minutes
                    host, _, port = address.removeprefix("ray://").rpartition(":")
                    socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
                ray.init(address=address or "local", **options)
            except Exception as error:  # Ray raises this class itself, too
                what = f"reached at RAY_ADDRESS={address!r}" if address else "started on this machine"
                raise EngineError(f"no Ray cluster can be {what}: {error}") from error
        try:
            yield self._check_resources(job)
        finally:
            if is_own:
                ray.shutdown()

    def _check_resources(self, job: Job) -> dict[str, float]:
        """The resources that each engine needs. Refuses more engines than fit."""
        ray, config = self._ray, job.config
        dist = config.distributed or DistConfig(config.tensor_parallel_size, pp_size=config.pipeline_parallel_size)
        ranks = dist.tp_size * dist.pp_size
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        kind = "CPU" if config.device == "cpu" or (config.device == "auto" and not has_gpus) else "GPU"
        nodes = [
            (node["NodeManagerAddress"], node["Resources"].get(kind, 0.0)) for node in ray.nodes() if node["Alive"]
        ]
        if sum(int(there // ranks) for _, there in nodes) < self._num_engines:
            listed = ", ".join(f"{name} has {there:g}" for name, there in nodes)
            raise EngineError(
                f"{self._num_engines} engines need {ranks} {kind} each, on one node; {listed}: use fewer --engines, "
                "or add nodes"
            )
        return {"num_gpus": float(ranks), "num_cpus": 1.0} if kind == "GPU" else {"num_cpus": float(ranks)}


def make_parts(scan: Scan, part_rows: int) -> list[dict[str, Any]]:
    """The places of all parts: plain numbers, and the duplicates among the rows as JSON."""
    duplicates: dict[int, dict[int, int]] = {}
    for row, first in scan.duplicates.items():
        duplicates.setdefault(row // part_rows, {})[row] = first
    parts = []
    for number, first in enumerate(range(0, scan.num_rows, part_rows)):
        place = {"start": scan.starts[first], "line": scan.lines[first]} if scan.starts else {"start": 0, "line": 1}
        num = min(part_rows, scan.num_rows - first)
        found = json.dumps(list(duplicates.get(number, {}).items()))
        parts.append({"part": number, "first": first, "num": num, **place, "duplicates": found})
    return parts


def part_path(job: Job, part: int) -> Path:
    return job.output / f"part-{part:06d}.jsonl"


class PartEngine:
    """The actor: an engine that makes parts, several at a time."""

    def __init__(self, job: Job, source_size: int, version: str) -> None:
        where = f"node {socket.gethostname()}"
        if version != __version__:
            raise InvalidValueError(f"{where} has infinilm {__version__}, the driver {version}; install the same")
        if not job.source.is_file() or job.source.stat().st_size != source_size or not job.manifest.is_file():
            raise InvalidValueError(
                f"{where} does not have {job.source} or {job.manifest} as the driver has them; INPUT, OUTPUT and the "
                "model must be in folders that all nodes share"
            )
        self._job = job
        self._host = EngineHost(job.open_service, job.row_options)

    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Make the part that the batch's only row describes."""
        part = {name: values[0] for name, values in batch.items()}
        done = await self._host.call(self._make(part))
        return {name: [value] for name, value in done.items()}

    async def _make(self, part: dict[str, Any]) -> dict[str, int]:
        number, first, num = int(part["part"]), int(part["first"]), int(part["num"])
        path = part_path(self._job, number)
        done = {"num_rows": 0, "num_tokens": 0, "num_earlier": num}
        if path.exists():  # Ray repeats a call whose result it has lost
            return done

        def note(num_rows: int, num_tokens: int) -> None:
            done["num_rows"] += num_rows
            done["num_tokens"] += num_tokens

        log_path = self._job.progress / f"part-{number:06d}.log"
        # After the driver was killed, an engine of that job may hold the log for some seconds.
        with await asyncio.to_thread(AnswerLog, log_path, first, num, wait_s=LOCK_WAIT_S) as log:
            if path.exists():
                return done
            done["num_earlier"] = log.num_done
            rows = Source(self._job.source).read(first, num, start=int(part["start"]), line=int(part["line"]))
            num_at_work = min(num, self._host.num_at_work)
            duplicates = dict(json.loads(part["duplicates"]))
            await answer_all(self._host.answerer, missing_rows(rows, log), num_at_work, keep_in(log, note), duplicates)
            log.write_sorted(path)
        log_path.unlink()
        return done
