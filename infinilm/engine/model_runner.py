"""Executes plans: keeps the rows, builds the batch, runs the model and the sampler."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from infinilm.attention.backend import AttentionBackend
from infinilm.attention.batch import ForwardBatch, IntArray
from infinilm.cache.paged import PagedKVCache
from infinilm.engine.plan import PENDING_TOKEN, RowStep, StepPlan, StepResult
from infinilm.models import InfinilmModel
from infinilm.outputs import TokenLogprobs
from infinilm.sampling import Sampler, Samples, logprobs_of

# Prompt log-probabilities need logits for every prompt token; this many at a time bounds their memory.
PROMPT_LOGITS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
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
    """One rank's model, cache, sampler and rows.

    A row lives as long as its sequence runs: its block table, its sampling state and the token drawn last.
    The batch of a step is gathered from the rows and thrown away.
    """

    def __init__(
        self,
        model: InfinilmModel,
        cache: PagedKVCache,
        backend: AttentionBackend,
        *,
        max_num_rows: int,
        max_model_len: int,
    ) -> None:
        self.model = model
        self.cache = cache
        self.backend = backend
        self.device = cache.device
        self.sampler = Sampler(model.config.vocab_size, self.device)
        max_blocks = -(-max_model_len // cache.block_size)
        self._tables = np.full((max_num_rows, max_blocks), -1, dtype=np.int64)
        self._num_blocks = np.zeros(max_num_rows, dtype=np.int64)
        self._last_token = torch.zeros(max_num_rows, dtype=torch.int64, device=self.device)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step. On a GPU this returns while the device still works."""
        self._update_rows(plan)
        batch = self._gather(plan.steps)
        hidden = self.model(batch, self.cache, self.backend)

        ends = np.cumsum(batch.query_lens)
        draws = [index for index, step in enumerate(plan.steps) if step.draws]
        samples = self._draw(plan, draws, hidden, ends) if draws else None
        return StepHandle(draws, samples, self._prompt_logprobs(plan.steps, hidden, ends))

    def _draw(self, plan: StepPlan, draws: list[int], hidden: torch.Tensor, ends: IntArray) -> Samples:
        """Draw the next token of each step in `draws` from the hidden state of its last token."""
        steps = [plan.steps[index] for index in draws]
        rows = [step.row for step in steps]
        logits = self.model.compute_logits(hidden[self._to_device(ends[draws] - 1)])
        samples = self.sampler.sample(logits, rows, [step.start + len(step.token_ids) for step in steps])
        self._last_token[torch.tensor(rows, device=self.device)] = samples.token_ids
        return samples

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

    def _gather(self, steps: Sequence[RowStep]) -> ForwardBatch:
        rows = np.array([step.row for step in steps], dtype=np.int64)
        starts = np.array([step.start for step in steps], dtype=np.int64)
        query_lens = np.array([len(step.token_ids) for step in steps], dtype=np.int64)
        num_tokens = int(query_lens.sum())
        input_ids = np.fromiter(chain.from_iterable(s.token_ids for s in steps), np.int64, num_tokens)

        first_tokens = np.cumsum(query_lens) - query_lens
        positions = np.arange(num_tokens) + np.repeat(starts - first_tokens, query_lens)
        token_rows = np.repeat(rows, query_lens)
        block_size = self.cache.block_size
        slots = self._tables[token_rows, positions // block_size] * block_size + positions % block_size
        context_lens = starts + query_lens
        tables = self._tables[rows, : -(-int(context_lens.max()) // block_size)]

        ids = self._to_device(input_ids)
        if (input_ids == PENDING_TOKEN).any():
            ids = torch.where(ids == PENDING_TOKEN, self._last_token[self._to_device(token_rows)], ids)
        return ForwardBatch(
            input_ids=ids,
            positions=self._to_device(positions),
            slot_mapping=self._to_device(slots),
            block_tables=self._to_device(tables),
            query_lens=query_lens,
            context_lens=context_lens,
        )

    def _to_device(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _prompt_logprobs(
        self, steps: Sequence[RowStep], hidden: torch.Tensor, ends: IntArray
    ) -> dict[int, list[TokenLogprobs]]:
        found: dict[int, list[TokenLogprobs]] = {}
        for index, step in enumerate(steps):
            if not step.prompt_targets:
                continue
            first = int(ends[index]) - len(step.token_ids)
            rows: list[TokenLogprobs] = []
            for start in range(0, len(step.prompt_targets), PROMPT_LOGITS_AT_ONCE):
                targets = step.prompt_targets[start : start + PROMPT_LOGITS_AT_ONCE]
                logits = self.model.compute_logits(hidden[first + start : first + start + len(targets)])
                rows += logprobs_of(
                    logits, torch.tensor(targets, device=self.device), step.num_prompt_logprobs
                ).to_host()
            found[index] = rows
        return found
