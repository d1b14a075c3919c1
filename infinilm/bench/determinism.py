"""Checks whether answers depend on their circumstances: compares requests with the same ones alone, bit for bit.

`check` computes the requests in one circumstance after the other: with others, in chunks, on a warm cache, after
preemption, through other interfaces. Tokens and log-probabilities must be equal. If they are not, hooks find the layer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from infinilm.bench.hidden_states import Difference, Rows, first_difference, recording
from infinilm.config import Config
from infinilm.engine.llm_engine import LLM
from infinilm.errors import EngineError
from infinilm.outputs import RequestOutput, TokenLogprobs
from infinilm.sampling_params import SamplingParams

LENGTHS = (5, 17, 63, 64, 65, 130, 255, 256, 257, 511, 513, 1025, 2047, 2049, 4095, 4097, 8193, 16000)
"""Prompt lengths, around the sizes of blocks, tiles and chunks. Those above the requested maximum are left out."""
HEAD_LEN = 300
"""The length of the common beginning of every third prompt, as far as the prompt's length permits."""
NUM_SHARING = 16
"""The number of requests with the same beginning. With this many, a GPU reads the beginning only once."""
CHUNKS = (16, 50, 250)
NUM_WATCHED = 6
"""Requests whose hidden states are compared."""

Entry = tuple[int, float, tuple[tuple[int, float], ...]]


@dataclass(frozen=True, slots=True)
class Answer:
    """The results of a request that are compared. Numbers are not rounded: every bit counts."""

    token_ids: tuple[int, ...]
    logprobs: tuple[Entry | None, ...] = ()
    """The prompt's entries, if requested, then the answer's."""

    @classmethod
    def of(cls, output: RequestOutput) -> "Answer":
        if output.error is not None:
            raise EngineError(f"request {output.request_id} failed: {output.error}")
        entries = [*(output.prompt_logprobs or ()), *(output.logprobs or ())]
        return cls(tuple(output.token_ids), tuple(None if entry is None else make_entry(entry) for entry in entries))

    def describe_difference(self, other: "Answer") -> str:
        for index, (ours, theirs) in enumerate(zip(self.token_ids, other.token_ids, strict=False)):
            if ours != theirs:
                return f"token {index} is {theirs} instead of {ours}"
        for index, (mine, found) in enumerate(zip(self.logprobs, other.logprobs, strict=False)):
            if mine is not None and found is not None and mine != found:
                return f"the tokens are equal, but log-probability {index} is {found[1]!r} instead of {mine[1]!r}"
        return f"{len(other.token_ids)} tokens instead of {len(self.token_ids)}"


def make_entry(entry: TokenLogprobs) -> Entry:
    return entry.token_id, entry.logprob, tuple(entry.top.items())


Answers = dict[int, Answer]
"""Answers by the request's index."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests, and others to compute them among."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    others: list[list[int]]
    sharing: range
    """The indices of the requests with the same beginning. They are the last ones."""

    @classmethod
    def make(
        cls,
        vocab_size: int,
        *,
        num_requests: int,
        max_tokens: int,
        max_prompt_len: int,
        num_others: int,
        num_sharing: int = NUM_SHARING,
        seed: int = 0,
    ) -> "Workload":
        """Make random prompts. A third of the requests is greedy; the others are sampled, each with its own seed."""
        random = Random(seed)

        def text(length: int) -> list[int]:
            return [random.randrange(3, vocab_size) for _ in range(length)]

        lengths = [length for length in LENGTHS if length <= max_prompt_len] or [max_prompt_len]
        head = text(min(HEAD_LEN, max(max_prompt_len - 8, 1)))
        prompts = [
            ((head if index % 3 == 0 else []) + text(lengths[index % len(lengths)]))[:max_prompt_len]
            for index in range(num_requests)
        ]
        prompts += [(head + text(5))[:max_prompt_len] for _ in range(num_sharing)]
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
            {"temperature": 1.0, "repetition_penalty": 1.1},
        ]
        params = []
        for index in range(len(prompts)):
            common = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=index, logprobs=2)
            # Prompts with log-probabilities do not use the prefix cache, so only some requests ask for them.
            prompt_logprobs = 0 if index % 4 == 3 and index < num_requests else None
            params.append(replace(common, **kinds[index % 3], prompt_logprobs=prompt_logprobs))
        others = [text(min(random.choice((3, 20, 70, 150)), max_prompt_len)) for _ in range(num_others)]
        return cls(prompts, params, others, range(num_requests, len(prompts)))


NOTHING = Workload([], [], [], range(0))


class Session:
    """A model with at most one open engine at a time."""

    def __init__(self, config: Config, work: Workload = NOTHING) -> None:
        self.config, self.work = config, work
        self._engine: LLM | None = None
        self._settings: dict[str, Any] = {}
        self.expected: Answers = {}
        """The requests computed alone."""
        self.ids: dict[int, str] = {}
        """The request ids of the last run, by index."""

    def engine(self, **settings: Any) -> LLM:
        """An engine with these settings changed. Its prefix cache is off until `changed` turns it on."""
        if self._engine is None or settings != self._settings:
            self.close()
            self._engine, self._settings = LLM(self.config.replace(**settings)), settings
            self._engine.scheduler.blocks.enable_prefix_caching = False
        return self._engine

    @property
    def open_engine(self) -> LLM | None:
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.exit()
        self._engine = None

    def run(self, llm: LLM, indices: Iterable[int], others: Sequence[list[int]] = ()) -> Answers:
        """Compute the requests `indices`, in this order and in the middle of `others`."""
        work, indices = self.work, list(indices)
        half = len(others) // 2
        plain = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        prompts = [*others[:half], *(work.prompts[i] for i in indices), *others[half:]]
        params = [*[plain] * half, *(work.params[i] for i in indices), *[plain] * (len(others) - half)]
        outputs = llm.generate(prompts, params, use_tqdm=False)[half : half + len(indices)]
        self.ids = {index: output.request_id for index, output in zip(indices, outputs, strict=True)}
        return {index: Answer.of(output) for index, output in zip(indices, outputs, strict=True)}

    def run_alone(self, llm: LLM, indices: Iterable[int] | None = None) -> Answers:
        """Compute requests one by one."""
        answers: Answers = {}
        ids: dict[int, str] = {}
        for index in self.all if indices is None else indices:
            answers |= self.run(llm, [index])
            ids |= self.ids
        self.ids = ids
        return answers

    @property
    def all(self) -> range:
        return range(len(self.work.prompts))


@contextmanager
def changed(target: object, **values: Any) -> Iterator[None]:
    """Change attributes within the block."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


