"""Layers and whole models shared out over ranks, against the layer or model that is not."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoints import load, make_reference, reference_logits
from drive import make_batch
from narrow import dense
from ranks import run_ranks
from torch import Tensor

from infinilm.attention import TorchAttention
from infinilm.cache.paged import PagedKVCache
from infinilm.cache.specs import kv_heads_per_rank
from infinilm.distributed import CommunicationGroup, RankInfo
from infinilm.distributed.shard import Shard
from infinilm.errors import InvalidValueError
from infinilm.executor.memory import rank_specs
from infinilm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from infinilm.layers.formats.dense import DenseWeight
from infinilm.layers.linear import (
    ColumnParallelLinear,
    GateUpParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)

MAKE: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
SIZES = [2, 3, 4]


def fill(shards: Mapping[str, Shard], weights: Mapping[str, Tensor]) -> None:
    for name, shard in shards.items():
        dense(shard).tensor.copy_(dense(shard).cut(weights[name]))


def random_weights(shards: Mapping[str, Shard]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shard.full_shape, generator=generator) for name, shard in shards.items()}


def outputs_of(
    build: Callable[[CommunicationGroup], Any], size: int, inputs: Callable[[int], tuple[Tensor, ...]]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Each rank's output for `inputs(rank)`, and the whole weights, which have pieces of every rank."""
    weights = random_weights(build(CommunicationGroup()).weight_targets(""))

    def run(group: CommunicationGroup) -> Tensor:
        layer = build(group)
        fill(layer.weight_targets(""), weights)
        return layer(*inputs(group.rank))

    return run_ranks(size, run), weights


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_columns_are_side_by_side(size: int, bias: bool) -> None:
    x = torch.randn(5, 8)
    parts, weights = outputs_of(
        lambda group: ColumnParallelLinear(8, {"a": 12, "b": 24}, bias=bias, group=group, **MAKE), size, lambda _: (x,)
    )
    for name, pieces in {"a": [p[:, : 12 // size] for p in parts], "b": [p[:, 12 // size :] for p in parts]}.items():
        whole = F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole)


@pytest.mark.parametrize("size", SIZES)
def test_gate_and_up_of_a_rank_belong_together(size: int) -> None:
    x = torch.randn(5, 8)
    parts, weights = outputs_of(
        lambda group: GateUpParallelLinear(8, 12, bias=True, group=group, **MAKE), size, lambda _: (x,)
    )
    products = [gate * up for gate, up in (part.chunk(2, dim=-1) for part in parts)]
    gate, up = (F.linear(x, weights[f"{n}.weight"], weights[f"{n}.bias"]) for n in ("gate_proj", "up_proj"))
    torch.testing.assert_close(torch.cat(products, dim=1), gate * up)


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_rows_add_up_with_bias_and_residual_once(size: int, bias: bool, has_residual: bool) -> None:
    x, residual = torch.randn(5, 12), torch.randn(5, 7)
    share = 12 // size
    parts, weights = outputs_of(
        lambda group: RowParallelLinear(12, {"down_proj": 7}, bias=bias, group=group, **MAKE),
        size,
        lambda rank: (x[:, rank * share : (rank + 1) * share], *([residual.clone()] if has_residual else [])),
    )
    whole = F.linear(x, weights["down_proj.weight"], weights.get("down_proj.bias"))
    for part in parts:
        torch.testing.assert_close(part, whole + residual if has_residual else whole)


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "own"),
    [
        (2, 4, 4, [[0, 1], [2, 3]]),
        (2, 4, 2, [[0], [1]]),
        (4, 4, 2, [[0], [0], [1], [1]]),
        (3, 6, 1, [[0], [0], [0]]),
        (4, 8, 4, [[0], [1], [2], [3]]),
    ],
)
def test_heads_are_shared_out_and_kv_heads_copied(size: int, heads: int, kv_heads: int, own: list[list[int]]) -> None:
    dim, x = 6, torch.randn(5, 8)
    parts, weights = outputs_of(
        lambda group: QKVParallelLinear(8, dim, heads, kv_heads, bias=True, group=group, **MAKE), size, lambda _: (x,)
    )
    q, k, v = (
        F.linear(x, weights[f"{n}.weight"], weights[f"{n}.bias"]).view(5, -1, dim)
        for n in ("q_proj", "k_proj", "v_proj")
    )
    assert kv_heads_per_rank(kv_heads, size) == len(own[0])
    for rank, part in enumerate(parts):
        mine = slice(rank * heads // size, (rank + 1) * heads // size)
        expected = torch.cat([q[:, mine], k[:, own[rank]], v[:, own[rank]]], dim=1)
        torch.testing.assert_close(part.view(5, -1, dim), expected)


# 161 and 65 leave the last rank rows to spare; of 5 over 4 ranks, the last has none at all.
@pytest.mark.parametrize(("vocab_size", "size"), [(160, 2), (161, 2), (161, 3), (65, 4), (5, 4), (256, 4)])
@pytest.mark.parametrize("num_rows", [1, 5, 20])
def test_vocabulary_is_shared_out(vocab_size: int, size: int, num_rows: int) -> None:
    ids = torch.cat([torch.tensor([0, vocab_size - 1]), torch.randint(0, vocab_size, (num_rows,))])[:num_rows]
    hidden = torch.randn(num_rows, 8)
    table, matrix = torch.randn(vocab_size, 8), torch.randn(vocab_size, 8)

    def run(group: CommunicationGroup) -> tuple[Tensor, Tensor, Tensor]:
        embedding = VocabParallelEmbedding(vocab_size, 8, group=group, **MAKE)
        head = ParallelLMHead(vocab_size, 8, group=group, **MAKE)
        for layer in (embedding, head):
            assert isinstance(layer.matrix, DenseWeight)
            layer.matrix.weight.fill_(torch.nan)  # rows to spare may hold anything
        fill(embedding.weight_targets(""), {"weight": table})
        fill(head.weight_targets(""), {"weight": matrix})
        return embedding(ids), embedding.logits(hidden), head(hidden)

    for rank, (found, tied, untied) in enumerate(run_ranks(size, run)):
        assert found.equal(table[ids])
        if rank > 0:
            assert tied.numel() == untied.numel() == 0
            continue
        torch.testing.assert_close(tied, hidden @ table.T)
        torch.testing.assert_close(untied, hidden @ matrix.T)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda group: QKVParallelLinear(8, 4, 6, 3, bias=False, group=group, **MAKE),
            "num_attention_heads=6 and num_key_value_heads=3 can't be shared out over 2 ranks; use .* 1, 3, 6$",
        ),
        (
            lambda group: QKVParallelLinear(8, 4, 5, 1, bias=False, group=group, **MAKE),
            "num_attention_heads=5 and num_key_value_heads=1 .* use a tensor parallel size of 1, 5$",
        ),
        (
            lambda group: GateUpParallelLinear(8, 13, bias=False, group=group, **MAKE),
            "intermediate_size=13 can't be shared out evenly over 2 ranks; use a tensor parallel size that divides it",
        ),
        (lambda group: ColumnParallelLinear(8, {"a": 4, "b": 3}, bias=False, group=group, **MAKE), "b=3 can't"),
        (lambda group: RowParallelLinear(7, {"a": 4}, bias=False, group=group, **MAKE), "in_features=7 can't"),
    ],
)
def test_what_does_not_come_out_even_is_refused(build: Callable[[CommunicationGroup], Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        build(CommunicationGroup(RankInfo(0, 2)))


SHAPES: dict[str, Any] = {"num_attention_heads": 12, "hidden_size": 96, "intermediate_size": 96, "vocab_size": 161}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "one kv head per head": ("llama-mha", {"num_key_value_heads": 12}),
    "one kv head for all": ("llama-tied", {"num_key_value_heads": 1}),
    "biases": ("llama-bias", {"num_key_value_heads": 12}),
    "biases of q, k, v": ("qwen2", {"num_key_value_heads": 12}),
    "norms of q and k": ("qwen3", {"num_key_value_heads": 12}),
    "a window": ("mistral", {"num_key_value_heads": 1}),
    "norms around the mixers": ("gemma3", {"num_key_value_heads": 1}),
    "heads of two sizes, shared keys and values": ("gemma4-shared", {"num_key_value_heads": 12}),
    "experts beside an MLP": ("gemma4-moe", {"num_key_value_heads": 12, "moe_intermediate_size": 96}),
    "capped scores": ("gemma2-capped", {"num_key_value_heads": 1}),
    "fused matrices, half of each head rotated": ("phi3-window", {"num_key_value_heads": 12}),
    "neighbours rotated": ("glm4", {"num_key_value_heads": 12}),
    "latent vectors": ("deepseek-v3", {"num_key_value_heads": 12, "moe_intermediate_size": 96}),
    "recurrent layers": (
        "qwen3.5",
        {"num_key_value_heads": 12, "linear_num_key_heads": 12, "linear_num_value_heads": 12},
    ),
    "recurrent layers and a gated expert": (
        "qwen3.5-moe",
        {
            "num_key_value_heads": 12,
            "linear_num_key_heads": 12,
            "linear_num_value_heads": 12,
            "moe_intermediate_size": 96,
        },
    ),
    "scales": ("granite", {"num_key_value_heads": 12}),
    "experts": ("qwen3-moe", {"num_key_value_heads": 12, "moe_intermediate_size": 96}),
    "shared experts": ("glm4-moe", {"num_key_value_heads": 12, "moe_intermediate_size": 96}),
    "stacked experts and sinks": ("gpt-oss", {"num_key_value_heads": 12}),
    "experts of Mixtral": ("mixtral", {"num_key_value_heads": 1}),
    "norms of all heads": ("olmo2", {"num_key_value_heads": 12}),
    "norms of all heads, one kv head": ("olmo2", {"num_key_value_heads": 1}),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", MODELS)
def test_shared_out_models_compute_what_transformers_does(kind: str, size: int) -> None:
    architecture, settings = MODELS[kind]
    reference = make_reference(architecture, **SHAPES, **settings)
    texts = [torch.randint(0, 161, (count,)).tolist() for count in (40, 1, 17)]
    batch = make_batch(texts, [0, 0, 0], [[4, 1, 2], [3], [0, 5]], block_size=16)

    @torch.inference_mode()
    def run(group: CommunicationGroup) -> Tensor:
        model = load(reference, group=group)
        cache = PagedKVCache(rank_specs(model.config, size), 6, 16, **MAKE)
        return model.compute_logits(model(batch, cache, TorchAttention()))

    logits = run_ranks(size, run)
    expected = torch.cat([reference_logits(reference, text) for text in texts])
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=0)
    assert all(others.numel() == 0 for others in logits[1:])
