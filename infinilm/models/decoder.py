"""The decoder that all supported architectures share: Llama, and with a flag here and there its relatives."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinilm.attention import AttentionBackend, ForwardBatch
from infinilm.cache.paged import PagedKVCache
from infinilm.debug.taps import Taps
from infinilm.distributed.group import SINGLE, CommunicationGroup
from infinilm.distributed.shard import Shard, WeightShard
from infinilm.kernels import native
from infinilm.kernels.support import has_kernels
from infinilm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from infinilm.layers.formats import DENSE, WeightFormats
from infinilm.layers.linear import GateUpParallelLinear, Linear, QKVParallelLinear, RowParallelLinear
from infinilm.layers.norm import RMSNorm
from infinilm.layers.rotary import RotaryEmbedding, apply_rotary
from infinilm.models.config import LlamaConfig


@dataclass(frozen=True)
class _Step:
    """What all layers of one forward pass share."""

    batch: ForwardBatch
    rotary: RotaryEmbedding
    cache: PagedKVCache
    backend: AttentionBackend
    plan: Any  # the backend's own, of this batch
    taps: Taps | None  # None: no hook is to see anything

    @cached_property
    def angles(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the batch's positions, `[T, 1, head_dim]` each."""
        angles: tuple[Tensor, Tensor] = self.rotary(self.batch.positions)
        return angles


