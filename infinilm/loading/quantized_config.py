"""Reads a `quantization_config`: how quantised matrices are stored, and whether they can be read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinilm.distributed.grouped import GROUP_STEP
from infinilm.errors import CheckpointError

MXFP4 = "mxfp4"
"""The `quant_method` of experts in one tensor; see `mxfp4`."""
METHODS = ("fp8", "awq", "gptq", "compressed-tensors")
"""The `quant_method`s that `quantized_checkpoint` can read."""
WHOLE_ROW = -1
"""The group size of a matrix with one scale for each row."""
_ADVICE = "take another checkpoint of the model, or a GGUF file"


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """Matrices of 8-bit floats (e4m3) under their usual names, with scales to multiply them by."""

    scale_names: tuple[str, ...]
    """Possible ends of the scales' name, after the matrix's name."""
    block: tuple[int, int] | None
    """The rows and columns that share a scale, unless a row or the whole matrix shares one."""
    whole: bool
    """Whether a row or the whole matrix may share a scale."""
    rounds_inputs: bool = True
    """Whether the checkpoint expects inputs that are rounded to 8-bit floats."""


@dataclass(frozen=True, slots=True)
class Int4Scheme:
    """Matrices of 4-bit integers, eight in an int32, with `value = scale * (code - zero)`.

    The names are the ends of tensor names, after the layer's name.
    """

    codes: str
    scales: str
    zeros: str
    index: str
    """The tensor with the group of each input."""
    group_sizes: frozenset[int]
    is_input_first: bool
    """Whether tensors are `[in, out]`."""
    packs_inputs: bool
    """Whether eight inputs share an int32; otherwise eight outputs do. Zeros are always packed by outputs."""
    order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    """The index of each of the eight values, from the lowest bits on."""
    zero_shift: int = 0
    """The number that is added to stored zeros."""
    is_symmetric: bool = False
    """Whether all zeros are 8."""
    needs_zeros: bool = True
    needs_index: bool = False


@dataclass(frozen=True, slots=True)
class Schemes:
    """The schemes of a checkpoint. A matrix without the tensors of either scheme is dense."""

    fp8: Fp8Scheme | None = None
    int4: Int4Scheme | None = None


def find_method(config: Mapping[str, Any]) -> str | None:
    """The `quant_method` of a `config.json`; None if nothing is quantised."""
    stored = find_quantization(config)
    if not stored:
        return None
    return str(stored.get("quant_method") if isinstance(stored, Mapping) else stored)


def find_quantization(config: Mapping[str, Any]) -> Any:
    """The `quantization_config` of a `config.json`, or of its language model."""
    text = config.get("text_config")
    return config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, Mapping) else None)


def read_schemes(config: Mapping[str, Any]) -> Schemes:
    """How a checkpoint's matrices are quantised. Errors name the setting that can't be read."""
    stored = find_quantization(config)
    method = find_method(config)
    if not isinstance(stored, Mapping) or method not in METHODS:
        raise CheckpointError(
            f"quantization_config: weights quantised by {method!r} can't be read; known are "
            f"{', '.join((*METHODS, MXFP4))}; {_ADVICE}"
        )
    readers = {"fp8": _read_fp8, "awq": _read_awq, "gptq": _read_gptq, "compressed-tensors": _read_compressed}
    return readers[method](stored)


def _read_fp8(stored: Mapping[str, Any]) -> Schemes:
    _require(stored, "activation_scheme", ("dynamic", "static"), default="dynamic")
    _require(stored, "fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
    block = _read_block("weight_block_size", stored.get("weight_block_size"))
    return Schemes(fp8=Fp8Scheme(("_scale_inv", "_scale"), block, whole=block is None))


def _read_awq(stored: Mapping[str, Any]) -> Schemes:
    _require(stored, "bits", (4,), default=stored.get("w_bit", 4))
    _require(stored, "version", ("gemm", "GEMM"), default="gemm")
    _require(stored, "zero_point", (True,), default=True)
    size = _read_group_size(stored.get("group_size", stored.get("q_group_size", 128)))
    scheme = Int4Scheme(
        ".qweight",
        ".scales",
        ".qzeros",
        ".g_idx",
        frozenset({size}),
        is_input_first=True,
        packs_inputs=False,
        order=(0, 2, 4, 6, 1, 3, 5, 7),
    )
    return Schemes(int4=scheme)


def _read_gptq(stored: Mapping[str, Any]) -> Schemes:
    _require(stored, "bits", (4,), default=None)
    _require(stored, "checkpoint_format", ("gptq", "gptq_v2"), default="gptq")
    _require(stored, "dynamic", ({},), default={})
    needs_index = _require(stored, "desc_act", (False, True), default=False)
    scheme = Int4Scheme(
        ".qweight",
        ".scales",
        ".qzeros",
        ".g_idx",
        frozenset({_read_group_size(stored.get("group_size", 128))}),
        is_input_first=True,
        packs_inputs=True,
        zero_shift=0 if stored.get("checkpoint_format") == "gptq_v2" else 1,
        is_symmetric=stored.get("sym") is True,
        needs_index=bool(needs_index),
    )
    return Schemes(int4=scheme)


def _read_compressed(stored: Mapping[str, Any]) -> Schemes:
    sparsity = stored.get("sparsity_config") or {}
    _require(sparsity, "format", ("dense",), default="dense", path="sparsity_config.")
    groups = stored.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"quantization_config.config_groups={groups!r:.80} must describe groups of matrices")
    fp8: list[Fp8Scheme] = []
    int4: list[tuple[int, bool, bool]] = []  # group size, has zeros, has an index
    for name, group in groups.items():
        path = f"config_groups.{name}.weights."
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise CheckpointError(f"quantization_config.{path.rstrip('.')}={weights!r:.80} must be an object")
        kind = _require(weights, "type", ("int", "float"), default=None, path=path)
        _require(weights, "num_bits", (4,) if kind == "int" else (8,), default=None, path=path)
        known = ("pack-quantized",) if kind == "int" else ("float-quantized", "naive-quantized")
        own = {"format": group.get("format") or stored.get("format")}
        _require(own, "format", known, default=None)
        strategies = ("channel", "group") if kind == "int" else ("tensor", "channel", "block")
        strategy = _require(weights, "strategy", strategies, default="group" if kind == "int" else "tensor", path=path)
        if kind == "float":
            block = (
                _read_block(f"{path}block_structure", weights.get("block_structure")) if strategy == "block" else None
            )
            fp8.append(Fp8Scheme(("_scale",), block, block is None, bool(group.get("input_activations"))))
        else:
            size = _read_group_size(weights.get("group_size")) if strategy == "group" else WHOLE_ROW
            symmetric = _require(weights, "symmetric", (True, False), default=True, path=path)
            int4.append((size, not symmetric, weights.get("actorder") in ("group", True)))
    blocks = {each.block for each in fp8 if each.block is not None}
    if len(blocks) > 1:
        raise CheckpointError(
            f"quantization_config: several block_structure, {sorted(blocks)}, can't be read; {_ADVICE}"
        )
    return Schemes(
        fp8=Fp8Scheme(
            ("_scale",),
            next(iter(blocks), None),
            any(each.whole for each in fp8),
            all(each.rounds_inputs for each in fp8),
        )
        if fp8
        else None,
        int4=Int4Scheme(
            ".weight_packed",
            ".weight_scale",
            ".weight_zero_point",
            ".weight_g_idx",
            frozenset(size for size, _, _ in int4),
            is_input_first=False,
            packs_inputs=True,
            needs_zeros=all(has_zeros for _, has_zeros, _ in int4),
            needs_index=all(has_index for _, _, has_index in int4),
        )
        if int4
        else None,
    )


def _require(stored: Mapping[str, Any], key: str, known: tuple[Any, ...], *, default: Any, path: str = "") -> Any:
    """The value of a key, which must be one of the `known` values."""
    value = stored.get(key)
    value = default if value is None else value
    if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in known):
        listed = ", ".join(map(repr, known))
        raise CheckpointError(f"quantization_config.{path}{key}={value!r} can't be read; known: {listed}; {_ADVICE}")
    return value


def _read_block(name: str, value: Any) -> tuple[int, int] | None:
    if value is None and "structure" not in name:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise CheckpointError(
            f"quantization_config.{name}={value!r} must be two positive integers, rows and columns; {_ADVICE}"
        )
    return value[0], value[1]


def _read_group_size(value: Any) -> int:
    if type(value) is not int or (value != WHOLE_ROW and (value <= 0 or value % GROUP_STEP)):
        raise CheckpointError(
            f"quantization_config: group_size={value!r} can't be read; known are multiples of {GROUP_STEP}, and "
            f"{WHOLE_ROW} for whole rows; {_ADVICE}"
        )
    return value
