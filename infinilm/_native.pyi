"""The native library (sources in `native/`). `infinilm.kernels.native.load` returns it if it was built.

Arrays are CPU tensors or numpy arrays, contiguous unless stated otherwise, and never copied. Arguments that do not fit
raise `ValueError` or `TypeError`. The GIL is released during computations.
"""

from collections.abc import Callable
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

Floats: TypeAlias = Tensor | npt.NDArray[np.float32]
Ints: TypeAlias = Tensor | npt.NDArray[np.int64]
AnyFloats: TypeAlias = Tensor | npt.NDArray[np.float32 | np.float16 | np.uint16 | np.uint8]
Bytes: TypeAlias = Tensor | npt.NDArray[np.uint8]

def instruction_set() -> str:
    """The instruction set that the kernels use: avx512_vnni, avx_vnni, avx2 or generic."""

def instruction_sets() -> list[str]:
    """All instruction sets that this machine has, best first."""

def use_instruction_set(name: str) -> None:
    """Choose another of the instruction sets. Must not be called while kernels run."""

def set_num_threads(count: int) -> None:
    """Set the number of threads that kernels run on, the caller's included."""

def num_threads() -> int:
    """The number of threads that kernels run on."""

class Matrix:
    """A quantised weight `[rows, columns]` in the kernels' own layout."""

    def __init__(self, format: str, rows: int, columns: int, activation_bits: int = 16) -> None:
        """A matrix of zeros. `format` is a GGML type's name, `columns` a multiple of its block.

        Rows that are multiplied with it are rounded to `activation_bits`, 8 or 16.
        """

    @property
    def format(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def activation_bits(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def load(self, blocks: Bytes, rows: Ints) -> None:
        """Load GGML's raw rows `[n, bytes]` as the matrix's `rows` `[n]`. Threads may load different rows at once."""

    def dequantize(self, rows: Ints, out: Floats) -> None:
        """Write some `rows` `[n]` as floats to `out` `[n, columns]`. Group scales of K formats are rounded to
        float16."""

def float_matrix(weight: AnyFloats, scales: Floats | None = None) -> Matrix:
    """A view of a matrix of floats `[in, out]`, of the types that `multiply_dense` takes. Lines may have any stride;
    `in` is a multiple of 16. Rows that are multiplied with it are not rounded."""

class Linear:
    """Matrices with the same number of columns. Their results are concatenated."""

    def __init__(self, matrices: list[Matrix], bias: Floats | None) -> None: ...
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    def multiply(self, x: Floats, out: Floats, accumulate: bool) -> None:
        """`out` `[T, out]` = or += `x Wᵀ + b`. `x` `[T, in]` is rounded to the matrices' `activation_bits`."""

class Experts:
    """A layer's experts: for each, gate and up as one `Linear`, and down."""

    def __init__(
        self,
        gate_up: list[Linear],
        down: list[Linear],
        activation: str = "silu",
        alpha: float = 0.0,
        limit: float = 0.0,
    ) -> None:
        """`activation` is silu, gelu_pytorch_tanh, or clamped with an `alpha` and a `limit`, see `ClampedGate`."""

    def mix(self, x: Floats, ids: Tensor, weights: Floats, out: Floats, accumulate: bool) -> None:
        """`out` `[T, hidden]` = or += the sum of the experts `ids` `[T, k]` int32 of each row of `x`, times `weights`.

        An expert that no row chose is not read. A row's experts are added in the order of its ids.
        """

def score(x: Floats, weight: Floats, out: Floats) -> None:
    """`out` `[T, out]` = `x W` in float32, with `weight` `[in, out]`; a row's sums do not depend on other rows."""

def activate(x: Floats, out: Floats, activation: str) -> None:
    """Silu or gelu_pytorch_tanh of `x` `[T, n]`, contiguous but for T, into `out`."""

def rms_norm(x: Floats, weight: Floats, out: Floats, eps: float) -> None:
    """`x / rms(x) * weight` of the rows of `x` `[T, n]`, contiguous but for T, into `out`."""

def multiply_dense(
    x: Floats,
    weight: AnyFloats,
    out: Floats,
    is_table: bool = False,
    scales: Floats | None = None,
) -> None:
    """`out` `[T, out]` = `x W` in float32, with `weight` `[in, out]`, or `x Wᵀ` with a table `[out, in]`.

    The weight is float32, float16, bfloat16 (as uint16), or codes of 8-bit floats with `scales` `[groups of in, out]`.
    A row's sums depend neither on other rows nor on the number of threads.
    """

class TokenMixer: ...

class Attention(TokenMixer):
    """Attention; `infinilm.layers.attention` explains the arguments.

    `rotary` `[max_len, dim]` has the cosines and sines for the first `dim` numbers of a head. `q_norm` and `k_norm` are
    `[head_dim]`, or `[heads * head_dim]` to norm all heads as one; `query_scale` is `[max_len]`, `sinks` `[num_heads]`,
    `v_norm` `[head_dim]`. If `qkv` computes only queries, another layer stores the keys and values in the same cache.
    With `has_gates` each query's rows of `qkv` are followed by its gate's.
    """

    def __init__(
        self,
        *,
        qkv: Linear,
        out: Linear,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary: Floats,
        is_interleaved: bool,
        query_scale: Floats | None,
        q_norm: Floats | None,
        k_norm: Floats | None,
        eps: float,
        scale: float,
        window: int | None,
        cap: float | None,
        sinks: Floats | None,
        v_norm: Floats | None = None,
        has_gates: bool = False,
    ) -> None: ...

class DeltaHeads:
    """The heads of a gated delta net, between its two products; `infinilm.layers.delta_net` defines what they compute.

    `conv` is `[width, channels of q, k and v]`, `decay` `[value_heads]` is -exp(A_log), `norm` is `[value_dim]`.
    """

    def __init__(
        self,
        *,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        conv: Floats,
        decay: Floats,
        dt_bias: Floats,
        norm: Floats,
        eps: float,
    ) -> None: ...
    def run(self, rows: Floats, cache: Cache, layer: int, step: Step) -> int:
        """Compute `rows` `[T, q, k, v, gates, rates and changes]` in place. `layer` counts the layers in the cache.

        Returns the column where the results `[T, value_heads * value_dim]` begin.
        """

class DeltaNet(TokenMixer):
    """A gated delta net. `in_` computes q, k, v, gates, rates and changes of the `heads`."""

    def __init__(self, *, in_: Linear, out: Linear, heads: DeltaHeads) -> None: ...

class LatentHeads:
    """The heads of latent attention, between its products; `infinilm.layers.latent_attention` defines them.

    `expansion` is `[heads * (plain_dim + value_dim), rank]`, `norm` `[rank]` that of the kept vectors.
    """

    def __init__(
        self,
        *,
        count: int,
        rank: int,
        plain_dim: int,
        value_dim: int,
        rotary: Floats,
        is_interleaved: bool,
        expansion: Floats,
        norm: Floats,
        eps: float,
        scale: float,
    ) -> None: ...
    def run(self, latents: Floats, queries: Floats, cache: Cache, layer: int, step: Step, out: Floats) -> None:
        """Store the new tokens' `latents` and attend with their `queries`, both of which are overwritten.

        `layer` counts the layers in the cache.
        """

class LatentAttention(TokenMixer):
    """Latent attention. `latents` computes the vectors to keep, with a `query_norm` after the inputs of `query`."""

    def __init__(
        self, *, latents: Linear, query: Linear, out: Linear, heads: LatentHeads, query_norm: Floats | None
    ) -> None: ...

class ChannelMixer: ...

class MLP(ChannelMixer):
    """`activation` is silu or gelu_pytorch_tanh."""

    def __init__(self, *, gate_up: Linear, down: Linear, activation: str) -> None: ...

class SparseMLP(ChannelMixer):
    """Experts that a router `[hidden, experts]` chooses; `infinilm.kernels.experts_torch.Routing` explains how.

    `router_bias` `[experts]` is added to the logits, `correction` to the ranks by which experts are chosen. With a
    `router_norm` `[hidden]` the router sees the layer's input after that norm, not the experts' input. The weights of
    chosen experts are multiplied by their `factors` `[experts]`. With a `shared_gate` `[hidden]`, the result of the
    shared experts is multiplied by the sigmoid of its product with the row.
    """

    def __init__(
        self,
        *,
        experts: Experts,
        router: Floats,
        router_bias: Floats | None,
        correction: Floats | None,
        top_k: int,
        renormalizes: bool,
        is_sigmoid: bool,
        num_groups: int,
        top_groups: int,
        group_best: int,
        scale: float,
        shared: MLP | None,
        router_norm: Floats | None = None,
        factors: Floats | None = None,
        shared_gate: Floats | None = None,
    ) -> None: ...

class MixerSum(ChannelMixer):
    """The sum of several mixers of the same input, each with its own norms `[hidden]` before and after it."""

    def __init__(
        self, mixers: list[ChannelMixer], *, before: list[Floats | None], after: list[Floats | None], eps: float
    ) -> None: ...

class OwnInput:
    """`norm(projection(activation(gate(hidden)) * input))`, which is added to a layer's output."""

    def __init__(self, *, gate: Linear, projection: Linear, norm: Floats, eps: float, activation: str) -> None: ...

class Layer:
    """Two mixers with norms `[hidden]` before and after each. Each result, times `residual_scale`, is added to the
    input.

    Then `own_input`, if there is one, is added, and everything is multiplied by `scale`.
    """

    def __init__(
        self,
        token_mixer: TokenMixer,
        channel_mixer: ChannelMixer,
        *,
        before_tokens: Floats | None,
        after_tokens: Floats | None,
        before_channels: Floats | None,
        after_channels: Floats | None,
        eps: float,
        residual_scale: float,
        own_input: OwnInput | None = None,
        scale: float = 1.0,
    ) -> None: ...

class Cache:
    """The caches of the layers.

    Attention: keys and values, `[blocks, block_size, 2, kv_heads, head_dim]` each: float32, float16 or bfloat16; or
    uint8, the codes of 8-bit floats, with scales `[blocks, kv_heads, block_size, 2]` bfloat16, one per such layer.
    Latent attention: `[blocks, block_size, 1, 1, rank + rope_dim]`, no 8-bit floats.
    A delta net: float32 `[blocks, value_heads, key_dim, value_dim]` and `[blocks, channels, width - 1]`, and int64
    `[blocks]`, the number of tokens that each state has seen. Delta nets need the `block_size`.
    """

    def __init__(
        self, layers: list[Floats | list[Floats | Ints]], scales: list[Tensor] = ..., block_size: int = ...
    ) -> None: ...

class Step:
    """A step's batch, with the same arrays as `ForwardBatch`."""

    def __init__(
        self, positions: Ints, slots: Ints, block_tables: Ints, query_lens: Ints, context_lens: Ints
    ) -> None: ...
    def only_last(self, last_lens: Ints) -> Self:
        """A step for a decoder's last layer. It computes results only for the last `last_lens` new tokens of each
        request. The other tokens only store keys and values; their rows of `hidden` are invalid afterwards."""

class Decoder:
    """All layers and the final norm, if there is one."""

    def __init__(self, layers: list[Layer], norm: Floats | None, eps: float) -> None: ...
    def forward(self, hidden: Floats, cache: Cache, steps: list[Step], inputs: Floats | None = None) -> None:
        """Run all layers on `hidden` `[T, hidden]`, in place. Each layer has a step, because groups of layers keep
        their keys and values in different blocks. `inputs` `[T, layers, width]` are the layers' own inputs."""

class Generator:
    """A model that decodes several steps by itself. `embedding` and `head` are `[vocab, hidden]`."""

    def __init__(
        self,
        embedding: Matrix,
        decoder: Decoder,
        head: Linear,
        *,
        embedding_scale: float,
        logit_scale: float,
        logit_cap: float | None,
    ) -> None: ...
    def run(
        self,
        cache: Cache,
        *,
        groups: list[int],
        tables: list[Ints],
        tokens: Ints,
        starts: Ints,
        settings: Ints,
        rows: Ints,
        is_stop: npt.NDArray[np.bool_],
        drawn: Ints,
        are_finite: npt.NDArray[np.bool_],
        seconds: float,
        is_awaited: Callable[[], bool],
    ) -> int:
        """Compute the last `tokens` `[n]` of n rows, at positions `starts`, draw the next tokens, compute these, and so
        on. The tokens are written to `drawn` `[steps, n]`. Returns the number of steps, at least one.

        `tables` has the rows' block tables for all steps, one per group of layers; `groups` has each layer's index in
        it. `settings` and `rows` are those of `draw`. The run ends after a step in which a row draws a token for which
        `is_stop` is true, or if another step would take the run beyond `seconds`, or if `is_awaited`, which is called
        between steps, returns true. It ends before a step in which a row can't draw, unless that is the first step:
        then `are_finite` `[n]` says which rows could draw."""

def store(new: Floats, cache: Tensor, step: Step, scales: Tensor | None = None) -> None:
    """Store keys and values `[T, 2, kv_heads, head_dim]`, contiguous but for T, in one layer's cache."""

def attend(
    query: Floats,
    cache: Tensor,
    step: Step,
    out: Floats,
    scale: float,
    window: int | None,
    cap: float | None = None,
    sinks: Floats | None = None,
    scales: Tensor | None = None,
) -> None:
    """Attention of `query` `[T, heads, head_dim]`, contiguous but for T, to the requests' keys, into `out`."""

def draw(logits: Floats, settings: Ints, rows: Ints, positions: Ints, tokens: Ints, are_finite: Tensor) -> None:
    """Draw a token from each row of `logits` `[n, vocab]`, as `infinilm.sampling.draw` defines, into `tokens` `[n]`."""

def logprobs(logits: Floats, targets: Ints, ids: Ints, values: Floats) -> None:
    """For each row of `logits` `[n, vocab]`, write the rank of its target and then the k likeliest tokens to `ids`
    `[n, 1 + k]`, and the log-probabilities of the target and of these tokens to `values` `[n, 1 + k]`. Equal logits are
    ordered by index."""

def cap_logits(logits: Floats, cap: float) -> None:
    """Apply `cap * tanh(x / cap)` to the `logits` `[n, vocab]`, in place."""

class Strings:
    """Texts, such as a vocabulary's tokens, without a Python object for each."""

    def __init__(self, data: Bytes, position: int, count: int, end: int) -> None:
        """An array of a GGUF header: each text follows its length. It must not go beyond `end`."""

    @staticmethod
    def of(texts: list[str]) -> Strings: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> str: ...
    @property
    def stored_bytes(self) -> int:
        """The size of the array in a GGUF header, in bytes."""

    @property
    def longest(self) -> int:
        """The number of characters of the longest text."""

class BPE:
    """Byte pair encoding. A token's id is its index. If several have the same text, only the last one has a text."""

    def __init__(
        self,
        tokens: Strings,
        *,
        merges: Strings | None,
        scores: npt.NDArray[np.float64] | None,
        can_result: Bytes | None,
        ignores_merges: bool,
        has_byte_fallback: bool,
        unknown: int | None,
    ) -> None:
        """`merges` are "left right", best first. Without them, all pairs are merged that form a token with
        `can_result`, the highest of `scores` first, then the longer left part, then the longer right part.
        """

    def find(self, text: str) -> int | None:
        """The id of the token with that text."""

    def content(self, id: int) -> str | None:
        """The text of a token."""

    def encode(self, words: list[str]) -> list[int]:
        """The tokens of some words. Words are not merged with each other."""

    def add_tokens(self, ids: list[int], control_ids: list[int]) -> None:
        """Add tokens that `split` finds. It finds those in `control_ids` only with `with_control`."""

    def split(self, text: str, with_control: bool) -> list[str | int]:
        """The added tokens in a text as ids, found from the left, longest first, and the texts between them."""
