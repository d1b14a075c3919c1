"""Experts: their choice, and products of rows that are few or sorted, in any tiles."""

import interpreter  # noqa: F401
import pytest
import torch
from packing import make_blocks
from torch import Tensor

from infinilm.distributed.ggml_blocks import BLOCK_FORMATS
from infinilm.kernels.experts import FEW_ROWS, Tile, Tiles, choose_experts, choose_tiles, mix_experts
from infinilm.kernels.experts_torch import choose_experts_torch, mix_experts_torch
from infinilm.kernels.packed_lines import PackedLines, unpack_lines_torch
from infinilm.kernels.routing import GELU, ClampedGate, Routing
from infinilm.layers.formats.lines import LinesPart
from infinilm.layers.formats.tiled import tile_format

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
PACKED = ["MXFP4", "FP8 row F32", "FP8 32 F32", "INT4 32 F16 zeros", "INT4 row F16", "Q4_K", "Q6_K", "Q4_1", "Q8_0"]
NUM_EXPERTS, TOP_K, HIDDEN, INNER = 6, 3, 48, 40


def make_layer(
    num_rows: int, dtype: torch.dtype = torch.float32, num_experts: int = NUM_EXPERTS, top_k: int = TOP_K
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, HIDDEN, generator=generator)
    gate_up = torch.randn(num_experts, 2 * INNER, HIDDEN, generator=generator) * HIDDEN**-0.5
    down = torch.randn(num_experts, HIDDEN, INNER, generator=generator) * INNER**-0.5
    logits = torch.randn(num_rows, num_experts, generator=generator)
    ids, weights = choose_experts_torch(logits, Routing(num_experts, top_k, renormalizes=True))
    x, gate_up, down = (each.to(DEVICE, dtype) for each in (x, gate_up, down))
    return x, ids.to(DEVICE), weights.to(DEVICE), gate_up, down


