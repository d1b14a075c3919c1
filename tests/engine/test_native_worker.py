"""Quantised models on the native library alone: without torch, and with the bits that they have under torch."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_reference, save
from gguf_families import write_family
from gguf_files import write_gguf
from packing import needs_native
from quantized_files import write_checkpoint
from tiny_tokenizer import save_tokenizer

from infinilm import LLM, RequestOutput, SamplingParams
from infinilm.debug import HookRegistry
from infinilm.executor.native_worker import NativeWorker
from infinilm.executor.rank_worker import RankWorker

pytestmark = needs_native

SMALL: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 64, "max_num_batched_tokens": 24}
SIZES = {"intermediate_size": 128, "vocab_size": 161}
PROMPTS = [list(range(2, 60)), [3, 1, 4, 1, 5], [9, 2, 6]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=9, ignore_eos=True, n=2, logprobs=0),
    SamplingParams(temperature=1.1, top_k=20, min_p=0.01, seed=7, max_tokens=9, min_tokens=9, logit_bias={5: 3, 7: -9}),
    SamplingParams(
        temperature=0.7, seed=1, max_tokens=9, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.2,
        presence_penalty=0.4,
    ),
]  # fmt: skip


def results(outputs: list[RequestOutput]) -> list[Any]:
    return [(each.prompt_logprobs, [(own.token_ids, own.logprobs) for own in each.outputs]) for each in outputs]


def run(model: Path, worker: type, **settings: Any) -> list[Any]:
    with LLM(model, **{**SMALL, **settings}) as llm:
        assert type(getattr(llm.executor, "worker")) is worker  # noqa: B009 - not in the protocol
        prompts = [*PROMPTS, PROMPTS[1]]
        return results(llm.generate(prompts, PARAMS, use_tqdm=False))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save(make_reference("llama-gqa", **SIZES | {"vocab_size": 300}, eos_token_id=1, bos_token_id=0), directory)
    save_tokenizer(directory)
    return directory


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2-window": SIZES,
    "qwen3": SIZES,
    "gemma2-capped": SIZES,
    "gemma3": SIZES,
    "granite": SIZES,
    "smollm3": SIZES,
    "olmo2": SIZES,
    "glm4": SIZES,
    "ministral3": SIZES,
    "phi3-longrope": SIZES,
    "llama-bias": SIZES,
    "qwen3-moe-mha": SIZES,
    "mixtral": SIZES,
    "glm4-moe": SIZES,
    "gpt-oss": {"vocab_size": 161},
    "gemma4": SIZES,
    "gemma4-shared": SIZES,
    "gemma4-moe": SIZES,
    "gemma4-moe-shared": SIZES,
    "qwen3.5-bias": SIZES,
    "qwen3.5-moe": SIZES,
    "qwen3-next": SIZES,
    "deepseek-v2": SIZES,
    "deepseek-v3": SIZES,
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_has_the_bits_that_it_has_under_torch(kind: str, tmp_path: Path) -> None:
    path = save(make_reference(kind, **FAMILIES[kind]), tmp_path)
    alone, hosted = (
        run(path, NativeWorker, quantization="q8"),
        run(path, RankWorker, quantization="q8", executor="processes"),
    )
    assert alone == hosted


@pytest.mark.parametrize("kind", ["gpt-oss", "gemma4-shared", "gemma4-moe"])
def test_company_preemption_and_cached_beginnings_change_nothing(kind: str, tmp_path: Path) -> None:
    path = save(make_reference(kind, **FAMILIES[kind]), tmp_path)
    settings: dict[str, Any] = {**SMALL, "quantization": "q8", "max_model_len": 80}
    prompts = [PROMPTS[0][:40], [*PROMPTS[0][:32], 7], PROMPTS[1], PROMPTS[2], [8, 8]]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=34, ignore_eos=True, logprobs=2)
    with LLM(path, **settings) as llm:
        alone = [results(llm.generate([prompt], params, use_tqdm=False)) for prompt in prompts]
        again = results(llm.generate(prompts[:1], params, use_tqdm=False))
    assert again == alone[0]
    with LLM(path, **{**settings, "num_kvcache_blocks": 10, "kvcache_block_size": 16}) as llm:
        together = results(llm.generate(prompts, params, use_tqdm=False))
        assert llm.stats().num_preemptions > 0
    assert [[each] for each in together] == alone


def test_experts_in_mxfp4_have_the_bits_that_they_have_under_torch(tmp_path: Path) -> None:
    """Of llama.cpp's files; what is not quantised there becomes Q8_0."""
    path = write_family(make_reference("gpt-oss", swiglu_limit=7.0), tmp_path / "model.gguf", "gpt-oss", "MXFP4")
    alone = run(path, NativeWorker, quantization="q8")
    assert alone == run(path, RankWorker, quantization="q8", executor="processes")


