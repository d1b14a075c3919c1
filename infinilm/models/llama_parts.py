"""The parts of a Llama model as separate modules, with the names of Hugging Face's and InfiniLM's modules."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from infinilm.attention import ForwardBatch, HostBatch, select_backend
from infinilm.cache.dynamic import DynamicCache, KVShape
from infinilm.cache.paged import PagedKVCache
from infinilm.checks import check_integer
from infinilm.distributed.shard import Weights, dense_weights
from infinilm.errors import InvalidTypeError, InvalidValueError, PromptTooLongError
from infinilm.generation.arrays import IntArray, read_rows
from infinilm.layers.attention import Attention
from infinilm.layers.formats import LayerOptions
from infinilm.layers.mixer import ForwardContext
from infinilm.layers.rotary_embedding import RotaryEmbedding
from infinilm.models.auto import choose_device, choose_dtype
from infinilm.models.causal_lm import CausalLM, build_attention, build_mlp
from infinilm.models.decoder import Decoder, DecoderLayer, build_rotaries
from infinilm.models.dense import LlamaConfig
from infinilm.models.random_weights import fill_randomly


@dataclass(frozen=True, slots=True, eq=False)
class LlamaModelOutput:
    """The result of a forward pass of `LlamaModel`."""

    last_hidden_state: Tensor
    """`[batch, seq, hidden]`, after the final norm."""
    past_key_values: DynamicCache
    """The cache of the tokens seen so far. Pass it to the next call, with the tokens that follow."""


class _Part(nn.Module):
    """A part of a model, with random weights until `load_params` replaces them.

    `device`: None is the GPU if there is one, else the CPU. `dtype`: None is float32 on a CPU, else the config's.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(config, LlamaConfig):
            raise InvalidTypeError(f"config must be a LlamaConfig, not {type(config).__name__}")
        check_integer("seed", seed, low=0, high=2**63 - 1)
        config.validate()
        self.config = config
        self.max_len = config.max_context_len()
        self.device = choose_device(device)
        self.dtype = choose_dtype(dtype, config, self.device)
        self.backend = select_backend("auto", self.device)
        self._shape = KVShape(config.cache_specs(), self.dtype, self.device)
        self._build(LayerOptions(dtype=self.dtype, device=self.device))
        fill_randomly(self.weight_targets(), config.initializer_range, seed)

    def _build(self, options: LayerOptions) -> None:
        raise NotImplementedError

    def weight_targets(self) -> Weights:
        """The part's weights, by their names in the state dict of Hugging Face's module."""
        raise NotImplementedError

    def load_params(self, params: Mapping[str, Tensor]) -> None:
        """Copy all weights into the part, by their names in the state dict of Hugging Face's module."""
        targets = dense_weights(self.weight_targets())
        shapes = {name: list(shard.full_shape) for name, shard in targets.items()}
        given = {name: list(tensor.shape) for name, tensor in params.items()}
        if shapes != given:
            wrong = sorted(name for name in {*shapes, *given} if shapes.get(name) != given.get(name))
            raise InvalidValueError(
                f"params[{wrong[0]!r}] has shape {given.get(wrong[0])}, but the part's is {shapes.get(wrong[0])}; "
                f"give exactly {', '.join(shapes)}"
            )
        with torch.no_grad():
            for name, shard in targets.items():
                shard.tensor.copy_(params[name])

    def _check_hidden(self, hidden_states: Tensor) -> None:
        if not isinstance(hidden_states, Tensor) or hidden_states.shape[-1:] != (self.config.hidden_size,):
            raise InvalidValueError(f"hidden_states must be a tensor of [..., hidden_size={self.config.hidden_size}]")
        if (hidden_states.dtype, hidden_states.device) != (self.dtype, self.device):
            raise InvalidValueError(
                f"hidden_states is {hidden_states.dtype} on {hidden_states.device}, but the part computes in "
                f"{self.dtype} on {self.device}; convert it"
            )

    def _run(
        self,
        ids: IntArray,
        position_ids: Any,
        cache: DynamicCache,
        compute: Callable[[ForwardBatch, PagedKVCache], Tensor],
        layer_idx: int | None = None,
    ) -> Tensor:
        """Compute tokens that follow those in the cache, or in one of its layers. Returns `[batch, seq, hidden]`."""
        if not isinstance(cache, DynamicCache):
            raise InvalidTypeError(f"past_key_values must be infinilm's DynamicCache, not {type(cache).__name__}")
        num_rows, num_new = ids.shape
        positions = read_positions(position_ids, cache.get_seq_length(layer_idx or 0), ids.shape, self.max_len)
        with torch.inference_mode():  # the only mode that may write to caches made in any mode
            placement, pool = cache.place(self._shape, num_rows, num_new, layer_idx)
            batch = HostBatch(ids.reshape(-1), positions.reshape(-1), **asdict(placement))
            result = compute(batch.to_device(self.device), pool)
        cache.advance(num_new, layer_idx)
        return result.clone().view(num_rows, num_new, -1)  # the clone is writable in any mode


