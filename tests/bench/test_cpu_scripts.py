"""The scripts in benchmarks/ for CPUs: what they count, and a picture of it."""

import math
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from infinilm import LLM

BENCH = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def accuracy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return import_module("cpu_accuracy")


@pytest.fixture
def growth(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return import_module("cpu_growth")


def test_distances_of_known_distributions(accuracy: ModuleType) -> None:
    reference = np.log(np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]], np.float32)) + 7  # a shift changes nothing
    other = np.log(np.array([[0.25, 0.5, 0.25], [0.25, 0.5, 0.25]], np.float32))
    following = np.array([0, 1])
    exact, found = accuracy.Distance(), accuracy.Distance()
    exact.add(reference, reference, following)
    found.add(reference, other, following)
    assert exact.perplexity == pytest.approx(2.0)
    assert found.perplexity == pytest.approx(math.sqrt(8))  # probabilities of 1/4 and 1/2
    summary = found.summary(exact)
    assert summary["mean_kl"] == pytest.approx(0.25 * math.log(2) / 2)
    assert summary["mean_kl_error"] == pytest.approx(0.125 * math.log(2) / math.sqrt(2))
    assert summary["max_kl"] == pytest.approx(0.25 * math.log(2))
    assert summary["perplexity_change"] == pytest.approx(math.sqrt(2) - 1)
    assert summary["same_top"] == 0.5


def test_distances_do_not_depend_on_slices(accuracy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    reference, other = random.normal(size=(2, 10, 20))
    following = random.integers(20, size=10)
    whole, sliced = accuracy.Distance(), accuracy.Distance()
    whole.add(reference, other, following)
    monkeypatch.setattr("benchmarks.distance.SLICE", 3)
    sliced.add(reference, other, following)
    assert len(sliced.divergences) == 10
    assert sliced.divergences == pytest.approx(whole.divergences)
    assert sliced.surprises == pytest.approx(whole.surprises)
    assert sliced.num_same_top == whole.num_same_top


def test_logits_are_the_engines_own(accuracy: ModuleType, llm: LLM) -> None:
    """By any number of rows, and what the engine draws from."""
    from infinilm import SamplingParams

    (output,) = llm.generate([[5, 6, 7, 8]], SamplingParams(temperature=0.0, max_tokens=30), use_tqdm=False)
    text = [*output.prompt_token_ids, *output.token_ids]
    by_rows = {rows: accuracy.Ours(llm).logits(text[:-1], rows) for rows in (1, 7, 512)}
    for logits in by_rows.values():
        assert logits.shape == (len(text) - 1, 300)
        assert logits[3:].argmax(axis=1).tolist() == output.token_ids
        np.testing.assert_allclose(logits, by_rows[512], atol=1e-4)


def test_there_are_enough_texts(accuracy: ModuleType, smollm2: Path) -> None:
    with LLM(smollm2, max_model_len=64, num_kvcache_blocks=4) as engine:
        texts = import_module("benchmarks.cpu_texts").read_texts(engine, 512)
    assert sum(len(token_ids) - 1 for token_ids in texts.values()) >= 2000
    assert {"README.md", "languages", "chats", "story"} <= set(texts)
    assert max(map(len, texts.values())) == 512


def test_growth_as_a_picture(growth: ModuleType, tmp_path: Path) -> None:
    report = {
        "model": "some-model",
        "machine": {"cpu": "some CPU", "num_threads": 2},
        "context": {128: {"infinilm": 200.0, "llama.cpp": 100.0}, 8192: {"infinilm": 90.0, "llama.cpp": 40.0}},
        "streams": {1: {"infinilm": 200.0, "llama.cpp": 100.0}, 64: {"infinilm": 900.0, "llama.cpp": 250.0}},
    }
    file = tmp_path / "growth.png"
    growth.plot(report, file)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.stat().st_size > 20_000
