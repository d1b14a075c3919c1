"""One rank: its device, its share of the model, its KV cache, and the commands it takes.

Rank 0 lives in the engine's process and is called directly. Every other rank is a process of its own
(`rank_process.py`) that gets the same commands as messages. Ranks never decide anything: what a step computes, and
where in the cache, is in the `StepInput` that rank 0 sends.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinilm.attention import HostBatch, select_backend
from infinilm.attention.batch import IntArray
from infinilm.cache.paged import CacheMemory, PagedKVCache
from infinilm.debug import HookRegistry
from infinilm.debug.taps import Taps
from infinilm.distributed.channel import Message
from infinilm.distributed.group import CommunicationGroup
from infinilm.distributed.shard import PackedShard, dense_weights
from infinilm.errors import EngineError
from infinilm.executor.threads import ThreadUsers
from infinilm.kernels.copies import to_device
from infinilm.layers.formats import DENSE, WeightFormats
from infinilm.layers.linear import kv_heads_per_rank
from infinilm.loading.checkpoint import open_checkpoint
from infinilm.loading.weights import load_weights
from infinilm.models import InfinilmModel, LlamaConfig, create_model
from infinilm.models.random_weights import fill_randomly

OnLogits = Callable[[int, Tensor], None]
"""Called with the index of a piece of `StepInput.logit_rows` and its logits `[n, vocab]`."""


class Command(StrEnum):
    """What a rank can be told to do."""

    INIT = "init"
    """Set up the device."""
    JOIN = "join"
    """Meet the other ranks, at first and after a step that failed on one of them."""
    LOAD = "load"
    """Build the model, or put a tensor into it."""
    RUN = "run"
    """Compute a step."""
    RESET_CACHE = "reset_cache"
    STATE = "state"
    """Send back the weights."""
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class StepInput:
    """What all ranks have to know of a step."""

    batch: HostBatch
    logit_rows: tuple[IntArray, ...]
    """The tokens whose logits are wanted, by their places in the batch and in this order, in pieces small enough to
    hold."""
    are_ids_pending: bool = False
    """Whether rank 0's device alone knows the token ids, and has to tell the others."""
    hook_patterns: tuple[str, ...] = ()

    def to_message(self) -> Message:
        """In a form that can be sent."""
        arrays = {name: getattr(self.batch, name) for name in HostBatch.__dataclass_fields__}
        arrays |= {f"logit_rows{i}": rows for i, rows in enumerate(self.logit_rows)}
        values = {
            "num_pieces": len(self.logit_rows),
            "are_ids_pending": self.are_ids_pending,
            "hook_patterns": self.hook_patterns,
        }
        return Message(values, {name: torch.from_numpy(array) for name, array in arrays.items()})

    @classmethod
    def from_message(cls, message: Message) -> "StepInput":
        """What `to_message` made."""
        arrays = {name: tensor.numpy() for name, tensor in message.tensors.items()}
        return cls(
            HostBatch(**{name: arrays[name] for name in HostBatch.__dataclass_fields__}),
            tuple(arrays[f"logit_rows{i}"] for i in range(message.values["num_pieces"])),
            message.values["are_ids_pending"],
            tuple(message.values["hook_patterns"]),
        )


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The size of the KV cache; the same on all ranks."""

    num_blocks: int
    block_size: int
    dtype: str


class RankWorker:
    """One rank's share of an engine."""

    def __init__(self, group: CommunicationGroup, dtype: torch.dtype, attention_backend: str = "auto") -> None:
        self.group = group
        self.device = group.info.device
        self.dtype = dtype
        self.backend = select_backend(attention_backend, self.device)
        self.cache: PagedKVCache | None = None
        self.thread_users = ThreadUsers()
        self._model: InfinilmModel | None = None
        self._memory = CacheMemory(self.device)

    @property
    def model(self) -> InfinilmModel:
        """This rank's share of the model."""
        if self._model is None:
            raise EngineError("no model is loaded")
        return self._model

    def load_model(self, config: LlamaConfig, max_len: int, source: Path | int, formats: WeightFormats = DENSE) -> None:
        """Build the model for texts of up to `max_len` tokens; read its weights from a checkpoint, or make them up
        from a seed. Those with a format stay quantised, or become so."""
        model = create_model(
            config, max_len=max_len, dtype=self.dtype, device=self.device, group=self.group, formats=formats
        )
        if isinstance(source, int):
            fill_randomly(model.weight_targets(), source)
        else:
            checkpoint = open_checkpoint(source)
            try:
                load_weights(
                    model.weight_targets(),
                    checkpoint,
                    is_ignorable=model.is_ignorable,
                    show_progress=self.group.rank == 0,
                )
            finally:
                checkpoint.close()
        self._model = model
        matrices = [shard for shard in model.weight_targets().values() if len(shard.full_shape) == 2]
        are_packed = [isinstance(shard, PackedShard) for shard in matrices]
        self.thread_users = ThreadUsers(
            torch=not all(are_packed), native=any(are_packed) or self.backend.name == "native"
        )
        self._settle_weights()

    @torch.inference_mode()
    def load_shards(self, pieces: Mapping[str, Tensor]) -> None:
        """Put this rank's pieces of some weights into the model."""
        targets = dense_weights(self.model.weight_targets())
        for name, piece in pieces.items():
            targets[name].tensor.copy_(piece)
        self._settle_weights()

    def _settle_weights(self) -> None:
        """Wait until weights are where they belong: kernels may read them before those launched earlier are done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of this rank's weights, on the host, by their names in a checkpoint."""
        return {
            name: shard.tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, shard in dense_weights(self.model.weight_targets()).items()
        }

    def reset_cache(self, shape: CacheShape | None) -> None:
        """Have an empty cache of this shape, or none. Memory that was taken before is used again if it suffices."""
        self.cache = None  # or its memory could not go before the new comes
        if shape is not None:
            self.cache = self._make_cache(shape)

    def _make_cache(self, shape: CacheShape) -> PagedKVCache:
        config = self.model.config
        return PagedKVCache(
            config.num_hidden_layers,
            shape.num_blocks,
            shape.block_size,
            kv_heads_per_rank(config.num_key_value_heads, self.group.size),
            config.head_dim,
            dtype=getattr(torch, shape.dtype),
            device=self.device,
            memory=self._memory,
        )

    @torch.inference_mode()
    def run(
        self,
        step: StepInput,
        on_logits: OnLogits,
        *,
        shape: CacheShape | None = None,
        input_ids: Tensor | None = None,
        registry: HookRegistry | None = None,
    ) -> Tensor:
        """Compute a step: the hidden states `[T, hidden]` after the final norm.

        `on_logits` gets the logits piece by piece, on rank 0. Without a cache one of the given `shape` serves this
        step alone. `input_ids` are rank 0's, where they are pending, and so is the `registry`, if there is one.
        """
        cache = self.cache
        if cache is None:
            if shape is None:
                raise EngineError("there is no cache to compute the step with; reset_cache makes one")
            cache = self._make_cache(shape)
        if step.are_ids_pending:
            if input_ids is None:
                input_ids = torch.empty(len(step.batch.input_ids), dtype=torch.int64, device=self.device)
            self.group.broadcast(input_ids)
        taps = Taps(step.hook_patterns, registry, self.group) if step.hook_patterns else None
        hidden = self.model(step.batch.to_device(self.device, input_ids), cache, self.backend, taps)
        for index, rows in enumerate(step.logit_rows):
            chosen = hidden if len(rows) == len(hidden) else hidden[to_device(self.device, rows)[0]]
            logits = self.model.compute_logits(chosen).float()
            if self.group.rank == 0:
                on_logits(index, logits)
        return hidden

    def execute(self, command: Command, message: Message) -> Message:
        """Do what a message says, on any rank but 0."""
        values: dict[str, Any] = message.values
        reply = Message()
        match command:
            case Command.LOAD if "config" in values:
                source = values["source"]
                self.load_model(
                    LlamaConfig.from_dict(values["config"]),
                    values["max_len"],
                    source if isinstance(source, int) else Path(source),
                    WeightFormats(values["formats"]),
                )
            case Command.LOAD:
                self.load_shards(message.tensors)
            case Command.RUN:
                shape = values.get("shape")
                self.run(StepInput.from_message(message), _ignore, shape=CacheShape(**shape) if shape else None)
            case Command.RESET_CACHE:
                self.reset_cache(CacheShape(**values) if values else None)
            case Command.STATE:
                reply = Message(tensors=self.state_dict())
            case _:
                raise EngineError(f"rank {self.group.rank} got the command {command!r}, which it does not know")
        return reply


def _ignore(index: int, logits: Tensor) -> None:
    """Other ranks than 0 have no logits to hand on."""
