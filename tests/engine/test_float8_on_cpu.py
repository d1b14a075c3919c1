"""8-bit floats on a CPU: they stay as they are stored, and the native library decodes them while it multiplies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_reference, reference_logits, save
from narrow import present, worker_of
from packing import needs_native
from quantized_files import write_checkpoint
from safetensors.torch import load_file, save_file

from infinilm import LLM, InferEngine, SamplingParams
from infinilm.debug import HookRegistry
from infinilm.distributed import DistConfig
from infinilm.distributed.shard import PackedShard
from infinilm.errors import CheckpointError, InvalidValueError
from infinilm.layers.formats.float8 import Float8Part

pytestmark = needs_native

TOKENS = list(range(3, 40))
NAME = "model.layers.0.self_attn.q_proj.weight"
SCORED = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=0)
SMALL: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 64, "kv_cache_dtype": "float32"}


def kept_in(model: Any) -> dict[str, str]:
    """The formats of matrices of 8-bit floats, by name."""
    shards = model.weight_targets()
    return {
        name: shard.matrix.format
        for name, shard in shards.items()
        if isinstance(shard, PackedShard) and isinstance(shard.matrix, Float8Part)
    }


def scores_of(output: Any) -> list[float]:
    return [entry.logprob for entry in present(output.prompt_logprobs) if entry is not None]


@pytest.mark.parametrize(
    ("name", "architecture", "format"),
    [
        ("fp8-blocks", "llama-gqa", "FP8 32 F32"),
        ("fp8-tensor", "llama-gqa", "FP8 row F32 rounded"),
        ("compressed-fp8-channel", "llama-gqa", "FP8 row F32"),
        ("compressed-fp8-channel", "qwen3-moe", "FP8 row F32"),
        ("fp8-blocks", "deepseek-v3", "FP8 32 F32"),
    ],
)
@pytest.mark.parametrize("ranks", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_scores_are_those_of_the_decoded_weights(
    tmp_path: Path, name: str, architecture: str, format: str, ranks: dict[str, int]
) -> None:
    path, reference = write_checkpoint(name, tmp_path, architecture)
    with LLM(path, **SMALL, **ranks) as llm:
        [output] = llm.generate([TOKENS], SCORED, use_tqdm=False)
        if not ranks:
            kept = kept_in(worker_of(llm.executor).model)
            assert set(kept.values()) == {format}
            assert architecture != "llama-gqa" or len(kept) == 13  # of 14: one is dense in the file
            assert llm.stats().guarantee == "yes"
    expected = (
        reference_logits(reference, TOKENS).log_softmax(-1)[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    )
    torch.testing.assert_close(torch.tensor(scores_of(output)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ["llama-gqa", "qwen3-moe"])
def test_a_request_has_the_same_bits_in_any_company(tmp_path: Path, architecture: str) -> None:
    path, _ = write_checkpoint("compressed-fp8-channel", tmp_path, architecture)
    prompts = [TOKENS[:length] for length in (37, 3, 20, 1, 9)]
    with LLM(path, **SMALL) as llm:
        alone = [llm.generate([prompt], SCORED, use_tqdm=False)[0] for prompt in prompts]
        together = llm.generate(prompts, SCORED, use_tqdm=False)
    with LLM(path, **SMALL, max_num_batched_tokens=8) as llm:
        in_chunks = llm.generate(prompts, SCORED, use_tqdm=False)
    for own, others, parts in zip(alone, together, in_chunks, strict=True):
        assert own.token_ids == others.token_ids == parts.token_ids
        assert scores_of(own) == scores_of(others) == scores_of(parts)


def test_dense_weights_are_rounded_while_they_are_read(tmp_path: Path) -> None:
    reference = make_reference("llama-gqa", tie_word_embeddings=False)
    path = save(reference, tmp_path)
    with InferEngine(path, device_type="cpu", quantization="fp8") as engine:
        kept = kept_in(worker_of(engine._executor).model)
        (weights,) = engine.state_dict()
    assert "lm_head.weight" in kept
    assert "model.embed_tokens.weight" not in kept
    for name, weight in weights.items():
        stored = reference.get_parameter(name).detach()
        if name not in kept:
            assert weight.equal(stored)
            continue
        steps = stored.abs().amax(1, keepdim=True) / 448
        expected = (stored / steps).to(torch.float8_e4m3fn).float() * steps
        torch.testing.assert_close(weight, expected, atol=1e-7, rtol=1e-6)


def test_weights_are_replaced_and_seen_by_hooks(tmp_path: Path) -> None:
    path, _ = write_checkpoint("compressed-fp8-channel", tmp_path)
    seen: dict[str, torch.Tensor] = {}
    registry = HookRegistry()
    registry.register_hook("layer0_*", lambda name, tensor, _layer: seen.update({name: tensor}))
    weight = torch.randn(64, 64)
    with InferEngine(path, device_type="cpu") as engine:
        plain = present(engine.forward(input_ids=[TOKENS], return_logits=True).logits)[0]
        engine.set_hook_registry(registry)
        watched = present(engine.forward(input_ids=[TOKENS], return_logits=True).logits)[0]
        engine.load_param(NAME, weight)
        torch.testing.assert_close(engine.state_dict()[0][NAME], weight, atol=1e-3, rtol=0.07)
    assert watched.equal(plain)
    assert {tensor.dtype for tensor in seen.values()} == {torch.float32}


@pytest.mark.parametrize("tp_size", [1, 2])
def test_codes_that_stand_for_no_number_are_refused(tmp_path: Path, tp_size: int) -> None:
    path, _ = write_checkpoint("compressed-fp8-channel", tmp_path)
    weights = load_file(path / "model.safetensors")
    weights[NAME].view(torch.uint8)[5, 7] = 0xFF
    save_file(weights, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{NAME}.* has 8-bit floats that stand for no number"):
        InferEngine(path, DistConfig(tp_size), device_type="cpu")


def test_activations_are_not_rounded(tmp_path: Path) -> None:
    path, _ = write_checkpoint("compressed-fp8-channel", tmp_path)
    with pytest.raises(InvalidValueError, match=r"activation_bits=8 is for quantised .* the matrices are 8-bit floats"):
        LLM(path, activation_bits=8, **SMALL)
