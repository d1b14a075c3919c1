"""Executes plans: keeps the rows, builds the batch, has the workers run it and draws tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from infinilm.attention.batch import HostBatch, IntArray
from infinilm.debug import HookRegistry
from infinilm.engine.plan import PENDING_TOKEN, RowStep, StepPlan, StepResult
from infinilm.engine.rank_worker import StepInput
from infinilm.engine.worker_group import WorkerGroup
from infinilm.outputs import TokenLogprobs
from infinilm.sampling import Sampler, Samples, logprobs_of

# Prompt log-probabilities need logits for every prompt token; this many at a time bounds their memory.
PROMPT_LOGITS_AT_ONCE = 256


@dataclass(slots=True)
class StepHandle:
    """A submitted step. `result` waits for the device and copies what was drawn to the host."""

    draws: Sequence[int]
    """The steps that draw, by their index in the plan; in the order of `samples`."""
    samples: Samples | None
    prompt_logprobs: dict[int, list[TokenLogprobs]]

    def result(self) -> StepResult:
        """What came of the step."""
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
        self, workers: WorkerGroup, *, vocab_size: int, block_size: int, max_num_rows: int, max_model_len: int
    ) -> None:
        self.workers = workers
        self.device = workers.worker.device
        self.sampler = Sampler(vocab_size, self.device)
        self.registry: HookRegistry | None = None
        self._block_size = block_size
        self._tables = np.full((max_num_rows, -(-max_model_len // block_size)), -1, dtype=np.int64)
        self._num_blocks = np.zeros(max_num_rows, dtype=np.int64)
        self._last_token = torch.zeros(max_num_rows, dtype=torch.int64, device=self.device)

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step. On a GPU this returns while the device still works."""
        self._update_rows(plan)
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
        steps = [plan.steps[index] for index in handle.draws]
        rows = [step.row for step in steps]
        handle.samples = self.sampler.sample(logits, rows, [step.start + len(step.token_ids) for step in steps])
        self._last_token[torch.tensor(rows, device=self.device)] = handle.samples.token_ids

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
        ids = torch.from_numpy(input_ids).to(self.device)
        last = self._last_token[torch.from_numpy(token_rows).to(self.device)]
        return batch, torch.where(ids == PENDING_TOKEN, last, ids)

    def _prompt_pieces(
        self, step: RowStep, end: int, found: list[TokenLogprobs]
    ) -> list[tuple[IntArray, Callable[[Tensor], None]]]:
        """The prompt tokens whose logits are wanted; their log-probabilities are added to `found`."""

        def piece(start: int) -> tuple[IntArray, Callable[[Tensor], None]]:
            targets = step.prompt_targets[start : start + PROMPT_LOGITS_AT_ONCE]
            first = end - len(step.token_ids) + start

            def take(logits: Tensor) -> None:
                ids = torch.tensor(targets, device=self.device)
                found.extend(logprobs_of(logits, ids, step.num_prompt_logprobs).to_host())

            return np.arange(first, first + len(targets)), take

        return [piece(start) for start in range(0, len(step.prompt_targets), PROMPT_LOGITS_AT_ONCE)]
