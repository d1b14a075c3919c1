"""Engines with quantised weights: the settings, what they come to, and how near they are to the dense model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_reference, save
from narrow import native_worker_of, present, worker_of
from packing import needs_native

from infinilm import LLM, SamplingParams
from infinilm.debug import HookRegistry
from infinilm.errors import InvalidValueError
from infinilm.models.auto import select_kv_dtype
from infinilm.models.cpu import ThreadUsers

TEXT = list(range(2, 150))
SCORED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
SMALL: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 32}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can be quantised whole, and still on two ranks."""
    reference = make_reference("llama-gqa", intermediate_size=128, vocab_size=161)
    return save(reference, tmp_path_factory.mktemp("tiny"))


def scores(llm: LLM, tokens: list[int] = TEXT) -> torch.Tensor:
    """Log-probabilities of a text's tokens."""
    [output] = llm.generate([tokens], SCORED, use_tqdm=False)
    assert output.prompt_logprobs is not None
    return torch.tensor([entry.logprob for entry in output.prompt_logprobs if entry is not None])


def scores_with(model: Path | None, **settings: Any) -> torch.Tensor:
    with LLM(model, **{**SMALL, **settings}) as llm:
        return scores(llm)


@pytest.fixture(scope="module")
def exact(tiny: Path) -> torch.Tensor:
    return scores_with(tiny)


