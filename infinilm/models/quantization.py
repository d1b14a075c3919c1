"""Choosing which matrices of a checkpoint stay quantised in memory, or are quantised while they are read."""

import logging
from collections import Counter
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from infinilm.checks import check_choice
from infinilm.distributed.grouped import MXFP4, GroupedFormat
from infinilm.distributed.shard import PackedShard, Weights
from infinilm.errors import InvalidValueError
from infinilm.kernels import native
from infinilm.layers.formats import DENSE, FORMATS, WeightFormats
from infinilm.loading.checkpoint import Checkpoint
from infinilm.loading.quantize import PLAIN_TYPES, QUANTIZERS
from infinilm.models.registry import keeps_quantized
from infinilm.platforms import HostDevice

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

QUANTIZED_TO = {"q8": "Q8_0", "q4": "Q4_1", "int4": "Q4_0"}
"""The format for each value of `quantization`, except for the embedding, the head and `_DEVICE_FORMATS`."""
_DEVICE_FORMATS = {"fp8": GroupedFormat(8, None, "F32"), "int4": GroupedFormat(4, 128, "F16")}
"""The formats on a GPU; `fp8` is for CPUs, too. Groups are smaller where rows do not consist of whole groups."""
OUTER_FORMAT = "Q8_0"
"""The format of the embedding and the head, where rounding errors cost most. With fp8 they are 8-bit floats."""
OUTER_NAMES = ("model.embed_tokens.weight", "lm_head.weight")
ROUTERS = (
    *("*.mlp.gate.weight", "*.block_sparse_moe.gate.weight", "*.mlp.router.weight", "*.router.proj.weight"),
    "*.shared_expert_gate.weight",
)
"""Routers, and gates of shared experts. They stay dense: they are small, and a rounding error could choose another
expert."""
HALVES = ("float16", "bfloat16")
QUANTIZED_KINDS = ("FP8", "INT4", MXFP4)
"""The types of quantised matrices in checkpoints with a `quantization_config`."""
_MAX_LISTED = 8


def choose_formats(
    checkpoint: Checkpoint,
    model_type: str,
    *,
    quantization: str | None,
    dtype: str,
    device: "torch.device | HostDevice",
    activation_bits: int = 16,
    keeps_halves: bool = False,
) -> WeightFormats:
    """Choose the formats of all matrices that are to be quantised. The arguments are the engine's settings.

    With `keeps_halves`, dense 16-bit matrices keep the checkpoint's type on a CPU, although it computes in float32.
    Results have the same bits, but a weight that is replaced later is rounded to 16 bits.
    """
    formats = _find_formats(checkpoint, model_type, quantization, dtype, device)
    check_has_short(formats, activation_bits, device)
    if keeps_halves and device.type == "cpu" and dtype == "auto" and has_native_floats(model_type):
        formats = replace(formats, halves=_find_halves(checkpoint))
    return replace(formats, activation_bits=activation_bits) if formats.by_name else formats


def _find_halves(checkpoint: Checkpoint) -> dict[str, str]:
    shapes = checkpoint.shapes()
    stored = {name: PLAIN_TYPES.get(format) for name, format in checkpoint.formats().items()}
    halves = {name: type for name, type in stored.items() if type in HALVES and len(shapes[name]) == 2}
    return {name: type for name, type in halves.items() if not is_router(name)}


def check_has_short(formats: WeightFormats, activation_bits: int, device: "torch.device | HostDevice") -> None:
    """Refuse 8-bit activations where no matrix would use them."""
    has_blocks = formats.is_native and any(format in FORMATS for format in formats.by_name.values())
    if activation_bits != 16 and not has_blocks:
        kept = "are 8-bit floats" if formats.by_name else "are dense"
        here = f"the matrices {kept}" if device.type == "cpu" else f"the model runs on {device}"
        raise InvalidValueError(
            f"activation_bits={activation_bits} is for quantised matrices on a CPU, which the native library "
            f"multiplies, and here {here}; use a GGUF file or quantization='q8' with device='cpu', or "
            "activation_bits=16"
        )


