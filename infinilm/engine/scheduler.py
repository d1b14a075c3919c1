"""Decides what each step computes, as a pure function of its inputs: no torch, no clock, no randomness."""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Tokens
from heapq import heapify, heappop, heappush
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from infinilm.engine.block_manager import BlockManager, BlockUpdate
from infinilm.engine.prefill_order import by_arrival, order_prompts
from infinilm.engine.sequence import Sequence, Status
from infinilm.engine.step import Admitted, Decoders, Step, StepBuilder
from infinilm.errors import PromptTooLongError
from infinilm.executor.step_io import (
    LAST_TOKEN,
    NO_TOKEN,
    ONE_STEP,
    BlockUpdates,
    DecodeRows,
    DecodeRun,
    IntArray,
    RowChunk,
    StepInput,
    StepOutput,
)
from infinilm.outputs import FinishReason
from infinilm.sampling_params import RowStart

MIN_AWAITED_TOKENS = 256
"""A common prefix shorter than this is computed twice instead of waited for."""
MIN_CHUNK_FRACTION = 1 / 8
"""Don't start a prompt beside others if the remaining budget covers less than 1/8 of what a whole step would."""
NUM_CANDIDATES = 256
"""The scheduler chooses the next sequence to start among this many waiting ones, in order of arrival."""

DraftSource = Callable[[Sequence], Tokens[int]]
"""Guesses the next tokens of a sequence that has no pending token. A step computes them together with the last one."""


