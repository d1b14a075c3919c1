"""Models with only quantised matrices, run by the native library alone on NumPy arrays. This module needs no torch.

For a family with `ModelFamily.is_native`, a `LlamaConfig` or a `SparseConfig` determines the weights
(`weight_shapes`) and how the library's layers are built from them (`NativeDecoder`). The torch model of such a family
uses the same `NativeDecoder` while no hook watches its layers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from infinilm.attention.native_backend import why_not_native
from infinilm.cache.specs import StateSpec
from infinilm.distributed.shard import ArrayShard, PackedShard, ShardRange
from infinilm.kernels.native import load_library
from infinilm.kernels.routing import native_gate
from infinilm.layers.formats import WeightFormats
from infinilm.layers.formats.packed import FORMATS, MatrixOutline
from infinilm.layers.names import NATIVE_ACTIVATIONS
from infinilm.layers.rotary_tables import RotaryTable, query_scales
from infinilm.models.config import ModelConfig
from infinilm.models.dense import LlamaConfig
from infinilm.models.gemma4 import Gemma4Config
from infinilm.models.latent import DeepseekV3Config
from infinilm.models.native_delta_net import build_delta_net, delta_net_shapes, is_recurrent, why_no_delta_net
from infinilm.models.native_gemma4 import LayerInputs, build_gemma4_layer, gemma4_shapes
from infinilm.models.native_latent import EXPANSION, build_latents, latent_shapes, why_no_latents
from infinilm.models.quantization import is_router
from infinilm.models.registry import FAMILIES
from infinilm.models.sparse import SparseConfig
from infinilm.platforms import HOST

if TYPE_CHECKING:
    import torch

    from infinilm.attention.batch import HostBatch
    from infinilm.cache.host import HostCache

Floats = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
Shapes = dict[str, tuple[int, ...]]

_POSITIONS_AHEAD = 256
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class Rotary(NamedTuple):
    """The rotary embedding of a layer's queries and keys."""

    table: Any  # [max_len, dim] float32
    query_scale: Any  # [max_len] float32, or None
    is_interleaved: bool
    fill: Callable[[int], None] = lambda _: None
    """Makes sure that the table's rows for this many positions are computed."""


def weight_shapes(config: LlamaConfig) -> Shapes:
    """The shapes of a model's weights, by their names in a checkpoint."""
    shapes: Shapes = {EMBEDDING: (config.vocab_size, config.hidden_size), FINAL_NORM: (config.hidden_size,)}
    if not config.tie_word_embeddings:
        shapes[HEAD] = shapes[EMBEDDING]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}.weight": (config.hidden_size,) for name in config.norms if name}
        if is_recurrent(config, layer):
            shapes |= delta_net_shapes(config, prefix)
        elif isinstance(config, DeepseekV3Config):
            shapes |= latent_shapes(config, prefix)
        else:
            shapes |= _attention_shapes(config, layer, f"{prefix}self_attn.")
        if isinstance(config, SparseConfig) and config.is_sparse(layer):
            shapes |= _expert_shapes(config, prefix)
        else:
            shapes |= _mlp_shapes(f"{prefix}mlp.", config.hidden_size, config.mlp_size(layer), bias=config.mlp_bias)
    return shapes | gemma4_shapes(config) if isinstance(config, Gemma4Config) else shapes


def _attention_shapes(config: LlamaConfig, layer: int, prefix: str) -> Shapes:
    hidden, dim, projections = config.hidden_size, config.layer_head_dim(layer), config.projections(layer)
    q, kv = config.num_attention_heads * dim, config.layer_kv_heads(layer) * dim
    shapes: Shapes = {}
    for name, rows in zip(projections, (2 * q if config.has_gates else q, kv, kv), strict=False):
        shapes[f"{prefix}{name}.weight"] = (rows, hidden)
        if config.attention_bias or config.qkv_bias:
            shapes[f"{prefix}{name}.bias"] = (rows,)
    shapes[f"{prefix}o_proj.weight"] = (hidden, q)
    if config.out_bias:
        shapes[f"{prefix}o_proj.bias"] = (hidden,)
    if config.qk_norm:
        widths = (q, kv) if config.norms_all_heads else (dim, dim)
        names = ("q_norm", "k_norm")[: len(projections)]
        shapes |= {f"{prefix}{name}.weight": (width,) for name, width in zip(names, widths, strict=False)}
    if config.has_sinks:
        shapes[f"{prefix}sinks"] = (config.num_attention_heads,)
    return shapes


