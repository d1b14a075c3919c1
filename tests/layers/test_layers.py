"""Layers that take shortcuts, against the plain operation."""

import pytest
import torch
import torch.nn.functional as F
from narrow import dense

from infinilm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from infinilm.layers.formats.dense import DenseWeight
from infinilm.layers.linear import Linear
from infinilm.layers.norm import RMSNorm


@pytest.mark.parametrize("vocab_size", [128, 100])
@pytest.mark.parametrize("num_rows", [1, 3, 4, 8, 15, 16, 40])
def test_the_tied_head_is_a_product_with_the_table(num_rows: int, vocab_size: int) -> None:
    embedding = VocabParallelEmbedding(vocab_size, 24, dtype=torch.float32, device="cpu")
    assert isinstance(embedding.matrix, DenseWeight)
    embedding.matrix.weight.copy_(torch.randn(vocab_size, 24))
    hidden = torch.randn(num_rows, 24)
    torch.testing.assert_close(embedding.logits(hidden), F.linear(hidden, embedding.matrix.weight))


def test_embedding_and_head_of_one_rank() -> None:
    table, matrix, ids = torch.randn(10, 6), torch.randn(10, 6), torch.tensor([0, 9, 9, 3])
    embedding = VocabParallelEmbedding(10, 6, dtype=torch.float32, device="cpu")
    head = ParallelLMHead(10, 6, dtype=torch.float32, device="cpu")
    dense(embedding.weight_targets("model.embed_tokens.")["model.embed_tokens.weight"]).tensor.copy_(table)
    dense(head.weight_targets("lm_head.")["lm_head.weight"]).tensor.copy_(matrix)
    assert embedding(ids).equal(table[ids])
    torch.testing.assert_close(head(embedding(ids)), table[ids] @ matrix.T)


@pytest.mark.parametrize("bias", [False, True])
def test_fused_matrices_are_loaded_through_views_and_multiplied_as_one(bias: bool) -> None:
    linear = Linear(8, {"q_proj": 6, "k_proj": 4}, bias=bias, dtype=torch.float32, device="cpu")
    shards = linear.weight_targets("attn.")
    assert {name: shard.full_shape for name, shard in shards.items() if name.endswith("weight")} == {
        "attn.q_proj.weight": (6, 8),
        "attn.k_proj.weight": (4, 8),
    }
    weights = {name: dense(shard).tensor.copy_(torch.randn(shard.full_shape)).clone() for name, shard in shards.items()}
    x, residual = torch.randn(5, 8), torch.randn(5, 10)
    parts = [F.linear(x, weights[f"attn.{p}.weight"], weights.get(f"attn.{p}.bias")) for p in ("q_proj", "k_proj")]
    torch.testing.assert_close(linear(x), torch.cat(parts, dim=-1))
    torch.testing.assert_close(linear(x, residual.clone()), residual + torch.cat(parts, dim=-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_torchs(dtype: torch.dtype) -> None:
    norm = RMSNorm(32, 1e-5, dtype=dtype, device="cpu")
    norm.weight.copy_(torch.rand(32) + 0.5)
    x = torch.randn(7, 32).to(dtype)
    expected = F.rms_norm(x.float(), (32,), None, 1e-5).to(dtype) * norm.weight
    torch.testing.assert_close(norm(x), expected)
