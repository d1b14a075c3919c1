"""A request gets the same bits in every circumstance on a GPU, as on a CPU (`tests/engine/test_determinism.py`)."""

from pathlib import Path

import pytest
import torch
from gpu.whole_models import SHAPES, write_checkpoint

from infinilm.bench.circumstances import all_circumstances
from infinilm.bench.determinism import Session, Workload, check, check_hidden_states
from infinilm.config import Config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SMALL = (
    *("llama-gqa", "qwen3", "gemma3", "mistral", "gpt-oss", "mixtral", "glm4-moe", "gemma4", "smollm3"),
    *("qwen3.5", "qwen3.5-moe", "deepseek-v2", "deepseek-v3"),
)


@pytest.mark.parametrize("name", [*SHAPES, *SMALL])
def test_models(name: str, tmp_path: Path) -> None:
    path = write_checkpoint(name, tmp_path / "model", "cuda")
    longest, vocab_size = (2049, 100_000) if name in SHAPES else (513, 160)
    work = Workload.make(vocab_size, num_requests=16, max_tokens=32, max_prompt_len=longest, num_others=100)
    # A share of the memory, so that tests can run side by side.
    config = Config(model=path, device="cuda", max_model_len=4096, deterministic=True, gpu_memory_utilization=0.2)
    session = Session(config, work)
    try:
        circumstances = all_circumstances(session, num_others=100)
        if name not in SHAPES:  # those have no tokenizer, and need no second look at the interfaces
            circumstances = [each for each in circumstances if each.name not in ("AsyncLLM", "server")]
        guarantee = session.engine().stats().guarantee
        found = [*check(session, circumstances), check_hidden_states(session)]
        assert guarantee == "yes"
        assert [finding for finding in found if not finding.is_equal] == []
    finally:
        session.close()
