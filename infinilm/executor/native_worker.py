"""The only rank of a quantised model on a CPU: NumPy and the native library, no torch.

It replaces `RankWorker` and `ModelRunner` for such a model. A step consists of the embedding, one call of the library
for all layers, the head, and the same `Sampler` on arrays. Only hooks need torch: a torch model with the same weights
and the same KV cache computes the steps that they watch (`hooked_model.py`).
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from infinilm.cache.host import HostCache
from infinilm.distributed.shard import PackedShard
from infinilm.errors import EngineError
from infinilm.executor.executor import CacheShape, ExecutorInfo, RunnerSettings
from infinilm.executor.memory import rank_specs
from infinilm.executor.step_io import (
    LAST_TOKEN,
    IntArray,
    Rows,
    StepBatch,
    StepInput,
    StepOutput,
    make_output,
    prompt_logprobs,
    wants_prompt_logprobs,
)
from infinilm.kernels.native import load_library
from infinilm.layers.formats import WeightFormats
from infinilm.loading.checkpoint import open_checkpoint
from infinilm.loading.weights import load_weights
from infinilm.models.config import ModelConfig
from infinilm.models.dense import LlamaConfig
from infinilm.models.native_model import NativeModel
from infinilm.outputs import TokenLogprobs
from infinilm.platforms import HOST, count_cores, require_torch
from infinilm.sampling.host_arrays import HostArrays
from infinilm.sampling.logprobs import Logprobs
from infinilm.sampling.sampler import Sampler, Samples

if TYPE_CHECKING:
    from infinilm.debug import HookRegistry
    from infinilm.executor.hooked_model import HookedModel

Floats = npt.NDArray[np.float32]

MAX_RUN_STEPS = 16
RUN_SECONDS, UNWATCHED_RUN_SECONDS = 0.02, 0.25
"""Time limits of the decode steps in one call, so that streams and progress bars stay smooth."""


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step whose output is already computed."""

    output: StepOutput

    def result(self) -> StepOutput:
        """See `StepHandle`."""
        return self.output


class NativeWorker:
    """A single rank. It has the methods of `RankWorker` that `LocalExecutor` calls for an `LLMEngine`."""

    device = HOST

    def __init__(self) -> None:
        self.registry: HookRegistry | None = None
        self.cache: HostCache | None = None
        torch = sys.modules.get("torch")  # the caller may have set its number of threads
        self.num_threads: int = count_cores() if torch is None else torch.get_num_threads()
        self._model: NativeModel | None = None
        self._runner: _Runner | None = None

    def describe(self) -> ExecutorInfo:
        """How the model runs."""
        return ExecutorInfo(
            num_ranks=1,
            device=str(HOST),
            dtype="float32",
            attention="native",
            max_in_flight=1,
            max_run_steps=MAX_RUN_STEPS,
            is_native=True,
        )

    @property
    def model(self) -> NativeModel:
        if self._model is None:
            raise EngineError("no model is loaded")
        return self._model

    @property
    def cache_bytes(self) -> int:
        return self.cache.num_bytes if self.cache is not None else 0

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute with this rank's threads."""
        library = load_library()
        if library.num_threads() != self.num_threads:
            library.set_num_threads(self.num_threads)
        yield

    def load(self, config: ModelConfig, max_len: int, source: Path | int, formats: WeightFormats) -> None:
        """Build the model for texts of up to `max_len` tokens, with weights from a checkpoint."""
        assert isinstance(source, Path)  # random weights are dense
        model = NativeModel(cast(LlamaConfig, config), formats, max_len)
        checkpoint = open_checkpoint(source)
        try:
            load_weights(model.weight_targets(), checkpoint, is_ignorable=config.is_ignorable)
        finally:
            checkpoint.close()
        model.build()
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Copies of the weights, as tensors, by their names in a checkpoint. Quantised ones are decoded."""
        with require_torch("state_dict"):
            import torch
        return {
            name: shard.values() if isinstance(shard, PackedShard) else torch.from_numpy(shard.array.copy())
            for name, shard in self.model.weight_targets().items()
        }

    def reset_cache(self, shape: CacheShape | None) -> None:
        """Make an empty cache, or none."""
        self.cache = self._runner = None  # so that their memory is free before more is allocated
        if shape is not None:
            specs = rank_specs(self.model.config, 1)
            self.cache = HostCache(specs, shape.num_blocks, shape.block_size, shape.dtype)

    def start_rows(self, settings: RunnerSettings) -> None:
        """Make a runner for steps of requests in rows."""
        assert self.cache is not None
        self._runner = _Runner(self.model, self.cache, settings, self.num_threads)

    def execute(self, step: StepInput, hook_patterns: Sequence[str] = ()) -> ComputedStep:
        """Compute a step of requests in rows: forward pass and sampling."""
        if self._runner is None:
            raise EngineError("the rank has no rows to compute a step for; start_rows makes them")
        return ComputedStep(self._runner.execute(step, hook_patterns, self.registry))

    def check_layers(self) -> list[str]:
        """None fail: a row's product with quantised matrices has the same bits for any other rows."""
        return []


