"""The assembly of a decoder model: embedding, layers of mixers and norms, final norm, output head.

A family's file (such as `causal_lm.py`) says which mixers its layers have; the mixers are in `layers/`.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from infinilm.attention import AttentionBackend, ForwardBatch, TorchAttention
from infinilm.cache.paged import Cache
from infinilm.cache.specs import LatentSpec, StateSpec
from infinilm.debug.taps import Taps
from infinilm.distributed.group import SINGLE, CommunicationGroup
from infinilm.distributed.shard import PackedShard, Shard, WeightShard
from infinilm.kernels import native
from infinilm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from infinilm.layers.formats import DENSE, LayerOptions, WeightFormats, below, is_native
from infinilm.layers.formats.float8 import Float8Part
from infinilm.layers.linear import Linear
from infinilm.layers.mixer import ForwardContext, Mixer
from infinilm.layers.moe import Experts
from infinilm.layers.names import PRE_NORMS, LayerNorms
from infinilm.layers.norm import RMSNorm
from infinilm.layers.rotary_embedding import RotaryEmbedding
from infinilm.layers.state_plan import check_states, plan_states
from infinilm.models.base import InfinilmModel
from infinilm.models.config import ModelConfig
from infinilm.models.dense import LlamaConfig
from infinilm.models.native_model import (
    EMBEDDING,
    HEAD,
    NativeDecoder,
    Rotary,
    are_packed,
    is_described,
    stays_dense,
)
from infinilm.models.stages import Stage

PLAIN = (bool, int, float, str, type(None))
"""The types of attributes that count as settings of a module; see `_kind`."""


class DecoderLayer(nn.Module):
    """A token mixer and a channel mixer, each between norms, scaled and added to its input."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        token_mixer: Mixer,
        channel_mixer: Mixer,
        options: LayerOptions,
        *,
        norms: LayerNorms = PRE_NORMS,
        norm_class: type[RMSNorm] = RMSNorm,
        residual_scale: float = 1.0,
    ) -> None:
        """A mixer's result is multiplied by `residual_scale` before it is added."""
        super().__init__()
        self.layer, self.token_mixer, self.channel_mixer = layer, token_mixer, channel_mixer
        self.residual_scale = residual_scale
        kind: dict[str, Any] = {"dtype": options["dtype"], "device": options["device"]}
        self._norms = {name: norm_class(config.hidden_size, config.rms_norm_eps, **kind) for name in norms if name}
        for name, norm in self._norms.items():
            self.add_module(name, norm)
        # The norms before and after each mixer.
        found = [None if name is None else self._norms[name] for name in norms]
        self._token_norms, self._channel_norms = tuple(found[:2]), tuple(found[2:])
        self._is_plain = norm_class is RMSNorm and norms == PRE_NORMS and residual_scale == 1

    def forward(self, hidden: Tensor, step: ForwardContext) -> Tensor:
        """`[T, hidden]` to `[T, hidden]`."""
        hidden = self._mix(self.token_mixer, hidden, step, *self._token_norms)
        if step.taps is not None:
            step.taps.see("after_attention_residual", hidden, self.layer)
        hidden = self._mix(self.channel_mixer, hidden, step, *self._channel_norms)
        if step.taps is not None:
            step.taps.see("output", hidden, self.layer)
        return hidden

    def _mix(
        self, mixer: Mixer, hidden: Tensor, step: ForwardContext, before: RMSNorm | None, after: RMSNorm | None
    ) -> Tensor:
        if self._is_plain:
            added: Tensor = mixer(hidden, step, hidden, before)  # the mixer may fuse norm and residual
            return added
        mixed = self._mixed(mixer, hidden, step, before, after)
        return hidden + (mixed if self.residual_scale == 1 else mixed * self.residual_scale)

    def _mixed(
        self, mixer: Mixer, hidden: Tensor, step: ForwardContext, before: RMSNorm | None, after: RMSNorm | None
    ) -> Tensor:
        """The result of a mixer and its norms, without the residual."""
        x = hidden if before is None else before(hidden)
        if before is not None and step.taps is not None:
            point = "input_layernorm" if mixer is self.token_mixer else "post_attention_layernorm"
            step.taps.see(point, x, self.layer)
        mixed: Tensor = mixer(x, step)
        return mixed if after is None else after(mixed)

    def weight_targets(self, prefix: str) -> dict[str, Shard]:
        """The weights to load, by name."""
        return {
            **{f"{prefix}{name}.weight": WeightShard.whole(norm.weight) for name, norm in self._norms.items()},
            **self.token_mixer.weight_targets(prefix),
            **self.channel_mixer.weight_targets(prefix),
        }


