"""The engine: accepts prompts, runs steps and returns answers."""

import atexit
import logging
import re
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial, wraps
from itertools import count, islice
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from xxhash import xxh3_64_intdigest

from infinilm.checks import check_integer, check_text
from infinilm.config import Config
from infinilm.engine.block_manager import BlockManager
from infinilm.engine.prompts import (
    Prompt,
    as_conversations,
    as_prompt_list,
    check_ids,
    check_names,
    check_params,
    encode_prompt,
    pair_params,
)
from infinilm.engine.request import OnToken, Request
from infinilm.engine.scheduler import Scheduler
from infinilm.engine.sequence import Sequence as TokenSequence
from infinilm.engine.stats import EngineStats, ProgressBar
from infinilm.engine.step import Step
from infinilm.errors import EngineError, InvalidValueError, WorkerDiedError
from infinilm.executor.step_io import StepInput, StepOutput
from infinilm.garbage import gc_paused
from infinilm.interrupts import Turns, interrupts_allowed, interrupts_held
from infinilm.outputs import AnswerDelta, RequestOutput
from infinilm.sampling_params import SamplingParams

if TYPE_CHECKING:  # these import torch, which this module does not need
    from infinilm.debug import HookRegistry, RequestRows
    from infinilm.structured.compiler import GrammarCompiler

logger = logging.getLogger(__name__)

_AUTOMATIC_ID = re.compile(r"auto-\d+")
NUM_LOOKED_AT = 4
"""`generate` looks for ended requests among the first `NUM_LOOKED_AT * max_num_seqs` pending ones."""

Messages = Sequence[Mapping[str, Any]]
P = ParamSpec("P")
T = TypeVar("T")


def _in_turn(method: Callable[Concatenate["LLMEngine", P], T]) -> Callable[Concatenate["LLMEngine", P], T]:
    """Decorator: the method runs with interrupts held, while no other thread changes the engine."""

    @wraps(method)
    def call(engine: "LLMEngine", /, *args: P.args, **kwargs: P.kwargs) -> T:
        with interrupts_held(), engine._turns:
            return method(engine, *args, **kwargs)

    return call


