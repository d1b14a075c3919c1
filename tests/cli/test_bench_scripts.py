"""The scripts in benchmarks/, run as a user would."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from zlib import crc32

import pytest

from infinilm.models import LlamaConfig

BENCH = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def workloads(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return import_module("gpu_workloads")


@pytest.fixture
def profiling(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return import_module("gpu_profile")


CHECKSUMS = {"single": 379194996, "nano": 2867243125, "prefix": 2613632653, "long": 2383997637}


def test_the_workloads_are_the_published_ones(workloads) -> None:
    """Token for token what every engine is timed on."""
    works = {name: make() for name, make in workloads.WORKLOADS.items()}
    texts = {name: json.dumps([work.prompts, work.output_lens]) for name, work in works.items()}
    assert {name: crc32(text.encode()) for name, text in texts.items()} == CHECKSUMS
    assert sum(works["nano"].output_lens) == 133966
    assert works["prefix"].shared_len == 1024
    other = workloads.WORKLOADS["nano"](seed=100)
    assert not {tuple(prompt[:16]) for prompt in other.prompts} & {tuple(p[:16]) for p in works["nano"].prompts}


@pytest.mark.parametrize(("name", "rate"), [("nano", 36217), ("single", 3498), ("prefix", 30973), ("long", 457)])
def test_the_floors_are_the_published_ones(workloads, name, rate) -> None:
    """In tokens per second, of Qwen3-0.6B in bfloat16 on the device they were published for."""
    config = LlamaConfig(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    )
    work = workloads.WORKLOADS[name]()
    limits = workloads.Limits(bytes_per_second=4281e9, operations_per_second=788e12)
    floor = workloads.Needs.of(work, config, itemsize=2).floor(limits)
    assert round(sum(work.output_lens) / floor) == rate


def test_they_run_and_report(tiny_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "gpu_workloads.py"), str(tiny_dir), "single", "prefix"]
    done = subprocess.run(
        [*command, "--scale", "0.05", "--json", str(tmp_path / "report.json")],
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert list(report["workloads"]) == ["single", "prefix"]
    single, prefix = report["workloads"].values()
    assert (single["output_tokens"], prefix["output_tokens"]) == (13, 13 * 3)
    assert report["process_to_first_token"] > report["first_token"] > report["ready"] > 0
    for result in (single, prefix):
        assert 0 < result["ttft_p50"] <= result["ttft_max"] < result["seconds"]
        assert 0 < result["itl_p50"] <= result["itl_p99"]
        assert result["floor_share"] == result["floor_seconds"] / result["seconds"]
        assert result["gigabytes_per_second"] > 0
    assert [line.split()[0] for line in done.stdout.splitlines()[-2:]] == ["single", "prefix"]


def test_an_unknown_workload_is_named(workloads, capsys) -> None:
    with pytest.raises(SystemExit):
        workloads.main(["any", "huge"])
    assert "no workload is called huge; there are single, nano, prefix, long" in capsys.readouterr().err


# --- profiles -----------------------------------------------------------------------------------------------


def test_kernels_that_overlap_are_counted_once(profiling) -> None:
    event = profiling.Event
    timeline = profiling.Timeline.of(
        [
            event("b", 1_008_000, 7_000),  # started early, waits for a
            event("a", 1_000_000, 10_000),
            event("inside", 1_012_000, 1_000),
            event("a", 1_020_000, 5_000),  # 5 us later
            event("c", 1_225_000, 1_000),  # 200 us later
        ]
    )
    assert {name: kernel.count for name, kernel in timeline.kernels.items()} == {"a": 2, "b": 1, "inside": 1, "c": 1}
    microseconds = {name: round(kernel.seconds * 1e6, 3) for name, kernel in timeline.kernels.items()}
    assert microseconds == {"a": 15, "b": 5, "inside": 0, "c": 1}
    assert timeline.busy_seconds == pytest.approx(21e-6)
    assert timeline.gap_seconds == pytest.approx(205e-6)
    assert timeline.long_gap_seconds == pytest.approx(200e-6)
    parts = profiling.Profile(300e-6, timeline, 0.0).parts()
    assert sum(parts.values()) == pytest.approx(300e-6)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("decode_kernel", "attention, decode"),
        ("shared_kernel", "attention, decode"),
        ("_prefill_kernel", "attention, prefill"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128", "attention, prefill"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNN", "matrices"),
        ("_gemv_kernel", "matrices"),
        ("_settle", "sampling"),
        ("_norm_kernel", "norm, rope, activation"),
        ("_rope_store_kernel", "norm, rope, activation"),
        ("_silu_mul_kernel", "norm, rope, activation"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>", "other"),
    ],
)
def test_kernels_are_known_by_name(profiling, kernel, kind) -> None:
    assert profiling.kind_of(kernel) == kind


@pytest.mark.parametrize("form", [["--rows", "3", "--context", "40", "--steps", "2"], ["--workload", "single"]])
def test_profiles_run_and_report(profiling, tiny_dir, tmp_path, form) -> None:
    path = tmp_path / "report.json"
    profiling.main([str(tiny_dir), *form, "--scale", "0.05", "--json", str(path)])
    report = json.loads(path.read_text())
    assert sum(kernel["seconds"] for kernel in report["kernels"]) > 0
    wall = report["profiled_seconds"] if "--workload" in form else report["busy_seconds"]
    assert sum(report["parts"].values()) == pytest.approx(wall)


def test_draws_are_timed() -> None:
    command = [sys.executable, str(BENCH / "cpu_sampling.py"), "--vocab-size", "300", "--repeat", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    table = [line.rsplit(maxsplit=3) for line in done.stdout.splitlines()[1:]]
    assert [(name, int(rows)) for name, rows, _, _ in table[:5]] == [
        ("greedy", 1),
        ("temperature 0.7", 1),
        ("and top_p 0.9", 1),
        ("and top_k 50", 1),
        ("greedy", 8),
    ]
    assert len(table) == 12
    assert all(float(native) > 0 and float(twin) > 0 for _, _, native, twin in table)