def _find_formats(
    checkpoint: Checkpoint, model_type: str, quantization: str | None, dtype: str, device: "torch.device | HostDevice"
) -> WeightFormats:
    is_native = device.type == "cpu"
    if quantization is not None:
        check_choice("quantization", quantization, ("none", *{**_DEVICE_FORMATS, **QUANTIZED_TO}))
    if quantization not in (None, "none"):
        _check_quantization(model_type, quantization, dtype, device)
    elif quantization == "none" or not keeps_quantized(model_type) or (is_native and dtype != "auto"):
        return DENSE
    found: dict[str, str] = {}
    exact: Counter[tuple[str, str]] = Counter()
    inexact: Counter[str] = Counter()
    shapes = checkpoint.shapes()
    for name, stored in checkpoint.formats().items():
        is_table = name == OUTER_NAMES[0]  # a GPU keeps it dense
        packed = checkpoint.packed_format(name, is_native=is_native)
        if len(shapes[name]) != 2 or (is_table and not is_native) or is_router(name):
            continue
        is_grouped = packed is not None and GroupedFormat.parse(packed) is not None
        if packed in FORMATS or (is_grouped and not (is_native and quantization in QUANTIZED_TO)):
            found[name] = str(packed)
            if packed in FORMATS and is_native and stored in QUANTIZED_KINDS:
                exact[stored, packed] += 1
        elif quantization is not None and not (is_table and quantization == "fp8"):  # no look-ups in 8-bit floats
            found[name] = _format_of(name, shapes[name][1], quantization, is_native=is_native)
        elif stored in QUANTIZED_KINDS:
            inexact[stored] += 1
    for (stored, packed), count in exact.items():
        logger.info("%d matrices stored as %s are kept as %s, which has exactly the same values", count, stored, packed)
    for stored, count in inexact.items():
        logger.warning(
            "%d matrices stored as %s are computed dense: %s has no form of them with exactly the same values%s",
            count,
            stored,
            "the native library" if is_native else str(device),
            "; quantization='q8' keeps them as Q8_0, which rounds them and needs a quarter of the memory"
            if is_native
            else "",
        )
    if found and is_native and native.load() is None:  # `load` has logged why
        return DENSE
    return WeightFormats(found, is_native=is_native)


def has_native_floats(model_type: str) -> bool:
    """Whether the native library multiplies a model's float matrices on this CPU by default."""
    return keeps_quantized(model_type) and native.has_vectors()


def is_router(name: str) -> bool:
    """Whether a matrix is one of `ROUTERS`."""
    return any(fnmatchcase(name, pattern) for pattern in ROUTERS)


def _format_of(name: str, columns: int, quantization: str, *, is_native: bool) -> str:
    """The format that a dense matrix is quantised to."""
    device = None if is_native and quantization != "fp8" else _DEVICE_FORMATS.get(quantization)
    if name in OUTER_NAMES and quantization != "fp8":
        return OUTER_FORMAT
    if device is None:
        return QUANTIZED_TO[quantization]
    if device.group is None:
        return device.name
    whole = [size for size in (device.group, device.group // 2) if columns % size == 0]
    return replace(device, group=whole[0] if whole else device.group // 4).name


def can_be_made(shard: PackedShard) -> bool:
    """Whether dense values can be quantised to the format of a matrix."""
    format = GroupedFormat.parse(shard.matrix.format)
    if format is None:
        return shard.matrix.format in QUANTIZERS
    return not (format.has_zeros or format.is_mxfp4 or format.order)


def note_dense(weights: Weights, formats: WeightFormats) -> None:
    """Log which matrices could not be kept quantised."""
    dense = [name for name in formats.by_name if name in weights and not isinstance(weights[name], PackedShard)]
    if dense:
        listed = ", ".join(dense[:_MAX_LISTED]) + (", …" if len(dense) > _MAX_LISTED else "")
        logger.warning(
            "%d of %d quantised matrices are computed dense, because their columns, or those of matrices that they are "
            "multiplied with, can't be cut into whole blocks, or experts have several formats, or for want of an "
            "activation in the native library: %s",
            len(dense),
            len(formats.by_name),
            listed,
        )


def _check_quantization(model_type: str, quantization: str, dtype: str, device: "torch.device | HostDevice") -> None:
    """Refuse settings that do not allow quantisation."""
    asked = f"quantization={quantization!r}"
    if device.type == "cpu" and dtype not in ("auto", "float32"):
        raise InvalidValueError(f"{asked} computes in float32, and dtype={dtype!r}; use dtype='auto'")
    if not keeps_quantized(model_type):
        raise InvalidValueError(
            f"{asked}: the builder of model_type={model_type!r} has no parameter `formats`, or can't keep matrices "
            "quantised; use quantization='none'"
        )
    if device.type == "cpu" and native.load() is None:
        raise InvalidValueError(
            f"{asked} needs the native library, which was not built with the package; install a C++ compiler and then "
            "InfiniLM again, or use quantization='none'"
        )