def _mlp_shapes(prefix: str, hidden: int, inner: int, names: Sequence[str] = (), *, bias: bool = False) -> Shapes:
    gate, up, down = names or ("gate_proj", "up_proj", "down_proj")
    sizes = {gate: (inner, hidden), up: (inner, hidden), down: (hidden, inner)}
    shapes: Shapes = {f"{prefix}{name}.weight": shape for name, shape in sizes.items()}
    return shapes | ({f"{prefix}{name}.bias": shape[:1] for name, shape in sizes.items()} if bias else {})


def _expert_shapes(config: SparseConfig, prefix: str) -> Shapes:
    names, hidden = config.expert_names, config.hidden_size
    prefix += names.prefix
    shapes: Shapes = {f"{prefix}{names.router}.weight": (config.num_experts, hidden)}
    if config.adds_router_bias:
        shapes[f"{prefix}{names.router}.bias"] = (config.num_experts,)
    if config.has_router_bias:
        shapes[f"{prefix}{names.router}.{names.router_bias}"] = (config.num_experts,)
    for expert in range(config.num_experts):
        parts = (names.gate, names.up, names.down)
        own = f"{prefix}experts.{expert}."
        shapes |= _mlp_shapes(own, hidden, config.expert_size, parts, bias=names.has_biases)
    if config.shared_size:
        shapes |= _mlp_shapes(f"{prefix}{names.shared}.", hidden, config.shared_size)
    if config.gates_shared:
        shapes[f"{prefix}{names.shared}_gate.weight"] = (1, hidden)
    return shapes


def stays_dense(name: str) -> bool:
    """Whether the library takes a matrix as an array, never quantised."""
    return name.endswith(EXPANSION) or is_router(name)


def is_described(config: ModelConfig, model_class: type) -> bool:
    """Whether a configuration fully describes models of this class, and the library can compute them."""
    family = FAMILIES.get(config.model_type)
    if family is None or not family.is_native or not isinstance(config, LlamaConfig):
        return False
    return _why_no_mixers(config) is None and model_class is family.builder


def are_packed(weights: Mapping[str, Any]) -> bool:
    """Whether all matrices are the library's own, except those that stay dense."""
    arrays = [name for name, weight in weights.items() if isinstance(weight, np.ndarray) and weight.ndim == 2]
    return all(map(stays_dense, arrays))


def _why_no_mixers(config: LlamaConfig) -> str | None:
    """Why the native library can't compute a model's mixers; None if it can."""
    if config.activation not in NATIVE_ACTIVATIONS:
        return f"models with hidden_act={config.activation!r}"
    return why_no_token_mixers(config, cast(Any, HOST))


def why_no_token_mixers(config: ModelConfig, device: "torch.device") -> str | None:
    """Why the native library can't run a model's token mixers, apart from their matrix products; None if it can."""
    if isinstance(config, DeepseekV3Config):
        return why_no_latents(config)
    if (reason := why_not_native(device, config.max_head_dim, config.max_group)) is not None:
        return f"models that the native library can't attend in ({reason})"
    return why_no_delta_net(config)


