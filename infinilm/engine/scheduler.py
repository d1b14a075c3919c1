"""Decides what each step computes. A pure function of what it was given: no torch, no clock, no randomness."""

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import attrgetter

from infinilm.engine.block_manager import BlockManager
from infinilm.engine.plan import PENDING_TOKEN, RowStep, StepPlan, StepResult
from infinilm.engine.sequence import Sequence, Status
from infinilm.errors import PromptTooLongError
from infinilm.outputs import FinishReason
from infinilm.sampling_params import RowStart

MIN_AWAITED_TOKENS = 256
"""A beginning in common that is shorter is computed twice rather than waited for."""


@dataclass(slots=True)
class InFlight:
    """A submitted plan and whose steps they are: rows may change hands before it is committed."""

    plan: StepPlan
    seqs: list[Sequence]
    num_preemptions: list[int]
    """Each sequence's count when planned: if it rose since, the blocks computed are no longer its own."""


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    budget: int
    starts: list[RowStart] = field(default_factory=list)
    steps: list[RowStep] = field(default_factory=list)
    seqs: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Serves sequences in the order they came, as many as fit into a step's tokens, rows and blocks.

    Every step first goes on with the running sequences, oldest first, then admits waiting ones. When blocks
    run out the newest running sequence gives up its own and is computed again later, so the oldest always
    gets on and nobody starves.

    Plans may be submitted ahead: `schedule` counts tokens as computed, and drawn ones as pending, the moment
    they are planned; `commit` brings in the drawn tokens in the order of the plans.
    """

    def __init__(
        self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ) -> None:
        self.blocks = blocks
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        # Each running row needs a token of every step.
        self.max_num_rows = min(max_num_seqs, max_num_batched_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.in_flight: deque[InFlight] = deque()
        self.num_preemptions = 0
        self.min_awaited_tokens = MIN_AWAITED_TOKENS
        self._free_rows = list(range(self.max_num_rows))
        heapify(self._free_rows)
        self._ended_rows: list[int] = []

    @property
    def has_work(self) -> bool:
        """Whether anything waits, runs or is in flight."""
        return bool(self.waiting or self.running or self.in_flight)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        self.check_fits(seq)
        self.waiting.append(seq)

    def check_fits(self, seq: Sequence) -> None:
        """Refuse a sequence that could never run."""
        if seq.num_prompt_tokens >= self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {seq.num_prompt_tokens} tokens; with max_model_len={self.max_model_len} it may have "
                f"at most {self.max_model_len - 1}, to leave room for one more. Shorten it, or raise max_model_len, "
                "num_kvcache_blocks or gpu_memory_utilization if the model and the memory allow"
            )

    # --- planning ---------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step, or None if there is nothing to compute right now."""
        draft = Draft(budget=self.max_num_batched_tokens)
        has_preempted = self._continue_running(draft)
        if not has_preempted:
            self._admit_waiting(draft)
        if not draft.steps:
            return None
        plan = StepPlan(ended_rows=self._ended_rows, starts=draft.starts, steps=draft.steps)
        self._ended_rows = []
        preemptions = [seq.num_preemptions for seq in draft.seqs]
        self.in_flight.append(InFlight(plan, draft.seqs, preemptions))
        return plan

    def _continue_running(self, draft: Draft) -> bool:
        """Plan the running sequences, oldest first. Returns whether blocks ran out and some were preempted."""
        has_preempted = False
        index = 0
        while index < len(self.running):
            seq = self.running[index]
            # One token stays reserved for every sequence behind this one: a long prompt stops no answer.
            num_behind = len(self.running) - index - 1
            num_tokens = min(seq.num_wanted, draft.budget - num_behind)
            index += 1
            if num_tokens <= 0 or self._has_drawn_all(seq):
                continue
            num_new = self.blocks.blocks_for(seq.num_computed + num_tokens) - len(seq.block_table)
            while num_new > self.blocks.num_free and self.running[-1] is not seq:
                self._preempt(self.running[-1])
                has_preempted = True
            if num_new > self.blocks.num_free:
                self._preempt(seq)
                return True
            new_blocks = self.blocks.allocate(max(num_new, 0))
            seq.block_table += new_blocks
            self._plan_step(draft, seq, num_tokens, new_blocks)
        return has_preempted

    def _admit_waiting(self, draft: Draft) -> None:
        """Start waiting sequences in order, while tokens, rows and blocks last."""
        held: list[Sequence] = []
        while self.waiting and self._free_rows and draft.budget > 0:
            seq = self.waiting[0]
            if seq.is_held:
                held.append(self.waiting.popleft())
                continue
            shared = self._shared_blocks(seq)
            if self._is_being_computed(seq, len(shared)):
                held.append(self.waiting.popleft())
                continue
            num_new = self.blocks.blocks_for(seq.num_tokens) - len(shared)
            # Room for one block more per running sequence: else the next steps would preempt this one again.
            num_spare = len(self.running)
            if seq.num_pending or num_new + num_spare > self.blocks.num_free_beside(shared):
                break
            self.waiting.popleft()
            self._start(draft, seq, shared, num_new)
        self.waiting.extendleft(reversed(held))

    def _start(self, draft: Draft, seq: Sequence, shared: list[int], num_new: int) -> None:
        self.blocks.take(shared)
        seq.block_table = shared + self.blocks.allocate(num_new)
        seq.num_computed = len(shared) * self.blocks.block_size
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = seq.num_computed
        seq.row = heappop(self._free_rows)
        seq.status = Status.RUNNING
        insort(self.running, seq, key=attrgetter("arrival"))
        start = RowStart(
            seq.row,
            seq.params,
            seq.seed,
            seq.stop_ids,
            seq.token_ids[: seq.num_prompt_tokens],
            seq.output_token_ids,
        )
        draft.starts.append(start)
        self._plan_step(draft, seq, min(seq.num_wanted, draft.budget), seq.block_table.copy())

    def _shared_blocks(self, seq: Sequence) -> list[int]:
        """Blocks that hold the sequence's beginning already: its leader's, or those found by content."""
        leader = seq.leader
        if leader is not None and leader.status is Status.RUNNING:
            num_tokens = min(leader.num_computed, seq.num_prompt_tokens - 1)
            return leader.block_table[: num_tokens // self.blocks.block_size]
        return self.blocks.find_prefix(seq)

    def _is_being_computed(self, seq: Sequence, num_found: int) -> bool:
        """Whether a running sequence is at work on much of what comes after the blocks found: worth waiting for.

        Sequences that come together with a long beginning in common then share its blocks, too.
        """
        block_size = self.blocks.block_size
        index = num_found + self.blocks.blocks_for(self.min_awaited_tokens) - 1
        end = (index + 1) * block_size
        if not self.blocks.enable_prefix_caching or not seq.may_reuse_prefix or end >= seq.num_tokens:
            return False
        key = seq.block_key(index, block_size)
        return any(
            other.num_output_tokens == 0
            and other.num_prompt_tokens >= end
            and other.may_publish
            and other.block_key(index, block_size) == key
            for other in self.running
        )

    def _plan_step(self, draft: Draft, seq: Sequence, num_tokens: int, new_blocks: list[int]) -> None:
        start, end = seq.num_computed, seq.num_computed + num_tokens
        draws = num_tokens == seq.num_wanted
        token_ids = seq.token_ids[start:end]
        token_ids += [PENDING_TOKEN] * (num_tokens - len(token_ids))
        targets = [] if seq.may_reuse_prefix else seq.token_ids[start + 1 : min(end + 1, seq.num_prompt_tokens)]
        assert seq.row is not None
        draft.steps.append(
            RowStep(seq.row, start, token_ids, new_blocks, draws, targets, seq.params.prompt_logprobs or 0)
        )
        draft.seqs.append(seq)
        draft.budget -= num_tokens
        seq.num_computed = end
        seq.num_pending += draws

    def _has_drawn_all(self, seq: Sequence) -> bool:
        """Whether the tokens pending are the last ones the answer may have."""
        return (
            seq.num_output_tokens + seq.num_pending >= seq.params.max_tokens
            or seq.num_tokens + seq.num_pending >= self.max_model_len
        )

    def _preempt(self, seq: Sequence) -> None:
        """Take back a running sequence's blocks; it will be computed again, first in the queue."""
        self.running.remove(seq)
        self._release(seq)
        seq.status = Status.WAITING
        seq.num_computed = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(seq)

    # --- results ----------------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> list[tuple[Sequence, int]]:
        """Take in the oldest plan's result. Returns the sequences it is about, each with its index in the plan.

        Those that had ended in the meantime are left out: what a step ahead computed for them is void.
        """
        flight = self.in_flight.popleft()
        news: list[tuple[Sequence, int]] = []
        for index, (seq, step) in enumerate(zip(flight.seqs, flight.plan.steps, strict=True)):
            if seq.is_finished:
                continue
            news.append((seq, index))
            seq.num_pending -= step.draws
            if index in result.errors:
                self.finish(seq, "abort")
                continue
            if seq.num_preemptions == flight.num_preemptions[index] and seq.may_publish:
                self.blocks.publish(seq, step.start, step.start + len(step.token_ids))
            if step.draws:
                self._append(seq, result.token_ids[index])
        return news

    def _append(self, seq: Sequence, token_id: int) -> None:
        seq.token_ids.append(token_id)
        if token_id in seq.stop_ids and seq.num_output_tokens > seq.params.min_tokens:
            self.finish(seq, "stop")
        elif seq.num_output_tokens >= seq.params.max_tokens or seq.num_tokens >= self.max_model_len:
            self.finish(seq, "length")

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence in whatever state it is and give back what it holds."""
        if seq.is_finished:
            return
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self._release(seq)
        else:
            self.waiting.remove(seq)
        seq.status = Status.FINISHED
        seq.finish_reason = reason

    def fail_in_flight(self) -> list[Sequence]:
        """A submitted step broke: drop all that were in flight, and end the sequences they were about."""
        broken = {seq.arrival: seq for flight in self.in_flight for seq in flight.seqs if not seq.is_finished}
        # Nobody knows how far the runner came with them: what they ended is ended once more.
        self._ended_rows = [row for flight in self.in_flight for row in flight.plan.ended_rows] + self._ended_rows
        self.in_flight.clear()
        for seq in broken.values():
            self.finish(seq, "abort")
        return list(broken.values())

    def _release(self, seq: Sequence) -> None:
        self.blocks.release(seq.block_table)
        seq.block_table = []
        assert seq.row is not None
        self._ended_rows.append(seq.row)
        heappush(self._free_rows, seq.row)
        seq.row = None
