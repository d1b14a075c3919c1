"""The engine's process, which `EngineHandle` starts.

It loads a model and computes steps. Between two steps it reads commands. It ends on `Stop`, or when the HTTP process
has ended.
"""

import gc
import logging
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from infinilm.config import Config
from infinilm.engine.llm_engine import LLMEngine
from infinilm.engine.scheduler import Scheduler
from infinilm.errors import CheckpointError, InfinilmError, WorkerDiedError
from infinilm.executor.step_io import StepInput
from infinilm.framing import ChannelClosedError, FrameSocket
from infinilm.platforms import may_have_gpu
from infinilm.processes import exit_with_parent, parent_socket
from infinilm.sampling_params import SamplingParams
from infinilm.server import messages
from infinilm.server.grammar_queue import GrammarQueue
from infinilm.server.logs import install_logging

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.1
MAX_CPU_STEP_TOKENS = 512
"""Default of `max_num_batched_tokens` on a CPU, where a step of the usual size takes seconds. `StepPace` lowers it."""
FIRST_TOKENS = 64
"""The first limit of prompt tokens. A slow machine computes this many in time, and a fast one soon gets more."""
STEP_S = 0.1, 0.5
"""Default target times of a step in which answers continue, and of a step with prompts only."""
GPU_STEP_S = 0.012, 0.1
"""The same on a GPU, where a step of a few hundred tokens reads the weights as efficiently as a longer one."""
ANSWER_S = 25e-6
"""How long the HTTP process takes to send one answer's new text."""
GPU_MIXED_RATIO = 2.0
"""On a GPU, a step with prompts and answers may take this many times as long as one without prompts (large models)."""
MIN_TOKENS = 16
"""The lowest limit of prompt tokens. With fewer per step, prompts would take much longer in total. Far into a long
prompt even this many take long."""


