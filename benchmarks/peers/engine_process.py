"""An engine in a child process.

The process has its own memory and threads. If it dies, for example because a library was built for another CPU, the
parent reports that. The process reads work from stdin and replies on stdout, one line of JSON each. It ends when its
stdin is closed.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Self

from benchmarks.peers import LLAMA_CPP, OPENVINO
from infinilm.bench.measure import Run, Workload
from infinilm.errors import EngineError, InfinilmError

Runner = Callable[[Workload, list[list[int]]], Run]


class EngineProcess:
    """`name` is `OURS` or one of `PEERS`. `settings` are those of a `Config`; peers use only the model."""

    def __init__(self, name: str, settings: Mapping[str, Any], num_threads: int) -> None:
        self.name = name
        self.peak_bytes: int | None = None
        """Peak resident memory up to the end of the last run. None where the system does not report it."""
        self._errors = TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.engine_process", name, json.dumps(settings), str(num_threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment(num_threads),
            start_new_session=True,  # Ctrl-C is for the parent
        )
        try:
            self.version, self.vocab_size, self.max_len = self._read_reply()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, workload: Workload, prompts: Sequence[Sequence[int]]) -> Run:
        message = json.dumps({"workload": asdict(workload), "prompts": prompts})
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(message.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._explain_death() from None
        run, self.peak_bytes = self._read_reply()
        return Run(**run)

    def _read_reply(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._explain_death()
        reply = json.loads(line)
        if "error" in reply:
            raise EngineError(f"{self.name}: {reply['error']}")
        return reply["result"]

    def _explain_death(self) -> EngineError:
        code = self._process.wait()
        self._errors.seek(0)
        return EngineError(describe_death(self.name, code, self._errors.read().decode(errors="replace")))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def environment(num_threads: int) -> dict[str, str]:
    """The environment of a process that computes with this many threads. Python may write its bytecode cache."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "OMP_NUM_THREADS": str(num_threads)}


def describe_death(name: str, code: int, errors: str) -> str:
    """Why an engine's process ended, by its exit code and stderr."""
    if code == -signal.SIGILL and name == LLAMA_CPP:
        from benchmarks.peers.llamacpp import PACKAGE, REMEDY

        return f"{PACKAGE} died of an illegal instruction: it was built for another CPU than this one is; {REMEDY}"
    last = errors.strip().rpartition("\n")[2]
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"the process of {name} {how}" + (f"; its last output: {last}" if last else "")


# --- inside the process -------------------------------------------------------------------------------------


def main(name: str, settings: dict[str, Any], num_threads: int) -> None:
    """Load the engine, reply with its version and sizes, then run the workloads from stdin."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not mix with the replies

    def reply(**message: Any) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        run, *facts = _load(name, settings, num_threads)
        reply(result=facts)
        for line in sys.stdin:
            work = json.loads(line)
            done = run(Workload(**work["workload"]), work["prompts"])
            reply(result=(asdict(done), _peak_bytes()))
    except InfinilmError as error:
        reply(error=str(error))


def _load(name: str, settings: dict[str, Any], num_threads: int) -> tuple[Runner, str, int, int]:
    """The function that runs a workload, the engine's version, its vocabulary size and its maximum length."""
    if name == LLAMA_CPP:
        from benchmarks.peers.llamacpp import LlamaCpp

        peer = LlamaCpp(Path(settings["model"]), num_threads=num_threads)
        return peer.run, peer.version, peer.vocab_size, peer.max_len
    if name == OPENVINO:
        from benchmarks.peers.openvino import OpenVINO

        other = OpenVINO(Path(settings["model"]), num_threads=num_threads)
        return other.run, other.version, other.vocab_size, other.max_len
    from functools import partial

    from infinilm import LLM, Config, __version__
    from infinilm.bench.measure import run_engine

    engine = LLM(Config.from_kwargs(**settings))
    return partial(run_engine, engine), __version__, engine.model_config.vocab_size, engine.max_model_len


def _peak_bytes() -> int | None:
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(fields["VmHWM"].removesuffix("kB")) * 1024


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
