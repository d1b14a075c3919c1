"""Two engines next to each other: processes, turns, figures, and llama.cpp itself where it is installed."""

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.peers import LLAMA_CPP, OPENVINO, OURS
from benchmarks.peers.engine_process import EngineProcess, describe_death
from benchmarks.peers.llamacpp import LlamaCpp
from benchmarks.peers.side_by_side import (
    WORKS,
    Comparison,
    Setup,
    Works,
    compare,
    make_comparison,
    make_setup,
    run_by_turns,
)
from infinilm.bench.measure import Run, Workload
from infinilm.cli.main import run as run_cli
from infinilm.config import Config
from infinilm.errors import EngineError, InvalidValueError

needs_llamacpp = pytest.mark.skipif(
    find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed: pip install 'infinilm[peers]'"
)


# --- what is made of runs -----------------------------------------------------------------------------------


def decoding(tokens_per_second: float) -> Run:
    return Run(
        seconds=1.0, num_decode_tokens=60, decode_seconds=60 / tokens_per_second, ttfts=[0.1], token_ids=[[1] * 61]
    )


def reading(tokens_per_second: float) -> Run:
    return Run(
        seconds=1.0, num_prefill_tokens=512, prefill_seconds=512 / tokens_per_second, ttfts=[0.1], token_ids=[[1]]
    )


@pytest.fixture
def found() -> Comparison:
    return Comparison(
        WORKS,
        versions={OURS: "1", LLAMA_CPP: "2"},
        runs={
            "decode": {OURS: [decoding(r) for r in (240, 10, 230)], LLAMA_CPP: [decoding(r) for r in (115, 110, 300)]},
            "prefill": {OURS: [reading(800)], LLAMA_CPP: [reading(250)]},
            "streams": {OURS: [decoding(690)], LLAMA_CPP: [decoding(345)]},
        },
        peak_bytes={OURS: [300 << 20, 100 << 20, 330 << 20], LLAMA_CPP: [200 << 20] * 3},
        start_seconds={OURS: [1.5], LLAMA_CPP: [0.5]},
    )


def test_figures_are_medians_and_ratios_ours_to_theirs(found: Comparison) -> None:
    figures = found.figures()
    assert [(figure.name, figure.unit, figure.is_more_better) for figure in figures] == [
        ("decode, one stream", "tok/s", True),
        ("prefill, 512-token prompt", "tok/s", True),
        ("8 streams, against its one", "tok/s", True),
        ("8 streams, against its 8", "tok/s", True),
        ("peak resident memory", "MiB", False),
        ("start to first token", "s", False),
    ]
    assert [figure.ours for figure in figures] == pytest.approx([230, 800, 690, 690, 300, 1.5])
    assert [figure.theirs for figure in figures] == pytest.approx([115, 250, 115, 345, 200, 0.5])
    assert [figure.ratio for figure in figures] == pytest.approx([2.0, 3.2, 6.0, 2.0, 1.5, 3.0])


def test_a_system_that_tells_no_memory_leaves_the_line_out(found: Comparison) -> None:
    found.peak_bytes = {OURS: [], LLAMA_CPP: []}
    assert [figure.unit for figure in found.figures()] == ["tok/s"] * 4 + ["s"]


def test_the_table(found: Comparison) -> None:
    screen = Console(width=80, record=True, file=StringIO())
    screen.print(make_comparison(found.figures()))
    lines = [line.split() for line in screen.export_text().splitlines()]
    assert lines[0] == ["infinilm", "llama.cpp", "ratio", "better"]
    assert lines[2] == ["decode,", "one", "stream", "tok/s", "230.0", "115.0", "2.00×", "more"]
    assert lines[-1] == ["start", "to", "first", "token", "s", "1.50", "0.50", "3.00×", "less"]


# --- how it is started --------------------------------------------------------------------------------------