def why_not_alone(config: ModelConfig, formats: WeightFormats) -> str | None:
    """Why the native library can't run a model without torch, as a part of an error's text; None if it can."""
    if not FAMILIES[config.model_type].is_native or not isinstance(config, LlamaConfig):
        return f"models of model_type={config.model_type!r}"
    if (reason := _why_no_mixers(config)) is not None:
        return reason
    for name, shape in weight_shapes(config).items():
        if len(shape) != 2 or stays_dense(name):
            continue
        format = formats.by_name.get(name)
        if format not in FORMATS or shape[1] % FORMATS[format].block_columns:
            kind = "dense weights" if format is None else "8-bit floats"
            return f"{kind}, such as {name} (quantization='q8' makes them Q8_0),"
    return None


def make_rotaries(config: LlamaConfig, max_len: int) -> dict[int, Rotary]:
    """The rotary embedding of each layer. Layers with equal settings share one."""
    found: list[tuple[Mapping[str, Any], Rotary]] = []
    rotaries: dict[int, Rotary] = {}
    for layer in range(config.num_hidden_layers):
        dim = config.layer_head_dim(layer)
        rope = {**config.rope(layer), "head_dim": dim}
        rotary = next((each for settings, each in found if settings == rope), None)
        if rotary is None:
            table = RotaryTable(dim, rope, max_len, config.max_position_embeddings)
            scale = query_scales(rope, max_len)
            rotary = Rotary(table.array, scale, bool(rope.get("interleaved")), table.fill)
            found.append((rope, rotary))
        rotaries[layer] = rotary
    return rotaries


class LayerBuilder:
    """Builds the library's layers from weights by name: matrices of the library, and arrays."""

    def __init__(self, config: LlamaConfig, weights: Mapping[str, Any], rotaries: Mapping[int, Rotary]) -> None:
        self.config, self.weights, self.rotaries, self.library = config, weights, rotaries, load_library()

    def norm(self, name: str) -> Floats | None:
        weight = self.weights.get(f"{name}.weight")
        if weight is None:
            return None
        return np.asarray(1 + weight if self.config.has_zero_centred_norms else weight, dtype=np.float32)

    def linear(self, prefix: str, *names: str) -> Any:
        biases = [self.weights[f"{prefix}{name}.bias"] for name in names if f"{prefix}{name}.bias" in self.weights]
        bias = np.ascontiguousarray(np.concatenate(biases)) if biases else None
        return self.library.Linear([self.weights[f"{prefix}{name}.weight"] for name in names], bias)

    def attention(self, layer: int) -> Any:
        config, rotary, prefix = self.config, self.rotaries[layer], f"model.layers.{layer}.self_attn."
        projections, dim = config.projections(layer), config.layer_head_dim(layer)
        if "v_proj" not in projections:
            projections += projections[1:]  # the keys are also the values
        return self.library.Attention(
            qkv=self.linear(prefix, *projections),
            out=self.linear(prefix, "o_proj"),
            num_heads=config.num_attention_heads,
            num_kv_heads=config.layer_kv_heads(layer),
            head_dim=dim,
            rotary=rotary.table,
            is_interleaved=rotary.is_interleaved,
            query_scale=rotary.query_scale,
            q_norm=self.norm(f"{prefix}q_norm"),
            k_norm=self.norm(f"{prefix}k_norm"),
            eps=config.rms_norm_eps if config.qk_norm else 0.0,
            scale=dim**-0.5 if config.attention_scale is None else config.attention_scale,
            window=config.window(layer),
            cap=config.attention_cap,
            sinks=self.weights.get(f"{prefix}sinks"),
            v_norm=np.ones(dim, dtype=np.float32) if config.norms_values else None,
            has_gates=config.has_gates,
        )

    def mlp(self, prefix: str, activation: str) -> Any:
        gate_up, down = self.linear(prefix, "gate_proj", "up_proj"), self.linear(prefix, "down_proj")
        return self.library.MLP(gate_up=gate_up, down=down, activation=activation)

    def experts(self, config: SparseConfig, prefix: str) -> Any:
        names = config.expert_names
        prefix += names.prefix
        each = [f"{prefix}experts.{expert}." for expert in range(config.num_experts)]
        gate_ups = [self.linear(own, names.gate, names.up) for own in each]
        downs = [self.linear(own, names.down) for own in each]
        router = self.weights[f"{prefix}{names.router}.weight"]
        return self.library.SparseMLP(
            experts=self.library.Experts(gate_ups, downs, **native_gate(config.expert_gate)),
            router=np.ascontiguousarray(router.T),
            router_bias=self.weights.get(f"{prefix}{names.router}.bias"),
            correction=self.weights.get(f"{prefix}{names.router}.{names.router_bias}"),
            shared=self.mlp(f"{prefix}{names.shared}.", "silu") if config.shared_size else None,
            shared_gate=self.weights[f"{prefix}{names.shared}_gate.weight"][0] if config.gates_shared else None,
            **{name: value for name, value in config.routing._asdict().items() if name != "num_experts"},
        )

    def token_mixer(self, layer: int) -> Any:
        if is_recurrent(self.config, layer):
            return build_delta_net(self, self.config, layer)
        if isinstance(self.config, DeepseekV3Config):
            return build_latents(self, self.config, layer)
        return self.attention(layer)

    def layer(self, layer: int) -> Any:
        config, prefix = self.config, f"model.layers.{layer}."
        if isinstance(config, Gemma4Config):
            return build_gemma4_layer(self, config, layer)
        if isinstance(config, SparseConfig) and config.is_sparse(layer):
            channels = self.experts(config, prefix)
        else:
            channels = self.mlp(f"{prefix}mlp.", config.activation)
        norms = {place: name and self.norm(prefix + name) for place, name in config.norms._asdict().items()}
        numbers = {"eps": config.rms_norm_eps, "residual_scale": config.residual_scale}
        return self.library.Layer(self.token_mixer(layer), channels, **norms, **numbers)


