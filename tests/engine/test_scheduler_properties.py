"""Thousands of random histories: whatever arrives, leaves or runs short, each sequence gets its own tokens."""

from collections import deque
from dataclasses import dataclass

import pytest
from fake_runner import STOP_ID, FakeRunner, generate_alone
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh32_intdigest

from infinilm.cache.specs import blocks_per_row
from infinilm.engine.block_manager import BlockManager
from infinilm.engine.scheduler import Scheduler
from infinilm.engine.sequence import Sequence
from infinilm.engine.step import Step
from infinilm.errors import PromptTooLongError
from infinilm.executor.step_io import LAST_TOKEN, StepOutput
from infinilm.sampling_params import SamplingParams


@dataclass
class Arrival:
    step: int
    prompt: list[int]
    max_tokens: int
    num_samples: int
    abort_after: int | None
    tenant: bytes


@dataclass
class World:
    arrivals: list[Arrival]
    windows: list[int | None]
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    depth: int
    enable_prefix_caching: bool
    min_awaited_tokens: int
    max_mixed_tokens: int
    graph_tokens: int
    num_drafts: int
    """Draft tokens of a row. Some are right, some are wrong."""
    num_stages: int
    max_run_steps: int


@st.composite
def worlds(draw: st.DrawFn) -> World:
    prefixes = draw(st.lists(st.lists(st.integers(1, 5), max_size=20), min_size=1, max_size=3))
    arrival = st.builds(
        Arrival,
        step=st.integers(0, 12),
        prompt=st.builds(
            lambda prefix, tail: prefix + tail,
            st.sampled_from(prefixes),
            st.lists(st.integers(1, 5), min_size=1, max_size=12),
        ),
        max_tokens=st.integers(1, 12),
        num_samples=st.sampled_from([1, 1, 1, 3]),
        abort_after=st.one_of(st.none(), st.none(), st.integers(0, 8)),
        tenant=st.sampled_from([b"", b"", b"other"]),
    )
    return World(
        arrivals=sorted(draw(st.lists(arrival, min_size=1, max_size=8)), key=lambda a: a.step),
        windows=draw(st.sampled_from([[None], [None], [5], [None, 3], [9, None], [1, 17]])),
        num_blocks=draw(st.integers(2, 24)),
        block_size=draw(st.sampled_from([1, 2, 4, 8])),
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(1, 40)),
        depth=draw(st.integers(1, 4)),
        enable_prefix_caching=draw(st.booleans()),
        min_awaited_tokens=draw(st.sampled_from([4, 1000])),
        max_mixed_tokens=draw(st.sampled_from([1, 5, 1000])),
        graph_tokens=draw(st.sampled_from([0, 4, 12])),
        num_drafts=draw(st.integers(0, 4)),
        num_stages=draw(st.sampled_from([1, 1, 2, 3])),
        max_run_steps=draw(st.sampled_from([1, 3, 8])),
    )


