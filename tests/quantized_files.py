"""Tiny checkpoints with a `quantization_config`, written by the documented layouts or by the formats' own library."""

import json
import re
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

from benchmarks.quantize_checkpoint import Coded, Format, formats, fp8_blocks, in_groups, int4

GROUP = 32


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
        groups = in_groups(weight, GROUP if args.strategy == "group" else 0)
        _, scales, zeros, _ = int4(weight, not args.symmetric, groups)
        kind = PackedQuantizationCompressor
        tensors = {"weight": weight, "weight_scale": scales.float()}
        if not args.symmetric:
            tensors["weight_zero_point"] = (zeros - 8).to(torch.int8)
    packed = kind.compress(tensors, scheme)
    values = kind.decompress(dict(packed), scheme)["weight"].float()
    if args.type == "int":
        packed["weight_scale"] = packed["weight_scale"].half()
    return {name: tensor.contiguous() for name, tensor in packed.items()}, values


def _by_library(format: Format) -> Format:
    config = format.config or {}
    if config.get("quant_method") != "compressed-tensors":
        return format
    return Format(config, partial(write_compressed, **config["config_groups"]["group_0"]["weights"]))


OWN_FORMATS = {name: format for name, format in formats(GROUP, 32).items() if format.config is not None}
FORMATS = {name: _by_library(format) for name, format in OWN_FORMATS.items()}
"""Those of compressed-tensors are written by that library."""


def config_of(name: str) -> dict[str, Any]:
    config = FORMATS[name].config
    assert config is not None
    return config


DENSE_LAYERS = ("lm_head", "model.layers.1.mlp.down_proj")
"""Those that a checkpoint does not quantise."""


def write_checkpoint(name: str, path: Path, architecture: str = "llama-gqa", **sizes: Any) -> tuple[Path, Any]:
    """A checkpoint in one of `FORMATS`, and its reference, whose weights are what the checkpoint's stand for."""
    format = FORMATS[name]
    reference = make_reference(architecture, **{"intermediate_size": 128, **sizes})
    save(reference, path)
    weights = load_file(path / "model.safetensors")
    for own in [name for name in weights if name.endswith("_proj.weight") and weights[name].dim() == 2]:
        layer = own.removesuffix(".weight")
        if layer in DENSE_LAYERS:
            continue
        tensors, values = format.write(weights.pop(own).float())
        weights |= {f"{layer}.{end}": tensor.contiguous() for end, tensor in tensors.items()}
        with torch.no_grad():
            parameter_of(reference, own).copy_(values)
    save_file(weights, path / "model.safetensors")
    skipped = {"modules_to_not_convert": list(DENSE_LAYERS)}
    change_config(path, quantization_config={**skipped, **(format.config or {})})
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