class _Runner:
    """Keeps the rows and runs steps: batch, forward pass, sampling."""

    def __init__(self, model: NativeModel, cache: HostCache, settings: RunnerSettings, num_threads: int) -> None:
        self._model, self._cache, self._num_threads = model, cache, num_threads
        num_rows = settings.max_num_rows
        self._sampler = Sampler(model.config.vocab_size, None, num_rows)
        max_blocks = -(-settings.max_model_len // cache.block_size)
        self._rows = Rows(len(cache.groups), num_rows, max_blocks, cache.block_size)
        self._last_token = np.zeros(num_rows, dtype=np.int64)
        self._hooked: HookedModel | None = None

    def execute(self, step: StepInput, patterns: Sequence[str], registry: "HookRegistry | None") -> StepOutput:
        self._rows.update(step)
        for row in step.ended_rows:
            self._sampler.end_row(row)
        for start in step.starts:
            self._sampler.start_row(start)
        if self._model.generator is not None and not (step.chunks or step.decoding.has_drafts or patterns):
            settings = self._sampler.plain_settings(step.decoding.rows.tolist())
            if settings is not None:
                return self._decode(step, settings)
        batch = self._rows.gather(step)
        ids = batch.tokens.input_ids
        ids = np.where(ids == LAST_TOKEN, self._last_token[batch.token_rows], ids)
        if patterns:
            hidden = self._hooked_model().forward(batch.tokens, ids, patterns, registry)
        else:
            hidden = self._model.forward(batch.tokens, ids, self._cache)
        drawn: tuple[Any, Any, Any] = [], {}, {}
        if step.num_samples > 0:
            logits = self._compute_logits(hidden, batch.sample_places)
            if patterns:
                self._hooked_model().show_logits(logits, registry)
            drawn = self._sample(logits, batch)
        return make_output(step, *drawn, self._prompt_logprobs(step, batch, hidden))

    def _decode(self, step: StepInput, settings: IntArray) -> StepOutput:
        """Compute as many decode steps as allowed in one call of the library."""
        rows, starts, run = step.decoding.rows, step.decoding.starts, step.run
        ids = step.decoding.token_ids.ravel()
        num_columns = -(-int(starts.max() + run.max_steps) // self._cache.block_size)
        drawn = np.empty((run.max_steps, len(rows)), dtype=np.int64)
        is_finite = np.empty(len(rows), dtype=np.bool_)
        self._model.reach(int(starts.max()) + run.max_steps)
        num_steps = self._model.generator.run(
            self._cache.native,
            groups=self._cache.group_of,
            tables=[own[rows, :num_columns] for own in self._rows.tables],
            tokens=np.where(ids == LAST_TOKEN, self._last_token[rows], ids),
            starts=starts,
            settings=settings,
            rows=rows,
            is_stop=run.is_stop,
            drawn=drawn,
            are_finite=is_finite,
            seconds=RUN_SECONDS if run.is_watched else UNWATCHED_RUN_SECONDS,
            is_awaited=run.is_awaited,
        )
        self._last_token[rows] = drawn[num_steps - 1]
        token_ids, _, errors = Samples(drawn[:num_steps].T.ravel(), is_finite).read()
        counts = None if num_steps == 1 else [num_steps] * len(rows)
        return StepOutput(token_ids, counts, errors=errors, num_steps=num_steps)

    def _compute_logits(self, hidden: Floats, places: npt.NDArray[np.int64]) -> Floats:
        return self._model.compute_logits(hidden if len(places) == len(hidden) else hidden[places])

    def _sample(self, logits: Floats, batch: StepBatch) -> tuple[Any, Any, Any]:
        rows = batch.sample_rows
        samples = self._sampler.sample(logits, rows.tolist(), batch.sample_positions.tolist())
        self._last_token[rows] = samples.token_ids
        return samples.read()

    def _prompt_logprobs(self, step: StepInput, batch: StepBatch, hidden: Floats) -> dict[int, list[TokenLogprobs]]:
        found: dict[int, list[TokenLogprobs]] = {}
        if not wants_prompt_logprobs(step):
            return found
        arrays = HostArrays()
        for index, places, targets, num_top in prompt_logprobs(step, batch):
            logits = self._compute_logits(hidden, places)
            top = min(num_top, logits.shape[1])
            entries = Logprobs(*arrays.logprobs(logits, np.array(targets, dtype=np.int64), top)).to_host()
            found.setdefault(index, []).extend(entries)
        return found

    def _hooked_model(self) -> "HookedModel":
        if self._hooked is None:
            from infinilm.executor.hooked_model import HookedModel  # which needs torch

            self._hooked = HookedModel(self._model, self._cache, self._num_threads)
        return self._hooked