@needs_native
@pytest.mark.parametrize("quantization", ["q8", "q4"])
@pytest.mark.parametrize("tp", [1, 2])
def test_matrices_are_quantised_while_loading(tp: int, quantization: str, tiny: Path, exact: torch.Tensor) -> None:
    with LLM(tiny, quantization=quantization, tensor_parallel_size=tp, **SMALL) as llm:
        assert llm.executor.info.attention == "native"
        if tp == 1:
            assert present(native_worker_of(llm.executor).cache).dtype == np.float16
        else:
            worker = worker_of(llm.executor)
            assert worker.thread_users == ThreadUsers(torch=False, native=True)
            assert present(worker.cache).dtype == torch.float16
        assert llm.memory.block_bytes == 16 * 2 * 2 * (2 // tp) * 16 * 2
        found = scores(llm)
    least, most = {"q8": (1e-3, 0.05), "q4": (0.05, 0.4)}[quantization]
    assert least < (found - exact).abs().mean() < most


@needs_native
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("attention_backend", ["auto", "torch"])
def test_the_cache_has_the_type_asked_for(name: str, attention_backend: str, tiny: Path, exact: torch.Tensor) -> None:
    settings = {"quantization": "q8", "kv_cache_dtype": name, "attention_backend": attention_backend}
    with LLM(tiny, **settings, **SMALL) as llm:
        is_native = attention_backend == "auto" and name != "bfloat16"  # which NumPy does not have
        worker: Any = native_worker_of(llm.executor) if is_native else worker_of(llm.executor)
        assert str(worker.cache.dtype).removeprefix("torch.") == name
        assert llm.executor.info.attention == ("native" if attention_backend == "auto" else "torch")
        assert (scores(llm) - exact).abs().mean() < 0.05


def test_dense_models_can_have_a_cache_of_half_the_size(tiny: Path, exact: torch.Tensor) -> None:
    half, whole = scores_with(tiny, kv_cache_dtype="float16"), scores_with(tiny, kv_cache_dtype="auto")
    assert whole.equal(exact)
    assert 0 < (half - exact).abs().max() < 1e-2


@needs_native
def test_dense_models_can_be_attended_natively(tiny: Path, exact: torch.Tensor) -> None:
    torch.testing.assert_close(scores_with(tiny, attention_backend="native"), exact, atol=1e-4, rtol=0)


@needs_native
@pytest.mark.parametrize("tp", [1, 2])
def test_hooks_see_quantised_models(tp: int, tiny: Path) -> None:
    """With hooks the layers run one by one."""
    shapes: dict[str, tuple[int, ...]] = {}
    registry = HookRegistry()

    def note(name: str, tensor: torch.Tensor, _layer: int) -> None:
        shapes.setdefault(name, tuple(tensor.shape))

    registry.register_hook("layer1_*", note)
    with LLM(tiny, quantization="q8", tensor_parallel_size=tp, enable_prefix_caching=False, **SMALL) as llm:
        without = scores(llm)
        llm.set_hook_registry(registry)
        assert (scores(llm) - without).abs().mean() < 0.02
    assert shapes["layer1_mlp_intermediate"] == (len(TEXT), 128)
    assert shapes["layer1_attention_k_after_rope"] == (len(TEXT), 2, 16)


@needs_native
def test_torch_computes_with_one_thread_meanwhile(tiny: Path) -> None:
    seen: list[int] = []
    registry = HookRegistry()
    registry.register_hook("final_norm", lambda *_: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for quantization in ("q8", "none"):
            with LLM(tiny, quantization=quantization, deterministic=False, **SMALL) as llm:
                llm.set_hook_registry(registry)
                scores(llm)
                assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen[: len(seen) // 2]) == {1}
    assert set(seen[len(seen) // 2 :]) == {2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "q5"}, "quantization='q5' is unknown; use one of none, fp8, int4, q8, q4"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8' is unknown; use one of auto, float32"),
        ({"quantization": "q8", "dtype": "bfloat16"}, "quantization='q8' computes in float32, and dtype='bfloat16'"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], message: str, tiny: Path) -> None:
    with pytest.raises(InvalidValueError, match=message):
        LLM(tiny, **settings, **SMALL)


def test_native_attention_serves_half_precision(tiny: Path) -> None:
    """It computes in float32 what a bfloat16 cache holds; torch's attention gives nearly the same."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    found = []
    for backend in ("native", "torch"):
        with LLM(tiny, attention_backend=backend, dtype="bfloat16", **SMALL) as llm:
            assert llm.executor.info.attention == backend
            (output,) = llm.generate([list(range(3, 40))], params, use_tqdm=False)
            assert output.logprobs is not None
            found.append(output.logprobs[0].top)
    shared = found[0].keys() & found[1].keys()
    assert len(shared) >= 3
    assert all(abs(found[0][token] - found[1][token]) < 0.05 for token in shared)


def test_settings_of_gpus() -> None:
    cuda = torch.device("cuda")
    for name in ("auto", "bfloat16"):
        assert select_kv_dtype(name, cuda, torch.bfloat16, is_half=False) == torch.bfloat16
    with pytest.raises(InvalidValueError, match=r"kv_cache_dtype='float16': on a GPU .* bfloat16; use 'auto'"):
        select_kv_dtype("float16", cuda, torch.bfloat16, is_half=False)


# --- the embedded model -----------------------------------------------------------------------------------

STORY = (
    "The lighthouse had stood at the end of the pier for a hundred years. Every evening its keeper climbed the stairs, "
    "lit the lamp and wrote the weather into a book. On the day of the storm the book was missing, and so was he.\n\n"
    "def mean(values):\n    total = sum(values)\n    return total / len(values)\n\nWater boils at 100 degrees Celsius."
)


@pytest.fixture(scope="module")
def dense(smollm2: Path) -> tuple[torch.Tensor, list[int]]:
    with LLM(smollm2, max_model_len=512, quantization="none", **SMALL) as llm:
        assert present(worker_of(llm.executor).cache).dtype == torch.float32
        tokens = present(llm.tokenizer).encode(STORY)
        return scores(llm, tokens), tokens


@needs_native
def test_a_gguf_file_stays_quantised_and_near_the_dense_model(
    smollm2: Path, dense: tuple[torch.Tensor, list[int]]
) -> None:
    expected, tokens = dense
    with LLM(smollm2, max_model_len=512, **SMALL) as llm:
        assert native_worker_of(llm.executor)
        assert llm.memory.weight_bytes < 1.02 * smollm2.stat().st_size
        found = scores(llm, tokens)
        messages = [{"role": "user", "content": "Answer with one word: what is the capital of France?"}]
        [answer] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    assert "Paris" in answer.text
    assert (found - expected).abs().mean() < 0.01
    perplexity, expected_perplexity = ((-values.mean()).exp() for values in (found, expected))
    assert abs(perplexity / expected_perplexity - 1) < 0.002


@needs_native
def test_three_ranks_share_a_quantised_file(smollm2: Path, dense: tuple[torch.Tensor, list[int]]) -> None:
    expected, tokens = dense
    settings = {"max_model_len": 512, "tensor_parallel_size": 3, **SMALL}
    with LLM(smollm2, **settings) as llm:
        assert not worker_of(llm.executor).thread_users.torch
        assert (scores(llm, tokens) - expected).abs().mean() < 0.01


@needs_native
def test_weights_of_a_quantised_engine_are_handed_out_decoded(tiny: Path) -> None:
    with LLM(tiny, quantization="q8", **SMALL) as llm, LLM(tiny, quantization="none", **SMALL) as dense:
        [found], [expected] = llm.executor.state_dicts(), dense.executor.state_dicts()
    assert found.keys() == expected.keys()
    assert all((found[name] - expected[name]).abs().max() < 0.05 for name in found)
