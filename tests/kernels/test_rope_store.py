from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from infinilm.kernels.rope_store import rope_store, rope_store_torch
from infinilm.layers.norm import RMSNorm
from infinilm.layers.rotary_embedding import RotaryEmbedding, apply_rotary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter cuts bfloat16 off instead of rounding it.
ROUNDED = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-6
BLOCK_SIZE, NUM_BLOCKS = 16, 5


@dataclass(frozen=True)
class Heads:
    """The heads of a model."""

    queries: int
    kv: int
    dim: int
    normed: bool = False
    rotated: float = 1.0
    interleaved: bool = False


QWEN3 = Heads(16, 8, 128, normed=True)
# Heads as in Llama and SmolLM2, one of an odd size, and so many that they take several programs.
MODELS = [QWEN3, Heads(9, 3, 64), Heads(3, 1, 80), Heads(5, 1, 20, normed=True), Heads(32, 8, 128)]
# A part of each head rotated, as in Phi-4-mini and GLM-4, and neighbours.
MODELS += [Heads(6, 2, 128, rotated=0.75), Heads(4, 2, 32, normed=True, rotated=0.5, interleaved=True)]
MODELS += [Heads(3, 1, 64, interleaved=True)]
CASES = [(heads, dtype) for heads in MODELS for dtype in DTYPES if DEVICE == "cuda" or dtype == torch.half]
CASES += [(QWEN3, torch.float32), (Heads(3, 1, 80), torch.bfloat16)]


@dataclass(frozen=True)
class Case:
    """Arguments of `rope_store`."""

    qkv: Tensor
    positions: Tensor
    table: Tensor
    slots: Tensor
    cache: Tensor
    settings: dict

    def run(self, function) -> tuple[Tensor, Tensor]:
        """The queries and the cache that come of it."""
        cache = self.cache.clone()
        if DEVICE == "cuda":
            torch.cuda.synchronize()  # kernels that are launched early read weights at once
        return function(self.qkv, self.positions, self.table, self.slots, cache, **self.settings), cache


def make_case(heads: Heads, dtype: torch.dtype, slots: list[int]) -> Case:
    torch.manual_seed(0)
    qkv = torch.randn(len(slots), heads.queries + 2 * heads.kv, heads.dim, device=DEVICE)
    rotary = rotary_of(heads, dtype)
    settings: dict = {"num_heads": heads.queries, "num_kv_heads": heads.kv, "is_interleaved": heads.interleaved}
    if heads.normed:
        q_norm, k_norm = (torch.randn(heads.dim, device=DEVICE).to(dtype) for _ in range(2))
        settings |= {"q_norm": q_norm, "k_norm": k_norm, "eps": EPS}
    cache = torch.randn(NUM_BLOCKS, BLOCK_SIZE, 2, heads.kv, heads.dim, device=DEVICE)
    positions = torch.randint(0, len(rotary.table), (len(slots),), device=DEVICE)
    return Case(
        qkv.to(dtype),
        positions,
        rotary.table,
        torch.tensor(slots, dtype=torch.int64, device=DEVICE),
        cache.to(dtype),
        settings,
    )


def rotary_of(heads: Heads, dtype: torch.dtype) -> RotaryEmbedding:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": heads.rotated}
    rope["interleaved"] = heads.interleaved
    return RotaryEmbedding(heads.dim, rope, max_len=300, max_position_embeddings=300, dtype=dtype, device=DEVICE)


def decoders_own(heads: Heads, case: Case) -> tuple[Tensor, Tensor]:
    """What a decoder layer makes of it in torch."""
    dtype, turned = case.qkv.dtype, case.qkv.clone()
    qk = turned[:, : -heads.kv]
    normed = qk
    if heads.normed:
        parts = []
        for name, part in (("q_norm", qk[:, : heads.queries]), ("k_norm", qk[:, heads.queries :])):
            norm = RMSNorm(heads.dim, EPS, dtype=dtype, device=DEVICE)
            norm.weight.copy_(case.settings[name])
            parts.append(norm(part))
        normed = torch.cat(parts, dim=1)
    angles = rotary_of(heads, dtype)(case.positions)
    apply_rotary(normed, *angles, out=qk, is_interleaved=heads.interleaved)
    cache, stored = case.cache.clone(), case.slots >= 0
    kv = turned[:, heads.queries :].view(len(turned), 2, heads.kv, heads.dim)
    cache.flatten(0, 1).index_copy_(0, case.slots[stored], kv[stored])
    return turned[:, : heads.queries], cache


