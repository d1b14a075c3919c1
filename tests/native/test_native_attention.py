"""Attention and what goes with it against torch; and that results depend on neither chunks, company nor threads."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from infinilm.attention import ForwardBatch, TorchAttention
from infinilm.kernels.fp8_cache import DTYPE, store_quantized

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@dataclass
class Case:
    """Some requests' new tokens, and a cache with everything before them. Places nobody has are huge."""

    query: Tensor
    new: Tensor
    cache: Tensor
    batch: ForwardBatch
    window: int | None = None
    cap: float | None = None
    sinks: Tensor | None = None

    @property
    def scale(self) -> float:
        return self.query.shape[-1] ** -0.5

    def torch(self) -> Tensor:
        cache, backend = self.cache.clone(), TorchAttention()
        plan = backend.prepare(self.batch, block_size=cache.shape[1], windows={self.window}, dtype=self.query.dtype)
        backend.store(self.new, cache, plan)
        return backend.attend(
            self.query, cache, plan, scale=self.scale, window=self.window, cap=self.cap, sinks=self.sinks
        )

    def native(self, native: Any) -> Tensor:
        cache, out = self.cache.clone(), torch.full_like(self.query, torch.nan)
        step = make_step(native, self.batch)
        native.store(self.new, cache, step)
        native.attend(self.query, cache, step, out, self.scale, self.window, self.cap, self.sinks)
        return out


def make_step(native: Any, batch: ForwardBatch) -> Any:
    return native.Step(batch.positions, batch.slot_mapping, batch.block_tables, batch.query_lens, batch.context_lens)