class Pace:
    """Finds the number of prompt tokens with which a step takes about `target_s` seconds."""

    def __init__(self, target_s: float, max_tokens: int) -> None:
        self.target_s = target_s
        self._max_tokens = max_tokens
        self.num_tokens = min(FIRST_TOKENS, max_tokens)

    def note(self, num_tokens: int, seconds: float) -> None:
        """Adapt to a step. Quick steps with fewer tokens than allowed are ignored: they say nothing of larger ones."""
        if num_tokens >= self.num_tokens or seconds > self.target_s:
            factor = min(max(self.target_s / max(seconds, 1e-6), 0.5), 2.0)
            # A slow step at most halves the limit, even if it had few tokens: it may have been slow for other reasons.
            found = max(int(min(num_tokens, self.num_tokens) * factor), self.num_tokens // 2, MIN_TOKENS)
            self.num_tokens = min(found, self._max_tokens)


class StepPace:
    """Keeps steps short: sets a scheduler's limits of prompt tokens from the times of the last steps.

    One limit is for steps in which answers continue, the other for steps with prompts only.
    """

    def __init__(self, scheduler: Scheduler, *, mixed_s: float, prefill_s: float, mixed_ratio: float = 0.0) -> None:
        """The target time of steps in which answers continue is `mixed_s`, or `mixed_ratio` times that of steps without
        prompts if this is longer."""
        self._scheduler = scheduler
        self._mixed_s, self._mixed_ratio = mixed_s, mixed_ratio
        self._decode_s = 0.0
        """The moving average of the time of steps without prompts."""
        self._mixed = Pace(mixed_s, scheduler.max_num_batched_tokens)
        self._prefill = Pace(prefill_s, scheduler.max_num_batched_tokens)
        self._apply()

    def note(self, step: StepInput | None, seconds: float) -> None:
        """Adapt to the time that a step took."""
        if step is None:
            return
        if not step.chunks:
            self._decode_s += (seconds - self._decode_s) / 16
            self._mixed.target_s = max(self._mixed_s, self._mixed_ratio * self._decode_s)
        else:
            pace = self._mixed if len(step.decoding.rows) else self._prefill
            pace.note(step.num_chunk_tokens, seconds)
            self._apply()

    def _apply(self) -> None:
        self._scheduler.max_mixed_tokens = self._mixed.num_tokens
        self._scheduler.max_prefill_tokens = self._prefill.num_tokens


class EngineLoop:
    """Computes steps while there are requests, and reads commands."""

    def __init__(
        self, engine: LLMEngine, frames: FrameSocket, timing: messages.Timing, *, reports_cache: bool = False
    ) -> None:
        self._engine = engine
        self._cache_changes = engine.scheduler.blocks.watch() if reports_cache else {}
        self._heartbeat_s = timing.heartbeat
        is_gpu = engine.executor.info.device.startswith("cuda")
        mixed_s, prefill_s = GPU_STEP_S if is_gpu else STEP_S
        self._pace = StepPace(
            engine.scheduler,
            mixed_s=timing.mixed_step or mixed_s,
            prefill_s=timing.prefill_step or prefill_s,
            mixed_ratio=GPU_MIXED_RATIO if is_gpu and timing.mixed_step is None else 0.0,
        )
        engine.scheduler.graph_tokens = engine.executor.info.graph_tokens
        self._frames = frames
        self._grammars = GrammarQueue(engine.grammars)
        self._stats_time = 0.0
        self._report_time = 0.0
        """When the HTTP process will have sent the output of the last report, by estimate."""
        engine.end_runs_if.append(lambda: self._wait(0))

    def run(self) -> None:
        """Run until told to stop. Raises `ChannelClosedError` if the HTTP process has ended.

        Only this loop sends reports: after one step or a few, and once per heartbeat while idle. Without reports the
        HTTP process kills the engine as hung.
        """
        engine = self._engine
        while True:
            if engine.is_finished():
                self._send_stats()
                self._wait(self._heartbeat_s)
            for message in self._frames.receive_ready_frames():
                command = messages.decode_command(message)
                if isinstance(command, messages.Submit):
                    self._submit(command)
                elif isinstance(command, messages.Abort):
                    self._abort(command)
                elif isinstance(command, messages.Stop):
                    self._grammars.close()
                    return
            for compiled in self._grammars.pop_compiled():
                with self._refusing(compiled.request):
                    if compiled.error is not None:
                        raise compiled.error
                    self._add(compiled.request, compiled.params)
            if engine.is_finished():
                continue
            self._step()

    def _wait(self, seconds: float) -> bool:
        """Wait for a command or a compiled grammar. Returns whether there is one."""
        return bool(select.select([self._frames.socket, self._grammars.bell], [], [], seconds)[0])

    def _step(self) -> None:
        """Compute a step. While the HTTP process is busy with the last report, the output is kept and reported together
        with the next step's: with hundreds of answers, quick steps would produce more than that process can send."""
        start_time = perf_counter()
        try:
            self._engine.advance()
        except WorkerDiedError:
            self._report()  # the output of earlier steps
            raise
        now = perf_counter()
        self._pace.note(self._engine.last_step, now - start_time)
        if now >= self._report_time or not self._engine.has_work:
            self._report_time = now + ANSWER_S * self._report()
        if now - self._stats_time > STATS_INTERVAL_S:
            self._send_stats()

    def _report(self) -> int:
        """Report the new deltas. Returns how many there are."""
        if deltas := self._engine.read_deltas():
            send_report(self._frames, messages.Stepped(deltas))
        return len(deltas)

    def _submit(self, request: messages.Submit) -> None:
        with self._refusing(request):
            params = messages.params_from_wire(request.params)
            if params.structured is None:
                self._add(request, params)
            else:
                self._grammars.add(request, params)

    def _add(self, request: messages.Submit, params: SamplingParams) -> None:
        self._engine.add_request(
            request.prompt_token_ids, params, request_id=request.request_id, cache_salt=request.cache_salt
        )

    @contextmanager
    def _refusing(self, request: messages.Submit) -> Iterator[None]:
        """Turn an error in the block into a `Rejected` report: it ends this request only."""
        try:
            yield
        except WorkerDiedError:
            raise
        except InfinilmError as error:
            send_report(self._frames, messages.Rejected(request.request_id, str(error)))
        except Exception as error:
            logger.exception("request %s failed", request.request_id)
            send_report(self._frames, messages.Rejected(request.request_id, _name(error), is_bug=True))

    def _abort(self, command: messages.Abort) -> None:
        if self._grammars.cancel(command.request_id):
            send_report(self._frames, messages.Rejected(command.request_id, "the request was aborted"))
        else:
            self._engine.abort(command.request_id, command.answer)

    def _send_stats(self) -> None:
        self._stats_time = perf_counter()
        send_report(self._frames, messages.Stats(self._engine.stats()))
        if changes := self._cache_changes:
            added, removed = (
                b"".join(key[: messages.HASH_BYTES] for key, is_there in changes.items() if is_there is kind)
                for kind in (True, False)
            )
            changes.clear()
            send_report(self._frames, messages.CacheChanged(added, removed))


def send_report(frames: FrameSocket, report: messages.Report) -> None:
    frames.send_frame(messages.encode_message(report))


def _load(config: Config) -> LLMEngine:
    is_cpu = config.device == "cpu" or (config.device == "auto" and not may_have_gpu())
    if is_cpu and config.max_num_batched_tokens == Config.max_num_batched_tokens:
        config = config.replace(max_num_batched_tokens=MAX_CPU_STEP_TOKENS)
    return LLMEngine(config)


def _describe(engine: LLMEngine, load_seconds: float, seconds: dict[str, float]) -> messages.Ready:
    info = engine.executor.info
    return messages.Ready(
        max_model_len=engine.max_model_len,
        vocab_size=engine.model_config.vocab_size,
        max_num_seqs=engine.config.max_num_seqs,
        max_num_batched_tokens=engine.config.max_num_batched_tokens,
        num_blocks=engine.memory.num_blocks,
        block_size=engine.memory.block_size,
        device=info.device,
        dtype=info.dtype,
        load_seconds=load_seconds,
        default_params=engine.default_sampling_params.model_defaults(),
        memory=str(engine.memory),
        guarantee=engine.stats().guarantee,
        system_fingerprint=engine.stats().system_fingerprint,
        seconds=seconds | engine.start_seconds,
    )


def serve(frames: FrameSocket) -> None:
    """Load the model that the first message names, and answer requests."""
    import_time = perf_counter()
    # Prepare while the HTTP process writes the first message.
    from infinilm.executor.loader import prepare_for_gpu

    prepare_for_gpu()

    seconds = {"imports": perf_counter() - import_time}
    command = messages.decode_command(frames.receive_frame())
    if not isinstance(command, messages.Start):
        raise TypeError(f"the first message must be Start, not {type(command).__name__}")
    try:
        start_time = perf_counter()
        engine = _load(messages.config_from_wire(command.settings))
    except Exception as error:
        is_known = isinstance(error, InfinilmError)
        # Lack of memory is not permanent: another process may be using it for now.
        send_report(
            frames,
            messages.Failed(str(error) if is_known else _name(error), is_permanent=isinstance(error, CheckpointError)),
        )
        raise SystemExit(2 if is_known else 1) from error
    gc.collect()
    gc.freeze()  # these objects stay, so later collections can skip them
    with engine:
        try:
            send_report(frames, _describe(engine, perf_counter() - start_time, seconds))
            EngineLoop(engine, frames, command.timing, reports_cache=command.reports_cache).run()
        except ChannelClosedError:
            return  # the HTTP process has ended
        except Exception as error:
            logger.exception("the engine failed")
            send_report(frames, messages.Failed(_name(error), is_permanent=False))
            raise SystemExit(1) from error


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def main() -> None:
    # A signal to the process group is for the HTTP process, which lets requests finish and then sends Stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    install_logging()
    exit_with_parent()
    serve(FrameSocket(parent_socket()))


if __name__ == "__main__":
    main()