class Scheduler:
    """Serves sequences in order of arrival, as many as fit into a step's tokens, rows and blocks.

    Every step first decodes a token for each running sequence that can take one. The rest of its budget is for
    prompts, started or waiting: short ones in order of arrival, then long ones, the shorter first (see
    `prefill_order`). Half of this rest is reserved for the oldest prompt, so a short prompt waits only a few steps for
    a long one, and short prompts never starve a long one. When blocks run out, the newest running sequence is
    preempted and recomputed later.

    Steps may be submitted ahead: `schedule` counts tokens as computed or pending as soon as they are planned. Steps
    must be committed in the order in which they were scheduled. In two cases a row is planned again only after its
    step is committed. With a `draft_source`, the number of accepted drafts is not known before. With several pipeline
    stages, the first stage needs the token that the last stage draws; the decoding rows are then divided over as many
    steps as there are stages.

    Decoding sequences are counted in arrays by row. A step of hundreds of them takes a handful of array operations;
    only sequences that need more, such as a new block, are handled one by one.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        draft_source: DraftSource | None = None,
        num_stages: int = 1,
        max_run_steps: int = 1,
        is_awaited: Callable[[], bool] = ONE_STEP.is_awaited,
    ) -> None:
        """`max_run_steps` and `is_awaited` are those of `DecodeRun`."""
        self.blocks = blocks
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        # Each running row needs one token of every step's budget.
        self.max_num_rows = min(max_num_seqs, max_num_batched_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.num_preemptions = 0
        self.num_finished = 0
        """Sequences that have ended, so far."""
        self.min_awaited_tokens = MIN_AWAITED_TOKENS
        self.max_prefill_tokens = max_num_batched_tokens
        """The most prompt tokens of a step in which no sequence decodes. A lower limit bounds the step's time."""
        self.max_mixed_tokens = max_num_batched_tokens
        """The same for a step with decoding sequences. Prompts may always get as many tokens as there are sequences
        that decode."""
        self.graph_tokens = 0
        """The most tokens in all of a step with prompts and decoding sequences. It applies only if it leaves prompts as
        many tokens as there are sequences that decode. 0: no limit."""
        self.draft_source = draft_source
        self._num_stages = num_stages
        self.num_shares = num_stages
        """The number of steps over which the decoding rows are divided, so that each stage has one to compute."""
        self._max_run_steps, self._is_awaited = max_run_steps, is_awaited
        self._num_in_flight = 0
        self._num_planned = 0  # steps
        self._free_rows = list(range(self.max_num_rows))
        heapify(self._free_rows)
        self._ended_rows: list[int] = []
        self._prefilling: list[Sequence] = []  # the running ones that don't decode yet, oldest first
        self._decoders: Decoders | None = None  # None: must be gathered again
        # By row, for sequences that decode: tokens computed by the steps planned so far, tokens that the blocks can
        # hold, and tokens at which the answer has its full length. Row generations are kept for all rows.
        self._computed, self._capacity, self._limit, self._row_generation = np.zeros(
            (4, self.max_num_rows), dtype=np.int64
        )
        self._last_planned = np.zeros(self.max_num_rows, dtype=np.int64)  # by row: the step it last decoded in
        # By row: whether it must not be planned before the commit of its step, and `RowStart.samples_on_host`.
        self._awaits_commit, self._samples_on_host = np.zeros((2, self.max_num_rows), dtype=np.bool_)
        self._is_stop = np.zeros(1, dtype=np.bool_)  # by token id: whether it ends any sequence; the last is False

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        self.check_fits(seq)
        if seq.stop_ids:
            num_missing = max(seq.stop_ids) + 2 - len(self._is_stop)
            self._is_stop = np.pad(self._is_stop, (0, max(num_missing, 0)))
            self._is_stop[list(seq.stop_ids)] = True
        seq.num_found_tokens = len(self.blocks.find_prefix(seq)[0]) * self.blocks.block_size
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

    def schedule(self, *, may_run: bool = True, is_watched: bool = True) -> Step | None:
        """Plan the next step, or None if there is nothing to compute right now.

        `may_run`: the step may become a `DecodeRun`, with this `is_watched`.
        """
        builder = StepBuilder(budget=self.max_num_batched_tokens)
        has_preempted = self._continue_decoding(builder)
        num_decoding = len(builder.seqs)
        limit = self.max_prefill_tokens
        if num_decoding:
            limit = max(self.max_mixed_tokens, num_decoding)
            if (room := self.graph_tokens - builder.decoding.num_tokens) >= num_decoding:
                limit = min(limit, room)
        builder.budget = min(builder.budget, limit)
        if builder.budget > 0 and (self._prefilling or self.waiting):
            self._plan_prompts(builder, may_admit=not has_preempted)
        if not builder.seqs:
            if not builder.lacks_blocks or self._num_in_flight:
                return None
            self._preempt(self.running[-1])  # all prompts wait for blocks that other sequences hold
            return self.schedule(may_run=may_run, is_watched=is_watched)
        rows = builder.decoding.rows
        if builder.chunks:
            rows = np.concatenate((rows, [chunk.row for chunk in builder.chunks]))
        sampling = [chunk.row for chunk in builder.chunks if chunk.samples]
        step_input = StepInput(
            self._ended_rows,
            builder.starts,
            _block_updates(builder.new_blocks),
            builder.decoding,
            builder.chunks,
            samples_on_host=bool(
                self._samples_on_host[builder.decoding.rows].any() or self._samples_on_host[sampling].any()
            ),
            run=self._plan_run(builder, is_watched=is_watched) if may_run else ONE_STEP,
        )
        self._ended_rows = []
        self._num_in_flight += 1
        self._num_planned += 1
        return Step(step_input, builder.seqs, rows, self._row_generation[rows])

    def _continue_decoding(self, builder: StepBuilder) -> bool:
        """Plan a token for each sequence that decodes. Returns whether blocks ran out and some were preempted."""
        has_preempted, use_drafts = False, True
        block_size = self.blocks.block_size
        while True:
            decoders = self._gather_decoders()
            computed = self._computed[decoders.rows]
            # The token to compute is the last known or pending one. Sequences that have drawn all tokens only wait.
            goes_on = (computed + 1 < self._limit[decoders.rows]) & ~self._awaits_commit[decoders.rows]
            if self.num_shares > 1:
                self._keep_share(goes_on, decoders.rows)
            rows, starts, seqs = decoders.rows, computed, decoders.seqs
            if not goes_on.all():
                rows, starts = rows[goes_on], starts[goes_on]
                seqs = [seqs[index] for index in np.flatnonzero(goes_on)]
            token_ids = np.full((len(rows), 1), LAST_TOKEN)
            if self._waits_for_commits:
                token_ids = self._propose(seqs, rows, starts, use_drafts=use_drafts)
            decoding = DecodeRows(rows, starts, token_ids)
            ends = starts + (decoding.query_lens if decoding.has_drafts else 1)
            num_new = -((self._capacity[rows] - ends) // block_size)  # blocks that each row lacks
            grown = np.flatnonzero(num_new > 0)
            if len(grown) == 0 or self.blocks.can_grow(num_new[grown].sum()):
                break
            if decoding.has_drafts:
                use_drafts = False
            else:
                self._preempt(self.running[-1])
                has_preempted = True
        for index in grown.tolist():
            self._add_blocks(builder, seqs[index], self.blocks.grow(seqs[index], int(num_new[index])))
        self._capacity[rows[grown]] += num_new[grown] * block_size
        self._computed[rows] += 1
        self._awaits_commit[rows] = self._waits_for_commits
        self._last_planned[rows] = self._num_planned
        builder.decoding = decoding
        builder.seqs = seqs.copy()
        builder.budget -= decoding.num_tokens
        return has_preempted

    def _plan_run(self, builder: StepBuilder, *, is_watched: bool) -> DecodeRun:
        """Let the rows decode as far as their blocks and limits allow, if no prompt waits and no token is pending."""
        is_busy = bool(self.waiting or self._prefilling or self._num_in_flight or self._waits_for_commits)
        if self._max_run_steps == 1 or is_busy or builder.chunks:
            return ONE_STEP
        rows, starts = builder.decoding.rows, builder.decoding.starts
        room = int((np.minimum(self._capacity[rows], self._limit[rows] - 1) - starts).min())
        if room < 2:
            return ONE_STEP
        self._awaits_commit[rows] = True
        return DecodeRun(min(room, self._max_run_steps), self._is_stop, self._is_awaited, is_watched)

    @property
    def _waits_for_commits(self) -> bool:
        """Whether a row is planned again only after its last token is known to the scheduler."""
        return self.draft_source is not None or self._num_stages > 1

    def _keep_share(self, goes_on: npt.NDArray[np.bool_], rows: IntArray) -> None:
        """Of the decoding `rows` that can go on, keep one step's share of all rows: those planned longest ago."""
        ready = np.flatnonzero(goes_on)
        share = -(-len(rows) // self.num_shares)
        oldest = np.argsort(self._last_planned[rows[ready]], kind="stable")
        goes_on[ready[oldest[share:]]] = False

    def _propose(self, seqs: list[Sequence], rows: IntArray, starts: IntArray, *, use_drafts: bool) -> IntArray:
        """The token ids of decoding rows `[n, 1 + d]`: the last token, and drafts for those after it."""
        if self.draft_source is None:
            return np.array([seq.token_ids[-1] for seq in seqs], dtype=np.int64).reshape(-1, 1)
        # Half of the budget that the rows leave is for prompts.
        budget = (self.max_num_batched_tokens - len(rows)) // 2 if use_drafts else 0
        lines: list[list[int]] = []
        # A row draws one token more than it has drafts, and none beyond its limit.
        for seq, most in zip(seqs, (self._limit[rows] - starts - 2).tolist(), strict=True):
            drafts = self.draft_source(seq)[: min(most, budget)] if seq.params.allows_drafts else ()
            budget -= len(drafts)
            lines.append([seq.token_ids[-1], *drafts])
        width = max(map(len, lines), default=1)
        padded = [line + [NO_TOKEN] * (width - len(line)) for line in lines]
        return np.array(padded, dtype=np.int64).reshape(len(lines), width)

    def _add_blocks(self, builder: StepBuilder, seq: Sequence, updates: Iterable[BlockUpdate]) -> None:
        """Tell the workers what changed in a running sequence's block tables."""
        assert seq.row is not None
        for update in updates:
            builder.new_blocks.append((seq.row, update))

    def _gather_decoders(self) -> Decoders:
        if self._decoders is None:
            seqs = [seq for seq in self.running if seq.is_decoding]
            rows = np.array([seq.row for seq in seqs], dtype=np.int64)
            order = np.argsort(-self._computed[rows], kind="stable")
            self._decoders = Decoders([seqs[index] for index in order], rows[order])
        return self._decoders

    def _plan_prompts(self, builder: StepBuilder, *, may_admit: bool) -> None:
        """Share the budget among prompts, started or waiting: half for the oldest, the rest by `order_prompts`."""
        budget, blocked = builder.budget, None
        first = next(self._candidates(), None) if may_admit else None
        is_oldest = first is not None and not (self._prefilling and self._prefilling[0].arrival < first.arrival)
        # The oldest prompt gets its row and blocks before all others.
        if first is not None and is_oldest and self._admit(builder, first, budget) is Admitted.REFUSED:
            blocked = first
            # No prompt may pass a short one. A long one may be passed: it may wait long for its many blocks.
            may_admit = first.num_tokens > budget
        prompts = self._prefilling.copy()
        if may_admit:
            prompts += (seq for seq in self._candidates() if seq is not blocked)
        oldest = self._prefilling[0] if self._prefilling else None
        kept = 0 if oldest is None else min(oldest.num_remaining, budget - budget // 2)
        for seq in order_prompts(prompts, oldest, budget):
            if seq is oldest:
                kept = 0
            available = builder.budget - kept
            if available <= 0:
                continue
            if seq.status is Status.WAITING:
                if not may_admit or not self._free_rows:
                    continue
                found = self._admit(builder, seq, available, budget=budget, blocked=blocked)
                may_admit = found is not Admitted.REFUSED
                if found is not Admitted.STARTED:
                    continue
            if not self._plan_chunk(builder, seq, available):
                builder.lacks_blocks, may_admit = True, False

    def _candidates(self) -> Iterator[Sequence]:
        """The waiting sequences that may start now, in order of arrival."""
        seen = islice(self.waiting, 4 * NUM_CANDIDATES if self._free_rows else 0)
        return islice((seq for seq in seen if not seq.is_held), NUM_CANDIDATES)

    def _admit(
        self, builder: StepBuilder, seq: Sequence, available: int, *, budget: int = 0, blocked: Sequence | None = None
    ) -> Admitted:
        """Start a waiting sequence if there are blocks for it and enough of the budget is left.

        `blocked` is an older sequence that lacks blocks. Others may pass it only while the pool has room for it and all
        younger ones. Then it can start when the older ones have ended, no matter how many pass it.
        """
        prefix = self.blocks.shared_prefix(seq)
        if self._is_being_computed(seq, len(prefix[0])):
            return Admitted.SKIPPED
        # Leave one block per running sequence; otherwise the next steps would preempt this one again.
        num_spare = len(self.running)
        if seq.num_pending or not self.blocks.can_start(seq, prefix, available, num_spare, self._prefilling):
            return Admitted.REFUSED
        num_tokens = seq.num_tokens - len(prefix[0]) * self.blocks.block_size
        if builder.chunks and available < MIN_CHUNK_FRACTION * min(num_tokens, budget):
            return Admitted.REFUSED
        if blocked is not None:
            younger = [other for other in self.running if other.arrival > blocked.arrival]
            if not self.blocks.fits_beside(seq, blocked, younger, num_spare + 1):
                return Admitted.REFUSED
        self.waiting.remove(seq)
        self._start(builder, seq, prefix, available)
        return Admitted.STARTED

    def _start(self, builder: StepBuilder, seq: Sequence, prefix: list[list[int]], available: int) -> None:
        """Give a sequence a row and blocks. A chunk of it must be planned in the same step."""
        seq.num_computed = len(prefix[0]) * self.blocks.block_size
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = seq.num_computed
        seq.row = heappop(self._free_rows)
        self._add_blocks(builder, seq, self.blocks.start(seq, prefix, available))
        seq.status = Status.RUNNING
        insort(self.running, seq, key=by_arrival)
        insort(self._prefilling, seq, key=by_arrival)
        start = RowStart(
            seq.row,
            seq.params,
            seq.seed,
            seq.stop_ids,
            seq.token_ids[: seq.num_prompt_tokens],
            seq.completion_token_ids,
            seq.grammar,
        )
        builder.starts.append(start)
        self._samples_on_host[seq.row] = start.samples_on_host

    def _is_being_computed(self, seq: Sequence, num_found: int) -> bool:
        """Whether a running sequence is computing enough of the prefix after the found blocks to wait for it.

        This lets sequences that arrive together share the blocks of a long common prefix, too.
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

    def _plan_chunk(self, builder: StepBuilder, seq: Sequence, budget: int) -> bool:
        """Plan as many of a sequence's tokens as the budget allows. With its last token the sequence begins to decode.

        Returns whether there were blocks for all of these tokens. They can run out only if layers have a window.
        """
        assert seq.row is not None
        start = seq.num_computed
        wanted = min(seq.num_tokens, start + budget)
        self._add_blocks(builder, seq, self.blocks.extend(seq, wanted))
        end = min(wanted, self.blocks.capacity(seq))
        if end == start:
            return False
        samples = end == seq.num_tokens
        targets = [] if seq.may_reuse_prefix else seq.token_ids[start + 1 : min(end + 1, seq.num_prompt_tokens)]
        builder.chunks.append(
            RowChunk(seq.row, start, seq.token_ids[start:end], samples, targets, seq.params.prompt_logprobs or 0)
        )
        builder.seqs.append(seq)
        builder.budget -= end - start
        seq.num_computed = end
        if samples:
            self._begin_decoding(seq, seq.row)
        return end == wanted

    def _begin_decoding(self, seq: Sequence, row: int) -> None:
        self._prefilling.remove(seq)
        seq.is_decoding = True
        self._computed[row] = seq.num_computed
        self._capacity[row] = self.blocks.capacity(seq)
        self._limit[row] = min(seq.num_prompt_tokens + seq.params.max_tokens, self.max_model_len)
        self._awaits_commit[row] = self._waits_for_commits
        self._decoders = None

    def num_pending(self, seq: Sequence) -> int:
        """Tokens that the steps planned so far draw for a sequence, and that are not known yet."""
        return int(self._computed[seq.row]) + 1 - seq.num_tokens if seq.is_decoding else seq.num_pending

    def _preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks away, and queue it again before all that arrived later."""
        self._release(seq)
        seq.status = Status.WAITING
        seq.num_computed = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        index = next((i for i, other in enumerate(self.waiting) if other.arrival > seq.arrival), len(self.waiting))
        self.waiting.insert(index, seq)

    # --- results ----------------------------------------------------------------------------------------

    def commit(self, step: Step, output: StepOutput) -> None:
        """Append a step's tokens, publish full blocks and end sequences. Call it in the order of planning."""
        self._num_in_flight -= 1
        is_same = self._row_generation[step.rows] == step.row_generations
        num_done = 0
        if is_same.all() and not output.errors and self.draft_source is None and output.num_steps == 1:
            num_done = self._commit_decoding(step, output.token_ids)
        for index in range(num_done, len(step.seqs)):
            if step.seqs[index].finish_reason is not None:
                step.stale.add(index)
            else:
                self._commit_one(step, index, output, is_same=bool(is_same[index]))

    def _commit_decoding(self, step: Step, token_ids: Tokens[int]) -> int:
        """Commit one token of each decoding row. No row has changed its sequence. Returns the number of rows."""
        decoding, block_size = step.input.decoding, self.blocks.block_size
        num_rows = len(decoding.rows)
        self._awaits_commit[decoding.rows] = False
        for seq, token_id in zip(step.seqs, token_ids[:num_rows], strict=False):
            seq.token_ids.append(token_id)
        is_full = (decoding.starts + 1) % block_size == 0
        is_last = decoding.starts + 2 >= self._limit[decoding.rows]
        is_last |= self._is_stop.take(np.array(token_ids[:num_rows], dtype=np.int64), mode="clip")
        for index in np.flatnonzero(is_full | is_last).tolist():
            seq = step.seqs[index]
            if is_full[index]:
                start = int(decoding.starts[index])
                self.blocks.commit(seq, start, start + 1)
            if is_last[index] and (reason := self._end_reason(seq)) is not None:
                self.finish(seq, reason)
        return num_rows

    def _commit_one(self, step: Step, index: int, output: StepOutput, *, is_same: bool) -> None:
        """Commit one row. `is_same`: the row and its blocks still belong to the sequence."""
        seq, decoding = step.seqs[index], step.input.decoding
        num_decoding = len(decoding.rows)
        if index < num_decoding:
            start, samples = int(decoding.starts[index]), True
        else:
            chunk = step.input.chunks[index - num_decoding]
            start, samples = chunk.start, chunk.samples
        if not is_same:
            seq.num_pending -= samples
        if index in output.errors:
            self.finish(seq, "abort")
            return
        reason = None
        num_gained = 0
        for token_id in output.tokens_of(index):
            seq.token_ids.append(token_id)
            num_gained += 1
            reason = self._end_reason(seq)
            if reason is not None:
                break
        if is_same:
            # The row has computed its last token and the accepted drafts, but not the token it drew last.
            num_computed = num_gained if index < num_decoding else len(chunk.token_ids)
            self.blocks.commit(seq, start, start + num_computed)
            if samples:
                self._awaits_commit[seq.row] = False
            if index < num_decoding:
                self._computed[seq.row] += num_gained - 1
        if reason is not None:
            self.finish(seq, reason)

    def _end_reason(self, seq: Sequence) -> FinishReason | None:
        """Why a sequence ends with its latest token; None if it goes on."""
        # A grammar may allow only stop tokens before `min_tokens` is reached.
        is_early = seq.num_output_tokens <= seq.params.min_tokens and seq.grammar is None
        if seq.token_ids[-1] in seq.stop_ids and not is_early:
            return "stop"
        if seq.num_output_tokens >= seq.params.max_tokens or seq.num_tokens >= self.max_model_len:
            return "length"
        return None

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence in any state and release its row and blocks."""
        if seq.is_finished:
            return
        if seq.status is Status.RUNNING:
            self._release(seq)
        else:
            self.waiting.remove(seq)
        seq.status = Status.FINISHED
        self.num_finished += 1
        seq.finish_reason = reason

    def fail(self, steps: Iterable[Step]) -> list[Sequence]:
        """After a failure, end the sequences of `steps`, which are all steps in flight. Returns the sequences."""
        steps = list(steps)
        self._num_in_flight = 0
        broken = {seq.arrival: seq for step in steps for seq in step.seqs if not seq.is_finished}
        # It is unknown how far the workers got with these steps, so the rows that the steps ended are ended once more.
        self._ended_rows = [row for step in steps for row in step.input.ended_rows] + self._ended_rows
        for seq in broken.values():
            self.finish(seq, "abort")
        return list(broken.values())

    def _release(self, seq: Sequence) -> None:
        """Take a running sequence's row and blocks away."""
        assert seq.row is not None
        self.running.remove(seq)
        if seq.is_decoding:
            seq.num_pending = self.num_pending(seq)
            seq.is_decoding = False
            self._decoders = None
        else:
            self._prefilling.remove(seq)
        self.blocks.release(seq)
        self._ended_rows.append(seq.row)
        heappush(self._free_rows, seq.row)
        self._row_generation[seq.row] += 1
        self._awaits_commit[seq.row] = False
        seq.row = None


def _block_updates(grown: list[tuple[int, BlockUpdate]]) -> BlockUpdates:
    """The changes of block tables as arrays."""
    sizes = [len(blocks) for _, (_, _, blocks) in grown]
    groups = np.repeat(np.array([group for _, (group, _, _) in grown], dtype=np.int64), sizes)
    rows = np.repeat(np.array([row for row, _ in grown], dtype=np.int64), sizes)
    places = [np.arange(first, first + size) for (_, (_, first, _)), size in zip(grown, sizes, strict=True)]
    blocks = np.fromiter(chain.from_iterable(blocks for _, (_, _, blocks) in grown), np.int64, sum(sizes))
    return BlockUpdates(groups, rows, np.concatenate(places) if places else rows, blocks)
