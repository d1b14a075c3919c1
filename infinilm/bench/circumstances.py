"""The circumstances that `determinism.check` goes through."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from infinilm.bench.determinism import CHUNKS, Answer, Answers, Circumstance, Entry, Session, changed, in_chunks
from infinilm.engine.async_engine import AsyncLLM
from infinilm.engine.llm_engine import LLM
from infinilm.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

    from infinilm.lowlevel.infer_engine import InferEngine

SERVER_PACKAGES = ("fastapi", "msgspec", "prometheus_client", "uvicorn")
NUM_REPLAYED = 4
"""Greedy requests that are computed by `InferEngine`."""


def all_circumstances(session: Session, *, num_others: int) -> list[Circumstance]:
    """The circumstances that are possible on the device of the session's engine."""
    executor = session.engine().executor
    is_gpu = executor.info.device.startswith("cuda")
    found = [
        Circumstance("alone, again", lambda session: session.run_alone(session.engine())),
        Circumstance("together", _together()),
        Circumstance("in reverse order", lambda session: session.run(session.engine(), reversed(session.all))),
        Circumstance(
            f"among {num_others} others",
            lambda session: session.run(session.engine(), session.all, session.work.others),
        ),
        *(Circumstance(f"chunks of {size}", _together(_chunks(size))) for size in CHUNKS),
        *(Circumstance(f"{count} in flight", _together(_in_flight(count))) for count in (1, 2)),
        Circumstance("cold prefix cache", _together(_cached)),
        Circumstance("warm prefix cache", _together(_cached)),
        Circumstance("warm, alone", _warm_alone),
        Circumstance("a common beginning", _sharing),
    ]
    if executor.info.device == "cpu" and executor.info.num_ranks == 1:
        counts = sorted({1, 2, executor.worker.num_threads})  # type: ignore[attr-defined] # a local one has it
        found += [Circumstance(f"{count} threads", _together(_threads(count))) for count in counts]
    found.append(Circumstance("preempted", _preempted))
    if is_gpu:
        found.append(
            Circumstance("eager", lambda session: session.run(session.engine(enforce_eager=True), session.all))
        )
    return [
        *found,
        Circumstance("AsyncLLM", _asynchronous),
        Circumstance("InferEngine", _low_level),
        Circumstance("server", _served),
    ]


Change = Callable[[LLM], AbstractContextManager[None]]


def _together(change: Change = lambda _: nullcontext()) -> Callable[[Session], Answers]:
    def run(session: Session) -> Answers:
        engine = session.engine()
        with change(engine):
            return session.run(engine, session.all)

    return run


def _chunks(size: int) -> Change:
    return lambda llm: in_chunks(llm, size)


def _in_flight(count: int) -> Change:
    return lambda llm: changed(llm, _max_in_flight=count)


def _threads(count: int) -> Change:
    return lambda llm: changed(llm.executor.worker, num_threads=count)  # type: ignore[attr-defined] # a local one has it


def _cached(llm: LLM) -> AbstractContextManager[None]:
    return changed(llm.scheduler.blocks, enable_prefix_caching=True)


def _warm_alone(session: Session) -> Answers:
    engine = session.engine()
    with _cached(engine):
        return session.run_alone(engine)


def _sharing(session: Session) -> Answers:
    engine = session.engine()
    with _cached(engine):
        return session.run(engine, session.work.sharing)


