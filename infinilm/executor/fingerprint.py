"""`system_fingerprint`: which weights and kernels made an answer, and whether it can be reproduced."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64

from infinilm.executor.executor import ExecutorInfo
from infinilm.executor.guarantee import Guarantee
from infinilm.kernels import native
from infinilm.layers.formats import WeightFormats

if TYPE_CHECKING:
    from infinilm.models import ModelConfig

SAMPLES = 64
SAMPLE_BYTES = 4096
HEADER_BYTES = 1 << 20
DIGITS = 8


ROPES_BY_LENGTH = ("dynamic", "longrope")
"""Types of rotary embeddings whose angles depend on `max_model_len`."""


def make_fingerprint(path: Path, guarantee: Guarantee, settings: Mapping[str, Any], *, uses_torch: bool) -> str:
    """For example `qwen3-0.6b:w1f0c6a2b:k9d3e0a71:deterministic`: model, weights, kernels, guarantee.

    The kernels' hash also covers `computing_settings`. With 8-bit activations: `…:k9d3e0a71:a8:deterministic`.
    """
    kind = "deterministic" if guarantee.holds else "unguaranteed"
    bits = "" if settings["activation_bits"] == 16 else f":a{settings['activation_bits']}"
    how = f"{hash_kernels(uses_torch=uses_torch)} {sorted(settings.items())}"
    kernels = xxh3_64(how.encode()).hexdigest()[:DIGITS]
    return f"{path.name}:w{hash_weights(path)}:k{kernels}{bits}:{kind}"


def computing_settings(
    info: ExecutorInfo, kv_dtype: str, formats: WeightFormats, model_config: "ModelConfig", max_model_len: int
) -> dict[str, Any]:
    """The settings that the bits of results depend on, besides code and weights."""
    layers = range(model_config.num_hidden_layers)
    has_length = any(model_config.rope(layer)["rope_type"] in ROPES_BY_LENGTH for layer in layers)
    return {
        "activation_bits": formats.activation_bits,
        "attention": info.attention,
        "dtype": info.dtype,
        "formats": sorted(formats.by_name.items()),
        "is_ordered": formats.is_ordered,
        "kv_dtype": kv_dtype,
        "max_model_len": max_model_len if has_length else None,
        "num_ranks": info.num_ranks // info.num_stages,
    }


def hash_weights(path: Path) -> str:
    """A hash of the names, sizes, first megabytes (with the headers) and 64 samples of 4 KiB of each weight file.

    It tells checkpoints apart, but may miss a change of a single weight: finding it would take reading everything.
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
    folders = ("kernels", "attention", "cache", "distributed", "layers", "models", "sampling")
    files = [file for folder in folders for file in sorted((root / folder).rglob("*.py"))]
    library = native.load()
    for file in [*files, *([Path(library.__file__)] if library is not None and library.__file__ else [])]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:DIGITS]
