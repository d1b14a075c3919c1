"""The native library computes all layers of models with dense weights on a CPU, where the weights lie."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_reference, save
from narrow import native_worker_of, present, worker_of
from packing import needs_native

from infinilm import LLM, InferEngine, SamplingParams
from infinilm.cache import StaticKVCacheConfig
from infinilm.debug import HookRegistry
from infinilm.models.decoder import Decoder

pytestmark = needs_native

TOKENS = list(range(3, 40))
SCORED = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)


def scores_of(llm: LLM) -> torch.Tensor:
    [output] = llm.generate([TOKENS], SCORED, use_tqdm=False)
    return torch.tensor([entry.logprob for entry in present(output.prompt_logprobs) if entry is not None])


def scores_in_one_call_and_by_layer(
    path: Path, *, is_native: bool = True, **settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Layers run one by one where a hook looks on."""
    registry = HookRegistry()
    registry.register_hook("layer0_output", lambda *_: None)
    with LLM(path, device="cpu", num_kvcache_blocks=64, **settings) as llm:
        found = scores_of(llm)
        if settings.get("quantization") == "q8":
            assert native_worker_of(llm.executor)
        else:
            model = worker_of(llm.executor).model
            assert isinstance(model, Decoder)
            assert (model._native is not None) == is_native
        llm.set_hook_registry(registry)
        return found, scores_of(llm)


@pytest.mark.parametrize("settings", [{}, {"quantization": "q8"}, {"quantization": "fp8"}], ids=str)
@pytest.mark.parametrize("kind", ["llama-bias", "qwen3", "gemma3", "granite", "olmo2", "smollm3", "glm4"])
def test_hooks_change_no_bit(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    path = save(make_reference(kind, intermediate_size=128), tmp_path)
    found, watched = scores_in_one_call_and_by_layer(path, **settings)
    assert found.equal(watched)


@pytest.mark.parametrize("kind", ["qwen3-moe", "deepseek-v3", "qwen3.5-moe", "glm4-moe"])
def test_layers_of_other_mixers_are_those_of_torch(tmp_path: Path, kind: str) -> None:
    """Which chooses experts, and adds their results, in orders of its own."""
    found, watched = scores_in_one_call_and_by_layer(save(make_reference(kind), tmp_path))
    torch.testing.assert_close(found, watched, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["gpt-oss", "gemma4"])  # lines of gate and up alternate; layers have tables
def test_other_layers_run_one_by_one(tmp_path: Path, kind: str) -> None:
    found, watched = scores_in_one_call_and_by_layer(save(make_reference(kind), tmp_path), is_native=False)
    assert found.equal(watched)


@pytest.mark.parametrize("settings", [{}, {"quantization": "q8"}, {"quantization": "fp8"}])
def test_weights_may_be_replaced_between_steps(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Of vectors the library's layers have copies."""
    reference = make_reference("llama-bias", intermediate_size=128)
    path, other = save(reference, tmp_path / "first"), make_reference("llama-bias", intermediate_size=128)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(parameter.roll(1, -1) * 1.25)
    expected_path = save(other, tmp_path / "other")
    cache = StaticKVCacheConfig(max_batch_size=1, max_cache_len=64)

    def logits(engine: InferEngine) -> torch.Tensor:
        return present(engine.forward(input_ids=[TOKENS], return_logits=True).logits)[0]

    with InferEngine(expected_path, device_type="cpu", cache_config=cache, **settings) as engine:
        expected = logits(engine)
    with InferEngine(path, device_type="cpu", cache_config=cache, **settings) as engine:
        assert not logits(engine).equal(expected)
        engine.load_params(other.state_dict())
        assert logits(engine).equal(expected)
