"""Requests that set no sampling parameters: every interface takes the model's own."""

import json
import logging
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from server_driver import Server, serving

from infinilm import LLM, SamplingParams
from infinilm.cli.main import run
from infinilm.loading.gguf import GGUFFile
from infinilm.loading.gguf_config import GGUFMetadata
from infinilm.loading.sources import ALIASES, find_source
from infinilm.models.auto import find_default_sampling

OWN: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 1, "min_p": 0.01, "repetition_penalty": 1.3}
"""With top_k=1 nothing is left to chance; with this penalty answers differ from greedy ones."""
TEXT, CHAT = "hello there", [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def own_dir(long_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("defaults") / "own"
    shutil.copytree(long_dir, directory)
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": True, "eos_token_id": 1, **OWN}))
    return directory


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are slower with threads than without."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def engine(own_dir: Path) -> Iterator[LLM]:
    with LLM(own_dir, num_kvcache_blocks=256) as opened:
        yield opened


@pytest.fixture(scope="module")
def own_server(own_dir: Path) -> Iterator[Server]:
    with serving(own_dir, "--num-kvcache-blocks", "256") as running:
        yield running


def found(generation_config: dict[str, Any], path: str = "model") -> SamplingParams:
    checkpoint: Any = SimpleNamespace(path=Path(path), generation_config=generation_config)
    return find_default_sampling(checkpoint)


def test_python_calls_without_parameters_use_them(engine: LLM) -> None:
    assert engine.default_sampling_params == SamplingParams(**OWN)
    expected = engine.generate(TEXT, SamplingParams(**OWN), use_tqdm=False)[0].text
    assert engine.generate(TEXT, use_tqdm=False)[0].text == expected
    assert "".join(engine.stream(TEXT)) == expected
    texts: list[str] = []
    engine.add_request(TEXT, on_token=lambda output: texts.append(output.text))
    while not engine.is_finished():
        engine.step()
    assert texts[-1] == expected
    answer = engine.chat(CHAT, SamplingParams(**OWN), use_tqdm=False)[0].text
    assert engine.chat(CHAT, use_tqdm=False)[0].text == answer


def test_explicit_parameters_keep_their_documented_values() -> None:
    assert SamplingParams().model_defaults() == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


def test_http_requests_use_them_and_may_say_otherwise(own_server: Server, engine: LLM) -> None:
    def expected(**changes: Any) -> str:
        return engine.chat(CHAT, SamplingParams(**{**OWN, "max_tokens": 20, **changes}), use_tqdm=False)[0].text

    def answer(**fields: Any) -> str:
        reply = own_server.post("/v1/chat/completions", messages=CHAT, max_tokens=20, **fields).json()
        return reply["choices"][0]["message"]["content"]

    assert answer() == expected()
    assert answer(repetition_penalty=1.0) == expected(repetition_penalty=1.0) != expected()
    completed = own_server.post("/v1/completions", prompt=TEXT, max_tokens=20).json()
    params = SamplingParams(**OWN, max_tokens=20)
    assert completed["choices"][0]["text"] == engine.generate(TEXT, params, use_tqdm=False)[0].text
    (model,) = own_server.http.get("/v1/models").json()["data"]
    assert model["default_sampling_params"] == OWN


def test_commands_use_them(
    own_dir: Path, engine: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def output_of(*arguments: str, stdin: str = "") -> str:
        monkeypatch.setattr(sys, "stdin", StringIO(stdin))
        capsys.readouterr()
        assert run([*arguments, "-m", str(own_dir)] if arguments[0] != "info" else [*arguments, str(own_dir)]) == 0
        return capsys.readouterr().out

    params = SamplingParams(**OWN, max_tokens=20)
    assert output_of("generate", TEXT, "-n", "20") == engine.generate(TEXT, params, use_tqdm=False)[0].text + "\n"
    plain = replace(params, repetition_penalty=1.0)
    asked = output_of("generate", TEXT, "-n", "20", "--repetition-penalty", "1")
    assert asked == engine.generate(TEXT, plain, use_tqdm=False)[0].text + "\n"
    assert output_of("chat", "-n", "20", stdin=TEXT) == engine.chat(CHAT, params, use_tqdm=False)[0].text + "\n"
    assert json.loads(output_of("info", "--json"))["sampling"] == OWN
    shown = " ".join(output_of("info").split())
    assert "sampling temperature 0.7, top_p 0.9, top_k 1, min_p 0.01, repetition_penalty 1.3" in shown


def test_wrong_values_are_ignored_by_name_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    wrong = {"temperature": "hot", "top_p": 7, "top_k": 2.5, "min_p": float("nan"), "repetition_penalty": ["x" * 5000]}
    with caplog.at_level(logging.WARNING, "infinilm"):
        assert found({**wrong, "top_k": 3}) == SamplingParams(top_k=3)
        assert found(wrong) == SamplingParams()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert all(name in lines[1] for name in wrong)
    assert "top_k" not in lines[0]
    assert len(lines[1]) < 1500


def test_absent_null_and_greedy_values() -> None:
    assert found({"temperature": None, "top_p": 0.5}) == SamplingParams(top_p=0.5)
    assert found({"do_sample": False, "temperature": 0.9}) == SamplingParams(temperature=0.0)
    assert found({"do_sample": True}) == SamplingParams()


def test_the_embedded_model_has_those_of_its_card(smollm2: Path) -> None:
    card = SamplingParams(temperature=0.2, top_p=0.9)
    assert found({}, str(smollm2)) == card
    assert found({"top_k": 3}, str(smollm2)) == SamplingParams(top_k=3), "a file's own values win"
    assert find_source(smollm2) is ALIASES["smollm2-135m"]
    assert find_source(Path("other.gguf")) is None


def test_gguf_metadata(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "some.gguf", "llama")
    writer.add_float32("general.sampling.temp", 0.95)
    writer.add_int32("general.sampling.top_k", 20)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "some.gguf")
    metadata = GGUFMetadata(file)
    assert [metadata.sampling(key) for key in ("temp", "top_k", "min_p")] == [0.95, 20, None]
    file.close()
