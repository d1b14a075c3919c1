"""Prefill attention over a paged cache, against plain torch. What no request may see of the cache is NaN."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from interpreter import DEVICE

from infinilm.kernels.attention_order import key_tile
from infinilm.kernels.prefill_attention import (
    Tiles,
    can_gather,
    choose_tiles,
    prefill_attention,
    prefill_attention_torch,
)
from infinilm.kernels.store_kv import gather_kv

ON_GPU = DEVICE == "cuda"
SMALL = Tiles(rows=16, num_warps=4, num_stages=2)
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Case:
    """Requests with random queries, keys and values."""

    query: torch.Tensor
    cache: torch.Tensor
    tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    scale: float
    cap: float | None = None
    sinks: torch.Tensor | None = None

    def ours(self, window: int | None, tiles: Tiles | None = SMALL) -> torch.Tensor:
        arguments = (self.query, self.cache, self.tables, self.query_starts, self.context_lens)
        scoring: dict[str, Any] = {"scale": self.scale, "window": window, "cap": self.cap, "sinks": self.sinks}
        return prefill_attention(*arguments, **scoring, tiles=tiles)

    def expected(self, window: int | None) -> torch.Tensor:
        arguments = (self.query, self.cache, self.tables, self.query_starts, self.context_lens)
        scoring: dict[str, Any] = {"scale": self.scale, "window": window, "cap": self.cap, "sinks": self.sinks}
        return prefill_attention_torch(*arguments, **scoring)


def make(
    query_lens: list[int],
    context_lens: list[int],
    *,
    heads: int = 3,
    kv_heads: int = 1,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Case:
    generator = torch.Generator().manual_seed(sum(context_lens) + head_dim)
    num_blocks = [-(-n // block_size) for n in context_lens]
    order = torch.randperm(sum(num_blocks) + 2, generator=generator).tolist()
    cache = torch.full((len(order), block_size, 2, kv_heads, head_dim), float("nan"))
    tables = torch.full((len(query_lens), max(num_blocks) + 1), -1, dtype=torch.int32)
    for row, context_len in enumerate(context_lens):
        blocks = [order.pop() for _ in range(num_blocks[row])]
        tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        places = torch.arange(context_len)
        slots = tables[row].long()[places // block_size] * block_size + places % block_size
        cache.flatten(0, 1)[slots] = torch.randn(context_len, 2, kv_heads, head_dim, generator=generator)
    # As it comes from the projection: queries beside keys and values.
    projected = torch.randn(sum(query_lens), heads + 2 * kv_heads, head_dim, generator=generator)
    return Case(
        query=projected.to(DEVICE, dtype)[:, :heads],
        cache=cache.to(DEVICE, dtype),
        tables=tables.to(DEVICE),
        query_starts=torch.tensor([0, *query_lens]).cumsum(0).to(DEVICE, torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=DEVICE),
        scale=head_dim**-0.5,
    )


def check(case: Case, window: int | None, tiles: Tiles | None = SMALL) -> None:
    expected = case.expected(window)
    assert expected.isfinite().all()
    tolerance = TOLERANCES[case.query.dtype]
    torch.testing.assert_close(case.ours(window, tiles), expected, atol=tolerance, rtol=0)


CASES = {
    "one token": ([1], [1]),
    "nothing cached": ([18], [18]),
    "whole blocks": ([16, 5], [16, 48]),
    "ragged prefixes": ([12, 7, 3], [28, 8, 18]),
    "single tokens in between": ([1, 6, 1, 1], [50, 20, 1, 33]),
    "far more cached than new": ([2], [70]),
}


@pytest.mark.parametrize("window", [None, 1, 16, 1000])
@pytest.mark.parametrize("case", CASES)
def test_equals_torch(case: str, window: int | None) -> None:
    check(make(*CASES[case]), window)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "block_size"), [(1, 1, 32), (3, 3, 16), (4, 2, 48), (7, 1, 16), (20, 1, 32)]
)
def test_equals_torch_for_any_grouping_and_block_size(heads: int, kv_heads: int, block_size: int) -> None:
    case = make([1, 9, 4], [40, 9, 36], heads=heads, kv_heads=kv_heads, block_size=block_size)
    check(case, None)
    check(case, 9)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("cap", "has_sinks"), [(4.0, False), (None, True), (4.0, True)])
def test_caps_and_sinks(cap: float | None, has_sinks: bool, window: int | None) -> None:
    case = make([1, 9, 30], [40, 9, 36], heads=6, kv_heads=2)
    sinks = torch.linspace(-3, 6, 6, device=DEVICE) if has_sinks else None
    check(replace(case, query=case.query * 3, cap=cap, sinks=sinks), window)


# The interpreter is slow, and can't multiply bfloat16.
TYPES = [torch.float32, torch.float16, torch.bfloat16] if ON_GPU else [torch.float16]
HEAD_DIMS = [16, 32, 64, 96, 128, 256, 512] if ON_GPU else [16, 96]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("window", [None, 70])
def test_equals_torch_with_its_own_tiles(dtype: torch.dtype, head_dim: int, window: int | None) -> None:
    check(make([50, 1, 30], [200, 65, 30], heads=4, head_dim=head_dim, dtype=dtype), window, tiles=None)


@pytest.mark.skipif(not ON_GPU, reason="takes minutes in the interpreter")
@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (32, 8), (8, 8)])
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_equals_torch_at_the_sizes_of_models(heads: int, kv_heads: int, block_size: int, window: int | None) -> None:
    lens = ([1024, 64, 1, 700, 333], [1024, 1088, 999, 2000, 333])
    case = make(*lens, heads=heads, kv_heads=kv_heads, head_dim=128, block_size=block_size, dtype=torch.bfloat16)
    check(case, window, tiles=None)


@pytest.mark.parametrize("window", [None, 20])
def test_neither_batch_mates_nor_chunks_change_a_bit(window: int | None) -> None:
    case = make([12, 7, 3], [40, 7, 20])
    together = case.ours(window)
    for row, (start, end) in enumerate([(0, 12), (12, 19), (19, 22)]):
        # The same request alone, and cut in two: first without its last tokens, then those behind the others.
        for first, num_left_out in ((start, 0), (start, 2), (end - 2, 0)):
            last = end - num_left_out
            alone = prefill_attention(
                case.query[first:last],
                case.cache,
                case.tables[row : row + 1],
                torch.tensor([0, last - first], dtype=torch.int32, device=DEVICE),
                case.context_lens[row : row + 1] - num_left_out,
                scale=case.scale,
                window=window,
                tiles=SMALL,
            )
            torch.testing.assert_close(alone, together[first:last], rtol=0, atol=0)


def test_requests_without_context_are_left_out() -> None:
    case = make([5, 8, 4], [5, 20, 9])
    expected = case.expected(None)
    case.context_lens[1] = 0
    expected[5:13] = 0
    torch.testing.assert_close(case.ours(None), expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(case.expected(None), expected)
    out = torch.full(case.query.shape, 7.0, device=DEVICE)
    arguments = (case.query, case.cache, case.tables, case.query_starts, case.context_lens)
    assert prefill_attention(*arguments, scale=case.scale, window=None, out=out, tiles=SMALL) is out
    expected[5:13] = 7
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=0)


def test_no_tokens() -> None:
    case = make([1], [1])
    empty = prefill_attention(
        case.query[:0], case.cache, case.tables, case.query_starts * 0, case.context_lens, scale=1.0, window=None
    )
    assert empty.shape == (0, 3, 16)


def test_tiles_fit_the_matrix_instructions() -> None:
    for dtype in TOLERANCES:
        for head_dim in (16, 64, 96, 128, 256):
            tiles = choose_tiles(dtype, head_dim)
            assert min(tiles.rows, key_tile(dtype, head_dim)) >= 16
            # Three stages of keys and values and the queries must fit into Hopper's 227 KiB of shared memory.
            numbers = 2 * tiles.num_stages * key_tile(dtype, head_dim) + tiles.rows
            assert numbers * max(16, head_dim) * dtype.itemsize <= 227 * 1024


def test_gathered_keys_and_values_give_the_same() -> None:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn((21, 4, 16), generator=generator).half().to(DEVICE)
    cache = torch.randn((9, 16, 2, 2, 16), generator=generator).half().to(DEVICE)
    table = torch.tensor([[3, 0, 5, 7, 1, 2]], dtype=torch.int32, device=DEVICE)
    starts, lens = (torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in ([0, 21], [90]))
    gathered = gather_kv(cache, table[0], context_len=90, num_tokens=128)
    assert can_gather(query)
    arguments = (query, cache, table, starts, lens)
    expected = prefill_attention(*arguments, scale=0.25, window=None, tiles=SMALL)
    actual = prefill_attention(*arguments, scale=0.25, window=None, gathered=gathered, tiles=SMALL)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("window", [None, 30])
def test_one_chunk_gives_the_same_but_for_rounding(window: int | None) -> None:
    generator = torch.Generator().manual_seed(4)
    query = torch.randn((33, 2, 16), generator=generator).to(DEVICE)
    cache = torch.randn((40, 16, 2, 1, 16), generator=generator).to(DEVICE)
    table = torch.arange(39, -1, -1, dtype=torch.int32, device=DEVICE)[None]
    starts, lens = (torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in ([0, 33], [600]))
    arguments = (query, cache, table, starts, lens)
    free = prefill_attention(*arguments, scale=0.25, window=window, is_ordered=False, tiles=SMALL)
    torch.testing.assert_close(
        free, prefill_attention_torch(*arguments, scale=0.25, window=window), rtol=1e-4, atol=1e-5
    )
