"""`activation_bits=8`: a request's bits depend on nothing else, and where it has no effect it is refused."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
from checkpoints import make_reference, save
from engine.test_native_worker import FAMILIES, SIZES, SMALL, results, run
from packing import needs_native
from tiny_tokenizer import save_tokenizer

from infinilm import LLM, Config, InferEngine, SamplingParams
from infinilm.errors import InvalidTypeError, InvalidValueError
from infinilm.executor import native_worker
from infinilm.executor.commands import Command
from infinilm.executor.native_worker import NativeWorker
from infinilm.executor.rank_worker import RankWorker
from infinilm.executor.wire import handle_call, write_call
from infinilm.layers.formats import WeightFormats
from infinilm.models.config import ModelConfig

pytestmark = needs_native

SHORT: dict[str, Any] = {**SMALL, "quantization": "q4", "activation_bits": 8}
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True, logprobs=2)
PROMPTS = [list(range(2, 60)), [*range(2, 34), 7], [3, 1, 4, 1, 5], [9, 2, 6], [8, 8]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    sizes = {**SIZES, "hidden_size": 96, "vocab_size": 300}
    save(make_reference("llama-gqa", **sizes, eos_token_id=1, bos_token_id=0), directory)
    save_tokenizer(directory)
    return directory


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe-mha", "gpt-oss", "gemma4-shared", "qwen3.5-moe", "deepseek-v3"])
def test_families_have_the_bits_that_they_have_under_torch(kind: str, tmp_path: Path) -> None:
    path = save(make_reference(kind, **FAMILIES[kind]), tmp_path)
    settings: dict[str, Any] = {"quantization": "q8", "activation_bits": 8}
    alone = run(path, NativeWorker, **settings)
    assert alone == run(path, RankWorker, **settings, executor="processes")
    assert alone != run(path, NativeWorker, quantization="q8")


def test_company_chunks_and_cached_beginnings_change_nothing(tiny: Path) -> None:
    with LLM(tiny, **SHORT) as llm:  # in chunks of 24 tokens
        alone = [results(llm.generate([prompt], PARAMS, use_tqdm=False)) for prompt in PROMPTS]
        assert results(llm.generate(PROMPTS[:1], PARAMS, use_tqdm=False)) == alone[0]  # from the cache
        assert ":a8:" in llm.stats().system_fingerprint
    with LLM(tiny, **{**SHORT, "max_num_batched_tokens": 512}) as llm:  # at once
        together = results(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    assert [[each] for each in together] == alone


def test_runs_of_steps_change_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_worker, "UNWATCHED_RUN_SECONDS", 1000.0)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    with LLM(tiny, **SHORT) as llm:
        in_runs = results(llm.generate(PROMPTS, params, use_tqdm=False))
        monkeypatch.setattr(native_worker, "UNWATCHED_RUN_SECONDS", 0.0)
        assert results(llm.generate(PROMPTS, params, use_tqdm=False)) == in_runs


def test_other_ranks_are_told(tiny: Path) -> None:
    found: list[WeightFormats] = []

    class Worker:
        def load(self, _config: Any, _max_len: int, _source: Any, formats: WeightFormats) -> None:
            found.append(formats)

    config = ModelConfig.from_dict(json.loads((tiny / "config.json").read_text()))
    (message,) = write_call(Command.LOAD, (config, 64, tiny, WeightFormats({"a": "Q4_1"}, activation_bits=8)), [1])
    handle_call(cast(RankWorker, Worker()), Command.LOAD, message)
    assert [formats.activation_bits for formats in found] == [8]


def test_what_it_has_no_effect_on_is_refused(tiny: Path) -> None:
    for bad in (4, 12):
        with pytest.raises(InvalidValueError, match=f"activation_bits={bad} must be"):
            Config(activation_bits=bad)
    with pytest.raises(InvalidTypeError, match="activation_bits='8' must be the integer"):
        Config(activation_bits="8")  # type: ignore[arg-type]
    for settings in ({}, {"quantization": "none"}, {"executor": "processes"}):
        with pytest.raises(InvalidValueError, match=r"activation_bits=8 is for quantised .* are dense; use a GGUF"):
            LLM(tiny, **SMALL, activation_bits=8, **settings)
    with pytest.raises(InvalidValueError, match="activation_bits=8 is for quantised matrices"):
        InferEngine(str(tiny), device_type="cpu", activation_bits=8)
