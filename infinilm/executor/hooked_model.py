"""A torch model on a `NativeWorker`'s weights and KV cache, for steps with hooks."""

import mmap
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from infinilm.attention import HostBatch, NativeAttention
from infinilm.cache.host import HostCache
from infinilm.cache.paged import CacheMemory, PagedKVCache
from infinilm.debug import HookRegistry
from infinilm.debug.taps import Taps, show_logits
from infinilm.distributed.group import SINGLE
from infinilm.distributed.shard import WeightShard
from infinilm.executor.memory import rank_specs
from infinilm.models.cpu import ThreadUsers
from infinilm.models.native_model import NativeModel
from infinilm.models.registry import create_model

Floats = npt.NDArray[np.float32]


class _SharedMemory(CacheMemory):
    """The memory of another cache, with its contents."""

    def __init__(self, mapping: mmap.mmap) -> None:
        super().__init__("cpu")
        self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)

    def zeros(self, num_bytes: int) -> torch.Tensor:
        return self._bytes[:num_bytes]


class HookedModel:
    """The same model, layer by layer. Matrices are shared with the native library, small weights are copied."""

    def __init__(self, model: NativeModel, cache: HostCache, num_threads: int) -> None:
        self._num_threads = num_threads
        formats = replace(model.formats, matrices=model.weights)
        self._model = create_model(model.config, max_len=model.max_len, formats=formats)
        for name, shard in self._model.weight_targets().items():
            if isinstance(shard, WeightShard):
                shard.tensor.copy_(torch.from_numpy(model.weights[name]))
        self._cache = PagedKVCache(
            rank_specs(model.config, 1),
            cache.num_blocks,
            cache.block_size,
            dtype=getattr(torch, str(cache.dtype)),
            device="cpu",
            memory=_SharedMemory(cache.memory),
        )
        self._cache.state_ends = cache.state_ends
        self._backend = NativeAttention()

    @torch.inference_mode()
    def forward(
        self, batch: HostBatch, token_ids: npt.NDArray[np.int64], patterns: Sequence[str], registry: HookRegistry | None
    ) -> Floats:
        """The hidden states `[T, hidden]` of a batch, after the hooks."""
        taps = Taps(patterns, registry, SINGLE)
        on_device = batch.to_device(torch.device("cpu"), torch.from_numpy(token_ids))
        with ThreadUsers(torch=False, native=True).computing(self._num_threads):
            hidden: Floats = self._model(on_device, self._cache, self._backend, taps).contiguous().numpy()
        return hidden

    @torch.inference_mode()
    def show_logits(self, logits: Floats, registry: HookRegistry | None) -> None:
        """Let hooks see logits and change them in place."""
        show_logits(torch.from_numpy(logits), registry)