def assert_alike(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    # Of a sum of two products of numbers up to about 5, each of them normed and rounded before.
    step = torch.finfo(actual[0].dtype).eps * (2 if actual[0].dtype == torch.bfloat16 else 1)
    torch.testing.assert_close(actual, expected, rtol=3 * step, atol=8 * step)


# One token, tokens on both sides of a block's boundary and at the cache's end, some not stored, and none at all.
SLOTS = [[37], [-1], [14, 15, 16, 17], [79, -1, 3, -1, 0], []]


@pytest.mark.parametrize("slots", SLOTS, ids=str)
@pytest.mark.parametrize(("heads", "dtype"), CASES, ids=str)
def test_is_its_twin(heads: Heads, slots: list[int], dtype: torch.dtype) -> None:
    case = make_case(heads, dtype, slots)
    queries, cache = case.run(rope_store)
    assert queries.shape == (len(slots), heads.queries, heads.dim)
    assert queries.is_contiguous()
    assert_alike((queries, cache), case.run(rope_store_torch))
    # Values are copied as they are, and no other slot is touched.
    kept = [slot for slot in slots if slot >= 0]
    values = cache.flatten(0, 1)[case.slots[case.slots >= 0], 1]
    assert torch.equal(values, case.qkv[case.slots >= 0, -heads.kv :])
    untouched = [slot for slot in range(NUM_BLOCKS * BLOCK_SIZE) if slot not in kept]
    assert torch.equal(cache.flatten(0, 1)[untouched], case.cache.flatten(0, 1)[untouched])


@pytest.mark.parametrize(("heads", "dtype"), CASES, ids=str)
def test_is_what_the_decoder_does(heads: Heads, dtype: torch.dtype) -> None:
    case = make_case(heads, dtype, [4, 60, -1])
    expected = decoders_own(heads, case)
    assert_alike(case.run(rope_store), expected)
    assert_alike(case.run(rope_store_torch), expected)


@pytest.mark.parametrize("dtype", ROUNDED)
def test_rounds_a_rotation_as_the_decoder_does(dtype: torch.dtype) -> None:
    heads = Heads(9, 3, 64)
    case = make_case(heads, dtype, [9, 33, 2])
    for actual, expected in zip(case.run(rope_store), decoders_own(heads, case), strict=True):
        assert torch.equal(actual, expected)


def test_tokens_may_be_strided() -> None:
    case = make_case(QWEN3, torch.float16, [1, 2])
    wide = torch.zeros(2, 5000, dtype=torch.float16, device=DEVICE)
    part = wide[:, 160 : 160 + 32 * 128].view(2, 32, 128)
    part.copy_(case.qkv)
    strided = Case(part, case.positions, case.table, case.slots, case.cache, case.settings)
    for actual, expected in zip(strided.run(rope_store), case.run(rope_store), strict=True):
        assert torch.equal(actual, expected)


def test_a_cache_may_be_of_another_type() -> None:
    case = make_case(QWEN3, torch.float16, [20])
    wide = Case(case.qkv, case.positions, case.table, case.slots, case.cache.float(), case.settings)
    assert torch.equal(wide.run(rope_store)[1].half(), case.run(rope_store)[1])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["key", "value"])
@pytest.mark.parametrize("heads", [Heads(9, 3, 64), Heads(3, 1, 80), Heads(32, 8, 128)], ids=str)
def test_a_number_that_is_not_finite_is_kept_as_a_nan_key(heads: Heads, place: str, number: float) -> None:
    case = make_case(heads, torch.float16, [4, 60, -1])
    case.cache.zero_()
    case.qkv[1, heads.queries + (heads.kv if place == "value" else 0), 7] = number
    queries, cache = case.run(rope_store)
    expected_queries, expected = case.run(rope_store_torch)
    step = torch.finfo(torch.float16).eps
    torch.testing.assert_close(cache, expected, rtol=3 * step, atol=8 * step, equal_nan=True)
    torch.testing.assert_close(queries, expected_queries, rtol=3 * step, atol=8 * step)
    token = cache.flatten(0, 1)[60]
    assert token[0, 0].isnan().all()
    assert cache.isnan().sum() == heads.dim
    assert cache[:, :, 1].isfinite().all()
    assert token[1, 0].eq(0).all() == (place == "value")


@pytest.mark.parametrize(("heads", "dtype"), CASES, ids=str)
def test_marks_change_no_bit_of_finite_numbers(heads: Heads, dtype: torch.dtype) -> None:
    """A token is computed with them in a step with prompts, and without in others."""
    case = make_case(heads, dtype, [3, 70, -1, 5])
    marked = case.run(partial(rope_store, marks_nonfinite=True))
    for actual, expected in zip(case.run(partial(rope_store, marks_nonfinite=False)), marked, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.skipif(DEVICE == "cpu", reason="takes the interpreter too long")
@pytest.mark.parametrize("heads", MODELS, ids=str)
def test_a_long_prefill(heads: Heads) -> None:
    case = make_case(heads, torch.bfloat16, list(range(NUM_BLOCKS * BLOCK_SIZE)) + [-1] * 4000)
    assert_alike(case.run(rope_store), case.run(rope_store_torch))