@dataclass(frozen=True, slots=True)
class Circumstance:
    """A way to compute the requests, or some of them, with its name."""

    name: str
    run: Callable[[Session], Answers | str]
    """Returns the answers, or the reason why there are none."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a circumstance."""

    name: str
    num_equal: int = 0
    num_compared: int = 0
    skipped: str = ""
    """Why nothing was compared."""
    difference: str = ""
    """Where the first difference is, in words."""

    @property
    def is_equal(self) -> bool:
        return self.num_equal == self.num_compared


def check(session: Session, circumstances: Sequence[Circumstance]) -> Iterator[Finding]:
    """Compute the requests alone, then compare every circumstance with that."""
    expected = session.expected = session.run_alone(session.engine())
    for circumstance in circumstances:
        found = circumstance.run(session)
        if isinstance(found, str):
            yield Finding(circumstance.name, skipped=found)
            continue
        wrong = [index for index, answer in found.items() if not is_same(expected[index], answer)]
        difference = ""
        if wrong:
            index = wrong[0]
            difference = (
                f"request {index} ({len(session.work.prompts[index])} prompt tokens): "
                f"{expected[index].describe_difference(found[index])}; {_locate(session, circumstance, index)}"
            )
        yield Finding(circumstance.name, len(found) - len(wrong), len(found), difference=difference)


def is_same(expected: Answer, found: Answer) -> bool:
    """Whether two answers are the same; log-probabilities that an interface does not give are not compared."""
    return expected.token_ids == found.token_ids and (not found.logprobs or expected.logprobs == found.logprobs)


def _locate(session: Session, circumstance: Circumstance, index: int) -> str:
    """Find where in the model the difference begins, by repeating both runs with hooks."""
    if session.open_engine is None:
        return "the layer can't be found through this interface"
    engine = session.open_engine
    with recording(engine) as records:
        session.run_alone(engine, [index])
        alone = records[session.ids[index]]
        circumstance.run(session)
        if session.open_engine is not engine:
            return "the layer can't be found through this interface"
        found = first_difference(alone, records[session.ids[index]])
    return "with hooks nothing differs" if found is None else f"begins at {found}"


def check_hidden_states(session: Session) -> Finding:
    """Compare the activations of some requests alone, together and in chunks, all recorded by hooks."""
    engine = session.engine()
    indices = [index for index in session.all if len(session.work.prompts[index]) <= HEAD_LEN][:NUM_WATCHED]
    different: dict[int, Difference] = {}
    with recording(engine) as records:
        session.run_alone(engine, indices)
        alone: dict[int, Rows] = {index: records[session.ids[index]] for index in indices}
        for chunk in (engine.scheduler.max_num_batched_tokens, CHUNKS[0]):
            with in_chunks(engine, chunk):
                session.run(engine, indices)
            for index in indices:
                found = first_difference(alone[index], records[session.ids[index]])
                if found is not None:
                    different.setdefault(index, found)
    words = "; ".join(f"request {index}: begins at {found}" for index, found in list(different.items())[:1])
    num_equal = len(indices) - len(different)
    return Finding("hidden states, by hooks", num_equal, len(indices), difference=words)


@contextmanager
def in_chunks(llm: LLM, num_tokens: int) -> Iterator[None]:
    """Compute at most `num_tokens` prompt tokens in a step."""
    with changed(llm.scheduler, max_prefill_tokens=num_tokens, max_mixed_tokens=num_tokens):
        yield