@pytest.mark.parametrize("kind", ["gpt-oss", "gemma4-shared", "gemma4-moe"])
def test_hooks_see_what_they_see_under_torch(kind: str, tmp_path: Path) -> None:
    path = save(make_reference(kind, **FAMILIES[kind]), tmp_path)
    found = []
    for executor in ("auto", "processes"):
        with LLM(path, quantization="q8", executor=executor, **SMALL) as llm:
            found.append(record(llm, is_changing=False))
    (seen, watched), (expected, hosted) = found
    assert watched == hosted
    assert all(torch.equal(seen[name], expected[name]) for name in seen.keys() | expected.keys())


@pytest.mark.parametrize("settings", [{"quantization": "q4"}, {"quantization": "q8", "kv_cache_dtype": "float32"}])
def test_settings_have_the_bits_that_they_have_under_torch(settings: dict[str, Any], tiny: Path) -> None:
    assert run(tiny, NativeWorker, **settings) == run(tiny, RankWorker, **settings, executor="processes")


def test_files_of_llama_cpp_have_the_bits_that_they_have_under_torch(tmp_path: Path) -> None:
    path = write_gguf(make_reference("llama-gqa", **SIZES), tmp_path / "model.gguf", "llama", "Q5_1")
    assert run(path, NativeWorker) == run(path, RankWorker, executor="processes")


def record(llm: LLM, is_changing: bool) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """What hooks see of a prompt and its answer, in an engine that has computed others before."""
    registry, seen = HookRegistry(), dict[str, torch.Tensor]()

    def note(name: str, tensor: torch.Tensor, _layer: int) -> torch.Tensor | None:
        seen.setdefault(name, tensor.clone())
        return tensor * 1.5 if is_changing and "mlp_output" in name else None

    registry.register_hook("*", note)
    llm.generate([PROMPTS[0][:30]], PARAMS[0], use_tqdm=False)  # the beginning of the next
    llm.set_hook_registry(registry)
    watched = results(llm.generate([PROMPTS[0]], PARAMS[0], use_tqdm=False))
    llm.set_hook_registry(None)
    return seen, watched


@pytest.mark.parametrize("is_changing", [False, True])
def test_hooks_can_be_attached_to_an_engine_that_runs(is_changing: bool, tiny: Path) -> None:
    found = []
    for executor in ("auto", "processes"):
        with LLM(tiny, quantization="q8", executor=executor, **SMALL) as llm:
            before = results(llm.generate([PROMPTS[1]], PARAMS[1], use_tqdm=False))
            found.append(record(llm, is_changing))
            assert results(llm.generate([PROMPTS[1]], PARAMS[1], use_tqdm=False)) == before
    (seen, watched), (expected, hosted) = found
    assert watched == hosted
    assert seen.keys() == expected.keys()
    assert len(seen) > 10
    assert all(torch.equal(seen[name], expected[name]) for name in seen)


def test_hooks_go_on_from_native_states(tmp_path: Path) -> None:
    path = save(make_reference("qwen3.5", **SIZES), tmp_path)
    beginning = [3 * i % 150 for i in range(140)]
    found = []
    for executor in ("auto", "processes"):
        registry, seen = HookRegistry(), list[torch.Tensor]()

        def note(_name: str, tensor: torch.Tensor, _layer: int, seen: list[torch.Tensor] = seen) -> None:
            seen.append(tensor.clone())

        registry.register_hook("layer0_state", note)
        with LLM(path, quantization="q8", executor=executor, **SMALL) as llm:
            llm.generate([beginning], PARAMS[0], use_tqdm=False)
            llm.set_hook_registry(registry)
            watched = llm.generate([[*beginning, 5, 7]], PARAMS[1], use_tqdm=False)
            assert watched[0].metrics.num_cached_tokens >= 128
            llm.set_hook_registry(None)
            found.append((seen, results(watched), results(llm.generate([beginning], PARAMS[1], use_tqdm=False))))
    (seen, *ours), (expected, *hosted) = found
    assert ours == hosted
    assert len(seen) > 2
    assert all(a.equal(b) for a, b in zip(seen, expected, strict=True))


LEAN = """
import json, sys
sys.modules["torch"] = None  # an import of it fails
from infinilm import LLM, SamplingParams, StructuredOutput
from infinilm.errors import MissingTorchError
{body}
"""


