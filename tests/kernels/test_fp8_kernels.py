"""The cache of 8-bit floats: what is stored, and every kernel that reads it, against plain torch."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from interpreter import DEVICE
from torch import Tensor

from infinilm.kernels import decode_attention as decode_kernels
from infinilm.kernels.decode_attention import DecodeWorkspace, SharedPrefix, decode_attention, decode_attention_torch
from infinilm.kernels.fp8_cache import DTYPE, decoded_cache, quantize_kv, read_quantized
from infinilm.kernels.prefill_attention import Tiles, prefill_attention, prefill_attention_torch
from infinilm.kernels.rope_store import rope_store, rope_store_torch
from infinilm.kernels.store_kv import gather_kv, gather_kv_torch, store_kv, store_kv_torch

ON_GPU = DEVICE == "cuda"
needs_cuda = pytest.mark.skipif(not ON_GPU, reason="needs a GPU: bits are those of its tensor cores")
# Triton's interpreter has no products of bfloat16.
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if ON_GPU else [torch.float32, torch.float16]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
BLOCK_SIZE = 16
SMALL = Tiles(rows=32, num_warps=4, num_stages=2)


def random(*shape: int, dtype: torch.dtype = torch.float32, spread: float = 3.0) -> Tensor:
    """Normal numbers, those of each head times a factor of its own."""
    generator = torch.Generator().manual_seed(sum(shape))
    factors = torch.exp(spread * torch.randn(*shape[:-1], 1, generator=generator))
    return (torch.randn(shape, generator=generator) * factors).to(DEVICE, dtype)


def empty_cache(num_blocks: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """A cache whose unused places are NaN."""
    cache = torch.full((num_blocks, BLOCK_SIZE, 2, kv_heads, head_dim), 0x7F, dtype=torch.uint8, device=DEVICE)
    scales = torch.full((num_blocks, kv_heads, BLOCK_SIZE, 2), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    return cache.view(DTYPE), scales


def bits(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_are_kept_to_four_bits(dtype: torch.dtype) -> None:
    """Whatever a head's size; below 2^-14 of its largest number it is the absolute error that is small."""
    new = random(50, 2, 3, 64, dtype=dtype)
    codes, scales = quantize_kv(new)
    kept = codes.float() * scales.float().unsqueeze(-1)
    largest = new.abs().amax(-1, keepdim=True).float()
    error = (kept - new.float()).abs()
    assert (error <= torch.maximum(new.abs().float() / 16, largest * 2**-17)).all()
    assert kept.to(dtype).float().equal(kept), "a code times its scale is exact in the type that is computed in"
    # The largest number uses the range of the codes.
    assert ((codes.float().abs().amax(-1) > 220) | (largest.squeeze(-1) < 1e-2)).all()


def test_scales_are_the_least_powers_of_two_that_fit() -> None:
    numbers = torch.tensor([448.0, 449.0, 447.0, 1.75, 1.7578125, 0.0, 2.0**-120, 3e38])
    codes, scales = quantize_kv(numbers.view(-1, 1, 1, 1))
    expected = [1.0, 2.0, 1.0, 2.0**-8, 2.0**-7, 2.0**-117, 2.0**-117, 2.0**120]
    assert scales.flatten().tolist() == expected
    assert codes.flatten().float().tolist() == [448.0, 224.0, 448.0, 448.0, 224.0, 0.0, 0.125, 224.0]
    _, scales = quantize_kv(torch.tensor([[[[1e-4]]], [[[65504.0]]]], dtype=torch.float16))
    assert scales.flatten().tolist() == [2.0**-15, 256.0]
    codes, _ = quantize_kv(torch.full((1, 1, 1, 2), 65504.0, dtype=torch.float16))
    assert (codes.half() * 256).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 16), (3, 24), (2, 128)])
