"""The native library (sources in `native/`); `infinilm.kernels.native.load` gives it, where it was built.

Arrays are CPU tensors or numpy arrays, contiguous where nothing else is said, and never copied. What does not fit is a
`ValueError` or a `TypeError`. The GIL is released while something is computed.
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
    """What the kernels run on: avx512_vnni, avx_vnni, avx2 or generic."""

def instruction_sets() -> list[str]:
    """All that this machine has, the best first."""

def use_instruction_set(name: str) -> None:
    """Have the kernels run on another one of them; not while they run."""

def set_num_threads(count: int) -> None:
    """Have kernels run on so many threads, the caller's included."""

def num_threads() -> int:
    """The threads that kernels run on."""

class Matrix:
    """A quantised weight `[rows, columns]` in the kernels' own layout."""

    def __init__(self, format: str, rows: int, columns: int, activation_bits: int = 16) -> None:
        """All zero; `format` is a GGML type's name, `columns` a multiple of its block.

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
        """Take GGML's raw rows `[n, bytes]`; `rows` `[n]` says where each goes. Threads may load different rows."""

    def dequantize(self, rows: Ints, out: Floats) -> None:
        """Some rows `[n]` as floats `[n, columns]`. Group scales of the K formats are rounded to float16."""

def float_matrix(weight: AnyFloats, scales: Floats | None = None) -> Matrix:
    """A matrix of floats `[in, out]` where it is, as `multiply_dense` takes it; lines may lie apart. `in` is a multiple
    of 16. Rows that are multiplied with it are not rounded."""

class Linear:
    """Matrices with as many columns, their results side by side."""

    def __init__(self, matrices: list[Matrix], bias: Floats | None) -> None: ...
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    def multiply(self, x: Floats, out: Floats, accumulate: bool) -> None:
        """`out` `[T, out]` = or += `x Wᵀ + b`, with `x` `[T, in]` rounded to 16 bits by groups of 32."""

class Experts:
    """A layer's experts: gate and up side by side, and down, of each."""

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

        An expert that no row chose is not read. A row's are added in the order of its ids.
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
    """`rotary` `[max_len, dim]` has the cosines and sines of the first `dim` numbers of a head.

    Norms of heads are `[head_dim]`, or `[heads * head_dim]` over all heads as one; `query_scale` is `[max_len]`,
    `sinks` `[num_heads]`, `v_norm` `[head_dim]`. If `qkv` gives only queries, the keys and values are those that
    another layer stores in the same cache. With `has_gates` each query's rows of `qkv` are followed by its gate's.
    `infinilm.layers.attention` says what they mean.
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

class DeltaNet(TokenMixer):
    """A gated delta net (`infinilm.layers.delta_net`). `in_` gives q, k, v, gates, rates and changes; `conv` is
    `[width, channels of q, k and v]`, `decay` `[value_heads]` -exp(A_log), `norm` `[value_dim]`."""

    def __init__(
        self,
        *,
        in_: Linear,
        out: Linear,
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

class LatentAttention(TokenMixer):
    """`infinilm.layers.latent_attention` says what it computes. `latents` gives what queries are made from, if there is
    a `query_norm` `[query_rank]`, and what is kept; `expansion` is `[heads * (plain_dim + value_dim), rank]`."""

    def __init__(
        self,
        *,
        latents: Linear,
        query: Linear,
        out: Linear,
        num_heads: int,
        rank: int,
        plain_dim: int,
        value_dim: int,
        rotary: Floats,
        is_interleaved: bool,
        expansion: Floats,
        query_norm: Floats | None,
        norm: Floats,
        eps: float,
        scale: float,
    ) -> None: ...

class ChannelMixer: ...

class MLP(ChannelMixer):
    """`activation` is silu or gelu_pytorch_tanh."""

    def __init__(self, *, gate_up: Linear, down: Linear, activation: str) -> None: ...

class SparseMLP(ChannelMixer):
    """Experts that a router `[hidden, experts]` chooses; `infinilm.kernels.experts_torch.Routing` says how.

    `router_bias` `[experts]` is added to the logits, `correction` to the ranks by which experts are chosen. With a
    `router_norm` `[hidden]` the router sees the layer's input after that norm, not what the experts see. The weights of
    chosen experts are multiplied by their `factors` `[experts]`. The result of shared experts is multiplied by the
    sigmoid of `shared_gate` `[hidden]` times the row, if there is one.
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
    """The sum of several mixers of the same input, each between norms `[hidden]` of its own."""

    def __init__(
        self, mixers: list[ChannelMixer], *, before: list[Floats | None], after: list[Floats | None], eps: float
    ) -> None: ...

class OwnInput:
    """`norm(projection(activation(gate(hidden)) * input))`, which is added to a layer's output."""

    def __init__(self, *, gate: Linear, projection: Linear, norm: Floats, eps: float, activation: str) -> None: ...