def test_our_settings_go_to_the_process_and_to_the_command(smollm2: Path) -> None:
    setup = make_setup(Config(max_model_len=700, dtype="float32"), num_threads=3)
    assert setup == Setup(
        {"model": str(smollm2), "max_model_len": 700, "device": "cpu", "dtype": "float32"}, num_threads=3
    )
    command = setup.first_token_command(OURS)[1:]
    assert command[:3] == ["-m", "infinilm", "generate"]
    pairs = dict(zip(command[3:-1:2], command[4:-1:2], strict=True))
    assert pairs == {
        "--model": str(smollm2),
        "--max-model-len": "700",
        "--device": "cpu",
        "--dtype": "float32",
        "--max-tokens": "1",
    }
    assert setup.first_token_command(LLAMA_CPP)[-3:] == [str(smollm2), "3", command[-1]]


def test_what_llamacpp_cannot_do_is_refused(tiny_dir: Path, smollm2: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"is not a \.gguf file, which both engines can read"):
        make_setup(Config(model=tiny_dir), num_threads=None)
    with pytest.raises(InvalidValueError, match="leave out --device cuda"):
        make_setup(Config(model=smollm2, device="cuda"), num_threads=None)


@pytest.mark.parametrize("option", [("-w", "single"), ("--output-len", "4")])
def test_sizes_are_not_accepted_and_ignored(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["bench", "--peer", "llama.cpp", *option]) == 2
    assert "--peer llama.cpp has work of its own; leave out --workload and sizes" in capsys.readouterr().err


def test_a_missing_llamacpp_is_missed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # Python's own way to say that there is none
    assert run_cli(["bench", "--peer", "llama.cpp"]) == 2
    assert "needs llama-cpp-python; install it with: pip install 'infinilm[peers]'" in capsys.readouterr().err


def test_an_unknown_peer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["bench", "--peer", "ollama"]) == 2
    assert "peer='ollama' is unknown; use one of transformers, llama.cpp, openvino" in capsys.readouterr().err


# --- engines in processes -----------------------------------------------------------------------------------

WORK = Workload("work", num_prompts=2, input_len=12, output_len=5)


@pytest.fixture(scope="module")
def ours(tiny_dir: Path) -> Iterator[EngineProcess]:
    with EngineProcess(OURS, {"model": str(tiny_dir), "num_kvcache_blocks": 64}, num_threads=1) as process:
        yield process


def test_a_process_does_the_work_and_tells_its_memory(ours: EngineProcess) -> None:
    assert (ours.vocab_size, ours.max_len) == (300, 256)
    run = ours.run(WORK, WORK.prompts(300, repeat=0))
    assert [len(ids) for ids in run.token_ids] == [5, 5]
    assert (run.num_prefill_tokens, len(run.ttfts), len(run.gaps)) == (24, 2, 8)
    status = Path(f"/proc/{ours.pid}/status").read_text()
    now = int(status.partition("VmRSS:")[2].split()[0]) * 1024
    assert ours.peak_bytes is not None
    assert 0.8 * now < ours.peak_bytes < 2 * now


def test_turns_use_the_same_prompts_and_others_each_time(ours: EngineProcess, tiny_dir: Path) -> None:
    with EngineProcess("infinilm", {"model": str(tiny_dir), "num_kvcache_blocks": 64}, num_threads=1) as twin:
        twin.name = "twin"
        runs = run_by_turns([ours, twin], WORK, repeat=2)
    assert list(runs) == [OURS, "twin"]
    first, second = ([run.token_ids for run in own] for own in runs.values())
    assert first == second
    assert first[0] != first[1]


def test_an_error_over_there_is_an_error_here() -> None:
    with pytest.raises(EngineError, match=r"^infinilm: model 'no-such-model\.gguf': no such file"):
        EngineProcess(OURS, {"model": "no-such-model.gguf"}, num_threads=1)


def test_a_process_that_dies_is_missed(tiny_dir: Path) -> None:
    with EngineProcess(OURS, {"model": str(tiny_dir), "num_kvcache_blocks": 64}, num_threads=1) as process:
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="the process of infinilm was ended by SIGKILL"):
            process.run(WORK, WORK.prompts(300, repeat=0))


