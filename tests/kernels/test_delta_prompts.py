"""A gated delta net's prompts by kernels against the torch version."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from infinilm.attention.batch import HostBatch
from infinilm.kernels.delta_rule import PromptRows
from infinilm.layers import state_plan
from infinilm.layers.delta_net import GatedDeltaNet, _Inputs
from infinilm.layers.formats import DENSE
from infinilm.layers.state_plan import GraphPrompts, PromptStates, StatePlan, _prompt_rows, find_sources

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16


def make_layer(
    heads: int, key_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, *, is_ordered: bool = False
) -> GatedDeltaNet:
    sizes: dict[str, Any] = {
        "num_key_heads": key_heads,
        "num_value_heads": heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
    }
    options: dict[str, Any] = {"dtype": dtype, "device": DEVICE, "formats": replace(DENSE, is_ordered=is_ordered)}
    layer = GatedDeltaNet(0, 32, **sizes, conv_width=4, norm_eps=1e-6, **options)
    generator = torch.Generator().manual_seed(0)
    for weight in (layer.conv, layer.dt_bias, layer.a_log, layer.norm):
        weight.copy_(torch.randn(weight.shape, generator=generator))
    return layer


def make_batch(new: list[int], context: list[int], block_size: int) -> tuple[HostBatch, np.ndarray, int]:
    """Requests with blocks in any order, their table, and how many blocks there are."""
    counts = [-(-length // block_size) for length in context]
    order = np.random.default_rng(0).permutation(sum(counts) + 2)
    tables = np.full((len(new), max(counts) + 1), -1, dtype=np.int64)
    for row, count in enumerate(counts):
        tables[row, :count] = order[sum(counts[:row]) : sum(counts[:row]) + count]
    empty = np.zeros(sum(new), dtype=np.int64)
    lens = (np.array(new, dtype=np.int64), np.array(context, dtype=np.int64))
    return HostBatch(empty, empty, empty, tables, *lens), tables, len(order)


SHAPES = [(4, 2, 16, 24)] if DEVICE.type == "cpu" else [(4, 2, 16, 24), (2, 2, 40, 16), (32, 16, 128, 128)]
TEXTS = [
    ([2, 1, 40, 16, 19], [2, 5, 40, 48, 60], 16),  # whole prompts, a decoding request, later chunks
    ([50, 7], [70, 26], 32),  # from the middle of a block, in which the second ends again
    ([9, 3], [9, 20], 8),
]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("texts", TEXTS)
@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("is_ordered", [False, True])
def test_prompts(
    is_ordered: bool, sizes: tuple[int, int, int, int], texts: tuple[list[int], list[int], int], dtype: torch.dtype
) -> None:
    heads, key_heads, key_dim, value_dim = sizes
    new, context, block_size = texts
    layer = make_layer(heads, key_heads, key_dim, value_dim, dtype, is_ordered=is_ordered)
    batch, tables, num_blocks = make_batch(new, context, block_size)
    generator = torch.Generator().manual_seed(1)
    widths = [2 * key_heads * key_dim + heads * value_dim, heads * value_dim, heads, heads]
    projected = torch.randn(sum(new), sum(widths), generator=generator).to(DEVICE, dtype)
    shapes = ((num_blocks, heads, key_dim, value_dim), (num_blocks, widths[0], 3))
    states = [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]
    starts = batch.context_lens - batch.query_lens
    ends = np.full(num_blocks, -1)
    lasts = tables[np.arange(len(new)), np.maximum(starts - 1, 0) // block_size]
    ends[lasts] = starts
    sources = find_sources(tables, starts, block_size, ends)
    others = np.flatnonzero(batch.query_lens > 1)
    options: dict[str, Any] = {"sources": sources, "block_size": block_size, "device": DEVICE}
    other_ends = ends.copy()
    plan = PromptStates.of(others, batch, tables, ends=ends, **options)
    rows = _prompt_rows(others, batch, tables, ends=other_ends, **options)
    assert (ends == other_ends).all()

    expected_states = [state.clone() for state in states]
    places = plan.places
    expected = torch.full((sum(new), heads * value_dim), 5.0, dtype=dtype, device=DEVICE)
    expected[places] = layer._compute_prompts(plan, _Inputs(*projected[places].split(widths, dim=1)), expected_states)
    found = torch.full_like(expected, 5.0)
    layer._prompts_by_kernels(rows, _Inputs(*projected.split(widths, dim=1)), states, found)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(states[0], expected_states[0], rtol=tolerance, atol=tolerance)
    assert torch.equal(states[1], expected_states[1])


def test_equal_keys_are_no_trouble() -> None:
    """The system of a chunk is as badly conditioned as can be: nothing decays, every token overwrites the last."""
    layer = make_layer(2, 1, 16, 16, torch.float32)
    layer.a_log.fill_(-20.0)
    batch, tables, num_blocks = make_batch([48], [48], 16)
    projected = torch.randn(1, 32 + 32 + 32 + 4, generator=torch.Generator().manual_seed(1)).repeat(48, 1).to(DEVICE)
    projected[:, -4:-2] = 30.0  # rates of 1
    states = [torch.zeros(num_blocks, 2, 16, 16, device=DEVICE), torch.zeros(num_blocks, 64, 3, device=DEVICE)]
    expected_states = [state.clone() for state in states]
    options: dict[str, Any] = {
        "sources": np.array([-1]),
        "block_size": 16,
        "device": DEVICE,
        "ends": np.zeros(num_blocks, np.int64),
    }
    inputs = _Inputs(*projected.split([64, 32, 2, 2], dim=1))
    plan = PromptStates.of(np.array([0]), batch, tables, **options)
    rows = _prompt_rows(np.array([0]), batch, tables, **options)
    found = torch.empty(48, 32, device=DEVICE)
    layer._prompts_by_kernels(rows, inputs, states, found)
    torch.testing.assert_close(found, layer._compute_prompts(plan, inputs, expected_states), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("sizes", SHAPES)
def test_a_token_has_the_same_bits_in_any_chunk_and_company(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If sums are in order: two texts whole, in parts, and token by token."""
    monkeypatch.setattr(state_plan, "has_kernels", lambda device: True)
    heads, key_heads, key_dim, value_dim = sizes
    layer = make_layer(*sizes, dtype, is_ordered=True)
    layer._has_kernels = True
    generator = torch.Generator().manual_seed(1)
    num_channels = 2 * key_heads * key_dim + heads * value_dim
    width = num_channels + heads * value_dim + 2 * heads
    lengths, block_size, num_blocks = (37, 21), 8, 10
    texts = [torch.randn(length, width, generator=generator).to(DEVICE, dtype) for length in lengths]
    tables = np.array([[7, 2, 0, 9, 4], [1, 8, 3, 5, 6]])

    def compute(*steps: list[tuple[int, int]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Outputs and last states by text. A step computes tokens of some texts: the text and how many."""
        shapes = ((num_blocks + 1, heads, key_dim, value_dim), (num_blocks + 1, num_channels, 3))
        states = [torch.full(shape, 3.0, device=DEVICE) for shape in shapes]
        found: list[list[torch.Tensor]] = [[], []]
        ends, done = np.zeros(num_blocks, dtype=np.int64), [0, 0]
        for parts in steps:
            rows = [text for text, _ in parts]
            new = np.array([count for _, count in parts])
            given = [texts[text][done[text] : done[text] + count] for text, count in parts]
            for text, count in parts:
                done[text] += count
            zeros = np.zeros(new.sum(), dtype=np.int64)
            batch = HostBatch(zeros, zeros, zeros, tables[rows], new, np.array([done[text] for text in rows]))
            plan = StatePlan.of(batch, tables[rows], block_size=block_size, device=DEVICE, ends=ends)
            context = SimpleNamespace(plan=plan, cache=SimpleNamespace(states={0: states}))
            outputs = layer._mix(torch.cat(given), cast(Any, context)).split(new.tolist())
            for text, output in zip(rows, outputs, strict=True):
                found[text].append(output)
        lasts = [tables[text, (length - 1) // block_size] for text, length in enumerate(lengths)]
        return [torch.cat(each) for each in found], [state[lasts] for state in states]

    whole = compute([(0, 37), (1, 21)])
    for steps in (
        [[(1, 21)], [(0, 37)]],
        [[(0, 5)], [(0, 1), (1, 3)], [(1, 1), (0, 20)], [(0, 1), (1, 1)], [(1, 16), (0, 10)]],
        [[(0, 1)]] * 16 + [[(1, 1), (0, 1)]] * 21,
    ):
        found = compute(*steps)
        for first, second in zip((*whole[0], *whole[1]), (*found[0], *found[1]), strict=True):
            assert torch.equal(first, second)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_the_plan_of_a_graph(is_ordered: bool) -> None:
    """Decoding rows, prompts and padding in memory that stays, against the plan of the step alone."""
    layer = make_layer(2, 1, 16, 16, torch.float32, is_ordered=is_ordered)
    layer._has_kernels = True
    batch, tables, num_blocks = make_batch([1, 1, 20, 2], [9, 17, 20, 18], 8)
    starts = batch.context_lens - batch.query_lens
    ends = np.zeros(num_blocks, dtype=np.int64)
    ends[tables[np.arange(4), (starts - 1) // 8]] = starts
    generator = torch.Generator().manual_seed(1)
    shapes = ((num_blocks + 1, 2, 16, 16), (num_blocks + 1, 64, 3))
    states = [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]
    inputs = torch.randn(32, 64 + 32 + 4, generator=generator).to(DEVICE)
    cache = SimpleNamespace(state_ends={0: ends.copy()}, block_size=8, device=DEVICE)
    held = GraphPrompts(32, 6, cast(Any, cache), 0, 2)
    held.fill(batch, tables, 2)
    sources = find_sources(tables, starts, 8, ends)
    others = np.array([2, 3])
    alone = _prompt_rows(others, batch, tables, sources=sources, ends=ends, block_size=8, device=DEVICE)
    blocks = torch.from_numpy(np.stack((sources[:2], tables[[0, 1], starts[:2] // 8]))).to(DEVICE)
    is_first = torch.zeros(2, dtype=torch.bool, device=DEVICE)
    plan = StatePlan(torch.arange(2, device=DEVICE), blocks[0], is_first, blocks[1], 8, alone)
    found = []
    for each, count in ((plan, 24), (held.plan(), 32)):
        assert isinstance(each.prompts, PromptRows)
        own = [state.clone() for state in states]
        out = torch.zeros(count, 32, device=DEVICE)
        split = [64, 32, 2, 2]
        out[each.places] = layer._step(each, _Inputs(*inputs[each.places].split(split, dim=1)), own)
        layer._prompts_by_kernels(each.prompts, _Inputs(*inputs[:count].split(split, dim=1)), own, out)
        found.append((out[:24], *(state[:-1] for state in own)))
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)
    ends[blocks[1].cpu().numpy()] = batch.context_lens[:2]
    assert (ends == cache.state_ends[0]).all()