class NativeDecoder:
    """Computes some layers, and the final norm if `weights` has it, in one call of the library."""

    def __init__(
        self, config: LlamaConfig, weights: Mapping[str, Any], rotaries: Mapping[int, Rotary], layers: Iterable[int]
    ) -> None:
        self._config, builder = config, LayerBuilder(config, weights, rotaries)
        norm = builder.norm(FINAL_NORM.removesuffix(".weight"))
        made = [builder.layer(layer) for layer in layers]
        self._decoder: Any = builder.library.Decoder(made, norm, config.rms_norm_eps)
        has_inputs = isinstance(config, Gemma4Config) and config.hidden_size_per_layer_input > 0
        self._inputs = LayerInputs(builder, config) if has_inputs and isinstance(config, Gemma4Config) else None

    def forward(self, token_ids: IntArray, hidden: Floats, cache: Any, steps: Sequence[Any]) -> None:
        """Compute `hidden` `[T, hidden]` in place, from the embeddings; see the library's `Decoder`."""
        inputs = None if self._inputs is None else self._inputs(token_ids, hidden)
        self._decoder.forward(hidden, cache, steps, inputs)

    def generator(self, embedding: Any, head: Any) -> Any | None:
        """The library's `Generator` for these layers, an embedding and a head.

        None if layers have their own inputs or are recurrent. A run may compute a step twice, and recurrent layers
        overwrite their states.
        """
        if self._inputs is not None or any(isinstance(spec, StateSpec) for spec in self._config.cache_specs()):
            return None
        return load_library().Generator(
            embedding,
            self._decoder,
            head,
            embedding_scale=self._config.embedding_scale,
            logit_scale=self._config.logit_scale,
            logit_cap=self._config.logit_cap,
        )


