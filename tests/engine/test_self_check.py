"""The start's check of token mixers, with the kernels of a GPU in Triton's interpreter."""

from pathlib import Path

import interpreter
import pytest
from checkpoints import make_reference, save

from infinilm import LLM
from infinilm.executor.self_check import MixerTrial
from infinilm.layers import delta_net, state_plan


@pytest.mark.skipif(interpreter.DEVICE == "cuda", reason="tests/gpu has the whole engine for a GPU")
@pytest.mark.parametrize(("kind", "is_ordered"), [("qwen3.5", True), ("qwen3.5", False), ("deepseek-v3", True)])
def test_kernels_for_single_tokens_and_for_prompts(
    kind: str, is_ordered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (delta_net, state_plan):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)
    path = save(make_reference(kind), tmp_path)
    settings = {"attention_backend": "triton", "max_model_len": 64, "num_kvcache_blocks": 8, "enforce_eager": True}
    with LLM(path, device="cpu", deterministic=is_ordered, **settings) as llm:
        worker = llm.executor.worker  # type: ignore[attr-defined] # a local one has it
        assert worker._passes(MixerTrial(kind, 20)) == is_ordered