class LlamaMLP(_Part):
    """`down(silu(gate(x)) * up(x))`."""

    def _build(self, options: LayerOptions) -> None:
        self.mixer = build_mlp(self.config, 0, prefix="", **options)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[…, hidden]` to `[…, hidden]`."""
        self._check_hidden(hidden_states)
        result: Tensor = self.mixer(hidden_states.reshape(-1, hidden_states.shape[-1]))
        return result.view(hidden_states.shape)

    def weight_targets(self) -> Weights:
        """See `load_params`."""
        return self.mixer.weight_targets("")


class LlamaModel(_Part):
    """Embedding, layers and final norm: a `LlamaForCausalLM` without the head."""

    def _build(self, options: LayerOptions) -> None:
        headless = type(self.config)(**{**asdict(self.config), "tie_word_embeddings": True})
        self.decoder: Decoder = CausalLM(headless, max_len=self.max_len, **options)

    def forward(
        self, input_ids: Any, position_ids: Any = None, past_key_values: DynamicCache | None = None
    ) -> LlamaModelOutput:
        """Compute the tokens `input_ids` `[batch, seq]`, which follow the tokens in `past_key_values`."""
        ids = read_rows("input_ids", input_ids, self.config.vocab_size)
        cache = DynamicCache() if past_key_values is None else past_key_values
        hidden = self._run(ids, position_ids, cache, lambda batch, pool: self.decoder(batch, pool, self.backend))
        return LlamaModelOutput(hidden, cache)

    def weight_targets(self) -> Weights:
        """See `load_params`."""
        prefix = self.decoder.body_prefix
        return {name.removeprefix(prefix): shard for name, shard in self.decoder.weight_targets().items()}


class _LayerPart(_Part):
    """A part of one layer. It may share a cache with the same parts of other layers."""

    layer: Attention | DecoderLayer

    def __init__(self, config: LlamaConfig, layer_idx: int = 0, **options: Any) -> None:
        """See `_Part` for the options."""
        if isinstance(config, LlamaConfig):
            check_integer("layer_idx", layer_idx, low=0, high=config.num_hidden_layers - 1)
        self.layer_idx = layer_idx
        super().__init__(config, **options)

    def forward(
        self, hidden_states: Tensor, position_ids: Any = None, past_key_values: DynamicCache | None = None
    ) -> Tensor:
        """`[batch, seq, hidden]` to the same shape, for tokens that follow this layer's tokens in `past_key_values`.

        `position_ids` `[batch, seq]` or `[seq]` continue from the cache by default.
        """
        self._check_hidden(hidden_states)
        if hidden_states.dim() != 3:
            raise InvalidValueError(f"hidden_states has shape {list(hidden_states.shape)}; use [batch, seq, hidden]")

        def compute(batch: ForwardBatch, pool: PagedKVCache) -> Tensor:
            windows = {self.config.window(self.layer_idx)}
            plan = self.backend.prepare(batch, block_size=pool.block_size, windows=windows, dtype=self.dtype)
            step = ForwardContext(batch, pool, self.backend, plan, None)
            result: Tensor = self.layer(hidden_states.flatten(0, 1).clone(), step)  # layers may write to their input
            return result

        ids = np.zeros(hidden_states.shape[:2], dtype=np.int64)
        return self._run(
            ids, position_ids, DynamicCache() if past_key_values is None else past_key_values, compute, self.layer_idx
        )

    def weight_targets(self) -> Weights:
        """See `load_params`."""
        return self.layer.weight_targets("")

    def _rotary(self, options: LayerOptions) -> RotaryEmbedding:
        kind: dict[str, Any] = {"dtype": options["dtype"], "device": options["device"]}
        return build_rotaries(self.config, [self.layer_idx], self.max_len, **kind)[self.layer_idx]


class LlamaAttention(_LayerPart):
    """Self-attention of one layer."""

    def _build(self, options: LayerOptions) -> None:
        self.layer = build_attention(self.config, self.layer_idx, self._rotary(options), prefix="", **options)


class LlamaDecoderLayer(_LayerPart):
    """One layer: attention and MLP, each with a norm before it and a residual connection."""

    def _build(self, options: LayerOptions) -> None:
        attention = build_attention(self.config, self.layer_idx, self._rotary(options), **options)
        mlp = build_mlp(self.config, self.layer_idx, **options)
        self.layer = DecoderLayer(self.config, self.layer_idx, attention, mlp, options)


def check_length(num_tokens: int, max_len: int) -> None:
    """Refuse a text that is longer than the model supports."""
    if num_tokens > max_len:
        raise PromptTooLongError(
            f"the text would have {num_tokens} tokens, prompt and answer; the model takes {max_len}. "
            "Shorten the prompt or ask for fewer new tokens"
        )


def read_positions(position_ids: Any, start: int, shape: tuple[int, ...], max_len: int) -> IntArray:
    """The positions of tokens `[batch, seq]` that follow `start` others. By default they are counted from `start`."""
    check_length(start + shape[1], max_len)
    if position_ids is None:
        return np.tile(np.arange(start, start + shape[1]), (shape[0], 1))
    positions = read_rows("position_ids", position_ids, max_len)
    if positions.shape not in (shape, (1, shape[1])):
        raise InvalidValueError(
            f"position_ids has shape {list(positions.shape)}, but input_ids {list(shape)}; give one for each token"
        )
    return np.tile(positions, (shape[0] // len(positions), 1))