class Simulation:
    """Runs a world to its end, checking after each step what must always hold."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.blocks = BlockManager(
            world.num_blocks,
            world.block_size,
            windows=world.windows,
            enable_prefix_caching=world.enable_prefix_caching,
        )
        self.max_model_len = world.num_blocks * world.block_size
        needed = [window and blocks_per_row(window, world.block_size) for window in world.windows]
        if all(count is not None and count <= world.num_blocks for count in needed):
            self.max_model_len = 1000  # blocks are released, and texts may be longer than the cache
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=world.max_num_seqs,
            max_num_batched_tokens=world.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            draft_source=self.guess if world.num_drafts else None,
            num_stages=world.num_stages,
            max_run_steps=world.max_run_steps,
        )
        self.scheduler.min_awaited_tokens = world.min_awaited_tokens
        self.scheduler.max_mixed_tokens = world.max_mixed_tokens
        self.scheduler.graph_tokens = world.graph_tokens
        self.runner = FakeRunner(world.num_blocks, world.block_size, world.windows)
        self.seqs: list[Sequence] = []
        self.refused = 0
        self.aborts: list[tuple[int, Sequence]] = []

    def guess(self, seq: Sequence) -> list[int]:
        """The next tokens, each wrong with a probability of a third. What follows a wrong one is never right."""
        alone = generate_alone(
            seq.token_ids[: seq.num_prompt_tokens],
            seed=seq.seed,
            max_tokens=seq.params.max_tokens,
            max_model_len=self.max_model_len,
            windows=self.world.windows,
        )
        first = seq.num_output_tokens
        assert seq.completion_token_ids == alone[:first]
        drafts = alone[first : first + self.world.num_drafts]
        return [
            draft if xxh32_intdigest(f"{seq.arrival}/{first + i}".encode()) % 3 else draft + 1
            for i, draft in enumerate(drafts)
        ]

    def run(self) -> None:
        arrivals = deque(self.world.arrivals)
        in_flight: deque[tuple[Step, StepOutput]] = deque()
        step = 0
        while arrivals or self.scheduler.has_work or in_flight:
            while arrivals and arrivals[0].step <= step:
                self.arrive(arrivals.popleft(), step)
            for when, seq in self.aborts:
                if when == step:
                    self.scheduler.finish(seq, "abort")
            prompts = {seq.arrival for seq in self.scheduler.running if not seq.is_decoding}
            planned = self.scheduler.schedule()
            if planned is not None:
                self.check_plan(planned)
                self.check_prompts(planned, prompts)
                if self.world.num_stages > 1:
                    self.check_stages(planned, [step for step, _ in in_flight])
                in_flight.append((planned, self.runner.submit(planned.input)))
            if in_flight and (planned is None or len(in_flight) >= self.world.depth):
                self.scheduler.commit(*in_flight.popleft())
            self.blocks.check_integrity(self.scheduler.running)
            step += 1
            assert step < 5000, "no end in sight"

    def arrive(self, arrival: Arrival, step: int) -> None:
        params = SamplingParams(max_tokens=arrival.max_tokens)
        leader = None
        for sample in range(arrival.num_samples):
            index = len(self.seqs) + self.refused
            seq = Sequence(
                index,
                arrival.prompt,
                params,
                seed=sample,
                stop_ids=(STOP_ID,),
                leader=leader,
                cache_salt=arrival.tenant,
            )
            leader = leader or seq
            if len(arrival.prompt) >= self.max_model_len:
                with pytest.raises(PromptTooLongError):
                    self.scheduler.add(seq)
                self.refused += 1
                continue
            self.scheduler.add(seq)
            self.seqs.append(seq)
            if arrival.abort_after is not None:
                self.aborts.append((step + arrival.abort_after, seq))

    def check_plan(self, step: Step) -> None:
        world, plan = self.world, step.input
        assert plan.decoding.num_tokens + plan.num_chunk_tokens <= world.max_num_batched_tokens
        rows = [*plan.decoding.rows.tolist(), *(chunk.row for chunk in plan.chunks)]
        assert len(set(rows)) == len(rows) == plan.num_rows <= world.max_num_seqs
        assert all(len(chunk.token_ids) >= 1 for chunk in plan.chunks)
        planned = step.seqs
        # Nothing is drawn beyond an answer's end.
        for seq, num_drawn in zip(planned, plan.sample_counts.tolist(), strict=True):
            if num_drawn:
                num_pending = self.scheduler.num_pending(seq) + num_drawn - 1
                assert seq.num_output_tokens + num_pending <= seq.params.max_tokens
                assert seq.num_tokens + num_pending <= self.max_model_len
        if plan.run.max_steps > 1:
            assert not self.scheduler.waiting
            assert all(seq.is_decoding for seq in self.scheduler.running)
            for seq in planned:
                assert self.scheduler.num_pending(seq) == 1
                assert seq.num_output_tokens + plan.run.max_steps <= seq.params.max_tokens
                assert seq.num_tokens + plan.run.max_steps <= self.max_model_len
        # Answers go on beside any prompt: every running one gets a token whenever it can take one.
        for seq in self.scheduler.running if world.num_stages == 1 else ():
            assert seq in planned or self.scheduler.num_pending(seq) > 0 or not seq.is_decoding

    def check_stages(self, step: Step, in_flight: list[Step]) -> None:
        """The first stage must be told every token, and all stages get their share of the rows that decode."""
        decoding = step.input.decoding
        assert LAST_TOKEN not in decoding.token_ids
        seqs = step.seqs[: len(decoding.rows)]
        drawing = {
            seq.arrival
            for other in in_flight
            for seq, num_drawn in zip(other.seqs, other.input.sample_counts.tolist(), strict=True)
            if num_drawn
        }
        assert drawing.isdisjoint(seq.arrival for seq in seqs)
        num_started = sum(chunk.samples for chunk in step.input.chunks)
        num_decoding = sum(seq.is_decoding for seq in self.scheduler.running) - num_started
        assert len(seqs) <= -(-num_decoding // self.world.num_stages)

    def check_prompts(self, step: Step, started: set[int]) -> None:
        """`started`: the prompts that were at work before this step."""
        plan = step.input
        num_decoding = len(plan.decoding.rows)
        budget = self.world.max_num_batched_tokens - plan.decoding.num_tokens
        if num_decoding:
            budget = min(budget, max(self.world.max_mixed_tokens, num_decoding))
            if (room := self.world.graph_tokens - plan.decoding.num_tokens) >= num_decoding:
                budget = min(budget, room)
        assert plan.num_chunk_tokens <= budget
        # Under a window prompts get their blocks as they are computed, and there may be too few.
        if any(pool.window and not pool.free for pool in self.blocks.pools):
            return
        # No part of the budget is lost while a started prompt could use it.
        if any(not seq.is_decoding for seq in self.scheduler.running):
            assert plan.num_chunk_tokens == budget
        # No long prompt starves: half of the budget is for the oldest, as far as it has use for it.
        sizes = {
            seq.arrival: (len(chunk.token_ids), seq.num_tokens - chunk.start)
            for seq, chunk in zip(step.seqs[num_decoding:], plan.chunks, strict=True)
        }
        alive = {seq.arrival for seq in self.scheduler.running}
        if prompts := sizes.keys() | (started & alive):
            size, remaining = sizes[min(prompts)]
            assert size >= min(remaining, budget - budget // 2)


@settings(max_examples=800, deadline=None)
@given(worlds())
def test_any_history_gives_each_sequence_its_own_tokens(world: World) -> None:
    simulation = Simulation(world)
    simulation.run()

    aborted = {seq.arrival for _, seq in simulation.aborts}
    for seq in simulation.seqs:
        alone = generate_alone(
            seq.token_ids[: seq.num_prompt_tokens],
            seed=seq.seed,
            max_tokens=seq.params.max_tokens,
            max_model_len=simulation.max_model_len,
            windows=world.windows,
        )
        if seq.finish_reason == "abort":
            assert seq.arrival in aborted
            assert seq.completion_token_ids == alone[: seq.num_output_tokens]
        else:
            assert seq.completion_token_ids == alone
            assert seq.finish_reason == ("stop" if alone[-1] == STOP_ID else "length")
    assert simulation.blocks.num_free == len(world.windows) * world.num_blocks
    assert not simulation.scheduler.running
    assert not simulation.scheduler.waiting


@settings(max_examples=200, deadline=None)
@given(
    long=st.integers(41, 400),
    shorts=st.lists(st.integers(1, 10), min_size=1, max_size=4),
    num_blocks=st.integers(30, 120),
    max_mixed_tokens=st.sampled_from([2, 10, 1000]),
    max_tokens=st.integers(1, 20),
    windows=st.sampled_from([[None], [20], [None, 10]]),
)
def test_no_flood_of_short_prompts_starves_a_long_one(
    *, long, shorts, num_blocks, max_mixed_tokens, max_tokens, windows
) -> None:
    """Every step brings another short prompt, for ever; the long one starts to answer all the same."""
    blocks = BlockManager(num_blocks, 4, windows=windows)
    scheduler = Scheduler(blocks, max_num_seqs=8, max_num_batched_tokens=40, max_model_len=num_blocks * 4)
    scheduler.max_mixed_tokens = max_mixed_tokens
    params = SamplingParams(max_tokens=max_tokens)
    runner = FakeRunner(num_blocks, 4, windows)
    early = Sequence(0, [1] * 8, params)
    seq = Sequence(1, [1] * min(long, num_blocks * 4 - 1), params, cache_salt=b"other")
    scheduler.add(early)
    scheduler.add(seq)
    num_steps = 0
    while seq.num_output_tokens == 0:
        scheduler.add(Sequence(2 + num_steps, [2] * shorts[num_steps % len(shorts)], params))
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, runner.submit(plan.input))
        num_steps += 1
        assert num_steps < 1000
