"""Runs the steps of one rank: keeps the rows, builds the batch, runs the forward pass and samples."""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import proxy

import numpy as np
import torch
from torch import Tensor

from infinilm.attention.batch import HostBatch, IntArray
from infinilm.debug.taps import show_logits
from infinilm.executor.executor import RunnerSettings
from infinilm.executor.step_io import (
    LAST_TOKEN,
    LOGIT_COPIES,
    PROMPT_LOGITS_AT_ONCE,
    Rows,
    StepBatch,
    StepInput,
    StepOutput,
    make_output,
    prompt_logprobs,
    wants_prompt_logprobs,
)
from infinilm.kernels.copies import reserve_pinned, to_device
from infinilm.kernels.support import has_kernels
from infinilm.outputs import TokenLogprobs
from infinilm.sampling import Sampler, Samples, logprobs_of

if TYPE_CHECKING:
    from infinilm.executor.rank_worker import RankWorker
    from infinilm.executor.step_graphs import StepGraphs


class SubmittedStep:
    """A step that the device computes or has computed."""

    def __init__(self, step: StepInput) -> None:
        self._step = step
        self._samples: Samples | None = None
        self._prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self._event: torch.cuda.Event | None = None

    def keep_samples(self, samples: Samples) -> None:
        """Keep the samples. From a GPU they are copied at once, so that `result` waits for this step only."""
        self._samples = samples.to_pinned() if samples.token_ids.device.type == "cuda" else samples

    def add_prompt_logprobs(self, index: int, entries: list[TokenLogprobs]) -> None:
        self._prompt_logprobs.setdefault(index, []).extend(entries)

    def mark_end(self) -> None:
        """Record an event: the GPU gets no more work for this step."""
        self._event = torch.cuda.current_stream().record_event()

    def result(self) -> StepOutput:
        """The step's output. Waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        if self._samples is None:
            return make_output(self._step, [], {}, {}, self._prompt_logprobs)
        return make_output(self._step, *self._samples.read(), self._prompt_logprobs)


class ModelRunner:
    """Keeps the rows and runs steps: batch, forward pass, sampling.

    A row has a block table, a sampling state and the token drawn last, as long as its sequence runs. A step's batch is
    gathered from the rows. Every rank does the same; the driver samples and sends the tokens to the ranks of its stage.
    With several stages, the engine sends the first stage each row's last token in the `StepInput`.
    """

    def __init__(self, worker: "RankWorker", settings: RunnerSettings) -> None:
        assert worker.cache is not None
        self._worker: RankWorker = proxy(worker)  # it owns the runner; without a cycle both are freed at once
        self._cache = worker.cache
        self._device = worker.device
        self._block_size = worker.cache.block_size
        self._max_num_tokens = min(settings.max_num_batched_tokens, settings.max_model_len)
        self._max_num_rows = max_num_rows = settings.max_num_rows
        vocab_size = worker.model.config.vocab_size
        self._sampler = Sampler(vocab_size, worker.sampling_device, max_num_rows) if worker.is_driver else None
        max_blocks = -(-settings.max_model_len // self._block_size)
        self._rows = Rows(len(self._cache.groups), max_num_rows, max_blocks, self._block_size)
        # One entry more than there are rows, for the padding of graphs.
        self._last_token = torch.zeros(max_num_rows + 1, dtype=torch.int64, device=self._device)
        # The inputs of graphs hold the tables of one group of attention layers. Models with more groups run eagerly. So
        # do pipeline stages.
        attention = [group for index, group in enumerate(self._cache.groups) if index not in self._cache.state_ends]
        use_graphs = settings.use_graphs and len(attention) == 1 and worker.stages.size == 1
        self._graphs = self._make_graphs(settings, max_blocks) if use_graphs else None

    def _make_graphs(self, settings: RunnerSettings, max_blocks: int) -> "StepGraphs":
        from infinilm.executor.step_graphs import StepGraphs  # which needs Triton

        return StepGraphs(
            self._worker,
            self._sampler,
            self._last_token,
            max_num_rows=settings.max_num_rows,
            max_num_tokens=settings.max_num_batched_tokens,
            max_blocks=max_blocks,
        )

    # --- warm-up ----------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """On a GPU: compile kernels, initialise libraries and reserve memory for the largest steps.

        Otherwise the first steps would wait for this.
        """
        if has_kernels(self._device):
            from infinilm.kernels.precompile import compile_together  # which needs Triton

            compile_together(self._compute_all_kinds)
        else:
            self._compute_all_kinds()
        reserve_pinned(8 * self._max_num_tokens * 8)  # a few numbers per token, and usual tables

    @property
    def graph_tokens(self) -> int:
        """See `ExecutorInfo`."""
        return 0 if self._graphs is None else self._graphs.launch_bound_tokens

    def capture_all(self) -> None:
        """Capture the graphs of usual steps, if graphs are used."""
        if self._graphs is not None:
            self._graphs.capture_all()

    @torch.inference_mode()
    def _compute_all_kinds(self) -> None:
        """Compute steps of all kinds, without writing to the cache. Quick ones first: kernels compile meanwhile."""
        if self._graphs is not None:
            self._graphs.compute_all()
        # A mixed step and one long prompt. Without graphs, also sizes for which kernels have other tiles.
        small = ([1, 1], [24], [48], [96], [256], [1024]) if self._graphs is None else ()
        for query_lens in (*small, [64, 64, 1, 1], [self._max_num_tokens]):
            lengths = np.minimum(query_lens, self._max_num_tokens)
            places = np.concatenate([np.arange(length) for length in lengths])
            tables = np.zeros((len(lengths), -(-int(lengths.max()) // self._block_size)), dtype=np.int64)
            batch = HostBatch(np.zeros_like(places), places, np.full_like(places, -1), tables, lengths, lengths)
            input_ids = self._fill_in_last(batch.input_ids, np.zeros_like(places))
            hidden = self._worker.compute_hidden(batch, self._cache, input_ids=input_ids)
            if not self._worker.is_last_stage:
                continue
            # As many rows as can ever draw at once, or as many prompt tokens as have logits at once.
            num_logits = max(self._max_num_rows, PROMPT_LOGITS_AT_ONCE)
            logits = self._worker.compute_logits(hidden, np.arange(min(len(places), num_logits)))
            if self._sampler is not None:
                self._sampler.warm_up(logits)
                # Log-probabilities or penalties of all rows take so many copies.
                del hidden
                _ = [torch.empty_like(logits) for _ in range(LOGIT_COPIES)]

    # --- a step -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, step: StepInput, hook_patterns: Sequence[str] = ()) -> SubmittedStep:
        """Start a step. On a GPU this returns while the device still computes."""
        self._update_rows(step)
        batch = self._rows.gather(step)
        submitted = SubmittedStep(step)
        if self._graphs is None or hook_patterns or not self._graphs.can_run(batch) or wants_prompt_logprobs(step):
            self._run_eagerly(submitted, step, batch, hook_patterns)
        else:
            self._run_graph(submitted, step, batch)
        if self._device.type == "cuda":
            submitted.mark_end()
        return submitted

    def _update_rows(self, step: StepInput) -> None:
        self._rows.update(step)
        if self._sampler is not None:
            for row in step.ended_rows:
                self._sampler.end_row(row)
            for start in step.starts:
                self._sampler.start_row(start)

    def _run_eagerly(
        self, submitted: SubmittedStep, step: StepInput, batch: StepBatch, hook_patterns: Sequence[str]
    ) -> None:
        worker = self._worker
        hidden = worker.compute_hidden(
            batch.tokens, self._cache, input_ids=self._input_ids(step, batch), hook_patterns=hook_patterns
        )
        if not worker.is_last_stage:
            return
        if step.num_samples > 0:
            logits = worker.compute_logits(hidden, batch.sample_places)
            if hook_patterns:
                show_logits(logits, worker.registry)
            self._sample(submitted, logits, batch)
        if wants_prompt_logprobs(step):
            self._add_prompt_logprobs(submitted, step, batch, hidden)

    def _run_graph(self, submitted: SubmittedStep, step: StepInput, batch: StepBatch) -> None:
        assert self._graphs is not None
        if step.samples_on_host:
            logits = self._graphs.run_to_logits(batch)
            if step.num_samples > 0:
                self._sample(submitted, logits, batch)
            return
        if self._sampler is not None:
            self._sampler.upload()
        token_ids, is_finite = self._graphs.run(batch)
        if step.num_samples > 0:
            submitted.keep_samples(Samples(token_ids, is_finite))

    def _input_ids(self, step: StepInput, batch: StepBatch) -> Tensor | None:
        """The token ids on the device; None if the host knows all of them."""
        if not (step.decoding.token_ids[:, :1] == LAST_TOKEN).any():
            return None
        if not step.chunks and not step.decoding.has_drafts:
            return self._last_token[to_device(self._device, batch.token_rows)[0]]
        return self._fill_in_last(batch.tokens.input_ids, batch.token_rows)

    def _fill_in_last(self, input_ids: IntArray, token_rows: IntArray) -> Tensor:
        ids, rows = to_device(self._device, input_ids, token_rows)
        return torch.where(ids == LAST_TOKEN, self._last_token[rows], ids)

    def _sample(self, submitted: SubmittedStep, logits: Tensor, batch: StepBatch) -> None:
        """Draw the step's tokens from their logits `[S, vocab]`, and send them to all ranks of the stage."""
        rows = batch.sample_rows
        if self._sampler is not None:
            samples = self._sampler.sample(logits, rows.tolist(), batch.sample_positions.tolist())
            token_ids = samples.token_ids.to(self._device)
            submitted.keep_samples(samples)
        else:
            token_ids = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        if self._worker.group.communicates:
            self._worker.group.broadcast(token_ids)
        self._last_token[to_device(self._device, rows)[0]] = token_ids

    def _add_prompt_logprobs(self, submitted: SubmittedStep, step: StepInput, batch: StepBatch, hidden: Tensor) -> None:
        for index, places, chunk_targets, num_top in prompt_logprobs(step, batch):
            logits = self._worker.compute_logits(hidden, places)
            if self._sampler is not None:
                (ids,) = to_device(logits.device, np.array(chunk_targets))
                submitted.add_prompt_logprobs(index, logprobs_of(logits, ids, num_top).to_host())
