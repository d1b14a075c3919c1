"""`system_fingerprint`: which weights and kernels made an answer, and whether it can be had again."""

from functools import cache
from pathlib import Path

from xxhash import xxh3_64

from infinilm.executor.guarantee import Guarantee
from infinilm.kernels import native

SAMPLES = 64
SAMPLE_BYTES = 4096
HEADER_BYTES = 1 << 20
DIGITS = 8


def make_fingerprint(path: Path, guarantee: Guarantee, *, uses_torch: bool = True, activation_bits: int = 16) -> str:
    """Such as `qwen3-0.6b:w1f0c6a2b:k9d3e0a71:deterministic`: model, weights, kernels, guarantee.

    8-bit activations make it `…:k9d3e0a71:a8:deterministic`.
    """
    kind = "deterministic" if guarantee.holds else "unguaranteed"
    bits = "" if activation_bits == 16 else f":a{activation_bits}"
    return f"{path.name}:w{hash_weights(path)}:k{hash_kernels(uses_torch=uses_torch)}{bits}:{kind}"


def hash_weights(path: Path) -> str:
    """A hash of the names, sizes, first megabytes (with the headers) and 64 samples of 4 KiB of each weight file.

    It tells checkpoints apart, but not whether a single weight was changed: that would take reading everything.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    digest = xxh3_64()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}/{size}/".encode() if path.is_dir() else f"{size}/".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(HEADER_BYTES))
            for index in range(SAMPLES):
                opened.seek(size * index // SAMPLES)
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()[:DIGITS]


@cache
def hash_kernels(*, uses_torch: bool = True) -> str:
    """A hash of the code that computes: the package's kernels, layers and native library, and torch's version."""
    digest = xxh3_64()
    if uses_torch:
        from importlib.metadata import version

        digest.update(version("torch").encode())
    root = Path(__file__).parent.parent
    folders = ("kernels", "attention", "layers", "models", "sampling")
    files = [file for folder in folders for file in sorted((root / folder).rglob("*.py"))]
    library = native.load()
    for file in [*files, *([Path(library.__file__)] if library is not None and library.__file__ else [])]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:DIGITS]
