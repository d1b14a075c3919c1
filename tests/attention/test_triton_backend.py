"""The Triton backend against the torch backend, on random batches. Unused places of the cache hold NaN."""

from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from interpreter import DEVICE

from infinilm.attention import AttentionBackend, ForwardBatch, TorchAttention, select_backend
from infinilm.attention.long_prefill import Cover, CudnnRefusedError, LongPrefill
from infinilm.attention.triton_backend import DecodePlan, MixedPlan, TritonAttention
from infinilm.errors import InvalidValueError

KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE = 1, 3, 16, 16
SCALE = HEAD_DIM**-0.5


@dataclass(frozen=True)
class Step:
    """A batch and what a layer has for it."""

    batch: ForwardBatch
    query: torch.Tensor
    new: torch.Tensor
    cache: torch.Tensor
    cap: float | None = None
    sinks: torch.Tensor | None = None

    def run(self, backend: AttentionBackend, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and the cache afterwards."""
        cache = self.cache.clone()
        plan = backend.prepare(self.batch, block_size=cache.shape[1], windows={window}, dtype=self.query.dtype)
        backend.store(self.new, cache, plan)
        scale = self.query.shape[2] ** -0.5
        more: dict[str, Any] = {"cap": self.cap, "sinks": self.sinks}
        return backend.attend(self.query, cache, plan, scale=scale, window=window, **more), cache


def make(
    query_lens: list[int],
    context_lens: list[int],
    *,
    heads: int = KV_HEADS * GROUP,
    kv_heads: int = KV_HEADS,
    head_dim: int = HEAD_DIM,
    dtype: torch.dtype = torch.float32,
) -> Step:
    generator = torch.Generator().manual_seed(sum(context_lens))
    num_blocks = [-(-n // BLOCK_SIZE) for n in context_lens]
    order = torch.randperm(sum(num_blocks) + 2, generator=generator)
    cache = torch.full((len(order), BLOCK_SIZE, 2, kv_heads, head_dim), float("nan"))
    tables = torch.full((len(query_lens), max(num_blocks)), -1)
    slots = []
    for row, (num_new, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        tables[row, : num_blocks[row]], order = order.split([num_blocks[row], len(order) - num_blocks[row]])
        places = torch.arange(context)
        own = tables[row, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
        cache.flatten(0, 1)[own] = torch.randn(context, 2, kv_heads, head_dim, generator=generator)
        slots.append(own[context - num_new :])
    num_tokens = sum(query_lens)
    projected = torch.randn(num_tokens, heads + 2 * kv_heads, head_dim, generator=generator).to(DEVICE, dtype)
    zeros = torch.zeros(num_tokens, dtype=torch.int64, device=DEVICE)
    batch = ForwardBatch(
        input_ids=zeros,
        positions=zeros,
        slot_mapping=torch.cat(slots).to(DEVICE),
        block_tables=tables.to(DEVICE),
        query_lens=np.array(query_lens, dtype=np.int64),
        context_lens=np.array(context_lens, dtype=np.int64),
    )
    new = projected[:, heads:].view(num_tokens, 2, kv_heads, head_dim)
    return Step(batch, projected[:, :heads], new, cache.to(DEVICE, dtype))


def check(step: Step, backend: TritonAttention, window: int | None, tolerance: float = 2e-5) -> None:
    output, cache = step.run(backend, window)
    expected, expected_cache = step.run(TorchAttention(), window)
    torch.testing.assert_close(cache, expected_cache, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(output, expected, rtol=0, atol=tolerance, equal_nan=True)


CASES = {
    "one token": ([1], [1]),
    "decode": ([1, 1, 1], [15, 16, 70]),
    "prefill": ([20, 3], [20, 3]),
    "decode, then prompts, new and cached": ([1, 1, 7, 5], [33, 4, 7, 40]),
    "decode between prompts": ([4, 1, 6, 1], [20, 30, 6, 1]),
}


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_torch_backend(case: str, window: int | None) -> None:
    check(make(*CASES[case]), TritonAttention(), window)


@pytest.mark.parametrize("window", [None, 10])
def test_caps_and_sinks(window: int | None) -> None:
    """Also where cuDNN would take a prompt, which knows neither."""
    step = make([1, 1, 7, 20], [33, 4, 7, 60])
    step = replace(step, query=step.query * 3, cap=4.0, sinks=torch.linspace(-3, 6, GROUP, device=DEVICE))
    check(step, TritonAttention(LongPrefill(min_pairs=1, step=16, piece=32, attention=never)), window)


def never(*_: object, **__: object) -> NoReturn:
    raise AssertionError("called")


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("is_value", [False, True], ids=["key", "value"])
def test_a_bad_number_reaches_only_tokens_that_see_it(is_value: bool, number: float, window: int | None) -> None:
    """Earlier tokens of the same prompt stay as they are: other requests may share their blocks."""
    step = make([1, 20, 9, 1], [30, 20, 40, 12])
    sound, _ = step.run(TorchAttention(), window)
    step.new[14, int(is_value), :, 3] = number  # token 13 of the first prompt
    output, _ = step.run(TritonAttention(), window)
    seeing = list(range(14, 21)) if window is None else list(range(14, 21))[:window]
    others = [token for token in range(31) if token not in seeing]
    assert output[seeing].isnan().all()
    torch.testing.assert_close(output[others], sound[others], rtol=0, atol=2e-5)
    check(step, TritonAttention(), window)


def test_a_negative_slot_is_not_written() -> None:
    step = make([1, 3], [20, 9])
    slots = step.batch.slot_mapping.clone()
    slots[1] = -1
    step = replace(step, batch=replace(step.batch, slot_mapping=slots))
    written, expected = (step.run(backend, None)[1] for backend in (TritonAttention(), TorchAttention()))
    torch.testing.assert_close(written, expected, rtol=0, atol=0, equal_nan=True)


def test_a_plan_for_decoding_can_be_made_of_padded_device_tensors_alone() -> None:
    step = make([1, 1], [33, 5])
    expected, expected_cache = step.run(TorchAttention(), None)
    padding = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    backend = TritonAttention()
    plan = DecodePlan(
        tables=torch.cat((step.batch.block_tables, -torch.ones_like(step.batch.block_tables))).int(),
        context_lens=torch.cat((torch.tensor([33, 5], dtype=torch.int32, device=DEVICE), padding)),
        slots=torch.cat((step.batch.slot_mapping, padding - 1)),
        workspace=backend.workspace(4, GROUP * KV_HEADS, HEAD_DIM, torch.device(DEVICE)),
    )
    cache = step.cache.clone()
    twice = torch.cat((step.new, step.new))
    backend.store(twice, cache, plan)
    output = backend.attend(torch.cat((step.query, step.query)), cache, plan, scale=SCALE, window=None)
    torch.testing.assert_close(cache, expected_cache, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(output[:2], expected, rtol=0, atol=2e-5)
    assert not output[2:].any()


def test_decoding_alone_and_mixed_have_plans_of_their_own() -> None:
    def plan(query_lens: list[int], context_lens: list[int]) -> DecodePlan | MixedPlan:
        batch = make(query_lens, context_lens).batch
        return TritonAttention().prepare(batch, block_size=BLOCK_SIZE, windows={None}, dtype=torch.float32)

    decode = plan([1, 1], [33, 5])
    assert isinstance(decode, DecodePlan)
    assert decode.context_lens.tolist() == [33, 5]
    mixed = plan([1, 1, 6], [33, 5, 8])
    assert isinstance(mixed, MixedPlan)
    assert mixed.decode is not None
    assert mixed.decode.context_lens.tolist() == [33, 5]
    assert mixed.decode_tokens == slice(0, 2)
    assert mixed.query_starts.tolist() == [0, 1, 2, 8]
    assert mixed.context_lens.tolist() == mixed.short_context_lens.tolist() == [0, 0, 8]
    prefill = plan([6], [8])
    assert isinstance(prefill, MixedPlan)
    assert prefill.decode is None


def test_a_workspace_serves_until_it_is_too_small() -> None:
    backend = TritonAttention()
    device = torch.device(DEVICE)
    first = backend.workspace(3, 4, 16, device)
    assert backend.workspace(64, 4, 16, device) is first
    second = backend.workspace(65, 4, 16, device)
    assert second.max_rows == 128
    assert backend.workspace(1, 4, 16, device) is second


# --- long prompts ---------------------------------------------------------------------------------------------------


class Standin:
    """Does what cuDNN does, and remembers the shapes it was asked for."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int, bool]] = []

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        is_causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.shapes.append((len(query), len(key), is_causal))
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
        score = torch.einsum("qhd,khd->hqk", query, key) * scale
        if is_causal:
            hidden = torch.ones(score.shape[1:], dtype=torch.bool, device=score.device).triu(1)
            score = score.masked_fill(hidden, float("-inf"))
        output = torch.einsum("hqk,khd->qhd", score.softmax(-1), value).contiguous()
        return output, score.logsumexp(-1)


@pytest.mark.parametrize(
    ("query_len", "context_len", "shapes"),
    [
        (60, 60, [(64, 64, True)]),
        (64, 64, [(64, 64, True)]),
        (50, 61, [(64, 64, True)]),  # little is cached: it is computed once more
        (90, 191, [(96, 96, True), (96, 32, False), (96, 32, False), (96, 32, False)]),
        (100, 180, [(112, 112, True), (112, 32, False), (112, 32, False), (112, 16, False)]),
    ],
)
def test_long_prompts_equal_the_torch_backend(query_len: int, context_len: int, shapes: list) -> None:
    standin = Standin()
    backend = TritonAttention(LongPrefill(min_pairs=1000, step=16, piece=32, attention=standin))
    check(make([1, query_len, 4], [20, context_len, 9]), backend, None)
    assert standin.shapes == shapes


def test_a_bad_number_in_a_long_prompt_reaches_only_tokens_that_see_it() -> None:
    backend = TritonAttention(LongPrefill(min_pairs=1000, step=16, piece=32, attention=Standin()))
    step = make([1, 90, 4], [20, 191, 9])
    step.new[51, 1] = float("nan")
    output, _ = step.run(backend, None)
    assert output[51:91].isnan().all()
    assert output[:51].isfinite().all()
    check(step, backend, None)


@pytest.mark.parametrize(("window", "is_long"), [(60, True), (59, False)])
def test_a_window_that_matters_is_left_to_the_kernel(window: int, is_long: bool) -> None:
    standin = Standin()
    check(make([60], [60]), TritonAttention(LongPrefill(min_pairs=1000, step=16, attention=standin)), window)
    assert bool(standin.shapes) == is_long


def test_the_kernel_serves_where_cudnn_does_not() -> None:
    check(make([60], [60]), TritonAttention(LongPrefill(min_pairs=1000, step=16)), None)  # float32: it says so itself
    calls = []

    def refuse(*_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(1)
        raise CudnnRefusedError("not today")

    prefill = LongPrefill(min_pairs=1000, step=16, attention=refuse)
    step = make([60], [60])
    check(step, TritonAttention(prefill), None)
    check(step, TritonAttention(prefill), None)
    assert len(calls) == 1
    assert prefill.why_not(step.query) == "cuDNN refuses: not today"


@pytest.mark.parametrize(
    ("query_len", "context_len", "cover"),
    [
        (16000, 16000, Cover(0, 16384)),
        (13312, 16000, Cover(0, 16384)),
        (16384, 16384, Cover(0, 16384)),
        (16384, 49152, Cover(32768, 16384)),
        (16284, 65000, Cover(47104, 18432)),
        (8192, 8192, Cover(0, 8192)),
        (8191, 8191, None),  # too little work
        (8300, 8300, None),  # too much of 10240 squared would be filling
        (300, 131072, None),
    ],
)
def test_what_is_worth_a_plan(query_len: int, context_len: int, cover: Cover | None) -> None:
    covers = LongPrefill().covers(np.array([5, query_len]), np.array([5, context_len]))
    assert covers == ({} if cover is None else {1: cover})


@pytest.mark.skipif(DEVICE == "cpu", reason="needs cuDNN")
@pytest.mark.parametrize(
    ("query_len", "context_len"), [(4096, 4096), (4000, 4000), (3900, 4050), (5900, 14200), (2048, 12288)]
)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (32, 8, 128), (8, 8, 64)])
def test_cudnn_equals_the_torch_backend(
    query_len: int, context_len: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    step = make(
        [1, query_len, 64],
        [700, context_len, 300],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=torch.bfloat16,
    )
    prefill = LongPrefill(min_pairs=1)
    assert 1 in prefill.covers(step.batch.query_lens, step.batch.context_lens)
    check(step, TritonAttention(prefill), None, tolerance=2e-2)
    assert prefill.why_not(step.query) is None  # it was asked, and did not refuse


@pytest.mark.skipif(DEVICE == "cpu", reason="needs cuDNN")
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_a_bad_number_reaches_only_tokens_that_see_it_by_cudnn(part: int, number: float) -> None:
    step = make([4096], [4096], heads=16, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    step.new[2001, part, :, 5] = number
    prefill = LongPrefill(min_pairs=1)
    output, _ = step.run(TritonAttention(prefill), None)
    assert prefill.why_not(step.query) is None
    assert output[2001:].isnan().all()
    assert output[:2001].isfinite().all()
    check(step, TritonAttention(prefill), None, tolerance=2e-2)


# --- the choice -----------------------------------------------------------------------------------------------------


def test_the_backend_can_be_asked_for_by_name() -> None:
    assert select_backend("triton", DEVICE).name == "triton"
    assert select_backend("auto", DEVICE).name == ("torch" if DEVICE == "cpu" else "triton")


def test_a_device_that_can_not_be_served_is_refused_with_the_reason() -> None:
    with pytest.raises(
        InvalidValueError, match="'triton' can't serve device meta: triton: Triton kernels need a CUDA device, not meta"
    ):
        select_backend("triton", "meta")
