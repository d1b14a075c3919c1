"""llama.cpp's vocabularies with golden tokenisations, and chat templates of real models, from the package index."""

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from infinilm.loading.sources import cache_dir

PACKAGE = "llama-cpp-python==0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
FOLDER = "llama_cpp_python-0.3.36/vendor/llama.cpp/models/"


def llama_cpp_models() -> Path:
    """The folder with `ggml-vocab-*.gguf` and `templates`, fetched once; skips the test if the index is unreachable."""
    target = cache_dir() / "test-data" / "llama-cpp-0.3.36"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=target.parent) as directory:
            extracted = _extract(_download(Path(directory)), Path(directory) / "models")
            try:
                extracted.rename(target)
            except OSError:
                if not target.is_dir():  # unless another process was faster
                    raise
    return target


def _download(directory: Path) -> Path:
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")  # checked before pip looks into the archive
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--no-binary=llama-cpp-python"]
    command += ["--disable-pip-version-check", "--dest", str(directory), "-r", str(requirements)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=240, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{PACKAGE} could not be fetched from the package index within 240 s")
    archives = list(directory.glob("*.tar.gz"))
    if done.returncode or not archives:
        said = (done.stdout + done.stderr).strip()
        assert "DO NOT MATCH THE HASHES" not in said, said
        pytest.skip(f"{PACKAGE} could not be fetched from the package index: {said[-300:]}")
    with archives[0].open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256
    return archives[0]


def _extract(archive: Path, target: Path) -> Path:
    (target / "templates").mkdir(parents=True)
    with tarfile.open(archive) as opened:
        for member in opened:
            name = member.name.removeprefix(FOLDER)
            is_wanted = name.startswith(("ggml-vocab-", "templates/")) and ".." not in name
            if member.isfile() and is_wanted:
                source = opened.extractfile(member)
                assert source is not None
                (target / name).write_bytes(source.read())
    return target
