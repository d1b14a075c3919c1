"""Whole layers against the same made of torch operations; and that tokens are the same bits in any chunks."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from native.test_native_attention import make_step
from native.test_native_matrix import make_matrix
from torch import Tensor

from infinilm.attention import ForwardBatch, TorchAttention
from infinilm.kernels.packed import packed_linear
from infinilm.layers.mlp import ACTIVATIONS
from infinilm.layers.rotary_embedding import apply_rotary

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS, EPS = 256, 512, 4, 2, 64, 16, 24, 1e-5
LAYERS = 2
NORM = torch.linspace(0.5, 2, HIDDEN)
QUERY_SCALE = torch.linspace(1, 1.5, 200)
NORM_PLACES = ("before_tokens", "after_tokens", "before_channels", "after_channels")
FORMATS = {"qkv": ["Q4_K", "Q4_K", "Q6_K"], "out": ["Q8_0"], "gate_up": ["Q4_1", "Q5_0"], "down": ["Q5_K"]}
ROWS = {
    "qkv": [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM],
    "out": [HIDDEN],
    "gate_up": [INNER, INNER],
    "down": [HIDDEN],
}
COLUMNS = {"qkv": HIDDEN, "out": HEADS * HEAD_DIM, "gate_up": HIDDEN, "down": INNER}


@dataclass(frozen=True)
class Kind:
    """What layers may have besides matrices."""

    has_biases: bool = False
    norms: tuple[str, ...] = ("before_tokens", "before_channels")
    head_norms: str | None = None  # of each head, or of all as one
    rotary_dim: int = HEAD_DIM
    is_interleaved: bool = False
    scales_queries: bool = False
    scale: float = HEAD_DIM**-0.5
    window: int | None = None
    cap: float | None = None
    has_sinks: bool = False
    activation: str = "silu"
    residual_scale: float = 1.0


KINDS = {
    "plain": Kind(),
    "window": Kind(window=20),
    "biases and norms of heads": Kind(has_biases=True, head_norms="each"),
    "four norms, caps, GELU": Kind(
        norms=NORM_PLACES, head_norms="each", scale=0.2, window=20, cap=5.0, activation="gelu_pytorch_tanh"
    ),
    "norms after, of all heads": Kind(norms=NORM_PLACES[1::2], head_norms="all"),
    "no norms, scaled": Kind(norms=(), scale=0.05, residual_scale=0.3),
    "neighbours of half a head, sinks": Kind(
        rotary_dim=HEAD_DIM // 2, is_interleaved=True, scales_queries=True, has_sinks=True, has_biases=True
    ),
}


@dataclass
class Layer:
    """A layer twice: the native one, and its weights."""

    native: Any
    kind: Kind
    weights: dict[str, Tensor]
    biases: dict[str, Tensor | None]
    norms: dict[str, Tensor | None]
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None


def make_layer(native: Any, seed: int, kind: Kind) -> Layer:
    torch.manual_seed(seed)
    linears, weights, biases = {}, {}, {}
    for name, formats in FORMATS.items():
        pairs = [
            make_matrix(native, format, rows, COLUMNS[name], seed + i)
            for i, (format, rows) in enumerate(zip(formats, ROWS[name], strict=True))
        ]
        weights[name] = torch.cat([weight for _, weight in pairs])
        biases[name] = 0.1 * torch.randn(sum(ROWS[name])) if kind.has_biases else None
        linears[name] = native.Linear([matrix for matrix, _ in pairs], biases[name])
    norms = {place: 1 + 0.1 * torch.randn(HIDDEN) if place in kind.norms else None for place in NORM_PLACES}
    heads = {"each": (1, 1), "all": (HEADS, KV_HEADS), None: (0, 0)}[kind.head_norms]
    q_norm, k_norm = (1 + 0.1 * torch.randn(count * HEAD_DIM) if count else None for count in heads)
    sinks = torch.randn(HEADS) if kind.has_sinks else None
    attention = native.Attention(
        qkv=linears["qkv"],
        out=linears["out"],
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rotary=make_rotary(kind.rotary_dim),
        is_interleaved=kind.is_interleaved,
        query_scale=QUERY_SCALE if kind.scales_queries else None,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=EPS,
        scale=kind.scale,
        window=kind.window,
        cap=kind.cap,
        sinks=sinks,
    )
    mlp = native.MLP(gate_up=linears["gate_up"], down=linears["down"], activation=kind.activation)
    layer = native.Layer(attention, mlp, **norms, eps=EPS, residual_scale=kind.residual_scale)
    return Layer(layer, kind, weights, biases, norms, q_norm, k_norm, sinks)


def norm(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else F.rms_norm(x, x.shape[-1:], weight, EPS)


def norm_heads(heads: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None or len(weight) == HEAD_DIM:
        return norm(heads, weight)
    return norm(heads.flatten(1), weight).view(heads.shape)


def turn(heads: Tensor, positions: Tensor, kind: Kind) -> Tensor:
    cos, sin = make_rotary(kind.rotary_dim)[positions].unsqueeze(1).chunk(2, dim=-1)
    if kind.is_interleaved:
        angles = cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
    else:
        angles = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    turned = torch.empty_like(heads)
    apply_rotary(heads, *angles, out=turned, is_interleaved=kind.is_interleaved)
    return turned


def run_torch(layer: Layer, hidden: Tensor, cache: Tensor, batch: ForwardBatch) -> Tensor:
    def linear(name: str, x: Tensor) -> Tensor:
        return packed_linear(x, layer.weights[name], layer.biases[name])

    kind, backend = layer.kind, TorchAttention()
    plan = backend.prepare(batch, block_size=BLOCK_SIZE, windows={kind.window}, dtype=torch.float32)
    heads = linear("qkv", norm(hidden, layer.norms["before_tokens"])).view(len(hidden), -1, HEAD_DIM)
    q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    q, k = (turn(norm_heads(x, own), batch.positions, kind) for x, own in ((q, layer.q_norm), (k, layer.k_norm)))
    if kind.scales_queries:
        q = q * QUERY_SCALE[batch.positions].view(-1, 1, 1)
    backend.store(torch.stack((k, v), dim=1), cache, plan)
    attended = backend.attend(
        q.contiguous(), cache, plan, scale=kind.scale, window=kind.window, cap=kind.cap, sinks=layer.sinks
    )
    mixed = norm(linear("out", attended.flatten(1)), layer.norms["after_tokens"])
    hidden = hidden + mixed * kind.residual_scale
    gate, up = linear("gate_up", norm(hidden, layer.norms["before_channels"])).chunk(2, dim=-1)
    mixed = norm(linear("down", ACTIVATIONS[kind.activation](gate) * up), layer.norms["after_channels"])
    return hidden + mixed * kind.residual_scale


def make_batch(chunks: list[tuple[int, int]]) -> ForwardBatch:
    """Requests with (cached, new) tokens; request i has blocks 12 i and following."""
    positions = [torch.arange(cached, cached + new) for cached, new in chunks]
    tables = torch.arange(12 * len(chunks)).view(len(chunks), 12)
    slots = [places + 12 * BLOCK_SIZE * i for i, places in enumerate(positions)]
    return ForwardBatch(
        torch.zeros(sum(new for _, new in chunks), dtype=torch.int64),
        torch.cat(positions),
        torch.cat(slots),
        tables,
        np.array([new for _, new in chunks]),
        np.array([cached + new for cached, new in chunks]),
    )


def make_rotary(dim: int) -> Tensor:
    angles = torch.arange(200.0).unsqueeze(1) / 10000 ** (torch.arange(0, dim, 2) / dim)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def make_decoder(native: Any, kind: Kind) -> tuple[Any, list[Layer]]:
    layers = [make_layer(native, 10 * i, kind) for i in range(LAYERS)]
    return native.Decoder([layer.native for layer in layers], NORM, EPS), layers


def empty_cache(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(LAYERS, NUM_BLOCKS, BLOCK_SIZE, 2, KV_HEADS, HEAD_DIM, dtype=dtype)


def run_native(native: Any, decoder: Any, hidden: Tensor, cache: Tensor, batch: ForwardBatch) -> None:
    decoder.forward(hidden, native.Cache(list(cache)), [make_step(native, batch)] * LAYERS)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_layers_equal_torch(native: Any, kind: Kind) -> None:
    decoder, layers = make_decoder(native, kind)
    ours, theirs = empty_cache(), empty_cache()
    for chunks in ([(0, 40), (0, 3)], [(40, 1), (3, 9)]):
        batch = make_batch(chunks)
        hidden = torch.randn(len(batch.positions), HIDDEN)
        expected = hidden
        for layer, cache in zip(layers, theirs, strict=True):
            expected = run_torch(layer, expected, cache, batch)
        expected = norm(expected, NORM)  # scores are large here, so that a last bit makes a difference
        run_native(native, decoder, hidden, ours, batch)
        assert (hidden - expected).norm() < 6e-3 * expected.norm()
        assert (ours - theirs).norm() < 6e-3 * theirs.norm()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("biases and norms of heads", torch.float32),
        ("biases and norms of heads", torch.float16),
        ("biases and norms of heads", torch.bfloat16),
        ("four norms, caps, GELU", torch.float32),
    ],
)
def test_tokens_do_not_depend_on_chunks_company_or_threads(native: Any, kind: str, dtype: torch.dtype) -> None:
    decoder, _ = make_decoder(native, KINDS[kind])
    hidden = torch.randn(50, HIDDEN)

    def run(sizes: list[int], *, num_threads: int = 2, has_company: bool = False) -> Tensor:
        native.set_num_threads(num_threads)
        cache, results, first = empty_cache(dtype), [], 0
        for size in sizes:
            rows = hidden[first : first + size].clone()
            chunks = [(first, size)]
            if has_company:
                chunks.append((0, 5))
                rows = torch.cat((rows, torch.randn(5, HIDDEN)))
            run_native(native, decoder, rows, cache, make_batch(chunks))
            results.append(rows[:size])
            first += size
        return torch.cat(results)

    whole = run([50])
    assert torch.equal(run([1] * 50), whole)
    assert torch.equal(run([33, 1, 16], num_threads=1), whole)
    assert torch.equal(run([7, 43], num_threads=3, has_company=True), whole)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_only_the_last_tokens_results(native: Any, kind: Kind) -> None:
    """Those that are wanted are the same bits, and so are all keys and values."""
    decoder, _ = make_decoder(native, kind)
    caches = (empty_cache(), empty_cache())
    for chunks, last_lens in (([(0, 70), (0, 4)], [1, 4]), ([(70, 9), (4, 1)], [0, 1]), ([(79, 2), (5, 3)], [0, 0])):
        batch = make_batch(chunks)
        hidden = torch.randn(len(batch.positions), HIDDEN)
        whole, wanted = hidden.clone(), hidden.clone()
        run_native(native, decoder, whole, caches[0], batch)
        step = make_step(native, batch)
        decoder.forward(wanted, native.Cache(list(caches[1])), [step, step.only_last(np.array(last_lens))])
        firsts = np.cumsum(batch.query_lens) - last_lens
        rows = [first + i for first, count in zip(firsts, last_lens, strict=True) for i in range(count)]
        assert wanted[rows].equal(whole[rows])
        assert caches[1].equal(caches[0])


def test_layers_may_keep_their_tokens_in_different_blocks(native: Any) -> None:
    decoder, _ = make_decoder(native, KINDS["plain"])
    batch, hidden, caches = make_batch([(0, 20)]), torch.randn(20, HIDDEN), (empty_cache(), empty_cache())
    elsewhere = replace(batch, slot_mapping=batch.slot_mapping + 5 * BLOCK_SIZE, block_tables=batch.block_tables + 5)
    same, moved = hidden.clone(), hidden.clone()
    run_native(native, decoder, same, caches[0], batch)
    decoder.forward(moved, native.Cache(list(caches[1])), [make_step(native, each) for each in (batch, elsewhere)])
    assert moved.equal(same)
    assert caches[1][0].equal(caches[0][0])
    assert caches[1][1].roll(-5, dims=0).equal(caches[0][1])


def test_a_decoder_without_a_norm_leaves_the_last_layers_output(native: Any) -> None:
    decoder, layers = make_decoder(native, KINDS["plain"])
    bare, batch = native.Decoder([layer.native for layer in layers], None, EPS), make_batch([(0, 3)])
    normed, plain = torch.ones(3, HIDDEN), torch.ones(3, HIDDEN)
    run_native(native, decoder, normed, empty_cache(), batch)
    run_native(native, bare, plain, empty_cache(), batch)
    torch.testing.assert_close(norm(plain, NORM), normed)


NO_NORMS: dict[str, Any] = dict.fromkeys(NORM_PLACES)


def make_parts(native: Any, **sizes: tuple[int, int]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Matrices of these rows and columns: the native linear layers, and the values."""
    made = {name: make_matrix(native, "Q8_0", *size, seed) for seed, (name, size) in enumerate(sizes.items())}
    linears = {name: native.Linear([matrix], None) for name, (matrix, _) in made.items()}
    return linears, {name: values for name, (_, values) in made.items()}