class Layer:
    """Two mixers, each between norms `[hidden]`, scaled by `residual_scale` and added to its input.

    In the end what it makes of an input of its own is added, if it has one, and all is multiplied by `scale`.
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
    """What the layers keep.

    Attention: keys and values, `[blocks, block_size, 2, kv_heads, head_dim]` each: float32, float16 or bfloat16; or
    uint8, the codes of 8-bit floats, with scales `[blocks, kv_heads, block_size, 2]` bfloat16, one for each such layer.
    Latent attention: `[blocks, block_size, 1, 1, rank + rope_dim]`, no 8-bit floats.
    A delta net: float32 `[blocks, value_heads, key_dim, value_dim]` and `[blocks, channels, width - 1]`, and int64
    `[blocks]`, the tokens that each state has seen; these need the `block_size`.
    """

    def __init__(
        self, layers: list[Floats | list[Floats | Ints]], scales: list[Tensor] = ..., block_size: int = ...
    ) -> None: ...

class Step:
    """A step's batch, as `ForwardBatch` has it."""

    def __init__(
        self, positions: Ints, slots: Ints, block_tables: Ints, query_lens: Ints, context_lens: Ints
    ) -> None: ...
    def only_last(self, last_lens: Ints) -> Self:
        """A step for a decoder's last layer: of each request only the last so many new tokens have their results
        computed. The others leave keys and values; their rows of `hidden` are of no use afterwards."""

class Decoder:
    """All layers and the final norm, if there is one."""

    def __init__(self, layers: list[Layer], norm: Floats | None, eps: float) -> None: ...
    def forward(self, hidden: Floats, cache: Cache, steps: list[Step], inputs: Floats | None = None) -> None:
        """Put `hidden` `[T, hidden]` through them, in place. Each layer has a step: groups of layers that keep their
        keys and values in different blocks have different ones. `inputs` are the layers' own, `[T, layers, width]`."""

class Generator:
    """A model that goes from tokens to the next ones: `embedding` and `head` are `[vocab, hidden]`."""

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
        are_sound: npt.NDArray[np.bool_],
        seconds: float,
        is_awaited: Callable[[], bool],
    ) -> int:
        """Compute the last `tokens` `[n]` of n rows, at positions `starts`, draw the next ones, compute these, and so
        on, into `drawn` `[steps, n]`. Returns the number of steps, at least one.

        `tables` are the rows' block tables for all steps, one for each group of layers, and `groups` says which one a
        layer has. `settings` and `rows` are those of `draw`. The run ends with a step in which a row draws a token of
        which `is_stop` is true, if another step would take longer than `seconds` in all, and if `is_awaited`, which is
        called between steps. It ends before a step in which a row can't draw, unless that is the first: then
        `are_sound` `[n]` says which rows could."""

def store(new: Floats, cache: Tensor, step: Step, scales: Tensor | None = None) -> None:
    """Put keys and values `[T, 2, kv_heads, head_dim]`, contiguous but for T, into one layer's cache."""

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
    """Attend `query` `[T, heads, head_dim]`, contiguous but for T, to the requests' keys, into `out`."""

def draw(logits: Floats, settings: Ints, rows: Ints, positions: Ints, tokens: Ints, are_finite: Tensor) -> None:
    """Draw a token from each row of `logits` `[n, vocab]`, as `infinilm.sampling.draw` says, into `tokens` `[n]`."""

def logprobs(logits: Floats, targets: Ints, ids: Ints, values: Floats) -> None:
    """Of each row of `logits` `[n, vocab]`: the rank of its target, then the likeliest tokens, into `ids` `[n, 1 + k]`;
    their log-probabilities, the target's first, into `values` `[n, 1 + k]`. Equal logits are ordered by index."""

def cap_logits(logits: Floats, cap: float) -> None:
    """`cap * tanh(x / cap)` of each of the `logits` `[n, vocab]`, in place."""

class Strings:
    """Texts, such as a vocabulary's tokens, without an object for each."""

    def __init__(self, data: Bytes, position: int, count: int, end: int) -> None:
        """An array of a GGUF header: each text behind its length. It ends before `end`."""

    @staticmethod
    def of(texts: list[str]) -> Strings: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> str: ...
    @property
    def stored_bytes(self) -> int:
        """The bytes that a header's array has."""

    @property
    def longest(self) -> int:
        """The characters of the longest one."""

class BPE:
    """Byte pair encoding. A token's id is its index; of several with the same text only the last one has a text."""

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
        """`merges` are "left right", best first. Without them all pairs merge that form a token with `can_result`,
        those with the highest of `scores` first; among equals the longer left, then right part.
        """

    def find(self, text: str) -> int | None:
        """A token's id."""

    def content(self, id: int) -> str | None:
        """A token's text."""

    def encode(self, words: list[str]) -> list[int]:
        """The tokens of words, between which nothing merges."""

    def add_tokens(self, ids: list[int], control_ids: list[int]) -> None:
        """Have `split` find these tokens. Those of them in `control_ids` it finds only if asked for."""

    def split(self, text: str, with_control: bool) -> list[str | int]:
        """The added tokens in a text, from the left and the longest first, as ids, and the text between them."""
