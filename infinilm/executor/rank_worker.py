"""The worker that each rank runs under any executor: its share of the model, its KV cache and its runner.

Ranks decide nothing. The `StepInput` or `ForwardInput` that all of them get says what a step computes, and where in the
cache. Only the driver, the first rank of the last pipeline stage, samples and holds the hooks.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from infinilm.attention import ForwardBatch, HostBatch, select_backend
from infinilm.attention.batch import IntArray
from infinilm.cache.paged import Cache, CacheMemory, PagedKVCache
from infinilm.debug import HookRegistry
from infinilm.debug.remote import RemoteHooks, serve_hooks
from infinilm.debug.taps import Taps, show_logits
from infinilm.distributed.group import SINGLE, CommunicationGroup
from infinilm.distributed.shard import PackedShard
from infinilm.errors import EngineError
from infinilm.executor.executor import CacheShape, ExecutorInfo, MeasuredWorkspace, RunnerSettings
from infinilm.executor.memory import free_memory_bytes, rank_specs
from infinilm.executor.model_runner import ModelRunner, SubmittedStep
from infinilm.executor.self_check import MIXER_TRIALS, TRIAL_BLOCK_SIZE, MixerTrial, check_products, computes_alike
from infinilm.executor.step_io import StepInput
from infinilm.kernels.copies import to_device
from infinilm.layers.formats import DENSE, WeightFormats
from infinilm.loading.checkpoint import open_checkpoint
from infinilm.loading.quantize import quantize
from infinilm.loading.weights import load_weights
from infinilm.models import InfinilmModel, ModelConfig, create_model
from infinilm.models.base import StagedModel
from infinilm.models.cpu import ThreadUsers
from infinilm.models.decoder import Decoder
from infinilm.models.random_weights import fill_randomly
from infinilm.platforms import is_nvidia, sampling_device


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """One forward pass. The caller manages the cache."""

    batch: HostBatch
    logit_rows: IntArray
    """The places in the batch of the tokens whose logits are wanted."""
    shape: CacheShape | None = None
    """If there is no cache, this pass uses a temporary one of this shape."""
    hook_patterns: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """The driver's tensors."""

    hidden: Tensor  # [T, hidden], after the final norm, on its device
    logits: Tensor  # [n, vocab] float32, where tokens are drawn