class Attention(nn.Module):
    """Self-attention of one layer; `num_heads` query heads share `num_kv_heads` keys and values."""

    def __init__(
        self,
        config: LlamaConfig,
        layer: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        group: CommunicationGroup,
        formats: WeightFormats,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.scale = self.head_dim**-0.5
        self.window = config.window(layer)
        self.qkv = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=config.attention_bias or config.qkv_bias,
            dtype=dtype,
            device=device,
            group=group,
            formats=formats,
        )
        self.num_heads, self.num_kv_heads = self.qkv.num_heads, self.qkv.num_kv_heads  # of this rank
        self._has_kernels = has_kernels(device)
        self.out = RowParallelLinear(
            config.num_attention_heads * self.head_dim,
            {"o_proj": config.hidden_size},
            bias=config.attention_bias,
            dtype=dtype,
            device=device,
            group=group,
            formats=formats,
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=dtype, device=device)

    def forward(self, hidden: Tensor, norm: RMSNorm, step: _Step) -> Tensor:
        """`hidden` `[T, hidden]` plus what attention makes of it after the `norm`."""
        taps, cache = step.taps, step.cache.layer(self.layer)
        if taps is None:
            qkv = self.qkv(hidden, norm=norm)
        else:
            normed = norm(hidden)
            taps.see("input_layernorm", normed, self.layer)
            qkv = self.qkv(normed)
        heads = qkv.view(len(hidden), -1, self.head_dim)  # [T, heads of q, k and v, head_dim]
        if taps is not None:
            self._show(taps, heads, "after_proj")
        q = self._rope_and_store_kv(heads, cache, step)
        attended = step.backend.attend(q, cache, step.plan, scale=self.scale, window=self.window).flatten(1)
        if taps is None:
            added: Tensor = self.out(attended, hidden)
            return added
        output: Tensor = self.out(attended)
        taps.see("attention_output", output, self.layer)
        return output.add_(hidden)

    def _rope_and_store_kv(self, heads: Tensor, cache: Tensor, step: _Step) -> Tensor:
        """Turn queries and keys by their positions and store keys and values: the queries `[T, heads, head_dim]`."""
        if self._has_kernels and step.taps is None:
            from infinilm.kernels.rope_store import rope_store

            return rope_store(
                heads,
                step.batch.positions,
                step.rotary.table,
                step.batch.slot_mapping,
                cache,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                q_norm=None if self.q_norm is None else self.q_norm.weight,
                k_norm=None if self.k_norm is None else self.k_norm.weight,
                eps=0.0 if self.q_norm is None else self.q_norm.eps,
                marks_nonfinite=getattr(step.plan, "has_prompts", True) or self.window is not None,
            )
        qk = heads[:, : -self.num_kv_heads]
        normed = qk
        if self.q_norm is not None and self.k_norm is not None:
            normed = torch.cat((self.q_norm(qk[:, : self.num_heads]), self.k_norm(qk[:, self.num_heads :])), dim=1)
        apply_rotary(normed, *step.angles, out=qk)
        if step.taps is not None:
            self._show(step.taps, heads, "after_rope")
        kv = heads[:, self.num_heads :].view(len(heads), 2, self.num_kv_heads, self.head_dim)
        step.backend.store(kv, cache, step.plan)
        return heads[:, : self.num_heads]

    def _show(self, taps: Taps, heads: Tensor, stage: str) -> None:
        """Let hooks see queries and keys and, before they are turned, values."""
        q, k, v = torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        shown = {"q": (q, 1), "k": (k, self.qkv.num_copies)}
        if stage == "after_proj":
            shown["v"] = (v, self.qkv.num_copies)
        for name, (tensor, num_copies) in shown.items():
            # A projection is seen as the matrix's outputs, what is turned as heads; both are views of `heads`.
            view = tensor.view(len(tensor), -1) if stage == "after_proj" else tensor
            point = f"attention_{name}_{stage}"
            taps.see(point, view, self.layer, is_shared_out=True, num_copies=num_copies)

    def weight_targets(self, prefix: str) -> dict[str, Shard]:
        """The weights to load, by name."""
        targets = self.qkv.weight_targets(prefix) | self.out.weight_targets(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            targets[f"{prefix}q_norm.weight"] = WeightShard.whole(self.q_norm.weight)
            targets[f"{prefix}k_norm.weight"] = WeightShard.whole(self.k_norm.weight)
        return targets


class MLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(
        self,
        config: LlamaConfig,
        layer: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        group: CommunicationGroup,
        formats: WeightFormats,
    ) -> None:
        super().__init__()
        self.layer = layer
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up = GateUpParallelLinear(
            hidden, inner, bias=config.mlp_bias, dtype=dtype, device=device, group=group, formats=formats
        )
        self.down = RowParallelLinear(
            inner, {"down_proj": hidden}, bias=config.mlp_bias, dtype=dtype, device=device, group=group, formats=formats
        )

    def forward(self, hidden: Tensor, norm: RMSNorm, step: _Step) -> Tensor:
        """`hidden` `[T, hidden]` plus what the MLP makes of it after the `norm`."""
        taps = step.taps
        if taps is None:
            added: Tensor = self.down(self.gate_up.activated(hidden, norm), hidden)
            return added
        normed = norm(hidden)
        taps.see("post_attention_layernorm", normed, self.layer)
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        taps.see("mlp_gate_proj", gate, self.layer, is_shared_out=True)
        taps.see("mlp_up_proj", up, self.layer, is_shared_out=True)
        inner = F.silu(gate).mul_(up)
        taps.see("mlp_intermediate", inner, self.layer, is_shared_out=True)
        output: Tensor = self.down(inner)
        taps.see("mlp_output", output, self.layer)
        return output.add_(hidden)

    def weight_targets(self, prefix: str) -> dict[str, Shard]:
        """The weights to load, by name."""
        return self.gate_up.weight_targets(prefix) | self.down.weight_targets(prefix)


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm and added to what came in."""

    def __init__(
        self,
        config: LlamaConfig,
        layer: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        group: CommunicationGroup,
        formats: WeightFormats,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.self_attn = Attention(
            config, layer, dtype=dtype, device=device, group=group, formats=formats.below("self_attn.")
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.mlp = MLP(config, layer, dtype=dtype, device=device, group=group, formats=formats.below("mlp."))

    def forward(self, hidden: Tensor, step: _Step) -> Tensor:
        """`[T, hidden]` to `[T, hidden]`."""
        hidden = self.self_attn(hidden, self.input_layernorm, step)
        if step.taps is not None:
            step.taps.see("after_attention_residual", hidden, self.layer)
        hidden = self.mlp(hidden, self.post_attention_layernorm, step)
        if step.taps is not None:
            step.taps.see("output", hidden, self.layer)
        return hidden

    def weight_targets(self, prefix: str) -> dict[str, Shard]:
        """The weights to load, by name."""
        return {
            f"{prefix}input_layernorm.weight": WeightShard.whole(self.input_layernorm.weight),
            f"{prefix}post_attention_layernorm.weight": WeightShard.whole(self.post_attention_layernorm.weight),
            **self.self_attn.weight_targets(f"{prefix}self_attn."),
            **self.mlp.weight_targets(f"{prefix}mlp."),
        }

    def to_native(self) -> Any | None:
        """This layer as one of the native library's; None unless all its matrices are quantised."""
        attention, mlp, library = self.self_attn, self.mlp, native.load()
        linears = {"qkv": attention.qkv, "out": attention.out, "gate_up": mlp.gate_up, "down": mlp.down}
        matrices = {name: each.matrix.to_native(each.bias) for name, each in linears.items()}
        if library is None or None in matrices.values():
            return None
        return library.Layer(
            **matrices,
            input_norm=self.input_layernorm.weight,
            q_norm=None if attention.q_norm is None else attention.q_norm.weight,
            k_norm=None if attention.k_norm is None else attention.k_norm.weight,
            post_norm=self.post_attention_layernorm.weight,
            eps=self.input_layernorm.eps,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            window=attention.window,
        )


class CausalLM(nn.Module):
    """The whole model; see `InfinilmModel` for the life it leads.

    `max_len` is the longest text it will be asked to compute (default: what it was trained for), `group` the ranks
    over which it is shared out, `formats` which of its matrices are to stay quantised.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        max_len: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        group: CommunicationGroup = SINGLE,
        formats: WeightFormats = DENSE,
    ) -> None:
        super().__init__()
        config.validate()
        self.config = config
        self.dtype = dtype
        self.group = group
        vocab_size, hidden_size = config.vocab_size, config.hidden_size
        self.embed_tokens = VocabParallelEmbedding(
            vocab_size,
            hidden_size,
            dtype=dtype,
            device=device,
            group=group,
            formats=formats.below("model.embed_tokens."),
        )
        self.rotary = RotaryEmbedding(
            config.head_dim,
            config.rope_parameters,
            max_len=max_len or config.max_position_embeddings,
            max_position_embeddings=config.max_position_embeddings,
            dtype=dtype,
            device=device,
        )
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(
            DecoderLayer(
                config, layer, dtype=dtype, device=device, group=group, formats=formats.below(f"model.layers.{layer}.")
            )
            for layer in layers
        )
        self.norm = RMSNorm(hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = ParallelLMHead(
                vocab_size, hidden_size, dtype=dtype, device=device, group=group, formats=formats.below("lm_head.")
            )
        self._windows = {config.window(layer) for layer in layers}

    def forward(
        self, batch: ForwardBatch, cache: PagedKVCache, backend: AttentionBackend, taps: Taps | None = None
    ) -> Tensor:
        """Compute the batch's tokens, storing their keys and values: `[T, hidden]` after the final norm."""
        steps = self._steps(batch, cache, backend, taps)
        hidden: Tensor = self.embed_tokens(batch.input_ids)
        if taps is not None:
            taps.see("embed_tokens", hidden)
        if taps is None and backend.name == "native" and len(cache.groups) == 1 and self._native is not None:
            self._native.forward(hidden, cache.tensors[0], steps[0].plan)
            return hidden
        for layer, step in zip(self.layers, steps, strict=True):
            hidden = layer(hidden, step)
        hidden = self.norm(hidden)
        if taps is not None:
            taps.see("final_norm", hidden)
        return hidden

    def _steps(
        self, batch: ForwardBatch, cache: PagedKVCache, backend: AttentionBackend, taps: Taps | None
    ) -> list[_Step]:
        """By layer: its group's step. Groups that have the same block tables share one."""
        windows = [{group.spec.window} for group in cache.groups] if batch.more_groups else [self._windows]
        steps = [
            _Step(
                part,
                self.rotary,
                cache,
                backend,
                backend.prepare(part, block_size=cache.block_size, windows=own, dtype=self.dtype),
                taps,
            )
            for part, own in zip(batch.of_groups(), windows, strict=True)
        ]
        return [steps[group] for group in cache.group_of] if batch.more_groups else steps * len(self.layers)

    @cached_property
    def _native(self) -> Any | None:
        """All layers and the final norm in one call of the native library; None unless it can compute all of them.

        Made when it is first needed, which is after the weights were loaded.
        """
        if self.group.size > 1:
            return None
        layers = [layer.to_native() for layer in self.layers if isinstance(layer, DecoderLayer)]
        library = native.load()
        if library is None or None in layers:
            return None
        return library.Decoder(layers, self.rotary.table, self.norm.weight)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The next token's logits for chosen rows of `forward`'s result: `[n, hidden]` to `[n, vocab]`.

        With several ranks, all must call this; rank 0 alone gets the logits.
        """
        logits: Tensor = self.embed_tokens.logits(hidden) if self.lm_head is None else self.lm_head(hidden)
        return logits

    def weight_targets(self) -> dict[str, Shard]:
        """The weights to load, by their names in a Hugging Face checkpoint."""
        targets = self.embed_tokens.weight_targets("model.embed_tokens.")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            targets |= layer.weight_targets(f"model.layers.{index}.")
        targets["model.norm.weight"] = WeightShard.whole(self.norm.weight)
        if self.lm_head is not None:
            targets |= self.lm_head.weight_targets("lm_head.")
        return targets

    def is_ignorable(self, name: str) -> bool:
        """Whether a checkpoint may hold a tensor of this name though the model has no use for it."""
        is_tied_head = self.lm_head is None and name == "lm_head.weight"
        return is_tied_head or name.endswith("rotary_emb.inv_freq")

    def num_bytes(self) -> int:
        """What weights and tables of this rank take."""
        kinds = Linear | VocabParallelEmbedding | ParallelLMHead
        matrices = [module.matrix for module in self.modules() if isinstance(module, kinds)]
        others = [weight for name, weight in self.named_parameters() if ".matrix." not in name]
        matrix_bytes = sum(matrix.num_bytes for matrix in matrices)
        return matrix_bytes + sum(weight.nbytes for weight in others) + self.rotary.table.nbytes