def test_how_an_engine_died() -> None:
    illegal = describe_death(LLAMA_CPP, -signal.SIGILL, "")
    assert "llama-cpp-python died of an illegal instruction" in illegal
    assert 'CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=ON' in illegal
    assert describe_death(OURS, -signal.SIGILL, "") == "the process of infinilm was ended by SIGILL"
    assert describe_death(OURS, 1, "Traceback\nKeyError: 'x'\n") == (
        "the process of infinilm ended with exit code 1; its last output: KeyError: 'x'"
    )


# --- llama.cpp itself ---------------------------------------------------------------------------------------

SMALL = Works(
    decode=replace(WORKS.decode, input_len=6, output_len=3),
    prefill=replace(WORKS.prefill, input_len=16),
    streams=replace(WORKS.streams, num_prompts=2, input_len=6, output_len=3),
    memory=replace(WORKS.memory, input_len=16, output_len=2),
)


@pytest.fixture(scope="module")
def works_here(smollm2: Path) -> None:
    """Its build may be for another CPU than this one; a process finds that out."""
    try:
        with EngineProcess(LLAMA_CPP, {"model": str(smollm2)}, num_threads=1) as process:
            process.run(WORK, WORK.prompts(300, repeat=0))
    except EngineError as error:
        if "illegal instruction" not in str(error):
            raise
        pytest.skip(str(error))


@needs_llamacpp
@pytest.mark.usefixtures("works_here")
def test_both_engines_do_the_same_work(smollm2: Path) -> None:
    notes: list[str] = []
    setup = Setup({"model": str(smollm2), "device": "cpu", "max_model_len": 256}, num_threads=1)
    found = compare(setup, 1, notes.append, SMALL)
    assert len(notes) == 5
    for runs in found.runs.values():
        ours, theirs = ([len(ids) for run in own for ids in run.token_ids] for own in runs.values())
        assert ours == theirs
    figures = found.figures()
    assert len(figures) == 6
    assert all(figure.ours > 0 and figure.theirs > 0 for figure in figures)
    memory = figures[4]
    assert 90 < memory.theirs < 1000  # MiB, of which the file is 94
    assert found.versions[LLAMA_CPP].endswith("(llama-cpp-python)")


@needs_llamacpp
@pytest.mark.usefixtures("works_here")
def test_streams_are_apart_and_rows_make_no_difference(smollm2: Path) -> None:
    peer = LlamaCpp(smollm2, num_threads=1)
    work = Workload("w", num_prompts=3, input_len=9, output_len=4)
    prompts = work.prompts(peer.vocab_size, repeat=0)
    together, apart = (peer.run(replace(work, concurrency=count), prompts) for count in (3, 1))
    assert (together.num_prefill_tokens, together.num_decode_tokens, len(together.gaps)) == (27, 9, 9)
    assert (apart.num_prefill_tokens, apart.num_decode_tokens, len(apart.gaps)) == (27, 9, 9)
    text = prompts[0] + apart.token_ids[0]
    logits = {rows: peer.logits(text, rows) for rows in (1, 5, 512)}
    assert logits[1].shape == (13, peer.vocab_size)
    for found in logits.values():
        assert found[8:12].argmax(axis=1).tolist() == apart.token_ids[0] == together.token_ids[0]
    peer.close()


# --- OpenVINO -----------------------------------------------------------------------------------------------


def test_a_missing_openvino_is_missed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "openvino_genai", None)
    assert run_cli(["bench", "--peer", "openvino"]) == 2
    assert "needs openvino-genai; install it with: pip install 'infinilm[peers]'" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("openvino_genai") is None, reason="openvino-genai is not installed")
def test_openvino_does_the_same_work(smollm2: Path) -> None:
    work = Workload("w", num_prompts=2, input_len=9, output_len=4)
    with EngineProcess(OPENVINO, {"model": str(smollm2)}, num_threads=1) as process:
        run = process.run(work, work.prompts(process.vocab_size, repeat=0))
    assert (process.vocab_size, process.max_len) == (49152, 8192)
    assert [len(ids) for ids in run.token_ids] == [4, 4]
    assert (run.num_prefill_tokens, run.num_decode_tokens, len(run.gaps), len(run.ttfts)) == (18, 6, 6, 2)