class RankWorker:
    """One rank's share of an engine."""

    def __init__(
        self,
        group: CommunicationGroup,
        dtype: torch.dtype,
        attention_backend: str = "auto",
        num_threads: int | None = None,
        stages: CommunicationGroup = SINGLE,
    ) -> None:
        """`group` has the ranks of this pipeline stage, `stages` the ranks with the same place in every stage.

        `num_threads` is by default torch's number of threads; ranks on a CPU share them.
        """
        self.group = group
        self.stages = stages
        self.is_first_stage, self.is_last_stage = stages.rank == 0, stages.rank == stages.size - 1
        self.rank = stages.rank * group.size + group.rank
        self.is_driver = self.is_last_stage and group.rank == 0
        self.device = group.info.device
        self.sampling_device = sampling_device(self.device)
        self.dtype = dtype
        self.backend = select_backend(attention_backend, self.device)
        self.cache: Cache | None = None
        self.registry: HookRegistry | None = None
        has_remote_hooks = not self.is_last_stage and group.rank == 0
        self._remote_hooks = RemoteHooks(stages) if has_remote_hooks else None
        self.num_threads = num_threads or torch.get_num_threads()
        if num_threads is None and self.device.type == "cpu":
            self.num_threads = max(1, self.num_threads // (group.size * stages.size))
        self.thread_users = ThreadUsers()
        self._model: InfinilmModel | None = None
        self._memory = CacheMemory(self.device)
        self._runner: ModelRunner | None = None
        self._max_step_tokens: int | None = None
        self._max_len = 0  # tokens of a text

    @property
    def model(self) -> InfinilmModel:
        if self._model is None:
            raise EngineError("no model is loaded")
        return self._model

    @property
    def cache_bytes(self) -> int:
        return self.cache.memory.num_bytes if self.cache is not None else 0

    def computing(self) -> AbstractContextManager[None]:
        """Compute with this rank's threads."""
        return self.thread_users.computing(self.num_threads)

    def describe(self) -> ExecutorInfo:
        """How this rank's model runs."""
        num_stages = self.stages.size
        return ExecutorInfo(
            num_ranks=self.group.size * num_stages,
            num_stages=num_stages,
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            attention=self.backend.name,
            max_in_flight=num_stages + 1 if num_stages > 1 or is_nvidia(self.device) else 1,
            graph_tokens=self._runner.graph_tokens if self._runner is not None else 0,
        )

    def join(self, rendezvous: int) -> None:
        """Join the other ranks, which must call this at the same time."""
        for group in (self.group, self.stages):
            if group.communicates:
                group.join(rendezvous)
                group.barrier()

    def leave(self) -> None:
        """Disconnect, so that no rank waits for this one."""
        self.group.leave()
        self.stages.leave()

    def close(self) -> None:
        """Disconnect for good."""
        self.group.close()
        self.stages.close()

    # --- weights and cache ------------------------------------------------------------------------------

    def load(self, config: ModelConfig, max_len: int, source: Path | int, formats: WeightFormats = DENSE) -> None:
        """Build the model for texts of up to `max_len` tokens, with weights from a checkpoint or a seed."""
        self.backend.is_ordered = self.group.is_ordered = formats.is_ordered
        model = create_model(
            config,
            max_len=max_len,
            dtype=self.dtype,
            device=self.device,
            group=self.group,
            formats=formats,
            num_stages=self.stages.size,
            stage=self.stages.rank,
        )
        if isinstance(source, int):
            fill_randomly(model.weight_targets(), config.initializer_range, source)
        else:
            checkpoint = open_checkpoint(source)
            try:
                load_weights(
                    model.weight_targets(),
                    checkpoint,
                    is_ignorable=model.is_ignorable,
                    show_progress=self.is_driver,
                )
            finally:
                checkpoint.close()
        self._model, self._max_len = model, max_len
        self.thread_users = ThreadUsers.of(model, self.backend)
        self._wait_for_weights()

    @torch.inference_mode()
    def load_shards(self, shards: Sequence[Mapping[str, Tensor]] | Mapping[int, Mapping[str, Tensor]]) -> None:
        """Copy, or quantise, this rank's shards of some weights into the model. `shards` is indexed by rank."""
        targets = self.model.weight_targets()
        for name, shard in shards[self.rank].items():
            target = targets[name]
            if isinstance(target, PackedShard):
                target.matrix.load(
                    quantize(shard.float().cpu().numpy(), target.matrix.format), torch.arange(len(shard))
                )
            else:
                target.tensor.copy_(shard)
        if isinstance(self.model, Decoder):
            self.model.note_new_weights()
        self._wait_for_weights()

    def _wait_for_weights(self) -> None:
        """Wait for copies to the device: kernels may read weights before kernels launched earlier are done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of this rank's weights, on the host, by their names in a checkpoint. Quantised ones are decoded."""
        return {
            name: shard.values()
            if isinstance(shard, PackedShard)
            else shard.tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, shard in self.model.weight_targets().items()
        }

    def reset_cache(self, shape: CacheShape | None) -> None:
        """Make an empty cache, or none. It reuses the memory of the old one if that is large enough."""
        self.cache = None  # so that its memory is free before more is allocated
        if shape is not None:
            self.cache = self._make_cache(shape)

    def _make_cache(self, shape: CacheShape) -> Cache:
        settings = dict(shape.cache_settings)
        if self.stages.size > 1:
            settings["held"] = cast(StagedModel, self.model).stage.layers
        return (shape.cache_class or PagedKVCache)(
            rank_specs(self.model.config, self.group.size),
            shape.num_blocks,
            shape.block_size,
            dtype=getattr(torch, shape.dtype),
            device=self.device,
            memory=self._memory,
            **settings,
        )

    def check_layers(self) -> list[str]:
        """The layers in which a token's bits depend on the other tokens of a step, tried on this device."""
        if self.device.type not in ("cpu", "cuda"):
            return ["any product, because none was tried"]
        failing = check_products(cast(nn.Module, self.model), self._max_step_tokens)
        if self.device.type == "cuda":
            kinds = {type(spec) for spec in self.model.config.cache_specs()}
            trials = [trial for kind, trial in MIXER_TRIALS.items() if kind in kinds]
            failing += [trial.name for trial in trials if not self._passes(trial)]
        return failing

    def _passes(self, trial: MixerTrial) -> bool:
        """Try with two texts in the cache, which is not in use yet, or in a temporary one."""
        cache = self.cache
        if cache is None:
            num_blocks = 2 * -(-trial.num_tokens // TRIAL_BLOCK_SIZE)
            cache = self._make_cache(CacheShape(num_blocks, TRIAL_BLOCK_SIZE, str(self.dtype).removeprefix("torch.")))
        compute, vocab_size = partial(self.compute_hidden, cache=cache), self.model.config.vocab_size
        return computes_alike(compute, cache, vocab_size, min(trial.num_tokens, self._max_len))

    # --- steps ------------------------------------------------------------------------------------------

    def measure_workspace(self, settings: RunnerSettings) -> MeasuredWorkspace:
        """Compute the largest steps on a GPU, in a cache of one block, and measure what they take."""
        free_bytes, reserved_bytes = free_memory_bytes(self.device), torch.cuda.memory_reserved(self.device)
        self.reset_cache(CacheShape(1, settings.block_size, settings.kv_dtype))
        ModelRunner(self, settings).warm_up()
        torch.cuda.synchronize(self.device)
        taken = free_bytes - torch.cuda.mem_get_info(self.device)[0]
        activations = torch.cuda.memory_reserved(self.device) - reserved_bytes
        self.reset_cache(None)
        return MeasuredWorkspace(activations, max(taken - activations, 0))

    def start_rows(self, settings: RunnerSettings) -> None:
        """Make a runner for steps of requests in rows."""
        self._runner = ModelRunner(self, settings)
        self._max_step_tokens = settings.max_num_batched_tokens
        self._runner.capture_all()

    def execute(self, step: StepInput, hook_patterns: Sequence[str] = ()) -> SubmittedStep:
        """Compute a step of requests in rows: forward pass and sampling."""
        if self._runner is None:
            raise EngineError("the rank has no rows to compute a step for; start_rows makes them")
        return self._runner.execute(step, hook_patterns)

    @torch.inference_mode()
    def forward(self, given: ForwardInput) -> ForwardOutput:
        """Compute one forward pass. The caller manages the cache."""
        cache = self.cache
        if cache is None:
            if given.shape is None:
                raise EngineError("there is no cache to compute the step with; reset_cache makes one")
            cache = self._make_cache(given.shape)
        hidden = self.compute_hidden(given.batch, cache, hook_patterns=given.hook_patterns)
        if not self.is_last_stage:
            return ForwardOutput(hidden, hidden[:0])
        logits = self.compute_logits(hidden, given.logit_rows)
        show_logits(logits, self.registry)
        return ForwardOutput(hidden, logits)

    def compute_hidden(
        self,
        batch: HostBatch,
        cache: Cache,
        *,
        input_ids: Tensor | None = None,
        hook_patterns: Sequence[str] = (),
    ) -> Tensor:
        """The hidden states `[T, hidden]` of a batch; `input_ids`, if given, replace those of the batch.

        Every stage but the last sends its hidden states to the next.
        """
        taps = Taps(hook_patterns, self.registry or self._remote_hooks, self.group) if hook_patterns else None
        on_device = batch.to_device(self.device, input_ids)
        if self.stages.size == 1:
            return self.model(on_device, cache, self.backend, taps)
        return self._compute_stage(on_device, cache, taps)

    def _compute_stage(self, batch: ForwardBatch, cache: Cache, taps: Taps | None) -> Tensor:
        stages, model = self.stages, cast(StagedModel, self.model)
        hidden = None
        if taps is not None and self.is_driver:
            serve_hooks(stages, taps)
        if not self.is_first_stage:
            size = (len(batch.input_ids), model.config.hidden_size)
            hidden = stages.receive(torch.empty(size, dtype=self.dtype, device=self.device), stages.rank - 1)
        hidden = model(batch, cache, self.backend, taps, hidden)
        if not self.is_last_stage:
            if taps is not None and self._remote_hooks is not None:
                self._remote_hooks.end_stage()
            stages.send(hidden, stages.rank + 1)
        return hidden

    def compute_logits(self, hidden: Tensor, places: IntArray) -> Tensor:
        """The logits `[n, vocab]` float32 of tokens at ascending `places` of the batch, on the sampling device.

        Only rank 0 of the group gets them.
        """
        if len(places) != len(hidden):
            hidden = hidden[to_device(self.device, places)[0]]
        return self.model.compute_logits(hidden).float().to(self.sampling_device)
