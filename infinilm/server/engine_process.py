"""The engine's process: `python -m infinilm.server.engine_process <socket> <parent>`.

It loads a model and takes steps; between two of them it listens. It ends when it is told to, or when the HTTP process
is gone.
"""

import ctypes
import gc
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from infinilm.config import Config
from infinilm.engine.llm_engine import LLMEngine
from infinilm.errors import CheckpointError, InfinilmError, WorkerDiedError
from infinilm.outputs import AnswerDelta
from infinilm.sampling_params import SamplingParams
from infinilm.server.compiling import GrammarQueue
from infinilm.server.logs import install_logging
from infinilm.server.messages import (
    Abort,
    Delta,
    Failed,
    FrameReader,
    Ready,
    Rejected,
    Report,
    Start,
    Stats,
    Stepped,
    Stop,
    Submit,
    Timing,
    config_from_wire,
    decode_command,
    frame,
    params_from_wire,
)
from infinilm.server.step_pace import StepPace

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.1
MAX_CPU_STEP_TOKENS = 512
"""The default on a CPU, where a step of the usual size takes seconds. `StepPace` lowers it further by measurement."""
PR_SET_PDEATHSIG = 1


class EngineLoop:
    """Steps while there is work, and listens."""

    def __init__(self, engine: LLMEngine, connection: socket.socket, reader: FrameReader, timing: Timing) -> None:
        self._engine = engine
        self._heartbeat_s = timing.heartbeat
        self._pace = StepPace(engine.scheduler, mixed_s=timing.mixed_step, prefill_s=timing.prefill_step)
        self._socket = connection
        self._reader = reader
        self._grammars = GrammarQueue(engine.grammars)
        self._stats_time = 0.0

    def run(self) -> None:
        """Until told to stop. Raises EOFError if the HTTP process is gone.

        Reports come from this loop only, at least one per step and, while idle, per heartbeat. Without them the HTTP
        process takes the engine for hung.
        """
        engine = self._engine
        while True:
            if engine.is_finished():
                self._tell_stats()
                select.select([self._socket, self._grammars.bell], [], [], self._heartbeat_s)
            for message in self._reader.read_all():
                command = decode_command(message)
                if isinstance(command, Submit):
                    self._submit(command)
                elif isinstance(command, Abort):
                    self._abort(command)
                elif isinstance(command, Stop):
                    self._grammars.close()
                    return
            for compiled in self._grammars.take():
                with self._refusing(compiled.request):
                    if compiled.error is not None:
                        raise compiled.error
                    self._add(compiled.request, compiled.params)
            if engine.is_finished():
                continue
            self._step()

    def _step(self) -> None:
        start_time = perf_counter()
        deltas = self._engine.step_deltas()
        self._pace.note(self._engine.last_step, perf_counter() - start_time)
        if deltas:
            self._send(Stepped([_to_wire(delta) for delta in deltas]))
        if perf_counter() - self._stats_time > STATS_INTERVAL_S:
            self._tell_stats()

    def _submit(self, request: Submit) -> None:
        with self._refusing(request):
            params = params_from_wire(request.params)
            if params.structured is None:
                self._add(request, params)
            else:
                self._grammars.add(request, params)

    def _add(self, request: Submit, params: SamplingParams) -> None:
        self._engine.add_request(
            request.prompt_token_ids, params, request_id=request.request_id, cache_salt=request.cache_salt
        )

    @contextmanager
    def _refusing(self, request: Submit) -> Iterator[None]:
        """Whatever is wrong with a request, or goes wrong with it, ends this one only."""
        try:
            yield
        except WorkerDiedError:
            raise
        except InfinilmError as error:
            self._send(Rejected(request.request_id, str(error)))
        except Exception as error:
            logger.exception("request %s failed", request.request_id)
            self._send(Rejected(request.request_id, _name(error), is_bug=True))

    def _abort(self, command: Abort) -> None:
        if self._grammars.cancel(command.request_id):
            self._send(Rejected(command.request_id, "the request was aborted"))
        else:
            self._engine.abort(command.request_id, command.answer)

    def _tell_stats(self) -> None:
        self._stats_time = perf_counter()
        self._send(Stats(self._engine.stats()))

    def _send(self, report: Report) -> None:
        self._socket.sendall(frame(report))


def _to_wire(delta: AnswerDelta) -> Delta:
    return Delta(
        delta.request_id,
        delta.index,
        delta.token_ids,
        delta.finish_reason,
        delta.stop_reason,
        delta.logprobs,
        delta.prompt_logprobs,
        delta.error,
        delta.metrics,
    )


def _load(config: Config) -> LLMEngine:
    import torch

    is_cpu = config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())
    if is_cpu and config.max_num_batched_tokens == Config.max_num_batched_tokens:
        config = config.replace(max_num_batched_tokens=MAX_CPU_STEP_TOKENS)
    return LLMEngine(config)


def _describe(engine: LLMEngine, load_seconds: float) -> Ready:
    info = engine.executor.info
    return Ready(
        max_model_len=engine.max_model_len,
        vocab_size=engine.model_config.vocab_size,
        max_num_seqs=engine.config.max_num_seqs,
        max_num_batched_tokens=engine.config.max_num_batched_tokens,
        num_blocks=engine.memory.num_blocks,
        block_size=engine.memory.block_size,
        device=info.device,
        dtype=info.dtype,
        load_seconds=load_seconds,
    )


def serve(connection: socket.socket) -> None:
    """Load the model that the first message names, and answer requests."""
    reader = FrameReader(connection)
    command = decode_command(reader.read_one())
    if not isinstance(command, Start):
        raise TypeError(f"the first message must be Start, not {type(command).__name__}")
    try:
        start_time = perf_counter()
        engine = _load(config_from_wire(command.settings))
    except Exception as error:
        is_known = isinstance(error, InfinilmError)
        # Lack of memory is no permanent failure: it may be another process that has it for now.
        is_permanent = isinstance(error, CheckpointError)
        connection.sendall(frame(Failed(str(error) if is_known else _name(error), is_permanent=is_permanent)))
        raise SystemExit(2 if is_known else 1) from error
    gc.collect()
    gc.freeze()  # what is there stays: no later collection needs to look through it
    with engine:
        connection.sendall(frame(_describe(engine, perf_counter() - start_time)))
        try:
            EngineLoop(engine, connection, reader, command.timing).run()
        except (EOFError, ConnectionError):
            return  # the HTTP process is gone: nobody is left to answer
        except Exception as error:
            logger.exception("the engine failed")
            connection.sendall(frame(Failed(_name(error), is_permanent=False)))
            raise SystemExit(1) from error


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, also in the middle of a long step."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(1)


def main() -> None:
    """Serve the socket of the first argument, a file descriptor, for the process of the second, its id."""
    # A signal to the whole group is for the HTTP process to act upon: it lets requests finish, and then says stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    install_logging()
    _end_with_parent(int(sys.argv[2]))
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