class LLMEngine:
    """Runs a model for many requests at a time. `infinilm.LLM` is this class.

    `generate`, `chat` and `stream` return answers; `add_request` and `step` drive the engine step by step. They can be
    mixed, and called from several threads: the threads take turns between steps, and each step computes the requests
    of all threads. For asyncio, use `AsyncLLM`.
    """

    def __init__(self, model: str | Path | Config | None = None, **settings: Any) -> None:
        self._is_open = False
        if isinstance(model, Config):
            self.config = model.replace(**settings)
        else:
            self.config = Config.from_kwargs(model=model, **settings)
        from infinilm.executor.loader import load_model  # imports torch; no module above the executor does

        loaded = load_model(self.config)
        self.executor = loaded.executor
        self.start_seconds = loaded.seconds
        """Seconds that loading took, by cause."""
        self.tokenizer = loaded.tokenizer
        self.model_config = loaded.model_config
        self.memory = loaded.memory
        self.max_model_len = loaded.max_model_len
        self.eos_token_ids = loaded.eos_token_ids
        self.default_sampling_params = loaded.default_sampling_params
        """Used for requests without parameters: the checkpoint's defaults, or those of the model's card."""
        self._turns = Turns()
        self.end_runs_if = [self._turns.is_awaited]
        """Functions called between the steps of a `DecodeRun`. The run ends if one of them returns True."""
        self.scheduler = Scheduler(
            BlockManager(
                self.memory.group_blocks,
                self.memory.block_size,
                windows=[group.window for group in self.memory.groups],
                enable_prefix_caching=self.config.enable_prefix_caching,
            ),
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            num_stages=self.executor.info.num_stages,
            max_run_steps=self.executor.info.max_run_steps,
            is_awaited=partial(_is_any, self.end_runs_if),
        )
        self._stats = EngineStats(guarantee=str(loaded.guarantee), system_fingerprint=loaded.fingerprint)
        self._registry: HookRegistry | None = None
        self._max_in_flight = self.executor.info.max_in_flight
        self._is_stepping = False
        self._in_flight: deque[Step] = deque()
        self.last_step: StepInput | None = None
        """The step that the last call committed, or None."""
        self._requests: dict[str, Request] = {}
        self._updated: dict[Request, None] = {}
        """Requests to report to their listeners, and to remove if they have ended, at the end of this step."""
        self._unreported: dict[Request, None] = {}
        """Requests that changed since the last call of `step` or `step_deltas`."""
        self._arrivals = count()
        self._is_open = True
        self._at_exit = partial(_exit_if_alive, weakref.ref(self))
        atexit.register(self._at_exit)

    # --- answers ----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts. Returns one output per prompt, in order.

        A prompt is a text, or token ids in a list, a NumPy array or a torch tensor of one dimension. Without
        `sampling_params`, `default_sampling_params` apply.
        """
        self._check_open()
        prompt_list = as_prompt_list(prompts)
        given = self.default_sampling_params if sampling_params is None else sampling_params
        params_list = pair_params(given, len(prompt_list))
        with interrupts_held(), gc_paused() as collect_young:
            # Check all requests before queuing the first, so that an invalid one leaves nothing queued.
            with self._turns, interrupts_allowed():
                requests = [
                    self._make_request(prompt, params, is_reported=False)
                    for prompt, params in zip(prompt_list, params_list, strict=True)
                ]
            with ProgressBar(self._stats, len(requests), is_shown=use_tqdm) as bar:
                return self._run(requests, bar, collect_young)

    def _run(self, requests: list[Request], bar: ProgressBar, collect_young: Callable[[], None]) -> list[RequestOutput]:
        with self._turns:
            for request in requests:
                self._queue(request)
        outputs: dict[Request, RequestOutput] = {}
        pending = dict.fromkeys(requests)
        num_finished = -1
        try:
            while pending:
                with self._turns:
                    self._advance(is_watched=False)
                    if num_finished != self.scheduler.num_finished:
                        num_finished = self.scheduler.num_finished
                        self._collect_outputs(pending, outputs)
                if not self.scheduler.waiting:
                    collect_young()
                with interrupts_allowed():
                    bar.update()
            return [outputs[request] for request in requests]
        finally:
            with self._turns:
                for request in requests:
                    self._end(request)

    def _collect_outputs(self, pending: dict[Request, None], outputs: dict[Request, RequestOutput]) -> None:
        """Make the outputs of requests that have ended, while a GPU computes the next step.

        There may be many requests. Looks only at the first pending ones, because hardly any later one has started.
        """
        num_looked_at = NUM_LOOKED_AT * self.config.max_num_seqs
        while ended := [request for request in islice(pending, num_looked_at) if request.is_finished]:
            for request in ended:
                outputs[request] = request.output()
                del pending[request]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        parse_special_tokens: bool = False,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, rendered with the checkpoint's chat template.

        Special tokens in messages, such as `<|im_end|>`, are plain text unless `parse_special_tokens` is set.
        """
        self._check_open()
        options = {"parse_special_tokens": parse_special_tokens, **template_kwargs}
        prompts = [self.chat_prompt(conversation, **options) for conversation in as_conversations(messages)]
        return self.generate(prompts, sampling_params, use_tqdm)

    def chat_prompt(
        self, messages: Messages, *, parse_special_tokens: bool = False, **template_kwargs: Any
    ) -> list[int]:
        """The token ids of a conversation, up to where the answer begins; see `chat`."""
        if self.tokenizer is None:
            raise InvalidValueError("the checkpoint has no tokenizer, so there is no chat template; use generate")
        token_ids = self.tokenizer.encode_chat(messages, parse_special_tokens=parse_special_tokens, **template_kwargs)
        return check_ids(token_ids, self.model_config.vocab_size, "conversation")

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[str]:
        """Yield the answer's text piece by piece. Closing the iterator early aborts the request."""
        self._check_open()
        with interrupts_held(), self._turns, interrupts_allowed():
            request = self._make_request(prompt, sampling_params, is_reported=False)
        if request.params.n > 1:
            raise InvalidValueError(f"n={request.params.n} can't be streamed as one text; use n=1 or add_request")
        return self._stream(request)

    def _stream(self, request: Request) -> Generator[str]:
        try:
            with interrupts_held(), self._turns:
                self._queue(request)
            is_finished = False
            while not is_finished:
                with interrupts_held(), self._turns:
                    if not request.is_finished:  # other calls may have stepped the engine since the last piece
                        self._advance()
                    is_finished = request.is_finished
                    piece = request.output().outputs[0].new_text
                if piece:
                    yield piece
            if request.error:
                raise EngineError(f"request {request.request_id} failed: {request.error}")
        finally:
            with interrupts_held(), self._turns:
                self._end(request)

    # --- step by step -----------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        on_token: OnToken | None = None,
        request_id: str | None = None,
        cache_salt: str | None = None,
    ) -> str:
        """Queue a prompt. `on_token` gets the request's output after each step, or every few steps, that changed it.

        `on_token` may abort this request and others, and add new ones. If it raises, its own request ends with that
        error. Only requests with the same `cache_salt` share cached prefixes.
        """
        self._check_open()
        check_names(request_id, cache_salt, on_token)
        with interrupts_held(), self._turns:
            with interrupts_allowed():
                request = self._make_request(
                    prompt,
                    sampling_params,
                    on_token=on_token,
                    request_id=request_id,
                    cache_salt=cache_salt or "",
                )
            self._queue(request)
        return request.request_id

    @_in_turn
    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns the requests that changed; `finished` says which have ended."""
        self._check_open()
        self._advance(may_run=False)
        unreported, self._unreported = self._unreported, {}
        return [request.output() for request in unreported]

    @_in_turn
    def step_deltas(self) -> list[AnswerDelta]:
        """Compute one step, or several that only decode. Returns the new tokens.

        This is much less work than `step` if text is decoded elsewhere.

        Use either this or `step` for a request. Requests with a listener are left out.
        """
        self.advance()
        return self.read_deltas()

    @_in_turn
    def advance(self) -> None:
        """Compute one step, or several that only decode, and keep the new tokens for `read_deltas`.

        There, the tokens that several steps add to an answer are one delta.
        """
        self._check_open()
        self._advance()

    @_in_turn
    def read_deltas(self) -> list[AnswerDelta]:
        """The new tokens of all steps since the last call, in the form that `step_deltas` returns."""
        unreported, self._unreported = self._unreported, {}
        return [delta for request in unreported if request.on_token is None for delta in request.deltas()]

    @_in_turn
    def _advance(self, *, may_run: bool = True, is_watched: bool = True) -> None:
        """Submit steps until as many as allowed are in flight, then commit the oldest, which may be a `DecodeRun`.

        `is_watched`: the caller reads tokens after each call.
        """
        if self._is_stepping:
            raise EngineError("the engine is in the middle of a step; don't call it from a hook or from on_token")
        self._is_stepping = True
        try:
            self._compute_step(may_run=may_run, is_watched=is_watched or self._has_watched_requests())
        finally:
            try:
                self._emit_updates()
            finally:
                self._is_stepping = False

    def _has_watched_requests(self) -> bool:
        """Whether a request's tokens are read, or checked for stop strings, as they arrive."""
        if self.executor.info.max_run_steps == 1 or self.scheduler.waiting:
            return True  # no run has more than one step
        return any(request.is_reported or not request.is_plain for request in self._requests.values())

    def _compute_step(self, *, may_run: bool, is_watched: bool) -> None:
        self.last_step = None
        try:
            self.executor.check_health()
            while len(self._in_flight) < self._max_in_flight:
                step = self.scheduler.schedule(may_run=may_run, is_watched=is_watched)
                if step is None:
                    break
                self._in_flight.append(step)
                self._submit(step)
            if self._in_flight:
                handle = self._in_flight[0].handle
                assert handle is not None
                output = handle.result()
                self._commit(self._in_flight.popleft(), output)
        except BaseException as error:
            self._fail_in_flight(error)
            if isinstance(error, WorkerDiedError) or not isinstance(error, Exception):
                raise

    def _submit(self, step: Step) -> None:
        now = perf_counter()
        decoding = step.input.decoding
        for seq in step.seqs[len(decoding.rows) :]:
            seq.request.start(now)
        if self._registry is not None:
            self._registry.begin_step(self._rows_of(step))
        self._stats.num_steps += 1
        self._stats.num_prefill_tokens += step.input.num_chunk_tokens
        step.handle = self.executor.submit(step.input)
        if self._registry is not None and self._registry.has_replaced:
            for seq in step.seqs:
                seq.is_patched = True

    def _rows_of(self, step: Step) -> "tuple[RequestRows, ...]":
        """For hooks: where in the step's tensors each request is."""
        from infinilm.debug import RequestRows

        decoding, chunks = step.input.decoding, step.input.chunks
        starts = [*decoding.starts.tolist(), *(chunk.start for chunk in chunks)]
        num_tokens = [*decoding.query_lens.tolist(), *(len(chunk.token_ids) for chunk in chunks)]
        found: list[RequestRows] = []
        first, num_samples = 0, 0
        for index, (seq, num_drawn) in enumerate(zip(step.seqs, step.input.sample_counts.tolist(), strict=True)):
            rows = slice(first, first + num_tokens[index])
            place = num_samples if num_drawn else None
            found.append(RequestRows(seq.request.request_id, seq.index, rows, starts[index], place))
            first, num_samples = rows.stop, num_samples + num_drawn
        return tuple(found)

    def _commit(self, step: Step, output: StepOutput) -> None:
        """Add a step's output to the answers. Listeners are called later, when all answers are up to date."""
        now = perf_counter()
        self.scheduler.commit(step, output)
        num_stale = sum(len(output.tokens_of(index)) for index in step.stale)
        self._stats.num_steps += output.num_steps - 1
        self._stats.num_decode_tokens += len(output.token_ids) - num_stale
        self.last_step = step.input
        num_decoding = len(step.input.decoding.rows)
        for index, seq in enumerate(step.seqs):
            if index in step.stale:
                continue
            request = seq.request
            if request.is_plain and index < num_decoding and seq.finish_reason is None:
                request.answers[seq.index].last_time = now
                if request.is_reported:
                    self._unreported[request] = None
                continue
            start = 0 if index < num_decoding else step.input.chunks[index - num_decoding].start
            if request.update(seq.index, start, output, index, now):
                self.scheduler.finish(seq, "stop")
                seq.finish_reason = "stop"  # even if the same token reached the token limit
            if request.on_token is None and seq.finish_reason is None:
                if request.is_reported and output.tokens_of(index):
                    self._unreported[request] = None
            elif output.tokens_of(index) or seq.finish_reason is not None:
                self._updated[request] = None

    def _emit_updates(self) -> None:
        """Report the updated requests, and remove those that have ended. Listeners may abort any of them."""
        leaving: BaseException | None = None
        while self._updated:
            request = next(iter(self._updated))
            del self._updated[request]
            if request.is_reported:
                self._unreported[request] = None
            if request.is_finished:
                self._remove(request)
            if request.on_token is None:
                continue
            try:
                request.on_token(request.output(for_listener=True))
            except BaseException as error:
                logger.warning("on_token of request %s failed: %s", request.request_id, error)
                request.error = f"on_token failed: {type(error).__name__}: {error}"
                request.on_token = None
                self._end(request)
                if not isinstance(error, Exception):
                    leaving = error
        if leaving is not None:
            raise leaving

    def _fail_in_flight(self, error: BaseException) -> None:
        """After a failed step, end the requests of all steps in flight and keep the others."""
        from infinilm.executor.memory import explain_oom

        if isinstance(error, Exception):
            logger.error("a step failed: %s: %s", type(error).__name__, error, exc_info=error)
        error = explain_oom(error, self.memory)
        broken = [seq.request for seq in self.scheduler.fail(self._in_flight)]
        self._in_flight.clear()
        if isinstance(error, WorkerDiedError):
            broken = list(self._requests.values())
            for request in broken:
                request.is_reported = False  # `step` raises the error instead
                self._unreported.pop(request, None)
        for request in broken:
            self._end(request, error)

    # --- requests ---------------------------------------------------------------------------------------

    def _make_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        on_token: OnToken | None = None,
        request_id: str | None = None,
        cache_salt: str = "",
        is_reported: bool = True,
    ) -> Request:
        self.executor.check_health()
        vocab_size = self.model_config.vocab_size
        params = self.default_sampling_params if params is None else params
        check_params(params, vocab_size, self.eos_token_ids)
        token_ids = encode_prompt(prompt, self.tokenizer, vocab_size)
        stop_ids = (*(() if params.ignore_eos else self.eos_token_ids), *params.stop_token_ids)
        if params.stop and self.tokenizer is None:
            raise InvalidValueError("stop needs text, and the checkpoint has no tokenizer; use stop_token_ids")
        has_grammar = params.structured is not None or params.reasoning is not None
        grammar = self.grammars.grammar_of(params, stop_ids) if has_grammar else None
        seqs: list[TokenSequence] = []
        arrival = next(self._arrivals)
        for sample in range(params.n):
            seed = params.seed if params.seed is not None else _mix(self.config.seed, arrival)
            seq = TokenSequence(
                arrival if sample == 0 else next(self._arrivals),
                token_ids,
                params,
                seed=seed if sample == 0 else _mix(seed, sample),
                stop_ids=stop_ids,
                leader=seqs[0] if seqs else None,
                cache_salt=cache_salt.encode(),
                grammar=grammar,
            )
            seqs.append(seq)
        self.scheduler.check_fits(seqs[0])
        if request_id is None:
            request_id = f"auto-{arrival}"
        else:
            self._check_id(request_id)
        text = prompt if isinstance(prompt, str) else None
        return Request(request_id, text, seqs, self.tokenizer, on_token, is_reported=is_reported)

    def _check_id(self, request_id: str) -> None:
        if request_id in self._requests:
            raise InvalidValueError(f"request_id={request_id!r} is in use; wait until it has finished or use another")
        if _AUTOMATIC_ID.fullmatch(request_id):
            raise InvalidValueError(f"request_id={request_id!r} has the form of automatic ids; use another")

    def _queue(self, request: Request) -> None:
        self._requests[request.request_id] = request
        for seq in request.seqs:
            self.scheduler.add(seq)

    def _end(self, request: Request, error: BaseException | None = None) -> None:
        """Abort the unfinished answers of a request. Its listener and the next `step` report it."""
        if self._requests.get(request.request_id) is not request:
            return
        if error is not None and request.error is None:
            request.error = f"{type(error).__name__}: {error}"
        for seq in request.seqs:
            self.scheduler.finish(seq, "abort")
        self._note_update(request)

    def _note_update(self, request: Request) -> None:
        """Report to the request's listener: at once or, during a step, at the end of the step."""
        self._updated[request] = None
        if not self._is_stepping:
            self._is_stepping = True
            try:
                self._emit_updates()
            finally:
                self._is_stepping = False

    def _remove(self, request: Request) -> None:
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]
            self._stats.num_finished += 1
            self._stats.num_cached_tokens += request.seqs[0].num_cached_tokens

    @_in_turn
    def abort(self, request_id: str, answer: int | None = None) -> bool:
        """End a request, or only one of its answers; the next `step` reports it.

        Returns False if it doesn't exist or has ended already.
        """
        check_text("request_id", request_id)
        request = self._requests.get(request_id)
        if request is None or request.is_finished:
            return False
        if answer is None:
            self._end(request)
            return True
        check_integer("answer", answer, low=0, high=len(request.seqs) - 1)
        seq = request.seqs[answer]
        if seq.is_finished:
            return False
        self.scheduler.finish(seq, "abort")
        request.replace_leader(seq)
        self._note_update(request)
        return True

    # --- the rest ---------------------------------------------------------------------------------------

    @_in_turn
    def set_hook_registry(self, registry: "HookRegistry | None") -> None:
        """Let hooks see, and replace, the activations of all later steps; None removes the hooks.

        If a hook raises, the requests of its step end. `registry.requests` says which rows belong to which request.
        Tokens found in the prefix cache are not computed, so hooks don't see them. Blocks that hooks have changed are
        never put into the prefix cache.
        """
        self._check_open()
        from infinilm.debug.hooks import attach

        self._registry = attach(registry, self._registry, self.model_config.num_hidden_layers)
        self.executor.set_hook_registry(self._registry)

    def is_finished(self) -> bool:
        """Whether nothing is left to compute, or to report by `step`."""
        return not (self.has_work or self._unreported)

    @property
    def has_work(self) -> bool:
        """Whether there is something to compute."""
        return self.scheduler.has_work or bool(self._in_flight)

    def stats(self) -> EngineStats:
        """Counters since the start, and the current state."""
        blocks = self.scheduler.blocks
        return replace(
            self._stats,
            num_preemptions=self.scheduler.num_preemptions,
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_blocks=blocks.num_blocks,
            num_free_blocks=blocks.num_free,
            num_cached_blocks=blocks.num_cached,
        )

    @cached_property
    def grammars(self) -> "GrammarCompiler":
        """Compiles `structured`. Not imported before a request needs it."""
        from infinilm.structured.compiler import GrammarCompiler

        return GrammarCompiler(self.tokenizer, self.model_config.vocab_size)

    @_in_turn
    def exit(self) -> None:
        """Abort all requests and free the memory. Calling it again does nothing."""
        self._exit()

    def _exit(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        atexit.unregister(self._at_exit)
        for request in list(self._requests.values()):
            self._end(request)
        self._in_flight.clear()
        if "grammars" in vars(self):
            self.grammars.close()
        self.executor.shutdown()

    def _check_open(self) -> None:
        if not self._is_open:
            raise EngineError("the engine was closed by exit(); make a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.exit()


LLM = LLMEngine


def _exit_if_alive(engine: "weakref.ref[LLMEngine]") -> None:
    if alive := engine():
        with interrupts_held():
            alive._exit()  # without waiting for a turn: the thread that holds it may never release it


def _is_any(conditions: list[Callable[[], bool]]) -> bool:
    return any(condition() for condition in conditions)


def _mix(seed: int, number: int) -> int:
    """A new 64-bit seed from a seed and a number."""
    return xxh3_64_intdigest(f"{seed}/{number}".encode())
