"""Executes plans: keeps the rows, builds the batch, has the workers run it and draws tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from infinilm.attention.batch import HostBatch, IntArray, send
from infinilm.debug import HookRegistry
from infinilm.debug.taps import show_logits
from infinilm.engine.plan import PENDING_TOKEN, RowStep, StepPlan, StepResult
from infinilm.engine.rank_worker import StepInput
from infinilm.engine.worker_group import WorkerGroup
from infinilm.outputs import TokenLogprobs
from infinilm.sampling import Sampler, Samples, logprobs_of

if TYPE_CHECKING:
    from infinilm.engine.decode_graphs import DecodeGraphs

# Prompt log-probabilities need logits for every prompt token; this many at a time bounds their memory.
PROMPT_LOGITS_AT_ONCE = 256


@dataclass(slots=True)
class StepHandle:
    """A submitted step. `result` waits for the device and copies what was drawn to the host."""

    draws: Sequence[int]
    """The steps that draw, by their index in the plan; in the order of `samples`."""
    samples: Samples | None
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    _event: torch.cuda.Event | None = None

    def take(self, samples: Samples) -> None:
        """Take what was drawn. From a GPU it is copied at once, so that `result` waits for this step only."""
        if samples.token_ids.device.type == "cuda":
            samples = samples.to_pinned()
            self._event = torch.cuda.current_stream().record_event()
        self.samples = samples

    def result(self) -> StepResult:
        """What came of the step."""
        if self._event is not None:
            self._event.synchronize()
        drawn = dict(zip(self.draws, self.samples.to_host(), strict=True)) if self.samples else {}
        return StepResult(
            token_ids={index: sample.token_id for index, sample in drawn.items()},
            logprobs={index: sample.logprobs for index, sample in drawn.items() if sample.logprobs},
            prompt_logprobs=self.prompt_logprobs,
            errors={index: sample.error for index, sample in drawn.items() if sample.error},
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
        """Compute steps of up to `num_tokens` of all kinds that leave nothing in the cache, and capture two graphs.

        On a GPU the first steps would otherwise wait for kernels to be compiled or read from disk.
        """
        for query_lens in ([num_tokens], [64, 64, 1, 1], [1, 1]):  # one long prompt, a mixture, decoding
            lengths = np.minimum(query_lens, num_tokens)
            places = np.concatenate([np.arange(length) for length in lengths])
            tables = np.zeros((len(lengths), -(-int(lengths.max()) // self._block_size)), dtype=np.int64)
            batch = HostBatch(np.zeros_like(places), places, np.full_like(places, -1), tables, lengths, lengths)
            rows = np.cumsum(lengths) - 1
            self.workers.run(StepInput(batch, (rows,)), lambda _, logits: self.sampler.warm_up(logits))
        if self._graphs is not None:
            self._graphs.capture_first()

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step. On a GPU this returns while the device still works."""
        self._update_rows(plan)
        if self._graphs is not None and (handle := self._replay(plan.steps)) is not None:
            return handle
        batch, input_ids = self._gather(plan.steps)
        ends = np.cumsum(batch.query_lens)
        handle = StepHandle([index for index, step in enumerate(plan.steps) if step.draws], None, {})

        # What to do with the logits of which tokens, piece by piece.
        pieces: list[tuple[IntArray, Callable[[Tensor], None]]] = []
        if handle.draws:
            pieces.append((ends[handle.draws] - 1, lambda logits: self._draw(plan, handle, logits)))
        for index, step in enumerate(plan.steps):
            if step.prompt_targets:
                handle.prompt_logprobs[index] = []
                pieces += self._prompt_pieces(step, int(ends[index]), handle.prompt_logprobs[index])

        patterns = self.registry.patterns() if self.registry is not None else ()
        step_input = StepInput(batch, tuple(rows for rows, _ in pieces), input_ids is not None, patterns)
        self.workers.run(
            step_input, lambda index, logits: pieces[index][1](logits), input_ids=input_ids, registry=self.registry
        )
        return handle

    def _draw(self, plan: StepPlan, handle: StepHandle, logits: Tensor) -> None:
        """Draw the next token of each step that draws."""
        show_logits(logits, self.registry)
        steps = [plan.steps[index] for index in handle.draws]
        rows = [step.row for step in steps]
        samples = self.sampler.sample(logits, rows, [step.start + len(step.token_ids) for step in steps])
        self._last_token[send(self.device, np.array(rows))[0]] = samples.token_ids
        handle.take(samples)

    def _update_rows(self, plan: StepPlan) -> None:
        for row in plan.ended_rows:
            self.sampler.end_row(row)
            self._tables[row, : self._num_blocks[row]] = -1
            self._num_blocks[row] = 0
        for start in plan.starts:
            self.sampler.start_row(start)
        for step in plan.steps:
            if step.new_blocks:
                first = self._num_blocks[step.row]
                self._num_blocks[step.row] += len(step.new_blocks)
                self._tables[step.row, first : self._num_blocks[step.row]] = step.new_blocks

    def _gather(self, steps: Sequence[RowStep]) -> tuple[HostBatch, Tensor | None]:
        """The batch, and its token ids on the device if some of them are known there only."""
        rows = np.array([step.row for step in steps], dtype=np.int64)
        starts = np.array([step.start for step in steps], dtype=np.int64)
        query_lens = np.array([len(step.token_ids) for step in steps], dtype=np.int64)
        num_tokens = int(query_lens.sum())
        input_ids = np.fromiter(chain.from_iterable(s.token_ids for s in steps), np.int64, num_tokens)

        first_tokens = np.cumsum(query_lens) - query_lens
        positions = np.arange(num_tokens) + np.repeat(starts - first_tokens, query_lens)
        token_rows = np.repeat(rows, query_lens)
        slots = self._tables[token_rows, positions // self._block_size] * self._block_size
        slots += positions % self._block_size
        context_lens = starts + query_lens
        tables = self._tables[rows, : -(-int(context_lens.max()) // self._block_size)]
        batch = HostBatch(input_ids, positions, slots, tables, query_lens, context_lens)
        if not (input_ids == PENDING_TOKEN).any():
            return batch, None
        ids, rows_of_ids = send(self.device, input_ids, token_rows)
        return batch, torch.where(ids == PENDING_TOKEN, self._last_token[rows_of_ids], ids)

    def _make_graphs(self, max_num_rows: int) -> "DecodeGraphs":
        from infinilm.engine.decode_graphs import DecodeGraphs  # which needs Triton

        return DecodeGraphs(
            self.workers.worker,
            self.sampler,
            self._last_token,
            max_num_rows=max_num_rows,
            max_blocks=self._tables.shape[1],
            block_size=self._block_size,
        )

    def _replay(self, steps: Sequence[RowStep]) -> StepHandle | None:
        """Run a step as a graph if it is one token for each of not too many rows, and nobody wants more than tokens."""
        assert self._graphs is not None
        if len(steps) > self._graphs.max_num_rows or (self.registry is not None and self.registry.has_hooks()):
            return None
        if not all(len(step.token_ids) == 1 and step.draws and not step.prompt_targets for step in steps):
            return None
        rows = np.array([step.row for step in steps])
        if self.sampler.needs_host(rows):
            return None
        self.workers.check_alive()
        self.sampler.upload()
        ids = np.array([step.token_ids[0] for step in steps])
        context_lens = np.array([step.start for step in steps]) + 1
        tables = self._tables[rows, : -(-int(context_lens.max()) // self._block_size)]
        token_ids, is_sound = self._graphs.run(ids, rows, context_lens, tables)
        handle = StepHandle(range(len(steps)), None, {})
        handle.take(Samples(token_ids, is_sound, None, (-1,) * len(steps), {}))
        return handle

    def _prompt_pieces(
        self, step: RowStep, end: int, found: list[TokenLogprobs]
    ) -> list[tuple[IntArray, Callable[[Tensor], None]]]:
        """The prompt tokens whose logits are wanted; their log-probabilities are added to `found`."""

        def piece(start: int) -> tuple[IntArray, Callable[[Tensor], None]]:
            targets = step.prompt_targets[start : start + PROMPT_LOGITS_AT_ONCE]
            first = end - len(step.token_ids) + start

            def take(logits: Tensor) -> None:
                (ids,) = send(self.device, np.array(targets))
                found.extend(logprobs_of(logits, ids, step.num_prompt_logprobs).to_host())

            return np.arange(first, first + len(targets)), take

        return [piece(start) for start in range(0, len(step.prompt_targets), PROMPT_LOGITS_AT_ONCE)]
