"""All attention kernels give a token the same bits, and all of them by the order that `attention_order` describes."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from infinilm.kernels.attention_order import MAX_CHUNKS, NO_WINDOW, chunk_shift
from infinilm.kernels.decode_attention import DecodeWorkspace, SharedPrefix, decode_attention
from infinilm.kernels.prefill_attention import prefill_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: bits are those of its tensor cores")


@triton.jit  # type: ignore[untyped-decorator]
def _shifts(num_seen, window, target, NUM: tl.constexpr):  # noqa: N803
    i = tl.arange(0, NUM)
    tl.store(target + i, chunk_shift(tl.load(num_seen + i), window))


def chunk_sizes(num_seen: list[int], window: int | None) -> list[int]:
    target = torch.empty(len(num_seen), dtype=torch.int32, device=DEVICE)
    seen = torch.tensor(num_seen, dtype=torch.int32, device=DEVICE)
    _shifts[(1,)](seen, NO_WINDOW.value if window is None else window, target, NUM=len(num_seen))
    return [1 << shift for shift in target.tolist()]


def test_chunk_sizes_depend_on_the_place() -> None:
    seen = [1, 256, 4095, 4096, 8191, 8192, 131_071, 131_072]
    assert chunk_sizes(seen, None) == [256, 256, 256, 512, 512, 1024, 8192, 16384]
    assert chunk_sizes(seen, 1000) == [256] * 8
    assert chunk_sizes(seen, 4096) == [256, 256, 256, 512, 512, 512, 512, 512]


@pytest.mark.parametrize("window", [None, 1, 255, 3640, 3641, 4095, 4096, 7281, 10_000, 100_000])
def test_no_token_has_too_many_chunks(window: int | None) -> None:
    seen = [1 << i for i in range(8, 24)]
    seen += [n - 1 for n in seen] + [n + n // 2 - 1 for n in seen] + [n + 77 for n in seen]
    for n, size in zip(seen, chunk_sizes(seen, window), strict=True):
        first = 0 if window is None else max(0, n - window)
        assert (n - 1) // size - first // size + 1 <= MAX_CHUNKS.value


LENGTHS = [1, 15, 63, 64, 65, 255, 256, 257, 511, 513, 1000, 2047, 2049, 4095, 4096, 4097, 5000]


class Context:
    """A text's queries, keys and values in blocks, and its attention by each kernel."""

    def __init__(self, length: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, **scoring: Any):
        generator = torch.Generator(DEVICE).manual_seed(length)
        options: dict[str, Any] = {"generator": generator, "device": DEVICE}
        num_blocks = -(-length // 16)
        self.query = torch.randn(length, heads, head_dim, **options).to(dtype) * 2
        self.cache = torch.randn(num_blocks + 3, 16, 2, kv_heads, head_dim, **options).to(dtype)
        self.table = torch.randperm(num_blocks, generator=generator, device=DEVICE).to(torch.int32)[None]
        self.scoring = {"scale": head_dim**-0.5, "window": None, **scoring}

    def prefill(self, begin: int, end: int) -> Tensor:
        starts, lens = (torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in ([0, end - begin], [end]))
        return prefill_attention(self.query[begin:end], self.cache, self.table, starts, lens, **self.scoring)

    def decode(self, places: list[int], num_shared: int = 0) -> Tensor:
        """Each place as a row of one batch."""
        query = self.query[places].contiguous()
        lens = torch.tensor([place + 1 for place in places], dtype=torch.int32, device=DEVICE)
        tables = self.table.expand(len(places), -1).contiguous()
        shared = None
        if num_shared:
            shared = SharedPrefix(torch.tensor([num_shared], dtype=torch.int32, device=DEVICE), self.table[0])
        rows, heads, head_dim = query.shape
        workspace = DecodeWorkspace(rows, heads, head_dim, DEVICE)
        return decode_attention(query, self.cache, tables, lens, workspace=workspace, shared=shared, **self.scoring)


# Heads, kv heads and head_dim, and how they are scored.
CASES = [
    ((16, 8, 128), "plain"),
    ((14, 2, 64), "plain"),
    ((9, 3, 96), "window"),
    ((8, 1, 256), "window"),
    ((16, 4, 128), "capped"),
    ((64, 8, 64), "sinks"),
    ((8, 2, 512), "plain"),
]
SCORINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 700},
    "capped": {"cap": 20.0},
    "sinks": {"sinks": torch.linspace(-2, 3, 64)},
}


@needs_cuda
@pytest.mark.parametrize(("shape", "scoring"), CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_same_bits_in_all_kernels(dtype: torch.dtype, shape: tuple[int, int, int], scoring: str) -> None:
    options = dict(SCORINGS[scoring])
    if "sinks" in options:
        options["sinks"] = torch.linspace(-2, 3, shape[0], device=DEVICE)
    context = Context(max(LENGTHS), *shape, dtype, **options)
    whole = context.prefill(0, max(LENGTHS))
    assert torch.isfinite(whole).all()
    for begin, end in pairwise([0, 1, 100, 163, 700, 3000, 4090, 4100, 5000]):
        assert torch.equal(context.prefill(begin, end), whole[begin:end]), (begin, end)
    places = [length - 1 for length in LENGTHS]
    alone = torch.cat([context.decode([place]) for place in places])
    assert torch.equal(alone, whole[places])
    assert torch.equal(context.decode(places), alone)
    assert torch.equal(context.decode(places * 30), alone.repeat(30, 1, 1))
    if options.get("window") is None:
        late = [place for place in places if place > 1008]
        for num_shared in (16, 256, 1008):
            assert torch.equal(context.decode(late * 10, num_shared), whole[late * 10]), num_shared