def run_lean(body: str, *arguments: object) -> str:
    """The output of a script in a process where torch can't be imported."""
    command = [sys.executable, "-c", LEAN.format(body=body), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_engines_run_where_torch_is_not_installed(tiny: Path) -> None:
    body = """
settings = dict(quantization="q8", num_kvcache_blocks=64, max_num_batched_tokens=24)
with LLM(sys.argv[1], **settings) as llm:
    prompts, params = eval(sys.argv[2]), [SamplingParams(**each) for each in eval(sys.argv[3])]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    print(json.dumps([each.token_ids for output in outputs for each in output.outputs]))
    stream = llm.stream("hello", SamplingParams(max_tokens=4, ignore_eos=True))
    print(len(list(stream)))
    number = SamplingParams(structured=StructuredOutput(regex="[0-9]{5}"), max_tokens=20)
    print(llm.generate("a", number, use_tqdm=False)[0].text)
    [failed] = llm.generate("a", SamplingParams(logits_processors=[lambda ids, x: x]), use_tqdm=False)
    print(failed.error)
"""
    params: list[dict[str, Any]] = [
        {"temperature": 0, "max_tokens": 6},
        {"seed": 3, "max_tokens": 6, "n": 2, "logprobs": 1, "stop": ["z"]},
    ]
    lines = run_lean(body, tiny, PROMPTS[:2], params).splitlines()
    with LLM(tiny, quantization="q8", executor="processes", **SMALL) as llm:
        outputs = llm.generate(PROMPTS[:2], [SamplingParams(**each) for each in params], use_tqdm=False)
    assert lines[0] == str([list(each.token_ids) for output in outputs for each in output.outputs])
    assert int(lines[1]) > 0  # pieces of text
    assert lines[2].isdecimal()
    assert len(lines[2]) == 5
    assert "torch is not installed, and logits_processors can't run without it" in lines[3]


def test_all_kinds_of_checkpoints_run_where_torch_is_not_installed(tmp_path: Path) -> None:
    kinds = ("gpt-oss", "gemma4-shared", "qwen3-next", "deepseek-v3")
    paths = [save(make_reference(kind, **FAMILIES[kind]), tmp_path / kind) for kind in kinds]
    for kind, architecture in (("qwen3.5-moe-tied", "qwen35moe"), ("deepseek-v2", "deepseek2")):
        paths.append(write_family(make_reference(kind, **SIZES), tmp_path / f"{kind}.gguf", architecture, "Q8_0"))
    paths += [write_checkpoint(name, tmp_path / name)[0] for name in ("awq", "gptq", "fp8-blocks")]
    body = """
for path in sys.argv[1:]:
    with LLM(path, quantization="q8", num_kvcache_blocks=64) as llm:
        print(list(llm.generate([[3, 1, 4]], SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)[0].token_ids))
"""
    expected = []
    for path in paths:
        with LLM(path, quantization="q8", executor="processes", **SMALL) as llm:
            [output] = llm.generate([[3, 1, 4]], SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
        expected.append(str(list(output.token_ids)))
    assert run_lean(body, *paths).splitlines() == expected


def test_files_of_llama_cpp_run_where_torch_is_not_installed(tmp_path: Path) -> None:
    path = write_gguf(make_reference("llama-gqa", **SIZES), tmp_path / "model.gguf", "llama", "Q8_0")
    body = """
with LLM(sys.argv[1], num_kvcache_blocks=64) as llm:
    print(list(llm.generate([[3, 1, 4]], SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)[0].token_ids))
"""
    with LLM(path, executor="processes", **SMALL) as llm:
        [output] = llm.generate([[3, 1, 4]], SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    assert run_lean(body, path).splitlines() == [str(list(output.token_ids))]


def test_what_needs_torch_says_so(tiny: Path) -> None:
    body = """
def refuse(call, *arguments, **settings):
    try:
        call(*arguments, **settings)
    except MissingTorchError as error:
        print(error)
refuse(LLM, sys.argv[1])
refuse(LLM, sys.argv[1], quantization="q8", tensor_parallel_size=2)
refuse(LLM, sys.argv[1], quantization="q8", device="cuda")
refuse(LLM, sys.argv[1], quantization="q8", attention_backend="torch")
def import_(name):
    import infinilm
    getattr(infinilm, name)
refuse(import_, "InferEngine")
refuse(import_, "debug")
"""
    lines = run_lean(body, tiny).splitlines()
    subjects = [line.split("torch is not installed, and ")[1].split(" can't run without it; ")[0] for line in lines]
    assert subjects[0].startswith("dense weights, such as model.")
    assert "quantization='q8'" in subjects[0]
    others = ["a model on 2 ranks", "device='cuda'", "attention_backend='torch'", "infinilm.InferEngine"]
    assert subjects[1:] == [*others, "hooks and tools for tensors"]
    assert all(line.endswith("install it: pip install 'infinilm[torch]'") for line in lines)