def make_attention(native: Any, qkv: Any, out: Any) -> Any:
    options: dict[str, Any] = dict.fromkeys(("query_scale", "window", "cap", "sinks"))
    options |= {name: torch.ones(HEAD_DIM) for name in ("q_norm", "k_norm", "v_norm")}
    heads = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    rotary = {"rotary": make_rotary(HEAD_DIM), "is_interleaved": False}
    return native.Attention(qkv=qkv, out=out, eps=EPS, scale=0.1, **heads, **rotary, **options)


def test_a_layer_may_read_what_another_stores(native: Any) -> None:
    """One that projects queries alone, with the same matrices, attends as the layer that stored keys and values."""
    parts, _ = make_parts(native, out=(HIDDEN, HEADS * HEAD_DIM), gate_up=(2 * INNER, HIDDEN), down=(HIDDEN, INNER))
    matrices = [make_matrix(native, "Q4_1", rows, HIDDEN, seed)[0] for seed, rows in enumerate(ROWS["qkv"])]
    mlp = native.MLP(gate_up=parts["gate_up"], down=parts["down"], activation="silu")
    batch, hidden, cache = make_batch([(0, 20)]), torch.randn(20, HIDDEN), empty_cache()[0]
    found = []
    for own in (matrices, matrices[:1]):
        attention = make_attention(native, native.Linear(own, None), parts["out"])
        layer = native.Layer(attention, mlp, **NO_NORMS, eps=EPS, residual_scale=1.0)
        found.append(hidden.clone())
        native.Decoder([layer], None, EPS).forward(found[-1], native.Cache([cache]), [make_step(native, batch)])
    assert found[1].equal(found[0])
    values = cache.flatten(0, 1)[:20, 1]  # which are normed
    torch.testing.assert_close(values.square().mean(-1), torch.ones(20, KV_HEADS), atol=1e-3, rtol=0)


