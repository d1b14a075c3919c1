"""What a job is begun with, and what is refused when it is resumed. No engine runs here."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import infinilm.batch
from infinilm.batch import job
from infinilm.errors import EngineError, InvalidValueError


@pytest.fixture
def files(tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    """An input, an output and a model, of a job that was begun and stopped."""
    model = tmp_path / "model"
    shutil.copytree(tiny_dir, model)
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n{"prompt": "y"}\n')

    def stop(*_: object) -> None:
        (tmp_path / "out.jsonl.progress" / "answers.log").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "_run_here", stop)
    with pytest.raises(KeyboardInterrupt):
        infinilm.batch.run(source, tmp_path / "out.jsonl", model, sampling={"temperature": 0})
    return source, tmp_path / "out.jsonl", model


def resume(files: tuple[Path, Path, Path], **changes: Any) -> None:
    source, output, model = files
    infinilm.batch.run(source, output, model, **{"sampling": {"temperature": 0}, **changes})


def change_weights(model: Path) -> None:
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


def change_template(model: Path) -> None:
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] += "!"
    (model / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"sampling": {"temperature": 0.5}}, "another sampling: temperature was 0 and is 0.5"),
        ({"sampling": {}}, "another sampling: temperature was 0 and is not given"),
        ({"chat": True}, "--chat"),
        ({"dtype": "bfloat16"}, 'another setting: dtype was "auto" and is "bfloat16"'),
        ({"seed": 3}, "another setting: seed was 0 and is 3"),
        ({"model_name": "other"}, 'another model: it was "model" and is "other"'),
        ({"tool_call_parser": "mistral"}, "another tool call parser"),
    ],
)
def test_a_changed_job_is_refused_by_name(files: tuple[Path, Path, Path], changes: dict[str, Any], part: str) -> None:
    with pytest.raises(InvalidValueError, match=part.replace("--", "")):
        resume(files, **changes)


def test_changed_files_are_refused_by_name(files: tuple[Path, Path, Path]) -> None:
    source, _, model = files
    change_template(model)
    with pytest.raises(InvalidValueError, match="another chat template"):
        resume(files)
    change_weights(model)
    with pytest.raises(InvalidValueError, match=r"another weights: model\.safetensors was"):
        resume(files)
    source.write_text('{"prompt": "x"}\n')
    with pytest.raises(InvalidValueError, match="another weights"):
        resume(files)


def test_a_changed_input_is_refused(files: tuple[Path, Path, Path]) -> None:
    files[0].write_text('{"prompt": "x"}\n')
    with pytest.raises(InvalidValueError, match="another input"):
        resume(files)


def test_what_changes_no_answer_may_change(files: tuple[Path, Path, Path]) -> None:
    with pytest.raises(KeyboardInterrupt):
        resume(files, max_num_seqs=3, gpu_memory_utilization=0.5)


def test_restart_starts_over(files: tuple[Path, Path, Path]) -> None:
    with pytest.raises(KeyboardInterrupt):
        resume(files, sampling={}, restart=True)
    with pytest.raises(InvalidValueError, match="another sampling"):
        resume(files)


def test_a_file_of_somebody_else_is_not_replaced(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text("mine")
    for restart in (False, True):
        with pytest.raises(InvalidValueError, match="exists, and has no"):
            infinilm.batch.run(files[0], foreign, files[2], restart=restart)
    assert foreign.read_text() == "mine"
    assert not (tmp_path / "foreign.jsonl.progress").exists()


def test_answers_without_a_manifest_are_not_used(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    log = tmp_path / "out.jsonl.progress" / "answers.log"
    log.write_text("answers of some other job")
    (tmp_path / "out.jsonl.manifest.json").unlink()
    with pytest.raises(KeyboardInterrupt):
        resume(files)
    assert log.read_text() == ""


def test_a_damaged_manifest_is_refused(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.manifest.json").write_text("{")
    with pytest.raises(InvalidValueError, match="damaged"):
        resume(files)


def test_two_processes_do_not_share_a_job(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    from infinilm.batch.answer_log import lock

    path = tmp_path / "out.jsonl.progress" / "lock"
    with path.open("ab") as file:
        lock(file, path)
        with pytest.raises(EngineError, match="another process is working on"):
            resume(files)


def test_a_running_event_loop_is_named(files: tuple[Path, Path, Path]) -> None:
    async def call() -> None:
        resume(files)

    with pytest.raises(EngineError, match=r"asyncio\.to_thread"):
        asyncio.run(call())


def test_a_missing_extra_is_named(files: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(InvalidValueError, match=r"pip install 'infinilm\[cluster\]'"):
        resume(files, cluster=True)


def test_a_cluster_that_is_not_there_is_named(
    files: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(EngineError, match=r"no Ray cluster can be reached at RAY_ADDRESS='127\.0\.0\.1:1'"):
        infinilm.batch.run(files[0], tmp_path / "parts", files[2], cluster=True)
