"""Layers whose matrices stay quantised, against the torch twin of the native library."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from packing import FORMATS, library, make_blocks, needs_native
from ranks import run_ranks
from torch import Tensor

from infinilm.distributed import CommunicationGroup
from infinilm.distributed.shard import PackedShard, Shard, ShardRange, WeightShard, dense_weights
from infinilm.errors import EngineError
from infinilm.kernels.packed import packed_linear
from infinilm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from infinilm.layers.formats import DENSE, DenseWeight, GGUFWeight, MatrixOutline, WeightFormats
from infinilm.layers.linear import ColumnParallelLinear, GateUpParallelLinear, Linear, RowParallelLinear
from infinilm.layers.norm import RMSNorm

MAKE: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
Weights = dict[str, tuple[Tensor, Tensor]]
"""By name: rows of blocks, and their values."""


def make_weights(formats: Mapping[str, str], rows: Mapping[str, int], columns: int) -> Weights:
    return {name: make_blocks(format, rows[name], columns, seed) for seed, (name, format) in enumerate(formats.items())}


def fill(shards: Mapping[str, Shard], weights: Weights, plain: Mapping[str, Tensor]) -> None:
    """Give each shard its piece of the weights, as loading would."""
    for name, shard in shards.items():
        if isinstance(shard, WeightShard):
            whole = plain[name] if name in plain else weights[name][1]
            shard.tensor.copy_(shard.cut(whole))
            continue
        blocks, values = weights[name]
        first, columns = shard.starts[0], shard.shape[1]
        row_bytes = blocks.shape[1] * columns // values.shape[1]
        at = shard.starts[1] // columns * row_bytes
        own = blocks[first : first + shard.shape[0], at : at + row_bytes]
        shard.matrix.load(own.contiguous(), torch.arange(shard.shape[0]))


def values_of(shard: Shard) -> Tensor:
    """What a quantised matrix holds; in the K formats scales are rounded once more."""
    assert isinstance(shard, PackedShard)
    out = torch.empty(shard.shape)
    matrix: Any = shard.matrix
    matrix.dequantize(torch.arange(len(out)), out)
    return out


# --- which matrices ---------------------------------------------------------------------------------------


def test_all_of_a_layer_or_none() -> None:
    formats = WeightFormats({"model.a.weight": "Q8_0", "model.b.weight": "Q4_K", "model.c.weight": "Q4_1"})
    below = formats.below("model.")
    whole = ShardRange.whole(256)
    assert below.find(["a.weight", "b.weight", "c.weight"], whole) == ["Q8_0", "Q4_K", "Q4_1"]
    assert below.find(["a.weight", "other.weight"], whole) is None
    assert formats.find(["a.weight"], whole) is None
    assert DENSE.find(["a.weight"], whole) is None
    assert below.find(["a.weight", "c.weight"], ShardRange(96, 96, 192)) == ["Q8_0", "Q4_1"]
    assert below.find(["a.weight", "b.weight"], ShardRange(128, 128, 256)) is None
    assert below.find(["a.weight"], ShardRange(48, 96, 192)) is None
    assert below.find(["a.weight"], ShardRange(0, 48, 48)) is None


@pytest.mark.parametrize("format", FORMATS)
@needs_native
def test_outlines_know_what_matrices_take(format: str) -> None:
    for rows in (16, 33, 100):
        matrix, outline = library().Matrix(format, rows, 512), MatrixOutline(format, rows, 512)
        assert outline.num_bytes == matrix.num_bytes
    with pytest.raises(EngineError, match="outline of a model takes no weights"):
        outline.load(torch.zeros(1), torch.zeros(1))


@needs_native
def test_quantised_weights_are_not_handed_out() -> None:
    layer = Linear(64, {"a": 8}, bias=True, formats=WeightFormats({"a.weight": "Q8_0"}), **MAKE)
    assert not hasattr(layer, "weight")
    with pytest.raises(EngineError, match="load the model with quantization='none'"):
        dense_weights(layer.weight_targets())


# --- products ---------------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_matrices_of_several_formats_side_by_side(bias: bool, num_rows: int) -> None:
    torch.manual_seed(0)
    formats = {"q.weight": "Q4_K", "k.weight": "Q8_0", "v.weight": "Q6_K"}
    rows = {"q": 40, "k": 24, "v": 17}
    weights = make_weights(formats, {f"{name}.weight": count for name, count in rows.items()}, 256)
    layer = Linear(256, rows, bias=bias, formats=WeightFormats(formats), **MAKE)
    biases = {f"{name}.bias": torch.randn(count) for name, count in rows.items()}
    fill(layer.weight_targets(), weights, biases)
    matrix = torch.cat([values_of(shard) for name, shard in layer.weight_targets().items() if "weight" in name])
    torch.testing.assert_close(matrix, torch.cat([values for _, values in weights.values()]), atol=2e-3, rtol=1e-2)
    all_biases = torch.cat(list(biases.values())) if bias else torch.zeros(81)
    x, residual, norm = torch.randn(num_rows, 256), torch.randn(num_rows, 81), RMSNorm(256, 1e-5, **MAKE)
    norm.weight.uniform_(0.5, 1.5)
    expected = packed_linear(norm(x), matrix, all_biases)
    # A tie may be rounded the other way.
    close: dict[str, Any] = {"atol": 2e-3 * float(expected.abs().max()), "rtol": 0.0}
    torch.testing.assert_close(layer(x, norm=norm), expected, **close)
    torch.testing.assert_close(layer(norm(x), residual.clone()), expected + residual, **close)
    inside = torch.randn(num_rows, 300)[:, 22:278]  # neither x nor residual need be contiguous
    expected = packed_linear(inside.contiguous(), matrix, all_biases) + residual
    torch.testing.assert_close(layer(inside, residual.T.contiguous().T), expected, **close)


@needs_native
@pytest.mark.parametrize("size", [2, 4])
def test_pieces_of_all_ranks_add_up(size: int) -> None:
    """Rows of the first layer, columns of the second; the bias and the residual count once."""
    torch.manual_seed(0)
    names = {"gate_proj.weight": 256, "up_proj.weight": 256, "down_proj.weight": 64}
    formats = {"gate_proj.weight": "Q4_1", "up_proj.weight": "Q8_0", "down_proj.weight": "Q5_0"}
    weights = {
        name: make_blocks(formats[name], rows, 256 if name.startswith("down") else 64) for name, rows in names.items()
    }
    biases = {"down_proj.bias": torch.randn(64)}
    x, residual = torch.randn(5, 64), torch.randn(5, 64)

    def run(group: CommunicationGroup) -> Tensor:
        kept = WeightFormats(formats)
        first = GateUpParallelLinear(64, 256, bias=False, group=group, formats=kept, **MAKE)
        second = RowParallelLinear(256, {"down_proj": 64}, bias=True, group=group, formats=kept, **MAKE)
        assert isinstance(first.matrix, GGUFWeight)
        assert isinstance(second.matrix, GGUFWeight)
        fill(first.weight_targets() | second.weight_targets(), weights, biases)
        norm = RMSNorm(64, 1e-5, **MAKE)
        norm.weight.fill_(1)
        return second(first.activated(x, norm), residual.clone())

    (whole,) = run_ranks(1, run)
    for part in run_ranks(size, run):
        torch.testing.assert_close(part, whole, atol=2e-3 * float(whole.abs().max()), rtol=0)


@needs_native
def test_columns_that_a_rank_can_not_have_in_blocks_make_it_dense() -> None:
    """Two ranks with 128 columns each of blocks of 256: both compute with plain matrices."""
    torch.manual_seed(0)
    weights = {"down_proj.weight": make_blocks("Q6_K", 8, 256)}
    x = torch.randn(3, 256)

    def run(group: CommunicationGroup) -> Tensor:
        formats = WeightFormats({"down_proj.weight": "Q6_K"})
        layer = RowParallelLinear(256, {"down_proj": 8}, bias=False, group=group, formats=formats, **MAKE)
        assert isinstance(layer.matrix, DenseWeight if group.size == 2 else GGUFWeight)
        fill(layer.weight_targets(), weights, {})
        return layer(x.chunk(group.size, dim=1)[group.rank])

    for part in run_ranks(2, run):
        torch.testing.assert_close(part, x @ weights["down_proj.weight"][1].T)


@needs_native
def test_column_parallel_layers_keep_their_rows() -> None:
    weights = {"a.weight": make_blocks("Q4_0", 48, 64)}
    x = torch.randn(2, 64)

    def run(group: CommunicationGroup) -> Tensor:
        formats = WeightFormats({"a.weight": "Q4_0"})
        layer = ColumnParallelLinear(64, {"a": 48}, bias=False, group=group, formats=formats, **MAKE)
        fill(layer.weight_targets(), weights, {})
        return layer(x)

    (whole,) = run_ranks(1, run)
    assert torch.cat(run_ranks(3, run), dim=1).equal(whole)


# --- the vocabulary ---------------------------------------------------------------------------------------


# 161 leaves the last rank rows to spare; of 5 over 4 ranks, the last has none at all.
@needs_native
@pytest.mark.parametrize(("vocab_size", "size"), [(160, 1), (161, 2), (161, 3), (5, 4)])
def test_embedding_and_head(vocab_size: int, size: int) -> None:
    torch.manual_seed(0)
    table, matrix = make_blocks("Q8_0", vocab_size, 64, 1), make_blocks("Q6_K", vocab_size, 256, 2)
    ids = torch.cat([torch.tensor([0, vocab_size - 1]), torch.randint(0, vocab_size, (7,))])
    hidden, wide = torch.randn(3, 64), torch.randn(3, 256)

    def run(group: CommunicationGroup) -> tuple[Tensor, Tensor, Tensor]:
        embedding = VocabParallelEmbedding(
            vocab_size, 64, group=group, formats=WeightFormats({"weight": "Q8_0"}), **MAKE
        )
        formats = WeightFormats({"lm_head.weight": "Q6_K"}).below("lm_head.")
        head = ParallelLMHead(vocab_size, 256, group=group, formats=formats, **MAKE)
        assert isinstance(embedding.matrix, GGUFWeight)
        fill(embedding.weight_targets(""), {"weight": table}, {})
        fill(head.weight_targets(""), {"weight": matrix}, {})
        return embedding(ids), embedding.logits(hidden), head(wide)

    for rank, (found, tied, untied) in enumerate(run_ranks(size, run)):
        assert found.equal(table[1][ids])
        if rank > 0:
            assert tied.numel() == untied.numel() == 0
            continue
        for logits, expected in ((tied, packed_linear(hidden, table[1])), (untied, packed_linear(wide, matrix[1]))):
            torch.testing.assert_close(logits, expected, atol=3e-3 * float(expected.abs().max()), rtol=0)
