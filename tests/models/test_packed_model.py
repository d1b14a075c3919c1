"""Whole models with quantised weights: in the native decoder, layer by layer, and as plain matrices again."""

from pathlib import Path

import pytest
import torch
from checkpoints import ARCHITECTURES, make_reference, save
from drive import Driver
from packing import needs_native
from transformers import PreTrainedModel

from infinilm.attention import NativeAttention, TorchAttention
from infinilm.distributed.shard import PackedShard, WeightShard
from infinilm.layers import MLP
from infinilm.loading.checkpoint import open_checkpoint
from infinilm.loading.weights import load_weights
from infinilm.models import CausalLM, LlamaConfig
from infinilm.models.quantization import choose_formats
from infinilm.models.registry import FAMILIES

pytestmark = needs_native

SIZES = {"intermediate_size": 128, "vocab_size": 160}
TOKENS = torch.randint(0, 160, (100,), generator=torch.Generator().manual_seed(0)).tolist()


def load_quantized(
    reference: PreTrainedModel, directory: Path, quantization: str = "q8", builder: type[CausalLM] | None = None
) -> CausalLM:
    checkpoint = open_checkpoint(save(reference, directory))
    config = LlamaConfig.from_dict(checkpoint.config)
    formats = choose_formats(
        checkpoint, config.model_type, quantization=quantization, dtype="auto", device=torch.device("cpu")
    )
    model = (builder or FAMILIES[config.model_type].builder)(config, formats=formats)
    assert isinstance(model, CausalLM)
    load_weights(model.weight_targets(), checkpoint, show_progress=False)
    checkpoint.close()
    matrices = {name: shard for name, shard in model.weight_targets().items() if len(shard.full_shape) == 2}
    dense = (".gate.weight", ".kv_b_proj.weight", ".shared_expert_gate.weight", ".router.proj.weight", ".router.weight")
    for name, shard in matrices.items():
        assert isinstance(shard, PackedShard) != name.endswith(dense)
    return model


def with_plain_matrices(model: CausalLM) -> CausalLM:
    """The same weights, no longer quantised."""
    plain, shards = type(model)(model.config), model.weight_targets()
    for name, target in plain.weight_targets().items():
        shard = shards[name]
        assert isinstance(target, WeightShard)
        if isinstance(shard, PackedShard):
            values = torch.empty(target.tensor.shape)
            shard.matrix.dequantize(torch.arange(len(values)), values)
            target.tensor.copy_(values)
        else:
            target.tensor.copy_(shard.tensor)
    return plain


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_architectures(kind: str, tmp_path: Path) -> None:
    """Activations are rounded to 8 bits in both quantised models, at slightly different places if sums differ."""
    model = load_quantized(make_reference(kind, **SIZES), tmp_path)
    exact = Driver(with_plain_matrices(model)).run(TOKENS)
    layers = Driver(model).run(TOKENS)
    assert model._native is not None
    fused = Driver(model, backend=NativeAttention()).run(TOKENS)
    assert exact.std() > 0.3
    # What a recurrent layer computes of a token, it keeps for all that follow.
    limit = 1e-3 if kind.startswith(("qwen3.5", "qwen3-next")) else 1.5e-4
    for found in (layers, fused):
        assert (found - exact).abs().mean() < limit


@pytest.mark.parametrize(("quantization", "least", "most"), [("q8", 1e-3, 0.04), ("q4", 0.08, 0.3)])
def test_what_quantising_costs(quantization: str, least: float, most: float, tmp_path: Path) -> None:
    reference = make_reference("llama-gqa", **SIZES)
    model = load_quantized(reference, tmp_path, quantization)
    formats = {
        name: shard.matrix.format for name, shard in model.weight_targets().items() if isinstance(shard, PackedShard)
    }
    assert formats["model.embed_tokens.weight"] == formats["lm_head.weight"] == "Q8_0"
    assert formats["model.layers.1.mlp.down_proj.weight"] == {"q8": "Q8_0", "q4": "Q4_1"}[quantization]
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    found = Driver(model, backend=NativeAttention()).run(TOKENS)
    assert least < (found - expected).abs().mean() < most


@pytest.mark.parametrize(
    "kind",
    [
        *("qwen2-window", "gemma2", "gemma3", "gemma4", "gemma4-moe", "gpt-oss", "qwen3-moe", "glm4-moe"),
        *("qwen3.5", "qwen3-next", "deepseek-v3"),
    ],
)
def test_chunks_and_company_change_nothing(kind: str, tmp_path: Path) -> None:
    """A row's sums are made in an order of its own."""
    model = load_quantized(make_reference(kind, **SIZES), tmp_path)
    whole = Driver(model, backend=NativeAttention()).run(TOKENS)
    assert Driver(model, backend=NativeAttention(), seed=1).run(TOKENS, chunk=7).equal(whole)
    assert Driver(model, backend=NativeAttention(), block_size=32).run(TOKENS, chunk=1).equal(whole)
    driver = Driver(model, backend=NativeAttention())
    driver.step({"other": TOKENS[50:90], "request": TOKENS[:60]})
    together = driver.step({"request": TOKENS[60:], "new": TOKENS[:3], "other": TOKENS[:1]})
    assert together["request"].equal(whole[60:])


def test_bytes_of_an_outline_are_those_of_the_model(tmp_path: Path) -> None:
    model = load_quantized(make_reference("llama-bias", **SIZES), tmp_path)
    shards = model.weight_targets()
    expected = sum(
        shard.matrix.num_bytes if isinstance(shard, PackedShard) else shard.tensor.nbytes for shard in shards.values()
    )
    assert model.num_bytes() == expected + model.rotaries[0].table.nbytes


class DoubledMLP(MLP):
    """A mixer that the native library does not have."""

    def forward(self, x, step=None, residual=None, norm=None):
        return residual + 2 * super().forward(x, step, None, norm)


class MixedLM(CausalLM):
    """A model whose layers have different channel mixers."""

    def channel_mixer(self, layer, options):
        if layer != 1:
            return super().channel_mixer(layer, options)
        return DoubledMLP(layer, self.config.hidden_size, self.config.intermediate_size, **options)


def test_a_mixer_that_the_library_lacks_is_computed_by_its_own_code(tmp_path: Path) -> None:
    reference = make_reference("llama-gqa", **SIZES)
    model = load_quantized(reference, tmp_path, builder=MixedLM)
    found = Driver(model, backend=NativeAttention()).run(TOKENS)
    assert model._native is None
    expected = Driver(with_plain_matrices(model)).run(TOKENS)
    assert (found - expected).abs().mean() < 1e-4
    llama = Driver(load_quantized(reference, tmp_path / "llama"), backend=NativeAttention()).run(TOKENS)
    assert (found - llama).abs().mean() > 0.1


def test_other_attention_runs_the_layers_one_by_one(tmp_path: Path) -> None:
    model = load_quantized(make_reference("llama-tied", **SIZES), tmp_path)
    Driver(model, backend=TorchAttention()).run(TOKENS)
    assert "_native" not in vars(model)