class Decoder(nn.Module):
    """An `InfinilmModel` whose subclass chooses the mixers of each layer.

    `max_len` is the longest text it will compute (default: what it was trained for). The ranks of `group` share it.
    `formats` says which matrices stay quantised. A `stage` holds some of the layers; the first stage also has the
    embedding, the last one the final norm and the head.
    """

    norms: ClassVar[LayerNorms] = PRE_NORMS
    norm_class: ClassVar[type[RMSNorm]] = RMSNorm
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer
    body_prefix: ClassVar[str] = "model."
    """The prefix of all weights in a checkpoint except the head's."""
    updates_cache: ClassVar[bool] = True
    """Whether the model calls `Cache.update` if a cache class overrides it."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_len: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        group: CommunicationGroup = SINGLE,
        formats: WeightFormats = DENSE,
        stage: Stage | None = None,
    ) -> None:
        super().__init__()
        config.validate()
        self.config, self.dtype, self.group = config, dtype, group
        self.stage = stage = stage or Stage.whole(config.num_hidden_layers)
        options = LayerOptions(dtype=dtype, device=device, group=group, formats=formats)
        body = below(options, self.body_prefix)
        sizes = (config.vocab_size, config.hidden_size)
        self.embed_tokens: VocabParallelEmbedding | None = None
        if stage.is_first or (stage.is_last and config.tie_word_embeddings):
            self.embed_tokens = VocabParallelEmbedding(*sizes, **below(body, "embed_tokens."))
        self.rotaries = build_rotaries(config, stage.layers, max_len, dtype=dtype, device=device)
        self.layers = nn.ModuleList(self.build_layer(layer, below(body, f"layers.{layer}.")) for layer in stage.layers)
        self.norm: RMSNorm | None = None
        self.lm_head: ParallelLMHead | None = None
        if stage.is_last:
            self.norm = self.norm_class(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        if stage.is_last and not config.tie_word_embeddings:
            self.lm_head = ParallelLMHead(*sizes, **below(options, "lm_head."))
        self._windows = {config.window(layer) for layer in stage.layers}
        self._skipped: frozenset[int] = frozenset()
        """Indices of layers that are not computed, see `skipping_like_layers`."""
        self.build_more(body)

    def build_more(self, options: LayerOptions) -> None:
        """Make the parts that a family has besides the layers."""

    def build_layer(self, layer: int, options: LayerOptions) -> DecoderLayer:
        """Make a layer."""
        mixers = self.token_mixer(layer, options), self.channel_mixer(layer, options)
        scale = self.config.residual_scale
        return self.layer_class(
            self.config, layer, *mixers, options, norms=self.norms, norm_class=self.norm_class, residual_scale=scale
        )

    def token_mixer(self, layer: int, options: LayerOptions) -> Mixer:
        """Make the token mixer of a layer."""
        raise NotImplementedError

    def channel_mixer(self, layer: int, options: LayerOptions) -> Mixer:
        """Make the channel mixer of a layer."""
        raise NotImplementedError

    def layer_inputs(self, batch: ForwardBatch, hidden: Tensor) -> Tensor | None:  # noqa: ARG002 - most have none
        """The layers' own inputs `[T, layers, …]`, computed from the embeddings `[T, hidden]`; None: there are none."""
        return None

    def forward(
        self,
        batch: ForwardBatch,
        cache: Cache,
        backend: AttentionBackend,
        taps: Taps | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """See `InfinilmModel`. Stages after the first get the previous stage's result as `hidden` `[T, hidden]`."""
        is_native = taps is None and backend.name == "native" and cache.only_stores and self._native is not None
        steps = self._steps(batch, cache, backend, taps)
        if hidden is None:
            assert self.embed_tokens is not None
            hidden = self.embed_tokens(batch.input_ids)
            if (scale := self.config.embedding_scale) != 1:
                hidden = hidden * torch.tensor(scale, dtype=hidden.dtype)  # the scale is rounded too
            if taps is not None:
                taps.see("embed_tokens", hidden)
        if is_native:
            assert self._native is not None
            ids, rows = native.arrays_of(batch.input_ids, hidden)
            plans = [step.plan for step in steps]
            if self.stage.is_last and batch.host is not None and batch.host.last_lens is not None:
                plans[-1] = plans[-1].only_last(batch.host.last_lens)
            self._native.forward(ids, rows, cache.native, plans)
            return hidden
        inputs = self.layer_inputs(batch, hidden)
        for index, (layer, step) in enumerate(zip(self.layers, steps, strict=True)):
            if index in self._skipped:
                continue
            hidden = layer(hidden, step) if inputs is None else layer(hidden, step, inputs[:, index])
        if self.norm is None:
            return hidden
        hidden = self.norm(hidden)
        if taps is not None:
            taps.see("final_norm", hidden)
        return hidden

    def _steps(
        self, batch: ForwardBatch, cache: Cache, backend: AttentionBackend, taps: Taps | None
    ) -> list[ForwardContext]:
        """The context of each layer's group. Groups of attention layers with the same block tables share a context.

        With the native backend, recurrent groups have the same kind of plan as attention groups.
        """
        parts = batch.of_groups() if batch.more_groups else [batch] * len(cache.groups)
        steps: list[ForwardContext] = []
        shared: ForwardContext | None = None
        for index, (group, part) in enumerate(zip(cache.groups, parts, strict=True)):
            if shared is not None and not isinstance(group.spec, StateSpec):
                steps.append(shared)
                continue
            if isinstance(group.spec, StateSpec) and backend.name != "native":
                made = batch.state_plans
                plan: Any = plan_states(batch, cache, index) if made is None else made[index]
            else:
                if isinstance(group.spec, StateSpec):
                    check_states(batch, cache, index)
                elif isinstance(group.spec, LatentSpec) and backend.name not in ("native", "triton"):
                    backend = TorchAttention()
                windows = {group.spec.window} if batch.more_groups else self._windows
                plan = backend.prepare(part, block_size=cache.block_size, windows=windows, dtype=self.dtype)
            steps.append(ForwardContext(part, cache, backend, plan, taps))
            if not batch.more_groups and not isinstance(group.spec, StateSpec):
                shared = steps[-1]
        return [steps[cache.group_of[layer]] for layer in self.stage.layers]

    @cached_property
    def _native(self) -> Any | None:
        """Computes all layers and the final norm in one call of the native library; None if the library can't.

        It is made at its first use, which is after the weights were loaded.
        """
        if native.load() is None or self.group.size > 1 or self.dtype != torch.float32:
            return None
        if not is_described(self.config, type(self)):
            return None
        targets = {name: shard for name, shard in self.weight_targets().items() if name not in (EMBEDDING, HEAD)}
        weights = {name: _to_array_or_matrix(name, shard) for name, shard in targets.items()}
        matrices = [weight for weight in weights.values() if not isinstance(weight, np.ndarray)]
        bits = {matrix.activation_bits for matrix in matrices if matrix is not None}
        if None in matrices or len(bits) > 1 or not are_packed(weights):
            return None
        rotaries = {layer: _to_native(rotary) for layer, rotary in self.rotaries.items()}
        return NativeDecoder(cast(LlamaConfig, self.config), weights, rotaries, self.stage.layers)

    def note_new_weights(self) -> None:
        """Call this after replacing weights: the native library's layers keep copies of some vectors."""
        self.__dict__.pop("_native", None)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `InfinilmModel`."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        assert head is not None
        logits = head.logits(hidden)
        if (scale := self.config.logit_scale) != 1:
            logits = logits * scale
        if (cap := self.config.logit_cap) is not None:
            if logits.device.type == "cpu" and logits.dtype == torch.float32 and native.load() is not None:
                if logits.numel():  # only rank 0 has logits
                    logits = logits.contiguous()
                    native.load_library().cap_logits(*native.arrays_of(logits), cap)
            else:
                logits = (logits / cap).tanh_().mul_(cap)
        return logits

    def weight_targets(self) -> dict[str, Shard]:
        """See `InfinilmModel`."""
        targets: dict[str, Shard] = {}
        if self.embed_tokens is not None:
            targets |= self.embed_tokens.weight_targets(f"{self.body_prefix}embed_tokens.")
        for index, layer in zip(self.stage.layers, self.layers, strict=True):
            assert isinstance(layer, DecoderLayer)
            targets |= layer.weight_targets(f"{self.body_prefix}layers.{index}.")
        if self.norm is not None:
            targets[f"{self.body_prefix}norm.weight"] = WeightShard.whole(self.norm.weight)
        if self.lm_head is not None:
            targets |= self.lm_head.weight_targets("lm_head.")
        return targets

    def is_ignorable(self, name: str) -> bool:
        """See `InfinilmModel`."""
        return self.stage.count > 1 or self.config.is_ignorable(name)  # a staged model's names were checked before

    def num_bytes(self) -> int:
        """See `InfinilmModel`."""
        kinds = Linear | VocabParallelEmbedding | ParallelLMHead | Experts
        matrix_bytes = sum(module.matrix.num_bytes for module in self.modules() if isinstance(module, kinds))
        others = sum(weight.nbytes for name, weight in self.named_parameters() if ".matrix." not in name)
        return matrix_bytes + others + sum(rotary.table.nbytes for rotary in set(self.rotaries.values()))


def _to_array_or_matrix(name: str, shard: Shard) -> Any | None:
    """A weight in the form that `NativeDecoder` takes; None if there is none."""
    if isinstance(shard, PackedShard):
        if isinstance(shard.matrix, Float8Part):
            return shard.matrix.as_native()
        return shard.matrix if is_native(shard) else None
    if len(shard.full_shape) != 2 or stays_dense(name):
        return native.arrays_of(shard.tensor)[0]
    return native.float_matrix(shard.tensor.detach().t())


def _to_native(rotary: RotaryEmbedding) -> Rotary:
    scale = rotary.query_scale
    scales = None if scale is None else scale.float().flatten().numpy()
    return Rotary(rotary.table.numpy(), scales, rotary.is_interleaved)


def build_rotaries(
    config: ModelConfig,
    layers: Iterable[int],
    max_len: int | None,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> dict[int, RotaryEmbedding]:
    """The rotary embedding of each layer, for texts of up to `max_len` tokens (None: what the model was trained for).

    Layers with equal settings share one.
    """
    found: list[tuple[Mapping[str, Any], RotaryEmbedding]] = []
    rotaries: dict[int, RotaryEmbedding] = {}
    for layer in layers:
        rope = {**config.rope(layer), "head_dim": config.layer_head_dim(layer)}
        rotary = next((each for settings, each in found if settings == rope), None)
        if rotary is None:
            rotary = RotaryEmbedding(
                config.layer_head_dim(layer),
                rope,
                max_len=max_len or config.max_position_embeddings,
                max_position_embeddings=config.max_position_embeddings,
                dtype=dtype,
                device=device,
            )
            found.append((rope, rotary))
        rotaries[layer] = rotary
    return rotaries


@contextmanager
def skipping_like_layers(model: InfinilmModel) -> Iterator[None]:
    """Within this context, compute only the first of the layers that launch the same kernels.

    Results are meaningless, but all kernels get loaded.
    """
    if not isinstance(model, Decoder):
        yield
        return
    kinds: dict[Any, int] = {}
    firsts = {kinds.setdefault(_kind(layer), index) for index, layer in enumerate(model.layers)}
    model._skipped = frozenset(range(len(model.layers))) - firsts
    try:
        yield
    finally:
        model._skipped = frozenset()


def _kind(layer: nn.Module) -> Any:
    """A key that is equal for layers that launch the same kernels: their modules, settings and shapes."""
    return tuple(
        (
            name,
            type(module),
            tuple((key, value) for key, value in vars(module).items() if key != "layer" and isinstance(value, PLAIN)),
            tuple((each.shape, each.dtype) for each in module.parameters(recurse=False)),
        )
        for name, module in layer.named_modules()
    )
