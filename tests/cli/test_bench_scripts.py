"""The scripts in bench/, run as a user would."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_workloads_are_the_published_ones() -> None:
    workloads = load("gpu_workloads").WORKLOADS
    prompts, outputs = workloads["nano"](1.0)
    assert (len(prompts), len(outputs)) == (256, 256)
    assert sum(outputs) == 133966, "what every engine is timed on"
    assert (min(map(len, prompts)) >= 100, max(map(len, prompts)) <= 1024) == (True, True)
    prompts, outputs = workloads["prefix"](1.0)
    assert {len(prompt) for prompt in prompts} == {1088}
    assert all(prompt[:1024] == prompts[0][:1024] for prompt in prompts)
    assert outputs == [64] * 256
    assert [len(prompt) for prompt in workloads["long"](1.0)[0]] == [16000] * 8
    assert [len(part) for part in workloads["single"](1.0)[0]] == [128]


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
    assert report["workloads"]["single"]["output_tokens"] == 13
    assert report["workloads"]["prefix"]["output_tokens"] == 13 * 3
    assert report["first_token"] > report["ready"] > 0
    assert "prefix" in done.stdout


def test_an_unknown_workload_is_named(tiny_dir: Path) -> None:
    command = [sys.executable, str(BENCH / "gpu_workloads.py"), str(tiny_dir), "huge"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "no workload is called huge; there are single, nano, prefix, long" in done.stderr
