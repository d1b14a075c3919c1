"""Whole layers against the same made of torch operations; and that tokens are the same bits in any chunks."""

from dataclasses import dataclass
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
from infinilm.layers.rotary_embedding import apply_rotary

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS, EPS = 256, 512, 4, 2, 64, 16, 24, 1e-5
LAYERS = 2
NORM = torch.linspace(0.5, 2, HIDDEN)
FORMATS = {"qkv": ["Q4_K", "Q4_K", "Q6_K"], "out": ["Q8_0"], "gate_up": ["Q4_1", "Q5_0"], "down": ["Q5_K"]}
ROWS = {
    "qkv": [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM],
    "out": [HIDDEN],
    "gate_up": [INNER, INNER],
    "down": [HIDDEN],
}
COLUMNS = {"qkv": HIDDEN, "out": HEADS * HEAD_DIM, "gate_up": HIDDEN, "down": INNER}


@dataclass
class Layer:
    """A layer twice: the native one, and its weights."""

    native: Any
    weights: dict[str, Tensor]
    biases: dict[str, Tensor | None]
    norms: dict[str, Tensor | None]
    window: int | None


def make_layer(native: Any, seed: int, *, has_extras: bool, window: int | None) -> Layer:
    torch.manual_seed(seed)
    linears, weights, biases = {}, {}, {}
    for name, formats in FORMATS.items():
        pairs = [
            make_matrix(native, format, rows, COLUMNS[name], seed + i)
            for i, (format, rows) in enumerate(zip(formats, ROWS[name], strict=True))
        ]
        weights[name] = torch.cat([weight for _, weight in pairs])
        biases[name] = 0.1 * torch.randn(sum(ROWS[name])) if has_extras else None
        linears[name] = native.Linear([matrix for matrix, _ in pairs], biases[name])
    norms: dict[str, Tensor | None] = {name: 1 + 0.1 * torch.randn(HIDDEN) for name in ("input_norm", "post_norm")}
    norms |= {name: 1 + 0.1 * torch.randn(HEAD_DIM) if has_extras else None for name in ("q_norm", "k_norm")}
    layer = native.Layer(
        **linears,
        **norms,
        eps=EPS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        window=window,
    )
    return Layer(layer, weights, biases, norms, window)


def norm(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else F.rms_norm(x, x.shape[-1:], weight, EPS)


def run_torch(layer: Layer, hidden: Tensor, cache: Tensor, batch: ForwardBatch, rotary: Tensor) -> Tensor:
    def linear(name: str, x: Tensor) -> Tensor:
        return packed_linear(x, layer.weights[name], layer.biases[name])

    backend = TorchAttention()
    plan = backend.prepare(batch, block_size=BLOCK_SIZE, windows={layer.window}, dtype=torch.float32)
    heads = linear("qkv", norm(hidden, layer.norms["input_norm"])).view(len(hidden), -1, HEAD_DIM)
    q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    cos, sin = rotary[batch.positions].unsqueeze(1).chunk(2, dim=-1)
    angles = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    q, k = norm(q, layer.norms["q_norm"]), norm(k, layer.norms["k_norm"])
    turned = torch.empty(len(q), HEADS + KV_HEADS, HEAD_DIM)
    apply_rotary(torch.cat((q, k), dim=1), *angles, out=turned)
    q, k = turned.split([HEADS, KV_HEADS], dim=1)
    backend.store(torch.stack((k, v), dim=1), cache, plan)
    attended = backend.attend(q.contiguous(), cache, plan, scale=HEAD_DIM**-0.5, window=layer.window)
    hidden = hidden + linear("out", attended.flatten(1))
    gate, up = linear("gate_up", norm(hidden, layer.norms["post_norm"])).chunk(2, dim=-1)
    return hidden + linear("down", F.silu(gate) * up)


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


def make_rotary() -> Tensor:
    angles = torch.arange(200.0).unsqueeze(1) / 10000 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def make_decoder(native: Any, **options: Any) -> tuple[Any, list[Layer], Tensor]:
    layers = [make_layer(native, 10 * i, **options) for i in range(LAYERS)]
    rotary = make_rotary()
    return native.Decoder([layer.native for layer in layers], rotary, NORM), layers, rotary


def empty_cache(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(LAYERS, NUM_BLOCKS, BLOCK_SIZE, 2, KV_HEADS, HEAD_DIM, dtype=dtype)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("has_extras", [False, True], ids=["plain", "biases and norms of heads"])
def test_layers_equal_torch(native: Any, has_extras: bool, window: int | None) -> None:
    decoder, layers, rotary = make_decoder(native, has_extras=has_extras, window=window)
    ours, theirs = empty_cache(), empty_cache()
    for chunks in ([(0, 40), (0, 3)], [(40, 1), (3, 9)]):
        batch = make_batch(chunks)
        hidden = torch.randn(len(batch.positions), HIDDEN)
        expected = hidden
        for layer, cache in zip(layers, theirs, strict=True):
            expected = run_torch(layer, expected, cache, batch, rotary)
        expected = norm(expected, NORM)  # scores are large here, so that a last bit makes a difference
        decoder.forward(hidden, ours, make_step(native, batch))
        assert (hidden - expected).norm() < 6e-3 * expected.norm()
        assert (ours - theirs).norm() < 6e-3 * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tokens_do_not_depend_on_chunks_company_or_threads(native: Any, dtype: torch.dtype) -> None:
    decoder, _, _ = make_decoder(native, has_extras=True, window=None)
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
            decoder.forward(rows, cache, make_step(native, make_batch(chunks)))
            results.append(rows[:size])
            first += size
        return torch.cat(results)

    whole = run([50])
    assert torch.equal(run([1] * 50), whole)
    assert torch.equal(run([33, 1, 16], num_threads=1), whole)
    assert torch.equal(run([7, 43], num_threads=3, has_company=True), whole)


def test_what_does_not_fit_is_refused(native: Any) -> None:
    decoder, _, _ = make_decoder(native, has_extras=False, window=None)
    step = make_step(native, make_batch([(0, 3)]))
    with pytest.raises(ValueError, match="a row for each token"):
        decoder.forward(torch.zeros(2, HIDDEN), empty_cache(), step)
    with pytest.raises(ValueError, match="do not fit the layers"):
        decoder.forward(torch.zeros(3, 32), empty_cache(), step)
    with pytest.raises(ValueError, match="a layer for each"):
        decoder.forward(torch.zeros(3, HIDDEN), empty_cache()[:1], step)
    with pytest.raises(ValueError, match="float32, float16 or bfloat16"):
        decoder.forward(torch.zeros(3, HIDDEN), empty_cache(torch.float64), step)
    far = make_batch([(0, 1)])
    far.positions[0] = 5000
    with pytest.raises(ValueError, match="outside of the rotary table"):
        decoder.forward(torch.zeros(1, HIDDEN), empty_cache(), make_step(native, far))