def test_sums_of_mixers_and_inputs_of_layers(native: Any) -> None:
    """Attention adds nothing here."""
    sizes = {"gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER), "gate": (32, HIDDEN), "projection": (HIDDEN, 32)}
    parts, values = make_parts(native, qkv=(sum(ROWS["qkv"]), HIDDEN), **sizes)
    nothing = native.Linear([native.Matrix("Q8_0", HIDDEN, HEADS * HEAD_DIM)], None)
    attention = make_attention(native, parts["qkv"], nothing)
    mlp = native.MLP(gate_up=parts["gate_up"], down=parts["down"], activation="silu")
    before, after, last = (1 + 0.1 * torch.randn(3, HIDDEN)).unbind()
    mixers = native.MixerSum([mlp, mlp], before=[before, None], after=[after, None], eps=EPS)
    linears = {"gate": parts["gate"], "projection": parts["projection"]}
    own = native.OwnInput(**linears, norm=last, eps=EPS, activation="gelu_pytorch_tanh")
    numbers = {"eps": EPS, "residual_scale": 1.0}
    norms = NO_NORMS | {"after_channels": NORM}
    layer = native.Layer(attention, mixers, **norms, **numbers, own_input=own, scale=0.5)
    hidden, inputs = torch.randn(20, HIDDEN), torch.randn(20, 1, 32)

    def run(layer: Any, *more: Any) -> Tensor:
        rows, step = hidden.clone(), make_step(native, make_batch([(0, 20)]))
        native.Decoder([layer], None, EPS).forward(rows, native.Cache([empty_cache()[0]]), [step], *more)
        return rows

    def linear(name: str, x: Tensor) -> Tensor:
        return packed_linear(x, values[name], None)

    def mix(x: Tensor) -> Tensor:
        gate, up = linear("gate_up", x).chunk(2, dim=-1)
        return linear("down", ACTIVATIONS["silu"](gate) * up)

    x = hidden + norm(norm(mix(norm(hidden, before)), after) + mix(hidden), NORM)
    x = x + norm(linear("projection", ACTIVATIONS["gelu_pytorch_tanh"](linear("gate", x)) * inputs[:, 0]), last)
    assert (run(layer, inputs) - x / 2).norm() < 1e-3 * x.norm()
    with pytest.raises(ValueError, match="layers with an input of their own need inputs"):
        run(layer)
    with pytest.raises(ValueError, match=r"inputs must be \[T, layers, width\]"):
        run(layer, inputs[:3])
    with pytest.raises(ValueError, match="inputs do not fit the layers"):
        run(native.Layer(attention, mlp, **NO_NORMS, **numbers), inputs)
    with pytest.raises(ValueError, match="not before all"):
        native.Layer(attention, mixers, **norms | {"before_channels": NORM}, **numbers)


def test_what_does_not_fit_is_refused(native: Any) -> None:
    decoder, layers = make_decoder(native, KINDS["plain"])
    batch = make_batch([(0, 3)])
    step, cache = make_step(native, batch), native.Cache(list(empty_cache()))
    with pytest.raises(ValueError, match="a row for each token"):
        decoder.forward(torch.zeros(2, HIDDEN), cache, [step, step])
    with pytest.raises(ValueError, match="does not fit the layers"):
        decoder.forward(torch.zeros(3, 32), cache, [step, step])
    with pytest.raises(ValueError, match="a cache and a step for each"):
        decoder.forward(torch.zeros(3, HIDDEN), cache, [step])
    with pytest.raises(ValueError, match="a cache and a step for each"):
        run_native(native, decoder, torch.zeros(3, HIDDEN), empty_cache()[:1], batch)
    with pytest.raises(ValueError, match="a cache does not fit its layer"):
        run_native(native, decoder, torch.zeros(3, HIDDEN), empty_cache()[..., :32].contiguous(), batch)
    with pytest.raises(ValueError, match="float32, float16, bfloat16, or uint8"):
        native.Cache(list(empty_cache(torch.float64)))
    with pytest.raises(ValueError, match="must be contiguous"):
        native.Cache(list(empty_cache()[..., :32]))
    with pytest.raises(ValueError, match="0 to the request's new tokens"):
        step.only_last(np.array([4]))
    with pytest.raises(ValueError, match="a number for each request"):
        step.only_last(np.array([1, 1]))
    far = make_batch([(0, 1)])
    far.positions[0] = 5000
    with pytest.raises(ValueError, match="outside of the rotary table"):
        run_native(native, decoder, torch.zeros(1, HIDDEN), empty_cache(), far)
    with pytest.raises(ValueError, match="norm must have 256 numbers"):
        native.Decoder([layers[0].native], torch.ones(3), EPS)
