"""The decoder that all supported architectures share: Llama, and with a flag here and there its relatives."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinilm.attention import AttentionBackend, ForwardBatch
from infinilm.cache.paged import PagedKVCache
from infinilm.layers.embedding import Embedding
from infinilm.layers.linear import Linear
from infinilm.layers.norm import RMSNorm
from infinilm.layers.rotary import RotaryEmbedding, apply_rotary
from infinilm.models.config import LlamaConfig


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of one forward pass share."""

    cos: Tensor  # [T, 1, head_dim]
    sin: Tensor  # [T, 1, head_dim]
    cache: PagedKVCache
    backend: AttentionBackend
    plan: Any  # the backend's own, of this batch


class Attention(nn.Module):
    """Self-attention of one layer; `num_heads` query heads share `num_kv_heads` keys and values."""

    def __init__(self, config: LlamaConfig, layer: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scale = self.head_dim**-0.5
        self.window = config.window(layer)
        q_dim, kv_dim = self.num_heads * self.head_dim, config.kv_dim()
        self.qkv = Linear(
            config.hidden_size,
            {"q_proj": q_dim, "k_proj": kv_dim, "v_proj": kv_dim},
            bias=config.attention_bias or config.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.out = Linear(q_dim, {"o_proj": config.hidden_size}, bias=config.attention_bias, dtype=dtype, device=device)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=dtype, device=device)

    def forward(self, x: Tensor, residual: Tensor, step: _Step) -> Tensor:
        """`residual` `[T, hidden]` plus what attention makes of `x` `[T, hidden]`."""
        heads = self.qkv(x).view(len(x), -1, self.head_dim)  # [T, heads of q, k and v, head_dim]
        qk = heads[:, : -self.num_kv_heads]
        normed = qk
        if self.q_norm is not None and self.k_norm is not None:
            normed = torch.cat((self.q_norm(qk[:, : self.num_heads]), self.k_norm(qk[:, self.num_heads :])), dim=1)
        apply_rotary(normed, step.cos, step.sin, out=qk)
        q, kv = heads[:, : self.num_heads], heads[:, self.num_heads :]
        cache = step.cache.layer(self.layer)
        step.backend.store(kv.view(len(x), 2, self.num_kv_heads, self.head_dim), cache, step.plan)
        attended = step.backend.attend(q, cache, step.plan, scale=self.scale, window=self.window)
        output: Tensor = self.out(attended.flatten(1), residual)
        return output

    def weight_targets(self, prefix: str) -> dict[str, Tensor]:
        """The tensors to load, by name."""
        targets = self.qkv.weight_targets(prefix) | self.out.weight_targets(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            targets |= {f"{prefix}q_norm.weight": self.q_norm.weight, f"{prefix}k_norm.weight": self.k_norm.weight}
        return targets


class MLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: LlamaConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up = Linear(
            hidden, {"gate_proj": inner, "up_proj": inner}, bias=config.mlp_bias, dtype=dtype, device=device
        )
        self.down = Linear(inner, {"down_proj": hidden}, bias=config.mlp_bias, dtype=dtype, device=device)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual` `[T, hidden]` plus what the MLP makes of `x` `[T, hidden]`."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        output: Tensor = self.down(F.silu(gate).mul_(up), residual)
        return output

    def weight_targets(self, prefix: str) -> dict[str, Tensor]:
        """The tensors to load, by name."""
        return self.gate_up.weight_targets(prefix) | self.down.weight_targets(prefix)


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm and added to what came in."""

    def __init__(self, config: LlamaConfig, layer: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.self_attn = Attention(config, layer, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.mlp = MLP(config, dtype=dtype, device=device)

    def forward(self, hidden: Tensor, step: _Step) -> Tensor:
        """`[T, hidden]` to `[T, hidden]`."""
        hidden = self.self_attn(self.input_layernorm(hidden), hidden, step)
        output: Tensor = self.mlp(self.post_attention_layernorm(hidden), hidden)
        return output

    def weight_targets(self, prefix: str) -> dict[str, Tensor]:
        """The tensors to load, by name."""
        return {
            f"{prefix}input_layernorm.weight": self.input_layernorm.weight,
            f"{prefix}post_attention_layernorm.weight": self.post_attention_layernorm.weight,
            **self.self_attn.weight_targets(f"{prefix}self_attn."),
            **self.mlp.weight_targets(f"{prefix}mlp."),
        }


class CausalLM(nn.Module):
    """The whole model; see `InfinilmModel` for the life it leads.

    `max_len` is the longest text it will be asked to compute (default: what it was trained for).
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        max_len: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        config.validate()
        self.config = config
        self.dtype = dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(
            config.head_dim,
            config.rope_parameters,
            max_len=max_len or config.max_position_embeddings,
            max_position_embeddings=config.max_position_embeddings,
            dtype=dtype,
            device=device,
        )
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(DecoderLayer(config, layer, dtype=dtype, device=device) for layer in layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(
                config.hidden_size, {"lm_head": config.vocab_size}, bias=False, dtype=dtype, device=device
            )
        self._windows = {config.window(layer) for layer in layers}
        self._num_bytes = sum(target.nbytes for target in self.weight_targets().values()) + self.rotary.table.nbytes

    def forward(self, batch: ForwardBatch, cache: PagedKVCache, backend: AttentionBackend) -> Tensor:
        """Compute the batch's tokens, storing their keys and values: `[T, hidden]` after the final norm."""
        plan = backend.prepare(batch, block_size=cache.block_size, windows=self._windows, dtype=self.dtype)
        cos, sin = self.rotary(batch.positions)
        step = _Step(cos, sin, cache, backend, plan)
        hidden: Tensor = self.embed_tokens(batch.input_ids)
        for layer in self.layers:
            hidden = layer(hidden, step)
        output: Tensor = self.norm(hidden)
        return output

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The next token's logits for chosen rows of `forward`'s result: `[n, hidden]` to `[n, vocab]` float32."""
        logits: Tensor = self.embed_tokens.logits(hidden) if self.lm_head is None else self.lm_head(hidden)
        return logits.float()

    def weight_targets(self) -> dict[str, Tensor]:
        """The tensors to load, by their names in a Hugging Face checkpoint."""
        targets: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embed_tokens.weight,
            "model.norm.weight": self.norm.weight,
        }
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            targets |= layer.weight_targets(f"model.layers.{index}.")
        if self.lm_head is not None:
            targets |= self.lm_head.weight_targets()
        return targets

    def is_ignorable(self, name: str) -> bool:
        """Whether a checkpoint may hold a tensor of this name though the model has no use for it."""
        is_tied_head = self.lm_head is None and name == "lm_head.weight"
        return is_tied_head or name.endswith("rotary_emb.inv_freq")

    def num_bytes(self) -> int:
        """What weights and tables take."""
        return self._num_bytes
