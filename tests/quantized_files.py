"""Tiny checkpoints with a `quantization_config`, written by the documented layouts or by the formats' own library."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_reference, save
from compressed_tensors.compressors.naive_quantized import FloatQuantizationCompressor
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
LARGEST_FP8 = 448.0
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, Tensor]
Coded = tuple[Tensors, Tensor]
"""The tensors of a layer by the ends of their names, and the values that they stand for, float32 `[out, in]`."""


def fp8_blocks(weight: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales by block, and the values."""
    rows, columns = weight.shape
    grid = -(-rows // height), -(-columns // width)
    scales = torch.empty(grid)
    spread = torch.empty(rows, columns)
    for i in range(grid[0]):
        for j in range(grid[1]):
            block = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            scales[i, j] = spread[block] = weight[block].abs().max() / LARGEST_FP8
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * spread


def write_fp8_blocks(weight: Tensor) -> Coded:
    codes, scales, values = fp8_blocks(weight, 32, 32)
    return {"weight": codes, "weight_scale_inv": scales}, values


def write_fp8_tensor(weight: Tensor) -> Coded:
    codes, scales, values = fp8_blocks(weight, *weight.shape)
    return {"weight": codes, "weight_scale": scales.reshape(()), "input_scale": torch.tensor(0.1)}, values


def int4(weight: Tensor, zeros: bool, groups: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes `[out, in]`, scales and zeros `[out, groups]`, and the values; `groups` are those of the inputs."""
    if groups is None:
        groups = torch.arange(weight.shape[1]) // GROUP
    count = int(groups.max()) + 1
    members = [weight[:, groups == group] for group in range(count)]
    if zeros:
        low = torch.stack([part.amin(1).clamp(max=0) for part in members], 1)
        high = torch.stack([part.amax(1).clamp(min=0) for part in members], 1)
        scales = ((high - low) / 15).half()
        zero = (-low / scales).round().clamp(1, 15)  # a stored zero of 0 can't be written by the first version of GPTQ
    else:
        scales = (torch.stack([part.abs().amax(1) for part in members], 1) / 7).half()
        zero = torch.full_like(scales, 8)
    scale, offset = scales.float()[:, groups], zero.float()[:, groups]
    codes = (weight / scale + offset).round().clamp(0, 15)
    return codes.int(), scales, zero.int(), (codes - offset) * scale


def pack(codes: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight codes in an int32 along `dim`."""
    parts = codes.long().unflatten(dim, (-1, 8)).unbind(dim + 1)
    words = sum(parts[place] << (4 * index) for index, place in enumerate(order))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def write_awq(weight: Tensor) -> Coded:
    codes, scales, zeros, values = int4(weight, zeros=True)
    tensors = {
        "qweight": pack(codes.t(), 1, AWQ_ORDER),
        "qzeros": pack(zeros.t(), 1, AWQ_ORDER),
        "scales": scales.t().contiguous(),
    }
    return tensors, values


def write_gptq(weight: Tensor, *, zeros: bool = False, shift: int = 1, is_ordered: bool = True) -> Coded:
    groups = torch.arange(weight.shape[1]) // GROUP
    if not is_ordered:
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(1))]
    codes, scales, zero, values = int4(weight, zeros, groups)
    tensors = {
        "qweight": pack(codes.t(), 0),
        "qzeros": pack(zero.t() - shift, 1),
        "scales": scales.t().contiguous(),
        "g_idx": groups.int(),
    }
    return tensors, values


