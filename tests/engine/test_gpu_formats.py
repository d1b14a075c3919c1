"""Engines whose matrices are kept as on a GPU: GGUF's own formats, and those made while a checkpoint is read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_reference, reference_logits, save
from gguf_families import write_family
from gguf_files import write_gguf
from narrow import present, worker_of
from packing import pack_as_on_gpus
from torch import Tensor

from benchmarks.random_checkpoint import Q4_K, SHAPES, write
from infinilm import LLM, InferEngine
from infinilm.distributed import DistConfig
from infinilm.distributed.shard import ShardRange
from infinilm.layers.formats import TiledWeight
from infinilm.loading.quantize import quantize

TOKENS = list(range(3, 40))
TINY_LLAMA = {
    **SHAPES["llama-3.1-8b"],
    **{"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256},
}
MADE = {"fp8": "FP8 row F32", "int4": "INT4 64 F16", "q8": "Q8_0", "q4": "Q4_1"}


@pytest.fixture(autouse=True)
def _packs_as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pack_as_on_gpus(monkeypatch)


def logits(path: Path, tp_size: int = 1, **settings: Any) -> Tensor:
    with InferEngine(path, DistConfig(tp_size), "cpu", **settings) as engine:
        return present(engine.forward(input_ids=[TOKENS], return_logits=True).logits)[0]


def kept(path: Path, **settings: Any) -> list[str]:
    """The formats of the packed matrices of an engine on torch."""
    with LLM(path, device="cpu", executor="processes", num_kvcache_blocks=16, **settings) as llm:
        found = worker_of(llm.executor).model.weight_targets().values()
        return [shard.matrix.format for shard in found if hasattr(shard, "matrix")]


@pytest.mark.parametrize("format", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_matrices_of_a_gguf_file_stay_packed(tmp_path: Path, format: str) -> None:
    reference = make_reference("llama-gqa", intermediate_size=128)
    path = write_gguf(reference, tmp_path / "model.gguf", "llama", format)
    assert kept(path) == [format] * 15  # the embedding is dense
    torch.testing.assert_close(logits(path), logits(path, quantization="none"), atol=1e-5, rtol=0)


def test_k_formats_stay_packed_on_all_ranks(tmp_path: Path) -> None:
    write(TINY_LLAMA, tmp_path, Q4_K)
    path = tmp_path / "model.gguf"
    assert kept(path) == ["Q4_K"] * 14 + ["Q6_K"]
    expected = logits(path, quantization="none")
    torch.testing.assert_close(logits(path), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits(path, 2), expected, atol=1e-5, rtol=0)


def test_experts_of_a_gguf_file_stay_in_mxfp4(tmp_path: Path) -> None:
    reference = make_reference("gpt-oss", swiglu_limit=7.0)
    path = write_family(reference, tmp_path / "model.gguf", "gpt-oss", "MXFP4")
    config = reference.config
    assert kept(path) == ["MXFP4"] * 3 * config.num_local_experts * config.num_hidden_layers
    expected = logits(path, quantization="none")
    torch.testing.assert_close(logits(path), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits(path, 2), expected, atol=1e-5, rtol=0)


def decoded(values: Tensor, format: str) -> Tensor:
    """What becomes of a matrix that is quantised to a format."""
    options: Any = {"dtype": torch.float32, "device": "cpu"}
    rows, columns = values.shape
    weight = TiledWeight([format], [rows], columns, **options)
    shard: Any = weight.shards([ShardRange.whole(rows)], ShardRange.whole(columns))[0]
    shard.matrix.load(quantize(values.detach().numpy(), format), torch.arange(rows))
    result: Tensor = weight.dequantized()
    return result


@pytest.mark.parametrize("quantization", MADE)
def test_matrices_are_quantised_while_they_are_read(tmp_path: Path, quantization: str) -> None:
    reference = make_reference("llama-gqa", intermediate_size=128)
    save(reference, tmp_path)
    format = MADE[quantization]
    layers = {own.replace("64", "128") if "INT4" in own else own for own in (format,)} | {format}
    outer = format if quantization == "fp8" else "Q8_0"
    assert set(kept(tmp_path, quantization=quantization)) == layers | {outer}
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                own = outer if name == "lm_head.weight" else format
                own = own.replace("64", str(weight.shape[1])) if "INT4" in own else own
                exact = decoded(weight, own)
                steps = {"fp8": 16.0, "int4": 7.0, "q8": 126.0, "q4": 14.0}[quantization]
                assert (exact - weight).abs().max() <= weight.abs().max() / steps
                weight.copy_(exact)
    torch.testing.assert_close(
        logits(tmp_path, quantization=quantization), reference_logits(reference, TOKENS), atol=1e-4, rtol=0
    )


def test_ranks_quantise_their_own_share(tmp_path: Path) -> None:
    save(make_reference("llama-gqa", intermediate_size=128), tmp_path)
    whole, shared = logits(tmp_path, quantization="q8"), logits(tmp_path, 2, quantization="q8")
    torch.testing.assert_close(shared, whole, atol=1e-5, rtol=0)