def assert_alike(actual: Tensor, expected: Tensor) -> None:
    # Results are of order 1 and rounded four times; the interpreter cuts bfloat16 off.
    torch.testing.assert_close(actual, expected, rtol=0, atol=16 * torch.finfo(actual.dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_experts", "top_k"), [(6, 3), (128, 8), (4, 4), (5, 1)])
@pytest.mark.parametrize("renormalizes", [False, True])
def test_choice(num_experts: int, top_k: int, renormalizes: bool, dtype: torch.dtype) -> None:
    logits = torch.randn(9, num_experts, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    logits[3] = torch.arange(num_experts)  # nothing is equal, as rounded numbers may be
    routing = Routing(num_experts, top_k, renormalizes)
    ids, weights = choose_experts(logits, routing)
    expected_ids, expected = choose_experts_torch(logits, routing)
    assert ids.dtype == torch.int32
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    assert ids[3].tolist() == expected_ids[3].tolist()
    probabilities = logits.float().softmax(dim=-1)
    own = probabilities.gather(1, ids.long())
    torch.testing.assert_close(own, probabilities.gather(1, expected_ids.long()), rtol=0, atol=0)
    assert all(len(set(row)) == top_k for row in ids.tolist())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "routing",
    [
        Routing(24, 5, renormalizes=True, is_sigmoid=True, scale=2.5),
        Routing(24, 5, renormalizes=False, is_sigmoid=True, num_groups=4, top_groups=2),
        Routing(24, 5, renormalizes=False, num_groups=4, top_groups=2, group_best=1),
        Routing(24, 6, renormalizes=True, num_groups=6, top_groups=3, scale=0.5),
        Routing(24, 4, renormalizes=True, is_sigmoid=True, num_groups=6, top_groups=1),
    ],
)
def test_choice_by_groups(routing: Routing, has_bias: bool) -> None:
    """Scores are sigmoids, a bias changes which are the best, and only some groups count."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(20, 24, generator=generator).to(DEVICE)
    bias = torch.randn(24, generator=generator).to(DEVICE) if has_bias else None
    ids, weights = choose_experts(logits, routing, bias)
    expected_ids, expected = choose_experts_torch(logits, routing, bias)
    assert ids.equal(expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_the_choice_of_bad_logits_is_valid_and_unknown() -> None:
    logits = torch.randn(3, NUM_EXPERTS, device=DEVICE)
    logits[1, 2] = torch.nan
    logits[2, 4] = torch.inf
    ids, weights = choose_experts(logits, Routing(NUM_EXPERTS, TOP_K, renormalizes=True))
    assert all(len(set(row)) == TOP_K and max(row) < NUM_EXPERTS for row in ids.tolist())
    assert weights.isnan().any(dim=1).tolist() == [False, True, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 2, FEW_ROWS, FEW_ROWS + 1, 70])
def test_rows_equal_the_twin(num_rows: int, dtype: torch.dtype) -> None:
    layer = make_layer(num_rows, dtype)
    assert_alike(mix_experts(*layer), mix_experts_torch(*layer))
    residual = torch.randn(num_rows, 2 * HIDDEN, device=DEVICE).to(dtype)[:, :HIDDEN]
    assert_alike(mix_experts(*layer, residual), mix_experts_torch(*layer, residual))


@pytest.mark.parametrize("num_rows", [3, 30])
def test_biases_and_a_limited_gate(num_rows: int) -> None:
    layer = make_layer(num_rows)
    biases = torch.randn(NUM_EXPERTS, 2 * INNER, device=DEVICE), torch.randn(NUM_EXPERTS, HIDDEN, device=DEVICE)
    gate = ClampedGate(alpha=1.7, limit=1.2)
    assert_alike(mix_experts(*layer, biases=biases, gate=gate), mix_experts_torch(*layer, biases=biases, gate=gate))
    first = (biases[0], None)
    assert_alike(mix_experts(*layer, biases=first), mix_experts_torch(*layer, biases=first))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [3, 30])
def test_a_gate_with_gelu(num_rows: int, dtype: torch.dtype) -> None:
    layer = make_layer(num_rows, dtype)
    found = mix_experts(*layer, gate=GELU)
    assert_alike(found, mix_experts_torch(*layer, gate=GELU))
    assert not torch.allclose(found, mix_experts(*layer), atol=1e-2)


def test_more_experts_than_pairs() -> None:
    """Each pair is a group of its own, or rows share one."""
    x, ids, weights, gate_up, down = make_layer(5, num_experts=40, top_k=2)
    ids[1] = ids[0]
    layer = (x, ids, weights, gate_up, down)
    assert_alike(mix_experts(*layer), mix_experts_torch(*layer))


def test_all_rows_may_choose_the_same_experts() -> None:
    x, ids, weights, gate_up, down = make_layer(40)
    ids[:] = torch.tensor([5, 0, 2], device=DEVICE)
    layer = (x, ids, weights, gate_up, down)
    assert_alike(mix_experts(*layer), mix_experts_torch(*layer))


@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_tiles_nor_company_change_a_bit(dtype: torch.dtype) -> None:
    x, ids, weights, gate_up, down = make_layer(40, dtype)
    together = mix_experts(x, ids, weights, gate_up, down)
    for first, count in ((0, 1), (3, 4), (5, FEW_ROWS), (7, 30)):
        own = slice(first, first + count)
        assert mix_experts(x[own], ids[own], weights[own], gate_up, down).equal(together[own])
    wide = Tiles(32, gate_up=Tile(32, 16, 4, 2), down=Tile(16, 32, 4, 3))
    swapped = Tiles(16, gate_up=Tile(64, 16, 4, 2, is_swapped=True), down=Tile(64, 32, 4, 3, is_swapped=True))
    for tiles in (wide, swapped):
        found = mix_experts(x, ids, weights, gate_up, down, tiles=tiles)
        if DEVICE == "cuda":
            assert found.equal(together)
        else:  # the interpreter's products of a tile are NumPy's, in no order
            assert_alike(found, together)


def test_a_row_of_nan_harms_no_other() -> None:
    for num_rows in (4, 30):
        x, ids, weights, gate_up, down = make_layer(num_rows)
        expected = mix_experts(x, ids, weights, gate_up, down)
        x[2] = torch.nan
        found = mix_experts(x, ids, weights, gate_up, down)
        assert found[2].isnan().all()
        others = torch.arange(num_rows, device=DEVICE) != 2
        assert found[others].equal(expected[others])


def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    rows = [choose_tiles(num_rows, 8, 128).rows for num_rows in (1, 16, 64, 256, 2048, 16384)]
    assert rows == [16, 16, 16, 32, 64, 128]


def packed_lines(format: str, num_lines: int, columns: int) -> tuple[PackedLines, Tensor]:
    """Random packed lines, and their values."""
    matrix = PackedLines.empty(tile_format(format), num_lines, columns, DEVICE)
    matrix.codes.copy_(torch.randint(0, 126 if matrix.format.is_float else 256, matrix.codes.shape))
    if format == "MXFP4":
        matrix.scales.copy_(torch.randint(118, 124, matrix.scales.shape))
    elif matrix.scales.dtype == torch.float32:
        matrix.scales.copy_(torch.rand(matrix.scales.shape) * 0.01)
    if matrix.zeros is not None:
        matrix.zeros.copy_(torch.randint(0, 16, matrix.zeros.shape))
    if format in BLOCK_FORMATS:
        blocks, values = make_blocks(format, num_lines, columns)
        LinesPart(format, matrix, 0, num_lines).load(blocks, torch.arange(num_lines))
        assert unpack_lines_torch(matrix, torch.float32).cpu().equal(values)
    return matrix, unpack_lines_torch(matrix, torch.float32)


@pytest.mark.parametrize("num_rows", [3, 30])
@pytest.mark.parametrize("format", PACKED)
def test_packed_experts(format: str, num_rows: int) -> None:
    """Of matrices that are not whole tiles, except in the formats whose blocks are as large as them."""
    torch.manual_seed(0)
    hidden, inner, num_experts = (256, 256, 2) if "_K" in format else (32, 96, 2)
    gate_up, gate_up_values = packed_lines(format, num_experts * 2 * inner, hidden)
    down, down_values = packed_lines(format, num_experts * hidden, inner)
    x = torch.randn(num_rows, hidden, device=DEVICE) * 0.1
    ids, weights = choose_experts_torch(torch.randn(num_rows, num_experts), Routing(num_experts, 2, True))
    ids, weights = ids.to(DEVICE), weights.to(DEVICE)
    dense = gate_up_values.view(num_experts, 2 * inner, hidden), down_values.view(num_experts, hidden, inner)
    expected = mix_experts_torch(x, ids, weights, *dense, None)
    found = mix_experts(x, ids, weights, gate_up, down)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
