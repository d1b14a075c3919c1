"""A model without an engine that computes logits and generates. Names are those of InfiniLM's Llama module."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Never, Self

import torch
from torch import Tensor, nn

from infinilm.attention import HostBatch, select_backend
from infinilm.cache.dynamic import DynamicCache, KVShape
from infinilm.checks import check_integer
from infinilm.debug.taps import Taps
from infinilm.distributed.group import SINGLE
from infinilm.distributed.shard import WeightShard, dense_weights
from infinilm.errors import EngineError, InvalidTypeError, InvalidValueError
from infinilm.generation import GenerationMixin, GenerationStep, NextTokens
from infinilm.generation.arrays import read_rows
from infinilm.loading.checkpoint import Checkpoint, open_checkpoint
from infinilm.loading.sources import resolve
from infinilm.loading.weights import load_weights
from infinilm.models.auto import choose_device, find_eos_token_ids, make_choices
from infinilm.models.config import ModelConfig
from infinilm.models.cpu import ThreadUsers, avoid_false_amx
from infinilm.models.dense import LlamaConfig
from infinilm.models.llama_parts import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
    LlamaModelOutput,
    check_length,
    read_positions,
)
from infinilm.models.random_weights import fill_randomly
from infinilm.models.registry import create_model
from infinilm.platforms import sampling_device
from infinilm.sampling import draw_uniform
from infinilm.text.tokenizer import Tokenizer

__all__ = [
    "AutoLlamaModel",
    "LlamaAttention",
    "LlamaConfig",
    "LlamaDecoderLayer",
    "LlamaForCausalLM",
    "LlamaMLP",
    "LlamaModel",
    "LlamaModelOutput",
    "LlamaOutput",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LlamaOutput:
    """The result of a forward pass."""

    logits: Tensor
    """`[batch, kept, vocab]` float32, on the model's device: the logits of the next tokens."""
    past_key_values: DynamicCache
    """The cache of the tokens seen so far. Pass it to the next call, with the tokens that follow."""


