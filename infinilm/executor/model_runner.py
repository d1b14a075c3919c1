"""Executes plans: keeps the rows, builds the batch, has the workers run it and draws tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from infinilm.attention.batch import HostBatch, IntArray
from infinilm.debug import HookRegistry
from infinilm.debug.taps import show_logits
from infinilm.engine.plan import NO_TOKEN, RowChunk, StepPlan, StepResult
from infinilm.executor.rank_worker import StepInput
from infinilm.executor.worker_group import WorkerGroup
from infinilm.kernels.copies import reserve_pinned, to_device
from infinilm.kernels.support import has_kernels
from infinilm.outputs import TokenLogprobs
from infinilm.sampling import Sampler, Samples, logprobs_of

if TYPE_CHECKING:
    from infinilm.executor.step_graphs import StepGraphs

# Prompt log-probabilities need logits for every prompt token; this many at a time bounds their memory.
PROMPT_LOGITS_AT_ONCE = 256

PENDING_TOKEN = -1
"""Stands for the token that a row drew last."""

LONG_STEP = 8192
"""A step of so many tokens keeps a GPU busy for about as long as it takes to capture a graph."""


@dataclass(slots=True)
class StepHandle:
    """A submitted step. `result` waits for the device and copies what was drawn to the host."""

    plan: StepPlan
    samples: Samples | None = None
    """What the rows drew that draw, in their order."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None
    _event: torch.cuda.Event | None = None

    def take(self, samples: Samples) -> None:
        """Take what was drawn. From a GPU it is copied at once, so that `result` waits for this step only."""
        self.samples = samples.to_pinned() if samples.token_ids.device.type == "cuda" else samples

    def mark_end(self) -> None:
        """Note that this is all that a GPU has to do for the step."""
        self._event = torch.cuda.current_stream().record_event()

    @property
    def is_ready(self) -> bool:
        """Whether `result` would not have to wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def result(self) -> StepResult:
        """What came of the step."""
        if self._event is not None:
            self._event.synchronize()
        prompt_logprobs = self.prompt_logprobs or {}
        if self.samples is None:
            return StepResult([NO_TOKEN] * self.plan.num_rows, prompt_logprobs=prompt_logprobs)
        token_ids, logprobs, errors = self.samples.read()
        draws = self.plan.draws
        if len(draws) < self.plan.num_rows:
            drawn = dict(zip(draws, token_ids, strict=True))
            token_ids = [drawn.get(index, NO_TOKEN) for index in range(self.plan.num_rows)]
        return StepResult(
            token_ids,
            logprobs={draws[i]: entry for i, entry in logprobs.items()},
            prompt_logprobs=prompt_logprobs,
            errors={draws[i]: error for i, error in errors.items()},
        )


class ModelRunner:
    """The rows that requests live in, and the way from a plan to the workers and back.

    A row lives as long as its sequence runs: its block table, its sampling state and the token drawn last.
    The batch of a step is gathered from the rows and thrown away.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        *,
        vocab_size: int,
        block_size: int,
        max_num_rows: int,
        max_model_len: int,
        use_graphs: bool = False,
    ) -> None:
        self.workers = workers
        self.device = workers.worker.device
        self.sampler = Sampler(vocab_size, self.device, max_num_rows)
        self.registry: HookRegistry | None = None
        self._block_size = block_size
        self._tables = np.full((max_num_rows, -(-max_model_len // block_size)), -1, dtype=np.int64)
        self._num_blocks = np.zeros(max_num_rows, dtype=np.int64)
        # One more than there are rows, for the padding of graphs.
        self._last_token = torch.zeros(max_num_rows + 1, dtype=torch.int64, device=self.device)
        self._graphs = self._make_graphs(max_num_rows) if use_graphs else None

    def warm_up(self, num_tokens: int) -> None:
        """Have everything ready for steps of up to `num_tokens`: kernels, libraries, memory, the first graphs.

        On a GPU the first steps would otherwise wait for it.
        """
        if has_kernels(self.device):
            from infinilm.kernels.precompile import compile_together  # which needs Triton

            # No lambda: if memory runs out, its frame in the traceback would keep everything.
            compile_together(partial(self._compute_all_kinds, num_tokens))
        else:
            self._compute_all_kinds(num_tokens)
        reserve_pinned(8 * num_tokens * self._tables.itemsize)  # a few numbers per token, and usual tables
        if self._graphs is not None:
            self._graphs.capture_first()

    def _compute_all_kinds(self, num_tokens: int) -> None:
        """Compute steps of all kinds that leave nothing in the cache, quick ones first: kernels compile meanwhile."""
        if self._graphs is not None:
            self._graphs.compute_first()
        for query_lens in ([1, 1], [64, 64, 1, 1], [num_tokens]):  # decoding, a mixture, one long prompt
            lengths = np.minimum(query_lens, num_tokens)
            places = np.concatenate([np.arange(length) for length in lengths])
            tables = np.zeros((len(lengths), -(-int(lengths.max()) // self._block_size)), dtype=np.int64)
            batch = HostBatch(np.zeros_like(places), places, np.full_like(places, -1), tables, lengths, lengths)
            # As many rows as can ever draw at once: their logits take memory that later steps find.
            rows = np.arange(min(len(places), len(self._tables)))
            self.workers.run(StepInput(batch, (rows,)), self._warm_up_sampler)

    def _warm_up_sampler(self, _piece: int, logits: Tensor) -> None:
        self.sampler.warm_up(logits)

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step. On a GPU this returns while the device still works."""
        self._update_rows(plan)
        batch, token_rows = self._gather(plan)
        handle = StepHandle(plan)
        if self._graphs is None or not self._replay(handle, batch, token_rows):
            self._run(handle, batch, token_rows)
        if self.device.type == "cuda":
            handle.mark_end()
        return handle

    def prepare_while(self, handle: StepHandle, following: StepHandle, num_expected_rows: int) -> None:
        """While `handle` is waited for, and a long step comes after it, capture graphs for the rows to come.

        A capture takes some 30 ms, and may take longer than `handle` does: the device must have more to do than that.
        """
        if self._graphs is None or following.plan.num_chunk_tokens < LONG_STEP:
            return
        while not handle.is_ready and self._graphs.capture_next(num_expected_rows):
            pass

    def _run(self, handle: StepHandle, batch: HostBatch, token_rows: IntArray) -> None:
        """Have all ranks compute a step, kernel by kernel, and do with the logits what is wanted."""
        plan = handle.plan
        ends = np.cumsum(batch.query_lens)
        # What to do with the logits of which tokens, piece by piece.
        pieces: list[tuple[IntArray, Callable[[Tensor], None]]] = []
        if plan.draws:
            pieces.append((ends[plan.draws] - 1, lambda logits: self._draw(handle, batch, logits)))
        handle.prompt_logprobs = {}
        for index, chunk in enumerate(plan.chunks, start=len(plan.decoding.rows)):
            if chunk.prompt_targets:
                found = handle.prompt_logprobs[index] = []
                pieces += self._prompt_pieces(chunk, int(ends[index]), found)
        input_ids = self._input_ids(plan, batch, token_rows)
        patterns = self.registry.patterns() if self.registry is not None else ()
        step_input = StepInput(batch, tuple(rows for rows, _ in pieces), input_ids is not None, patterns)
        self.workers.run(
            step_input, lambda index, logits: pieces[index][1](logits), input_ids=input_ids, registry=self.registry
        )

    def _input_ids(self, plan: StepPlan, batch: HostBatch, token_rows: IntArray) -> Tensor | None:
        """The token ids on the device, where it may be the only one to know some of them."""
        if len(plan.decoding.rows) == 0:
            return None
        if not plan.chunks:
            return self._last_token[to_device(self.device, token_rows)[0]]
        ids, rows = to_device(self.device, batch.input_ids, token_rows)
        return torch.where(ids == PENDING_TOKEN, self._last_token[rows], ids)

    def _draw(self, handle: StepHandle, batch: HostBatch, logits: Tensor) -> None:
        """Draw the next token of each row that draws, from its logits `[n, vocab]` float32."""
        show_logits(logits, self.registry)
        plan = handle.plan
        rows = [*plan.decoding.rows.tolist(), *(chunk.row for chunk in plan.chunks if chunk.draws)]
        samples = self.sampler.sample(logits, rows, batch.context_lens[plan.draws].tolist())
        self._last_token[to_device(self.device, np.array(rows))[0]] = samples.token_ids
        handle.take(samples)

    def _update_rows(self, plan: StepPlan) -> None:
        for row in plan.ended_rows:
            self.sampler.end_row(row)
            self._tables[row, : self._num_blocks[row]] = -1
            self._num_blocks[row] = 0
        for start in plan.starts:
            self.sampler.start_row(start)
        grown = plan.decoding.grown_rows
        self._tables[grown, self._num_blocks[grown]] = plan.decoding.new_blocks
        self._num_blocks[grown] += 1
        for chunk in plan.chunks:
            first = self._num_blocks[chunk.row]
            self._num_blocks[chunk.row] += len(chunk.new_blocks)
            self._tables[chunk.row, first : self._num_blocks[chunk.row]] = chunk.new_blocks

    def _gather(self, plan: StepPlan) -> tuple[HostBatch, IntArray]:
        """The batch, in which tokens drawn last are `PENDING_TOKEN`, and the row of each of its tokens."""
        rows, starts = plan.decoding.rows, plan.decoding.starts
        input_ids = np.full(len(rows), PENDING_TOKEN)
        query_lens = np.ones(len(rows), dtype=np.int64)
        if plan.chunks:
            tokens = chain.from_iterable(chunk.token_ids for chunk in plan.chunks)
            input_ids = np.concatenate((input_ids, np.fromiter(tokens, np.int64, plan.num_chunk_tokens)))
            rows = np.concatenate((rows, [chunk.row for chunk in plan.chunks]))
            starts = np.concatenate((starts, [chunk.start for chunk in plan.chunks]))
            query_lens = np.concatenate((query_lens, [len(chunk.token_ids) for chunk in plan.chunks]))
        context_lens = starts + query_lens
        tables = self._tables[rows, : -(-int(context_lens.max()) // self._block_size)]
        positions, token_rows = starts, rows
        if plan.chunks:
            first_tokens = np.cumsum(query_lens) - query_lens
            positions = np.arange(len(input_ids)) + np.repeat(starts - first_tokens, query_lens)
            token_rows = np.repeat(rows, query_lens)
        slots = self._tables[token_rows, positions // self._block_size] * self._block_size
        slots += positions % self._block_size
        return HostBatch(input_ids, positions, slots, tables, query_lens, context_lens), token_rows

    def _make_graphs(self, max_num_rows: int) -> "StepGraphs":
        from infinilm.executor.step_graphs import StepGraphs  # which needs Triton

        return StepGraphs(
            self.workers.worker,
            self.sampler,
            self._last_token,
            max_num_rows=max_num_rows,
            max_blocks=self._tables.shape[1],
            block_size=self._block_size,
        )

    def _replay(self, handle: StepHandle, batch: HostBatch, token_rows: IntArray) -> bool:
        """Run a step as a graph, if there can be one and nobody wants to see more than what is drawn."""
        assert self._graphs is not None
        plan = handle.plan
        if self.registry is not None and self.registry.has_hooks():
            return False
        num_decoding = len(plan.decoding.rows)
        if any(chunk.prompt_targets for chunk in plan.chunks) or not self._graphs.can_run(batch, num_decoding):
            return False
        self.workers.check_alive()
        draws = np.ones(plan.num_rows, dtype=np.bool_)
        rows = plan.decoding.rows
        if plan.chunks:
            draws[num_decoding:] = [chunk.draws for chunk in plan.chunks]
            rows = np.concatenate((rows, [chunk.row for chunk in plan.chunks]))
        if self.sampler.needs_host(rows[draws]):
            logits = self._graphs.run_to_logits(batch, token_rows, num_decoding)
            if plan.draws:
                self._draw(handle, batch, logits[to_device(self.device, np.flatnonzero(draws))[0]].float())
            return True
        self.sampler.upload()
        token_ids, is_finite = self._graphs.run(batch, token_rows, np.where(draws, rows, -1), num_decoding)
        if plan.draws:
            if not draws.all():
                (places,) = to_device(self.device, np.flatnonzero(draws))
                token_ids, is_finite = token_ids[places], is_finite[places]
            handle.take(Samples(token_ids, is_finite))
        return True

    def _prompt_pieces(
        self, chunk: RowChunk, end: int, found: list[TokenLogprobs]
    ) -> list[tuple[IntArray, Callable[[Tensor], None]]]:
        """The prompt tokens whose logits are wanted; their log-probabilities are added to `found`."""

        def piece(start: int) -> tuple[IntArray, Callable[[Tensor], None]]:
            targets = chunk.prompt_targets[start : start + PROMPT_LOGITS_AT_ONCE]
            first = end - len(chunk.token_ids) + start

            def take(logits: Tensor) -> None:
                (ids,) = to_device(self.device, np.array(targets))
                found.extend(logprobs_of(logits, ids, chunk.num_prompt_logprobs).to_host())

            return np.arange(first, first + len(targets)), take

        return [piece(start) for start in range(0, len(chunk.prompt_targets), PROMPT_LOGITS_AT_ONCE)]
