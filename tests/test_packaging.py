"""What is installed: the files of a wheel and of a source archive, and the native library's way in and out."""

import logging
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import infinilm
from infinilm.errors import InvalidValueError
from infinilm.kernels import native

ROOT = Path(__file__).parents[1]
INSTRUCTION_SETS = ["avx512_vnni", "avx_vnni", "avx2", "generic"]
OBJECTS = ROOT / "build/native/CMakeFiles"


def build(hook: str, directory: Path) -> Path:
    """What the build backend makes of the checkout, without compiling."""
    pytest.importorskip("scikit_build_core", reason="the build backend is not in this environment")
    code = f"from scikit_build_core.build import *; {hook}({str(directory)!r}, {{'wheel.cmake': 'false'}})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    (archive,) = directory.iterdir()
    return archive


def sources(*folders: str) -> set[str]:
    """The files below these folders of the checkout that belong to the package."""
    files = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in files if path.suffix not in {".pyc", ".so"}}


def test_a_wheel_has_every_file_of_the_package_and_no_other(tmp_path: Path) -> None:
    with zipfile.ZipFile(build("build_wheel", tmp_path)) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        script = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
        assert "infinilm = infinilm.cli.main:main" in wheel.read(script).decode()
    assert {"infinilm/py.typed", "infinilm/_native.pyi", "infinilm/server/static/index.html"} <= names
    assert names == sources("infinilm")


def test_a_source_archive_has_all_that_a_build_needs(tmp_path: Path) -> None:
    with tarfile.open(build("build_sdist", tmp_path)) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert sources("infinilm", "native") | {"pyproject.toml", "README.md", "LICENSE"} <= names
    assert [name for name in names if name.startswith((".", "build/")) or name.endswith((".so", ".pyc"))] == []


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own, for which INFINILM_NATIVE is not set if it isn't here."""
    settings = {key: value for key, value in os.environ.items() if key != "INFINILM_NATIVE"} | environment
    return subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, check=True)


@pytest.fixture
def library() -> ModuleType:
    module = native.load()
    if module is None:
        pytest.skip("the native library is not built")
    return module


def test_the_library_names_its_instruction_set(library: ModuleType) -> None:
    assert library.instruction_set() in INSTRUCTION_SETS


def test_the_environment_can_ask_for_torch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("INFINILM_NATIVE", "0")
    with caplog.at_level(logging.INFO):
        assert native.load.__wrapped__() is None
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_the_environment_can_ask_for_another_build(library: ModuleType, tmp_path: Path) -> None:
    copy = shutil.copy(str(library.__file__), tmp_path)
    code = """
import sys
from infinilm.kernels.native import load
assert load() is sys.modules["infinilm._native"]
print(load().__file__)
"""
    assert run(code, INFINILM_NATIVE=str(copy)).stdout.strip() == str(copy)


@pytest.mark.parametrize("path", ["", "nothing.so"])
def test_a_build_that_is_not_there_is_an_error(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINILM_NATIVE", path)
    with pytest.raises(InvalidValueError, match=f"INFINILM_NATIVE='{path}'"):
        native.load.__wrapped__()


def test_without_the_library_one_warning_says_what_to_do() -> None:
    code = """
import sys
sys.modules["infinilm._native"] = None  # Python's own way to say that it can't be imported
from infinilm.kernels.native import load
print(load(), load())
"""
    done = run(code)
    assert done.stdout == "None None\n"
    assert done.stderr.count("native CPU kernels are missing") == 1
    assert "install a C++ compiler" in done.stderr


def test_only_the_loader_imports_the_library() -> None:
    # A module that imports it directly would ignore INFINILM_NATIVE, which `make sanitize` sets.
    direct = re.compile(r"^\s*(import|from) infinilm(\._native| import .*\b_native)\b", re.MULTILINE)
    files = [path for folder in ("infinilm", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert [str(path) for path in files if direct.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("part", ["kernels", "kernels_attention", "kernels_bytes"])
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_kernels_share_no_code_between_instruction_sets(name: str, part: str) -> None:
    """An inline function outside of its own namespace would be shared, and fail on a machine with less."""
    path = OBJECTS / f"kernels_{name}.dir" / f"{part}.cpp.o"
    if not path.exists() or shutil.which("nm") is None:
        pytest.skip("no objects of `make native` to look into")
    listing = subprocess.run(["nm", "--demangle", path], capture_output=True, text=True, check=True).stdout
    shared = re.findall(r"^\S+ [TW] (.+)$", listing, re.MULTILINE)
    assert shared
    assert [symbol for symbol in shared if f"infinilm::{name}::" not in symbol] == []


def test_torch_is_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *extras["serve"], *extras["structured"]]
    names = {re.split(r"[\[<>=; ]", text)[0] for text in required}
    assert "numpy" in names
    assert not names & {"torch", "triton", "infinilm"}
    assert [re.split("[<>=]", text)[0] for text in extras["torch"]] == ["torch"]


def test_the_version_is_written_once(tmp_path: Path) -> None:
    assert build("build_sdist", tmp_path).name == f"infinilm-{infinilm.__version__}.tar.gz"
    assert infinilm.__version__ not in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## ([\d.]+)", changes, re.MULTILINE)[0] == infinilm.__version__