def test_store_equals_torch(kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    heads = random(7, 2 + 2 * kv_heads, head_dim, dtype=dtype)
    new = heads[:, 2:].view(7, 2, kv_heads, head_dim)
    new[3, 0] = 0.0
    new[4, 1, 0, 1] = float("inf")
    new[5, 0, 0, 1] = float("nan")
    slots = torch.tensor([17, -1, 0, 63, 40, 41, 42], device=DEVICE)
    ours, expected = (empty_cache(4, kv_heads, head_dim) for _ in range(2))
    store_kv(new, ours[0], slots, ours[1])
    store_kv_torch(new, expected[0], slots, expected[1])
    assert torch.equal(bits(ours[0]), bits(expected[0]))
    torch.testing.assert_close(ours[1], expected[1], rtol=0, atol=0, equal_nan=True)
    kept = read_quantized(*ours, slots[[0, 2, 3, 4, 5, 6]], torch.float32)
    assert kept[3, 0, 0].isnan().all()
    assert kept[3, 1, 0].eq(0).all()
    assert kept[4, 0, 0].isnan().all()
    assert kept[4, 1].isfinite().all()
    assert kept[[0, 1, 2, 5]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize(("shape", "is_interleaved"), [((4, 2, 64), False), ((3, 1, 80), True)])
def test_rope_store_equals_torch(
    shape: tuple[int, int, int], is_interleaved: bool, marks: bool, dtype: torch.dtype
) -> None:
    heads, kv_heads, head_dim = shape
    qkv = random(5, heads + 2 * kv_heads, head_dim, dtype=dtype, spread=1.0)
    if marks:
        qkv[2, -1, 3] = float("inf")
        qkv[3, heads, 5] = float("nan")
    table = random(40, head_dim, spread=0.0)
    positions = torch.tensor([0, 3, 39, 7, 8], device=DEVICE)
    slots = torch.tensor([17, -1, 0, 63, 40], device=DEVICE)
    ours, expected = (empty_cache(4, kv_heads, head_dim) for _ in range(2))
    settings: dict[str, Any] = {"num_heads": heads, "num_kv_heads": kv_heads, "is_interleaved": is_interleaved}
    if ON_GPU:
        torch.cuda.synchronize()  # kernels that are launched early read weights at once
    rope_store(qkv, positions, table, slots, ours[0], scales=ours[1], marks_nonfinite=marks, **settings)
    rope_store_torch(qkv, positions, table, slots, expected[0], scales=expected[1], **settings)
    # Values are the same; keys are rotated, and a rounding apart may be another code.
    assert torch.equal(bits(ours[0])[:, :, 1], bits(expected[0])[:, :, 1])
    kept, wanted = (read_quantized(*each, slots[slots >= 0], torch.float32) for each in (ours, expected))
    torch.testing.assert_close(kept, wanted, rtol=0.13, atol=0.02, equal_nan=True)
    assert (kept != wanted).float().mean() < 0.05 + kept.isnan().float().mean()
    unused = [slot for slot in range(64) if slot not in slots.tolist()]
    assert decoded_cache(*ours).flatten(0, 1)[unused].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("context_len", "num_tokens"), [(1, 1), (37, 64), (37, 0)])
def test_gather_equals_torch(context_len: int, num_tokens: int, dtype: torch.dtype) -> None:
    cache, scales = empty_cache(6, 3, 8)
    table = torch.tensor([4, 1, 5, -1], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([int(table[i // 16]) * 16 + i % 16 for i in range(context_len)], device=DEVICE)
    new = random(context_len, 2, 3, 8, dtype=dtype, spread=1.0)
    store_kv_torch(new, cache, slots, scales)
    options: dict[str, Any] = {"context_len": context_len, "num_tokens": num_tokens, "scales": scales, "dtype": dtype}
    ours = gather_kv(cache, table, **options)
    assert ours.dtype == dtype
    assert torch.equal(ours, gather_kv_torch(cache, table, **options))
    if num_tokens:
        torch.testing.assert_close(ours[:context_len], new, rtol=1 / 16, atol=1e-3)
    assert ours[context_len:].eq(0).all()


@dataclass(frozen=True)
class Context:
    """A text's queries, and its keys and values in blocks of a cache that has NaN everywhere else."""

    query: Tensor
    cache: Tensor
    scales: Tensor
    table: Tensor  # [1, blocks]
    scoring: dict[str, Any]

    @classmethod
    def make(
        cls, length: int, shape: tuple[int, int, int], dtype: torch.dtype, spread: float = 1.0, **scoring: Any
    ) -> "Context":
        heads, kv_heads, head_dim = shape
        num_blocks = -(-length // BLOCK_SIZE)
        order = torch.randperm(num_blocks + 2, generator=torch.Generator().manual_seed(length))[:num_blocks].to(DEVICE)
        cache, scales = empty_cache(num_blocks + 2, kv_heads, head_dim)
        places = torch.arange(length, device=DEVICE)
        slots = order[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
        store_kv_torch(random(length, 2, kv_heads, head_dim, dtype=dtype, spread=spread), cache, slots, scales)
        query = random(length, heads, head_dim, dtype=dtype, spread=0.0)
        scoring = {"scale": head_dim**-0.5, "window": None, **scoring}
        if scoring.get("sinks"):
            scoring["sinks"] = torch.linspace(-2, 3, heads, device=DEVICE)
        return cls(query, cache, scales, order.to(torch.int32)[None], scoring)

    def prefill(self, begin: int, end: int, function: Any = prefill_attention, **options: Any) -> Tensor:
        starts, lens = (torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in ([0, end - begin], [end]))
        arguments = (self.query[begin:end], self.cache, self.table, starts, lens)
        attended: Tensor = function(*arguments, scales=self.scales, **self.scoring, **options)
        return attended

    def decode(self, places: list[int], num_shared: int = 0) -> Tensor:
        rows, heads, head_dim = self.query[places].shape
        shared = None
        if num_shared:
            shared = SharedPrefix(torch.tensor([num_shared], dtype=torch.int32, device=DEVICE), self.table[0])
        workspace = DecodeWorkspace(rows, heads, head_dim, DEVICE)
        query, cache, tables, lens = self._rows(places)
        options: dict[str, Any] = {**self.scoring, "shared": shared, "scales": self.scales}
        return decode_attention(query, cache, tables, lens, workspace=workspace, **options)

    def decode_torch(self, places: list[int]) -> Tensor:
        return decode_attention_torch(*self._rows(places), scales=self.scales, **self.scoring)

    def _rows(self, places: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        lens = torch.tensor([place + 1 for place in places], dtype=torch.int32, device=DEVICE)
        tables = self.table.expand(len(places), -1).contiguous()
        return self.query[places].contiguous(), self.cache, tables, lens


# The interpreter is slow.
SHAPES = [(2, 1, 16), (6, 2, 80), (4, 1, 128)] if ON_GPU else [(2, 1, 24)]
SCORINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "capped": {"cap": 5.0, "sinks": True},
}


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after another, those without a chunk too."""
    if not ON_GPU:
        monkeypatch.setattr(decode_kernels, "_parts", lambda _pairs: (2, 64))


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decoding_equals_torch(shape: tuple[int, int, int], scoring: str, dtype: torch.dtype) -> None:
    context = Context.make(300, shape, dtype, **SCORINGS[scoring])
    places = [0, 70, 299]
    ours, expected = context.decode(places), context.decode_torch(places)
    tolerance = TOLERANCES[dtype] * float(expected.abs().max().clamp(min=1))
    torch.testing.assert_close(ours, expected, rtol=TOLERANCES[dtype], atol=tolerance)
    if scoring != "window":
        torch.testing.assert_close(context.decode([299], 256), ours[2:], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prompts_equal_torch(shape: tuple[int, int, int], scoring: str, dtype: torch.dtype) -> None:
    context = Context.make(50, shape, dtype, **SCORINGS[scoring])
    expected = context.prefill(0, 50, prefill_attention_torch)
    tolerance = TOLERANCES[dtype] * float(expected.abs().max().clamp(min=1))
    for is_ordered in (True, False):
        options: dict[str, Any] = {"is_ordered": is_ordered, "tiles": None if ON_GPU else SMALL}
        ours = torch.cat([context.prefill(*part, **options) for part in pairwise([0, 30, 50])])
        torch.testing.assert_close(ours, expected, rtol=TOLERANCES[dtype], atol=tolerance)


@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_a_nan_reaches_only_tokens_that_see_it(part: int) -> None:
    context = Context.make(64, (2, 1, 16), torch.float32)
    new = random(1, 2, 1, 16)
    new[0, part, 0, 3] = float("nan")
    slot = int(context.table[0, 2]) * BLOCK_SIZE + 5
    store_kv(new, context.cache, torch.tensor([slot], device=DEVICE), context.scales)
    attended = context.prefill(0, 64, tiles=None if ON_GPU else SMALL)
    assert attended[:37].isfinite().all()
    assert attended[37:].isnan().all()
    if ON_GPU:
        assert context.decode([36, 37]).isnan().all(-1).all(-1).tolist() == [False, True]


LENGTHS = [1, 15, 63, 64, 65, 255, 256, 257, 511, 513, 1000, 2047, 2049, 4095, 4096, 4097, 5000]
CASES = [
    ((16, 8, 128), {}),
    ((14, 2, 64), {}),
    ((9, 3, 96), {"window": 700}),
    ((8, 1, 256), {"window": 700}),
    ((16, 4, 128), {"cap": 20.0}),
    ((64, 8, 64), {"sinks": True}),
    ((8, 2, 512), {}),
]


@needs_cuda
@pytest.mark.parametrize(("shape", "scoring"), CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_same_bits_in_all_kernels(dtype: torch.dtype, shape: tuple[int, int, int], scoring: dict[str, Any]) -> None:
    context = Context.make(max(LENGTHS), shape, dtype, spread=1.5, **scoring)
    whole = context.prefill(0, max(LENGTHS))
    assert torch.isfinite(whole).all()
    for begin, end in pairwise([0, 1, 100, 163, 700, 3000, 4090, 4100, 5000]):
        assert torch.equal(context.prefill(begin, end), whole[begin:end]), (begin, end)
    places = [length - 1 for length in LENGTHS]
    alone = torch.cat([context.decode([place]) for place in places])
    assert torch.equal(alone, whole[places])
    assert torch.equal(context.decode(places * 30), alone.repeat(30, 1, 1))
    if "window" not in scoring:
        late = [place for place in places if place > 1008]
        for num_shared in (16, 256, 1008):
            assert torch.equal(context.decode(late * 10, num_shared), whole[late * 10]), num_shared