class NativeModel:
    """A model in the native library. It starts with empty weights, which are loaded through `weight_targets`."""

    def __init__(self, config: LlamaConfig, formats: WeightFormats, max_len: int, *, is_outline: bool = False) -> None:
        """With `is_outline` the quantised matrices take no memory."""
        self.config, self.formats, self.max_len = config, formats, max_len
        make: Any = MatrixOutline if is_outline else load_library().Matrix
        self.weights: dict[str, Any] = {
            name: make(formats.by_name[name], *shape, formats.bits_of(name))
            if len(shape) == 2 and not stays_dense(name)
            else np.zeros(shape, dtype=np.float32)
            for name, shape in weight_shapes(config).items()
        }
        """The library's matrices, and arrays, by name."""
        self._decoder: NativeDecoder | None = None
        self._head: Any = None
        self.generator: Any = None
        """Runs decode steps, including sampling; None if layers are recurrent or have their own inputs."""
        self._rotaries: tuple[Rotary, ...] = ()

    def weight_targets(self) -> dict[str, ArrayShard | PackedShard]:
        """All weights, by their names in a checkpoint."""
        return {
            name: ArrayShard(weight)
            if isinstance(weight, np.ndarray)
            else PackedShard.of(weight, ShardRange.whole(weight.rows), ShardRange.whole(weight.columns))
            for name, weight in self.weights.items()
        }

    def num_bytes(self) -> int:
        """The bytes of weights, and of rotary tables for `max_len` positions."""
        weights = sum(target.num_bytes for target in self.weight_targets().values())
        layers = range(self.config.num_hidden_layers)
        kinds = {(id(self.config.rope(layer)), self.config.layer_head_dim(layer)) for layer in layers}
        return weights + sum(dim for _, dim in kinds) * self.max_len * 4

    def build(self) -> None:
        """Build the layers from the weights. Call it after loading them."""
        config = self.config
        rotaries = make_rotaries(config, self.max_len)
        self._rotaries = tuple({id(each): each for each in rotaries.values()}.values())
        self._decoder = NativeDecoder(config, self.weights, rotaries, range(config.num_hidden_layers))
        self._head = load_library().Linear([self.weights[EMBEDDING if config.tie_word_embeddings else HEAD]], None)
        self.generator = self._decoder.generator(self.weights[EMBEDDING], self._head)

    def embed(self, token_ids: IntArray) -> Floats:
        """The embeddings `[T, hidden]` of tokens."""
        hidden = np.empty((len(token_ids), self.config.hidden_size), dtype=np.float32)
        self.weights[EMBEDDING].dequantize(np.ascontiguousarray(token_ids), hidden)
        if self.config.embedding_scale != 1:
            hidden *= np.float32(self.config.embedding_scale)
        return hidden

    def reach(self, position: int) -> None:
        """Prepare for tokens up to this position, and for some after it."""
        for rotary in self._rotaries:
            rotary.fill(position + _POSITIONS_AHEAD)

    def forward(self, batch: "HostBatch", token_ids: IntArray, cache: "HostCache") -> Floats:
        """Compute the batch's tokens and store their keys and values. Returns `[T, hidden]`, after the final norm."""
        hidden = self.embed(token_ids)
        self.reach(int(batch.positions.max(initial=0)))
        make_step = load_library().Step
        shared = [np.ascontiguousarray(each) for each in (batch.positions, batch.query_lens, batch.context_lens)]
        steps = [
            make_step(
                shared[0],
                np.ascontiguousarray(batch.slots_of(group)),
                np.ascontiguousarray(batch.tables_of(group)),
                *shared[1:],
            )
            for group in range(len(cache.groups))
        ]
        by_layer = [steps[group] for group in cache.group_of]
        if batch.last_lens is not None:
            by_layer[-1] = by_layer[-1].only_last(batch.last_lens)
        assert self._decoder is not None
        self._decoder.forward(token_ids, hidden, cache.native, by_layer)
        return hidden

    def compute_logits(self, hidden: Floats) -> Floats:
        """The next token's logits for some rows of the result of `forward`: `[n, hidden]` to `[n, vocab]`."""
        logits = np.empty((len(hidden), self.config.vocab_size), dtype=np.float32)
        self._head.multiply(np.ascontiguousarray(hidden), logits, False)
        if self.config.logit_scale != 1:
            logits *= np.float32(self.config.logit_scale)
        if self.config.logit_cap is not None:
            load_library().cap_logits(logits, self.config.logit_cap)
        return logits