def _preempted(session: Session) -> Answers | str:
    """Run with memory for half of the prompts. The running requests soon need more for their answers."""
    work, block_size = session.work, session.config.kvcache_block_size
    texts = zip(work.prompts, work.params, strict=True)
    longest = max(-(-(len(prompt) + params.max_tokens) // block_size) for prompt, params in texts)
    num_blocks = sum(-(-len(prompt) // block_size) for prompt in work.prompts)
    engine = session.engine(num_kvcache_blocks=max(num_blocks // 2, longest))
    answers = session.run(engine, session.all)
    return answers if engine.stats().num_preemptions else "no request was preempted: ask for more tokens"


def _asynchronous(session: Session) -> Answers:
    session.close()
    work = session.work

    async def answer(engine: AsyncLLM, index: int) -> Answer:
        outputs = [output async for output in engine.generate(work.prompts[index], work.params[index])]
        return Answer.of(outputs[-1])

    async def run() -> list[Answer]:
        async with AsyncLLM(session.config) as engine:
            return await asyncio.gather(*(answer(engine, index) for index in session.all))

    return dict(enumerate(asyncio.run(run())))


def _low_level(session: Session) -> Answers | str:
    """Compute greedy requests token by token, then each text as a whole. The hidden states must be equal."""
    from infinilm.cache import PagedKVCacheConfig
    from infinilm.distributed import DistConfig
    from infinilm.lowlevel.infer_engine import InferEngine

    config, work = session.config, session.work
    if config.executor.startswith("ray"):
        return "it has no such settings"
    session.close()
    ranks = config.distributed or DistConfig(config.tensor_parallel_size, pp_size=config.pipeline_parallel_size)
    indices = [index for index in session.all if work.params[index].temperature == 0][:NUM_REPLAYED]
    num_blocks = sum(len(work.prompts[i]) + work.params[i].max_tokens for i in indices) // 16 + len(indices)
    answers: Answers = {}
    with InferEngine(
        str(config.model),
        ranks,
        config.device,
        PagedKVCacheConfig(num_blocks, dtype=None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype),
        dtype=config.dtype,
        quantization=config.quantization,
        activation_bits=config.activation_bits,
        deterministic=config.deterministic,
    ) as engine:
        for index in indices:
            text, num_computed, states = list(work.prompts[index]), 0, []
            for _ in range(work.params[index].max_tokens):
                token, hidden = _forward(engine, text[num_computed:], num_computed)
                num_computed = len(text)
                text.append(token)
                states.append(hidden)
            _, whole = _forward(engine, text[:-1], 0)
            first = 0
            for part in states:
                if not part.equal(whole[first : first + len(part)]):
                    raise EngineError(
                        f"InferEngine: request {index}: hidden states from position {first} on differ between the text "
                        "computed token by token and as a whole"
                    )
                first += len(part)
            answers[index] = Answer(tuple(text[len(work.prompts[index]) :]))
    return answers


def _forward(engine: "InferEngine", new_ids: list[int], num_computed: int) -> "tuple[int, Tensor]":
    """The next token, and the hidden states `[n, hidden]` of the new ones."""
    output = engine.forward(input_ids=[new_ids], cache_lengths=[num_computed], temperature=0, return_hidden_states=True)
    assert output.hidden_states is not None
    return int(output.output_ids[0]), output.hidden_states[0]


def _served(session: Session) -> Answers | str:
    """Run through the service's routes and its engine process, without HTTP."""
    if missing := [name for name in SERVER_PACKAGES if find_spec(name) is None]:
        return f"{missing[0]} is not installed"
    tokenizer = session.engine().tokenizer
    if tokenizer is None:
        return "the checkpoint has no tokenizer"
    names = tokenizer.token
    session.close()
    from infinilm.server.direct import DirectService
    from infinilm.server.messages import params_to_wire

    async def ask(service: DirectService, index: int) -> Answer:
        params = session.work.params[index]
        settings = params_to_wire(params) | params.model_defaults()  # else the checkpoint's own would be used
        settings.pop("prompt_logprobs", None)
        body = {"prompt": session.work.prompts[index], **settings}
        reply = await service.post("/v1/completions", json.dumps(body).encode())
        content = json.loads(reply.content)
        if reply.status != 200:
            raise EngineError(f"the service answered {reply.status}: {content}")
        return _read_reply(content["choices"][0]["logprobs"], session.expected[index], names)

    async def run() -> list[Answer]:
        service = DirectService(session.config)
        await service.start()
        try:
            return await asyncio.gather(*(ask(service, index) for index in session.all))
        finally:
            await service.stop()

    return dict(enumerate(asyncio.run(run())))


def _read_reply(found: dict[str, Any], expected: Answer, names: "Callable[[int], str]") -> Answer:
    """Read a reply. It has the texts of tokens, not their ids: if all texts are as expected, so are the ids."""
    same = [names(token_id) for token_id in expected.token_ids] == found["tokens"]
    num_prompt = len(expected.logprobs) - len(expected.token_ids)
    entries: list[Entry | None] = [
        (token_id, logprob, entry[2] if entry is not None else ())
        for token_id, logprob, entry in zip(
            expected.token_ids, found["token_logprobs"], expected.logprobs[num_prompt:], strict=False
        )
    ]
    return Answer(expected.token_ids if same else (), (*expected.logprobs[:num_prompt], *entries))
