"""Which matrices of a checkpoint stay quantised in memory, or become so while they are read."""

import logging
from collections import Counter
from fnmatch import fnmatchcase

import torch

from infinilm.checks import check_choice
from infinilm.distributed.shard import PackedShard, Weights
from infinilm.errors import InvalidValueError
from infinilm.kernels import native
from infinilm.layers.formats import DENSE, FORMATS, WeightFormats
from infinilm.loading.checkpoint import Checkpoint
from infinilm.models.registry import keeps_quantized

logger = logging.getLogger(__name__)

QUANTIZED_TO = {"q8": "Q8_0", "q4": "Q4_1"}
"""The format of each setting, except for the embedding and the head."""
OUTER_FORMAT = "Q8_0"
"""Of the embedding and the head, where rounding errors cost most."""
OUTER_NAMES = ("model.embed_tokens.weight", "lm_head.weight")
ROUTERS = (
    *("*.mlp.gate.weight", "*.block_sparse_moe.gate.weight", "*.mlp.router.weight", "*.router.proj.weight"),
    "*.shared_expert_gate.weight",
)
"""Routers and gates of experts, which stay dense: they are small, and a rounding error chooses another expert."""
QUANTIZED_KINDS = ("FP8", "INT4")
"""What checkpoints with a `quantization_config` call the types of quantised matrices."""
_MAX_LISTED = 8


def choose_formats(
    checkpoint: Checkpoint, model_type: str, *, quantization: str | None, dtype: str, device: torch.device
) -> WeightFormats:
    """The formats of all matrices that are to be quantised. The arguments are the engine's settings."""
    if quantization is not None:
        check_choice("quantization", quantization, ("none", *QUANTIZED_TO))
    if quantization in QUANTIZED_TO:
        _check_quantization(model_type, quantization, dtype, device)
    elif quantization == "none" or not keeps_quantized(model_type) or (device.type == "cpu" and dtype != "auto"):
        return DENSE
    found: dict[str, str] = {}
    inexact: Counter[str] = Counter()
    shapes, is_native = checkpoint.shapes(), device.type == "cpu"
    for name, stored in checkpoint.formats().items():
        if len(shapes[name]) != 2 or any(fnmatchcase(name, pattern) for pattern in ROUTERS):
            continue
        packed = checkpoint.packed_format(name, is_native=is_native)
        if packed is not None and (packed in FORMATS or not is_native):
            found[name] = packed
        elif quantization is not None:
            found[name] = OUTER_FORMAT if name in OUTER_NAMES else QUANTIZED_TO[quantization]
        elif stored in QUANTIZED_KINDS:
            inexact[stored] += 1
    for stored, count in inexact.items():
        logger.warning(
            "%d matrices stored as %s are computed dense: %s has no form of them with exactly the same values",
            count,
            stored,
            "the native library" if is_native else str(device),
        )
    if found and is_native and native.load() is None:  # `load` has logged why
        return DENSE
    return WeightFormats(found)


def note_dense(weights: Weights, formats: WeightFormats) -> None:
    """Say once which matrices could not be kept quantised."""
    dense = [name for name in formats.by_name if name in weights and not isinstance(weights[name], PackedShard)]
    if dense:
        listed = ", ".join(dense[:_MAX_LISTED]) + (", …" if len(dense) > _MAX_LISTED else "")
        logger.warning(
            "%d of %d quantised matrices are computed dense, because they are experts on a GPU, or their columns, or "
            "those of matrices that they are multiplied with, can't be cut into whole blocks, or for want of an "
            "activation in the native library: %s",
            len(dense),
            len(formats.by_name),
            listed,
        )


def _check_quantization(model_type: str, quantization: str, dtype: str, device: torch.device) -> None:
    """Refuse settings under which nothing can be quantised."""
    asked = f"quantization={quantization!r}"
    if device.type != "cpu":
        raise InvalidValueError(f"{asked} is for CPUs, and the device is {device}; use quantization='none'")
    if dtype not in ("auto", "float32"):
        raise InvalidValueError(f"{asked} computes in float32, and dtype={dtype!r}; use dtype='auto'")
    if not keeps_quantized(model_type):
        raise InvalidValueError(
            f"{asked}: the builder of model_type={model_type!r} has no parameter `formats`, or can't keep matrices "
            "quantised; use quantization='none'"
        )
    if native.load() is None:
        raise InvalidValueError(
            f"{asked} needs the native library, which was not built with the package; install a C++ compiler and then "
            "InfiniLM again, or use quantization='none'"
        )