def make_case(
    query_lens: list[int],
    context_lens: list[int],
    *,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
) -> Case:
    generator = torch.Generator().manual_seed(sum(context_lens) + head_dim)
    counts = [-(-length // block_size) for length in context_lens]
    num_blocks = sum(counts) + 3
    cache = torch.full((num_blocks, block_size, 2, kv_heads, head_dim), 3e4, dtype=dtype)
    order = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.full((len(counts), max(counts)), -1)
    positions, slots, new = [], [], []
    for row, (num_new, context, count) in enumerate(zip(query_lens, context_lens, counts, strict=True)):
        blocks = torch.tensor([order.pop() for _ in range(count)])
        tables[row, :count] = blocks
        places = torch.arange(context)
        at = blocks[places // block_size] * block_size + places % block_size
        kv = torch.randn(context, 2, kv_heads, head_dim, generator=generator)
        cache.flatten(0, 1)[at[:-num_new]] = kv[:-num_new].to(dtype)
        new.append(kv[-num_new:])
        slots.append(at[-num_new:])
        positions.append(places[-num_new:])
    query = torch.randn(sum(query_lens), kv_heads * group, head_dim, generator=generator)
    batch = ForwardBatch(
        input_ids=torch.zeros(len(query), dtype=torch.int64),
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        block_tables=tables,
        query_lens=np.array(query_lens),
        context_lens=np.array(context_lens),
    )
    return Case(query, torch.cat(new), cache, batch, window)


BATCHES = {
    "one token": ([1], [1]),
    "decode at borders": ([1] * 5, [31, 32, 33, 256, 257]),
    "long and short": ([1, 1, 1], [2, 900, 40]),
    "prefill": ([100], [100]),
    "chunk behind a prefix": ([20], [300]),
    "everything at once": ([1, 20, 5, 1, 16], [50, 20, 270, 3, 32]),
}


@pytest.mark.parametrize("window", [None, 1, 10, 33, 300])
@pytest.mark.parametrize("batch", BATCHES)
def test_equals_torch(native: Any, batch: str, window: int | None) -> None:
    case = make_case(*BATCHES[batch], window=window)
    torch.testing.assert_close(case.native(native), case.torch(), atol=5e-6, rtol=0)


@pytest.mark.parametrize("window", [1, 10, 33])
@pytest.mark.parametrize("batch", BATCHES)
def test_what_lies_outside_of_a_window_is_not_even_multiplied_by_0(native: Any, batch: str, window: int) -> None:
    """NaN before the first window, where blocks may be other requests', and at a key that only some tokens see."""
    query_lens, context_lens = BATCHES[batch]
    case = make_case(query_lens, context_lens, window=window)
    expected = case.native(native)
    sees_nan = torch.zeros(len(case.query), dtype=torch.bool)
    first = 0
    for row, (num_new, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        last = context - num_new - 1  # the newest token of those in the cache
        places = torch.tensor(
            [*range(context - num_new - window + 1), *([last] if last >= 0 else [])], dtype=torch.int64
        )
        blocks = case.batch.block_tables[row][places // 16]
        case.cache.flatten(0, 1)[blocks * 16 + places % 16] = torch.nan
        if last >= 0:
            sees_nan[first : first + min(num_new, window - 1)] = True
        first += num_new
    found = case.native(native)
    assert found[~sees_nan].equal(expected[~sees_nan])
    assert found[sees_nan].isnan().all()


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize(("cap", "has_sinks"), [(4.0, False), (None, True), (4.0, True)])
def test_caps_and_sinks(native: Any, cap: float | None, has_sinks: bool, window: int | None) -> None:
    case = make_case([1, 20, 1], [900, 270, 5], window=window)
    case.query *= 3
    case.cap, case.sinks = cap, torch.linspace(-3, 6, 6) if has_sinks else None
    torch.testing.assert_close(case.native(native), case.torch(), atol=5e-6, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(16, 1, 1, 16), (80, 2, 8, 32), (128, 1, 64, 16), (10, 3, 2, 48), (256, 1, 2, 16)])
def test_all_kinds_of_heads(native: Any, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
    named = dict(zip(("head_dim", "kv_heads", "group", "block_size"), sizes, strict=True))
    case = make_case([1, 18], [70, 40], dtype=dtype, **named)
    torch.testing.assert_close(case.native(native), case.torch(), atol=5e-6, rtol=0)


@pytest.mark.parametrize("head_dim", [10, 64])
def test_8_bit_floats(native: Any, head_dim: int) -> None:
    """The same codes and scales as torch's, numbers of all sizes, zeros and those that are not finite included."""
    case = make_case([1, 18], [70, 40], head_dim=head_dim)
    new = case.new * torch.exp(6 * torch.randn(case.new.shape, generator=torch.Generator().manual_seed(1)))
    new[3], new[5, 0, 0, 1], new[6, 1, 0, 2], new[7, :, 1] = 0.0, torch.nan, torch.inf, 1e-38
    backend, found = TorchAttention(), []
    plan = backend.prepare(case.batch, block_size=16, windows={None}, dtype=torch.float32)
    for is_native in (True, False):
        cache = torch.zeros(case.cache.shape, dtype=DTYPE)
        scales = torch.zeros(len(cache), cache.shape[3], 16, 2, dtype=torch.bfloat16)
        if is_native:
            native.store(new, cache.view(torch.uint8), make_step(native, case.batch), scales)
        else:
            backend.store(new, cache, plan, scales=scales)
        found.append((cache.view(torch.uint8), scales))
    (codes, scales), (expected_codes, expected_scales) = found
    assert torch.equal(codes, expected_codes)
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)
    assert scales[..., 0].isnan().sum() == 2
    assert scales[..., 1].isfinite().all()

    cache, scales = torch.zeros(case.cache.shape, dtype=DTYPE), torch.zeros_like(scales)
    store_quantized(case.cache.flatten(0, 1).clamp(max=9), cache, scales, torch.arange(cache.shape[0] * 16))
    backend.store(case.new, cache, plan, scales=scales)
    out, step = torch.empty_like(case.query), make_step(native, case.batch)
    native.attend(case.query, cache.view(torch.uint8), step, out, case.scale, None, None, None, scales)
    expected = backend.attend(case.query, cache, plan, scale=case.scale, window=None, scales=scales)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    for wrong in (None, scales[:1], scales.half()):
        with pytest.raises(ValueError, match="scales"):
            native.store(new, cache.view(torch.uint8), step, wrong)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 40])
def test_a_token_depends_on_nothing_else(native: Any, dtype: torch.dtype, window: int | None) -> None:
    case = make_case([330], [600], dtype=dtype, window=window)
    whole = case.native(native)
    cache = case.cache.clone()
    native.store(case.new, cache, make_step(native, case.batch))
    for first, count in ((0, 1), (1, 40), (41, 288), (329, 1)):
        own = slice(first, first + count)
        batch = ForwardBatch(
            case.batch.input_ids[own],
            case.batch.positions[own],
            case.batch.slot_mapping[own],
            case.batch.block_tables,
            np.array([count]),
            np.array([270 + first + count]),
        )
        for threads in (1, 2, 5):
            native.set_num_threads(threads)
            out = torch.empty(count, *whole.shape[1:])
            native.attend(case.query[own].contiguous(), cache, make_step(native, batch), out, case.scale, window)
            assert torch.equal(out, whole[own])


def test_heads_may_lie_apart(native: Any) -> None:
    case = make_case([1, 6], [20, 6])
    expected = case.native(native)
    wide = torch.randn(7, 10, 64)
    wide[:, :6] = case.query
    out = torch.empty_like(expected)
    cache = case.cache.clone()
    wide_kv = torch.randn(7, 10, 64)
    wide_kv[:, 6:] = case.new.flatten(1, 2)
    step = make_step(native, case.batch)
    native.store(wide_kv[:, 6:].view(7, 2, 2, 64), cache, step)
    native.attend(wide[:, :6], cache, step, out, case.scale, None)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_storing_rounds_as_torch_does(native: Any, dtype: torch.dtype) -> None:
    numbers = [0.0, -0.0, 1e-8, 6e-8, 3.1e-5, 6.1e-5, 0.1, 1 / 3, 2049.0, 2051.0, 65504.0, 65519.9, 65520.0, 1e30]
    numbers += [torch.inf, -torch.inf, torch.nan, -1e-8, -1 / 3, 1.00048828125]
    new = torch.tensor(numbers).repeat(2, 2, 1, 1)  # [2, 2, 1, 20]
    cache = torch.full((1, 16, 2, 1, 20), 7.0).to(dtype)
    batch = ForwardBatch(
        torch.zeros(2, dtype=torch.int64),
        torch.arange(2),
        torch.tensor([5, -1]),
        torch.tensor([[0]]),
        np.array([2]),
        np.array([2]),
    )
    native.store(new, cache, make_step(native, batch))
    torch.testing.assert_close(cache[0, 5], new[0].to(dtype), rtol=0, atol=0, equal_nan=True)
    assert (cache[0, :5] == 7).all()  # the token without a slot went nowhere
    assert (cache[0, 6:] == 7).all()


def test_what_leads_outside_of_the_cache_is_refused(native: Any) -> None:
    case = make_case([1], [20])
    out = torch.empty_like(case.query)

    def attend(tables: list[int], context: int, *, slot: int = 0, new: int = 1) -> None:
        step = native.Step(
            torch.tensor([0]), torch.tensor([slot]), torch.tensor([tables]), np.array([new]), np.array([context])
        )
        native.attend(case.query, case.cache, step, out, 1.0, None)

    with pytest.raises(ValueError, match="a block lies outside of the cache"):
        attend([0, 99], 20)
    with pytest.raises(ValueError, match="a block lies outside of the cache"):
        attend([0, -1], 20)
    with pytest.raises(ValueError, match="longer than its row of the block table"):
        attend([0], 20)
    with pytest.raises(ValueError, match="a slot lies outside of the cache"):
        attend([0, 1], 20, slot=10_000)
    with pytest.raises(ValueError, match="not as many as the batch has"):
        attend([0, 1], 20, new=2)
    with pytest.raises(ValueError, match="at least one new token"):
        attend([0, 1], 20, new=0)
    attend([0, 1], 20)