class LlamaForCausalLM(nn.Module, GenerationMixin):
    """A callable model of any family that the decoder supports: Llama, Mistral, Qwen2, Qwen3 and registered families.

    `device`: None is the GPU if there is one, else the CPU. `dtype`: None is float32 on a CPU, else the checkpoint's.
    `dtype` and `quantization` have the same meaning as in `Config`: on a CPU a GGUF file's matrices stay quantised
    unless you set a `dtype` or quantization="none".
    Weights come from the `checkpoint`. Without one they are random: normal with the config's `initializer_range` as
    standard deviation, norms 1, biases 0.
    """

    config: ModelConfig
    tokenizer: Tokenizer | None
    """The checkpoint's tokenizer, if it has one. `generate` uses it by default."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: str | torch.dtype | None = None,
        quantization: str | None = None,
        device: str | torch.device | None = None,
        seed: int = 0,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise InvalidTypeError(f"config must be a ModelConfig, not {type(config).__name__}; read one by AutoConfig")
        check_integer("seed", seed, low=0, high=2**63 - 1)
        config.validate()
        self.config = config
        self.max_len = config.max_context_len()
        self.device = choose_device(device)
        choices = make_choices(config, checkpoint, self.device, dtype=dtype, quantization=quantization)
        self.dtype = choices.dtype
        if self.device.type == "cpu" and self.dtype != torch.float32:
            avoid_false_amx()
        self.backend = select_backend(choices.attention_backend, self.device)
        self._shape = KVShape(config.cache_specs(), choices.kv_dtype, self.device)
        self.tokenizer = None if checkpoint is None else checkpoint.tokenizer()
        self._end_ids: tuple[int, ...] | None = None
        if checkpoint is not None:
            self._end_ids = find_eos_token_ids(checkpoint, config, self.tokenizer)
        self.model = create_model(
            config, max_len=self.max_len, dtype=self.dtype, device=self.device, formats=choices.formats
        )
        self._thread_users = ThreadUsers.of(self.model, self.backend)
        self._hookable = tuple(self.modules())[1:] if self.backend.name == "native" else ()
        self._is_dense = all(isinstance(shard, WeightShard) for shard in self.model.weight_targets().values())
        if checkpoint is None:
            fill_randomly(self.model.weight_targets(), config.initializer_range, seed)
        else:
            load_weights(self.model.weight_targets(), checkpoint, is_ignorable=self.model.is_ignorable)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        quantization: str | None = None,
    ) -> Self:
        """Load a directory, a .gguf file, an alias or a hub id; None: the embedded model."""
        checkpoint = open_checkpoint(resolve(path))
        try:
            config = ModelConfig.from_dict(checkpoint.config)
            return cls(config, dtype=dtype, quantization=quantization, device=device, checkpoint=checkpoint)
        finally:
            checkpoint.close()

    def forward(
        self,
        input_ids: Any,
        position_ids: Any = None,
        past_key_values: DynamicCache | None = None,
        logits_to_keep: int | Tensor = 0,
    ) -> LlamaOutput:
        """Compute the tokens `input_ids` `[batch, seq]`, which follow the tokens in `past_key_values`.

        `input_ids` and `position_ids` are tensors, arrays or lists. `position_ids` `[batch, seq]` or `[seq]` are for
        the rotary embedding only: a token sees all earlier tokens, whatever their positions. By default they continue
        from the cache. `logits_to_keep` selects the tokens to compute logits for: a number of last tokens (0: all), or
        a tensor `[n]` of indices.
        """
        with self._thread_users.computing(torch.get_num_threads()):
            return self._forward(input_ids, position_ids, past_key_values, logits_to_keep)

    def _forward(
        self,
        input_ids: Any,
        position_ids: Any = None,
        past_key_values: DynamicCache | None = None,
        logits_to_keep: int | Tensor = 0,
    ) -> LlamaOutput:
        ids = read_rows("input_ids", input_ids, self.config.vocab_size)
        cache = DynamicCache() if past_key_values is None else past_key_values
        if not isinstance(cache, DynamicCache):
            raise InvalidTypeError(f"past_key_values must be infinilm's DynamicCache, not {type(cache).__name__}")
        num_rows, num_new = ids.shape
        start = cache.get_seq_length()
        positions = read_positions(position_ids, start, ids.shape, self.max_len)
        kept = _read_kept(logits_to_keep, num_new)
        # Later calls write to the same caches, in any mode. Only inference mode may write to memory made in any mode.
        with torch.inference_mode():
            placement, pool = cache.place(self._shape, num_rows, num_new)
            batch = HostBatch(
                input_ids=ids.reshape(-1),
                positions=positions.reshape(-1),
                slot_mapping=placement.slot_mapping,
                block_tables=placement.block_tables,
                query_lens=placement.query_lens,
                context_lens=placement.context_lens,
            )
            hidden = self.model(batch.to_device(self.device), pool, self.backend, self._taps())
            cache.advance(num_new)
        chosen = hidden.view(num_rows, num_new, -1)[:, kept]
        logits = self.model.compute_logits(chosen.flatten(0, 1)).float()
        return LlamaOutput(logits.view(num_rows, -1, logits.shape[-1]), cache)

    def _taps(self) -> Taps | None:
        """Empty taps, which make layers run one by one; None if the native library may run them in one call.

        Layers that run one by one call their modules' torch hooks, and use dense weights that were changed in place.
        """
        is_hooked = any(module._forward_hooks or module._forward_pre_hooks for module in self._hookable)
        return Taps((), None, SINGLE) if is_hooked or (self._is_dense and self._hookable) else None

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """See `torch.nn.Module`. Raises an error if the model has quantised matrices, because those are not tensors."""
        dense_weights(self.model.weight_targets())
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """See `torch.nn.Module`, and `state_dict`."""
        dense_weights(self.model.weight_targets())
        return super().load_state_dict(*args, **kwargs)

    def _start_generation(self, batch_size: int, max_len: int) -> NextTokens:  # noqa: ARG002 - any number of rows
        check_length(max_len, self.max_len)
        cache = DynamicCache()

        def next_tokens(step: GenerationStep) -> Sequence[int]:
            with self._thread_users.computing(torch.get_num_threads()):
                logits = self._forward(step.new_ids, past_key_values=cache, logits_to_keep=1).logits[:, 0]
                samples = draw_uniform(logits.to(sampling_device(self.device)), **step.sampling).to_host()
            for sample in samples:
                if sample.error is not None:
                    raise sample.error
            return [sample.token_id for sample in samples]

        return next_tokens

    def _eos_token_ids(self) -> tuple[int, ...]:
        return super()._eos_token_ids() if self._end_ids is None else self._end_ids

    def _apply(self, *_: object, **__: object) -> Never:
        raise EngineError(
            f"the model was built on {self.device} in {self.dtype} and stays so; "
            "build or load it with the device and dtype that you want"
        )


class AutoLlamaModel:
    """Loads any supported checkpoint as a `LlamaForCausalLM`."""

    def __init__(self) -> None:
        raise NotImplementedError("AutoLlamaModel is not built; call AutoLlamaModel.from_pretrained(path)")

    @staticmethod
    def from_pretrained(
        path: str | Path | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        quantization: str | None = None,
    ) -> LlamaForCausalLM:
        """`LlamaForCausalLM.from_pretrained`, plus a log line with the model, its device and the loading time."""
        start_time = perf_counter()
        model = LlamaForCausalLM.from_pretrained(path, device=device, dtype=dtype, quantization=quantization)
        logger.info(
            "%s on %s in %s, loaded in %.1f s",
            model.config.model_type,
            model.device,
            str(model.dtype).removeprefix("torch."),
            perf_counter() - start_time,
        )
        return model


def _read_kept(logits_to_keep: int | Tensor, num_new: int) -> slice | Tensor:
    """The indices of the new tokens to compute logits for."""
    if isinstance(logits_to_keep, Tensor):
        if logits_to_keep.dim() != 1:
            raise InvalidValueError(f"logits_to_keep has shape {list(logits_to_keep.shape)}; use [n], or a number")
        return torch.from_numpy(read_rows("logits_to_keep", logits_to_keep, num_new)[0])
    check_integer("logits_to_keep", logits_to_keep, low=0)
    return slice(-logits_to_keep if logits_to_keep else None, None)
