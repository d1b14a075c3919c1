"""Engines whose cache has 8-bit floats: what it comes to, how near it is, and that circumstances change nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_reference, save
from engine.test_determinism import find_differences
from narrow import present, worker_of
from packing import needs_native

from infinilm import LLM, SamplingParams
from infinilm.bench.circumstances import all_circumstances
from infinilm.bench.determinism import Session, Workload, check
from infinilm.cache import PagedKVCacheConfig
from infinilm.config import Config
from infinilm.errors import InvalidValueError
from infinilm.kernels import fp8_cache
from infinilm.lowlevel.infer_engine import InferEngine
from infinilm.models.auto import AutoConfig, check_fp8_cache, select_kv_dtype

TEXT = list(range(2, 150))
SCORED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
SMALL: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 32}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reference = make_reference("llama-gqa", intermediate_size=128, vocab_size=161)
    return save(reference, tmp_path_factory.mktemp("tiny"))


def scores(llm: LLM, tokens: list[int] = TEXT) -> torch.Tensor:
    [output] = llm.generate([tokens], SCORED, use_tqdm=False)
    return torch.tensor([entry.logprob for entry in present(output.prompt_logprobs) if entry is not None])


def scores_with(model: Path, **settings: Any) -> torch.Tensor:
    with LLM(model, **{**SMALL, **settings}) as llm:
        return scores(llm)


BACKENDS = ["torch", pytest.param("native", marks=needs_native)]


@pytest.mark.parametrize("attention_backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scores_are_near_those_of_a_wide_cache(dtype: str, attention_backend: str, tiny: Path) -> None:
    settings = {"attention_backend": attention_backend, "dtype": dtype}
    wide = scores_with(tiny, **settings)
    with LLM(tiny, kv_cache_dtype="fp8", **settings, **SMALL) as llm:
        cache = present(worker_of(llm.executor).cache)
        assert cache.dtype == fp8_cache.DTYPE
        # 16 tokens, two layers, keys and values of two heads of 16, each with a scale of two bytes.
        assert llm.memory.block_bytes == 16 * 2 * 2 * 2 * (16 + 2)
        assert cache.memory.num_bytes == 32 * llm.memory.block_bytes
        found = scores(llm)
    assert 0 < (found - wide).abs().mean() < 0.05


@needs_native
@pytest.mark.parametrize("quantization", [None, "q8"])
def test_the_native_library_agrees_with_torch(quantization: str | None, tiny: Path) -> None:
    """With quantised weights a step is one call, in which the library stores keys and values itself."""
    found = []
    for backend in ("native", "torch"):
        settings = {"attention_backend": backend, "quantization": quantization, "kv_cache_dtype": "fp8"}
        found.append(scores_with(tiny, **settings))
    # A rounding apart, a number may become the next code.
    assert (found[0] - found[1]).abs().mean() < 5e-3


@needs_native
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama-gqa", {}),
        ("llama-gqa", {"quantization": "q8"}),
        ("gemma3", {"dtype": "bfloat16"}),
        ("gemma4", {}),
    ],
)
def test_circumstances_change_nothing(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    path = save(make_reference(kind, **({"intermediate_size": 128} if settings.get("quantization") else {})), tmp_path)
    assert find_differences(path, kv_cache_dtype="fp8", **settings) == []


@needs_native
def test_nor_do_preemption_and_other_interfaces(tiny_dir: Path) -> None:
    work = Workload.make(300, num_requests=4, max_tokens=18, max_prompt_len=66, num_others=4, num_sharing=4)
    session = Session(Config(model=tiny_dir, device="cpu", deterministic=True, kv_cache_dtype="fp8"), work)
    try:
        chosen = [
            each for each in all_circumstances(session, num_others=4) if each.name in ("preempted", "InferEngine")
        ]
        found = list(check(session, chosen))
        assert len(found) == 2
        assert [finding for finding in found if not finding.is_equal or finding.skipped] == []
    finally:
        session.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_have_scales_of_their_own_heads(tp: int, tiny: Path) -> None:
    with LLM(tiny, kv_cache_dtype="fp8", tensor_parallel_size=tp, **SMALL) as llm:
        scales = present(worker_of(llm.executor).cache).scales
        assert {layer: tuple(each.shape) for layer, each in scales.items()} == dict.fromkeys(
            (0, 1), (32, 2 // tp, 16, 2)
        )
        assert torch.isfinite(scores(llm)).all()


def test_the_low_level_engine_has_it_too(tiny: Path) -> None:
    config = PagedKVCacheConfig(4, dtype=torch.float8_e4m3fn)
    assert config.dtype == "fp8"
    with InferEngine(str(tiny), device_type="cpu", cache_config=config) as engine:
        assert len(engine.generate([TEXT[:20]], max_new_tokens=3, stop_on_eos=False).token_ids[0]) == 3


def test_recurrent_layers_keep_their_states(tmp_path: Path) -> None:
    with LLM(save(make_reference("qwen3-next"), tmp_path), device="cpu", kv_cache_dtype="fp8") as llm:
        cache = present(worker_of(llm.executor).cache)
        assert {state.dtype for states in cache.states.values() for state in states} == {torch.float32}
        assert set(cache.scales) == set(cache.layers)
        assert torch.isfinite(scores(llm)).all()


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    path = save(make_reference("deepseek-v2"), tmp_path)
    with pytest.raises(
        InvalidValueError, match=r"kv_cache_dtype='fp8': latent attention keeps one vector .* use another"
    ):
        LLM(path, device="cpu", kv_cache_dtype="fp8")
    with pytest.raises(InvalidValueError, match=r"dtype='fp8': latent attention"):
        InferEngine(str(path), device_type="cpu", cache_config=PagedKVCacheConfig(4, dtype="fp8"))


def test_devices_that_can_not(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    config, cuda = AutoConfig.from_pretrained(tiny), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(InvalidValueError, match=r"='fp8': A100 has compute capability 8.0, and 8.9 is needed; use"):
        check_fp8_cache("kv_cache_dtype", config, cuda)
    with pytest.raises(InvalidValueError, match=r"on a CPU and on NVIDIA GPUs, not on mps"):
        check_fp8_cache("kv_cache_dtype", config, torch.device("mps"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    check_fp8_cache("kv_cache_dtype", config, cuda)
    assert select_kv_dtype("fp8", cuda, torch.bfloat16, is_half=False) == fp8_cache.DTYPE