def write_compressed(weight: Tensor, **settings: Any) -> Coded:
    """By the library itself."""
    args = QuantizationArgs(**settings)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    if args.type == "float":
        height = {"tensor": weight.shape[0], "channel": 1, "block": 32}[str(args.strategy)]
        width = 32 if args.strategy == "block" else weight.shape[1]
        scales = fp8_blocks(weight, height, width)[1]
        scales = scales.flatten() if args.strategy == "tensor" else scales
        kind: Any = FloatQuantizationCompressor
        tensors = {"weight": weight, "weight_scale": scales}
    else:
        groups = None if args.strategy == "group" else torch.zeros(weight.shape[1], dtype=torch.int64)
        _, scales, zeros, _ = int4(weight, zeros=not args.symmetric, groups=groups)
        kind = PackedQuantizationCompressor
        tensors = {"weight": weight, "weight_scale": scales.float()}
        if not args.symmetric:
            tensors["weight_zero_point"] = (zeros - 8).to(torch.int8)
    packed = kind.compress(tensors, scheme)
    values = kind.decompress(dict(packed), scheme)["weight"].float()
    if args.type == "int":
        packed["weight_scale"] = packed["weight_scale"].half()
    return {name: tensor.contiguous() for name, tensor in packed.items()}, values


def _compressed_config(format: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
_PACKED = {"num_bits": 4, "type": "int", "group_size": GROUP, "strategy": "group"}
_FLOAT = {"num_bits": 8, "type": "float"}
_COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "compressed-fp8-tensor": ("float-quantized", {**_FLOAT, "strategy": "tensor"}),
    "compressed-fp8-channel": ("float-quantized", {**_FLOAT, "strategy": "channel"}),
    "compressed-fp8-blocks": ("float-quantized", {**_FLOAT, "strategy": "block", "block_structure": [32, 32]}),
    "compressed-int4": ("pack-quantized", {**_PACKED, "symmetric": True}),
    "compressed-int4-zeros": ("pack-quantized", {**_PACKED, "symmetric": False}),
    "compressed-int4-rows": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}),
}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Coded]]] = {
    "fp8-blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
        write_fp8_blocks,
    ),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, write_fp8_tensor),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        write_awq,
    ),
    "gptq": (_GPTQ, write_gptq),
    "gptq-zeros": ({**_GPTQ, "sym": False}, lambda weight: write_gptq(weight, zeros=True)),
    "gptq-v2": (
        {**_GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
        lambda weight: write_gptq(weight, zeros=True, shift=0),
    ),
    "gptq-order": ({**_GPTQ, "desc_act": True}, lambda weight: write_gptq(weight, is_ordered=False)),
    **{
        name: (
            _compressed_config(format, **settings),
            partial(write_compressed, **settings),
        )
        for name, (format, settings) in _COMPRESSED.items()
    },
}
"""By name: the `quantization_config`, and the writer of a matrix."""
DENSE_LAYERS = ("lm_head", "model.layers.1.mlp.down_proj")
"""Those that a checkpoint does not quantise."""


def write_checkpoint(name: str, path: Path, architecture: str = "llama-gqa", **sizes: Any) -> tuple[Path, Any]:
    """A checkpoint in one of `FORMATS`, and its reference, whose weights are what the checkpoint's stand for."""
    config, write = FORMATS[name]
    reference = make_reference(architecture, **{"intermediate_size": 128, **sizes})
    save(reference, path)
    weights = load_file(path / "model.safetensors")
    for own in [name for name in weights if name.endswith("_proj.weight") and weights[name].dim() == 2]:
        layer = own.removesuffix(".weight")
        if layer in DENSE_LAYERS:
            continue
        tensors, values = write(weights.pop(own).float())
        weights |= {f"{layer}.{end}": tensor.contiguous() for end, tensor in tensors.items()}
        with torch.no_grad():
            parameter_of(reference, own).copy_(values)
    save_file(weights, path / "model.safetensors")
    skipped = {"modules_to_not_convert": list(DENSE_LAYERS)}
    change_config(path, quantization_config={**skipped, **config})
    return path, reference


def parameter_of(reference: Any, name: str) -> Tensor:
    """A weight of transformers' model, which has those of all experts in two tensors."""
    if not (match := re.fullmatch(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)):
        found: Tensor = reference.get_parameter(name)
        return found
    prefix, expert, part = match.groups()
    stacked = reference.get_parameter(f"{prefix}.{'down_proj' if part == 'down' else 'gate_up_proj'}")[int(expert)]
    return stacked if part == "down" else stacked.chunk(2)[part == "up"]


def change_config(path: Path, **changes: Any) -> None:
    """Replace keys of a `config.json`."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
