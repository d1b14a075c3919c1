"""Writes a checkpoint again with its matrices quantised, in each format that other tools write.

    python -m benchmarks.quantize_checkpoint SOURCE FORMAT DIRECTORY [--group 128] [--block 128]

`SOURCE` is a directory of safetensors or a .gguf file. Numbers are rounded to the nearest code, without calibration:
what AWQ's and GPTQ's own tools write is more accurate in the same format. The embedding, the head and the norms stay as
they are. Only torch and safetensors are needed.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from infinilm.loading.checkpoint import Checkpoint, open_checkpoint
from infinilm.loading.sources import resolve

LARGEST_FP8 = 448.0
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
MIDDLE = 8
Tensors = dict[str, Tensor]
Coded = tuple[Tensors, Tensor]
"""The tensors of a layer by the ends of their names, and the values that they encode, float32 `[out, in]`."""
REST = "rest.safetensors"
"""The file of all tensors outside the layers."""
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Format:
    """A way to store matrices: the `quantization_config`, and the writer of a matrix `[out, in]`."""

    config: dict[str, Any] | None
    write: Callable[[Tensor], Coded]
    bits: float | None = None
    """The bits of a number in the format whose values are written, if they are stored in another format."""


def fp8_blocks(weight: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[out, in]`, the scale of each block of rows and columns, and the values."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % width, 0, -rows % height))
    grid = padded.view(len(padded) // height, height, -1, width)
    scales = (grid.abs().amax((1, 3)) / LARGEST_FP8).clamp(min=2.0**-60)
    spread = scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * spread


def write_fp8_blocks(weight: Tensor, block: int) -> Coded:
    codes, scales, values = fp8_blocks(weight, block, block)
    return {"weight": codes, "weight_scale_inv": scales}, values


def write_fp8_tensor(weight: Tensor) -> Coded:
    codes, scales, values = fp8_blocks(weight, *weight.shape)
    return {"weight": codes, "weight_scale": scales.reshape(()), "input_scale": torch.tensor(0.1)}, values


def int4(weight: Tensor, zeros: bool, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes `[out, in]`, scales and zeros `[out, groups]`, and the values. `groups` has the group of each input."""
    order = groups.argsort(stable=True)
    members = weight[:, order].view(len(weight), int(groups.max()) + 1, -1)  # all groups have the same size
    if zeros:
        low, high = members.amin(2).clamp(max=0), members.amax(2).clamp(min=0)
        scales = ((high - low) / 15).clamp(min=2.0**-24).half()
        zero = (-low / scales).round().clamp(1, 15)  # a stored zero of 0 can't be written by the first version of GPTQ
    else:
        scales = (members.abs().amax(2) / 7).clamp(min=2.0**-24).half()
        zero = torch.full_like(scales, MIDDLE)
    scale, offset = scales.float()[:, groups], zero.float()[:, groups]
    codes = (weight / scale + offset).round().clamp(0, 15)
    return codes.int(), scales, zero.int(), (codes - offset) * scale


def in_groups(weight: Tensor, size: int) -> Tensor:
    """The group of each input. If `size` is 0, all inputs are one group."""
    return torch.arange(weight.shape[1]) // (size or weight.shape[1])


def pack(codes: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack eight codes into an int32 along `dim`."""
    parts = codes.long().reshape(*codes.shape[:dim], -1, 8, *codes.shape[dim + 1 :]).unbind(dim + 1)
    words = sum(parts[place] << (4 * index) for index, place in enumerate(order))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def write_awq(weight: Tensor, group: int) -> Coded:
    codes, scales, zeros, values = int4(weight, True, in_groups(weight, group))
    tensors = {
        "qweight": pack(codes.t(), 1, AWQ_ORDER),
        "qzeros": pack(zeros.t(), 1, AWQ_ORDER),
        "scales": scales.t(),
    }
    return tensors, values


def write_gptq(weight: Tensor, group: int, *, zeros: bool = False, shift: int = 1, is_ordered: bool = True) -> Coded:
    groups = in_groups(weight, group)
    if not is_ordered:
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(1))]
    codes, scales, zero, values = int4(weight, zeros, groups)
    tensors = {
        "qweight": pack(codes.t(), 0),
        "qzeros": pack(zero.t() - shift, 1),
        "scales": scales.t(),
        "g_idx": groups.int(),
    }
    return tensors, values


def write_compressed_fp8(weight: Tensor, height: int, width: int) -> Coded:
    """Write as compressed-tensors does. A height or width of 0 means that of the matrix."""
    codes, scales, values = fp8_blocks(weight, height or len(weight), width or weight.shape[1])
    return {"weight": codes, "weight_scale": scales.flatten() if not height else scales}, values


def write_compressed_int4(weight: Tensor, group: int, *, zeros: bool) -> Coded:
    """Write as compressed-tensors does, with scales in float16."""
    codes, scales, zero, values = int4(weight, zeros, in_groups(weight, group))
    tensors = {
        "weight_packed": pack(codes, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if zeros:
        tensors["weight_zero_point"] = pack(zero, 0)
    return tensors, values


def write_mxfp4_values(weight: Tensor) -> Coded:
    """Write MXFP4's values as a dense matrix, because only GPT-OSS's experts are stored as MXFP4."""
    from infinilm.loading.mxfp4 import decode, unpack_codes

    blocks, scales = encode_mxfp4(weight)
    values = torch.from_numpy(decode(unpack_codes(blocks.numpy()), scales.numpy()))
    return {"weight": values}, values


def encode_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 `[out, in / 32, 16]` and exponents uint8 `[out, in / 32]`, in the layout of `loading.mxfp4`."""
    groups = weight.view(len(weight), -1, 32)
    exponents = groups.abs().amax(2).clamp(min=2.0**-100).log2().floor().int() - 2  # the largest float is 6 = 1.5 * 2^2
    steps = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = torch.ldexp(groups, -exponents[..., None])
    codes = torch.bucketize(scaled.abs(), (steps[1:] + steps[:-1]) / 2).to(torch.uint8)
    codes |= (scaled < 0).to(torch.uint8) << 3
    return codes[..., ::2] | (codes[..., 1::2] << 4), (exponents + 127).to(torch.uint8)


def _compressed(format: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}


def formats(group: int, block: int = 128) -> dict[str, Format]:
    """All formats by name, INT4 in groups of `group` inputs and FP8 in blocks of `block` by `block`."""
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True}
    awq = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    packed = {"num_bits": 4, "type": "int", "group_size": group, "strategy": "group"}
    floats = partial(_compressed, "float-quantized", num_bits=8, type="float")
    rows = {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True}
    int4_writer = partial(write_compressed_int4, group=group)
    return {
        "fp8-blocks": Format(blocks, partial(write_fp8_blocks, block=block)),
        "fp8-tensor": Format({"quant_method": "fp8", "activation_scheme": "static"}, write_fp8_tensor),
        "compressed-fp8-tensor": Format(floats(strategy="tensor"), partial(write_compressed_fp8, height=0, width=0)),
        "compressed-fp8-channel": Format(floats(strategy="channel"), partial(write_compressed_fp8, height=1, width=0)),
        "compressed-fp8-blocks": Format(
            floats(strategy="block", block_structure=[block, block]),
            partial(write_compressed_fp8, height=block, width=block),
        ),
        "awq": Format(awq, partial(write_awq, group=group)),
        "gptq": Format(gptq, partial(write_gptq, group=group)),
        "gptq-zeros": Format({**gptq, "sym": False}, partial(write_gptq, group=group, zeros=True)),
        "gptq-v2": Format(
            {**gptq, "sym": False, "checkpoint_format": "gptq_v2"},
            partial(write_gptq, group=group, zeros=True, shift=0),
        ),
        "gptq-order": Format({**gptq, "desc_act": True}, partial(write_gptq, group=group, is_ordered=False)),
        "compressed-int4": Format(
            _compressed("pack-quantized", **packed, symmetric=True), partial(int4_writer, zeros=False)
        ),
        "compressed-int4-zeros": Format(
            _compressed("pack-quantized", **packed, symmetric=False), partial(int4_writer, zeros=True)
        ),
        "compressed-int4-rows": Format(
            _compressed("pack-quantized", **rows), partial(write_compressed_int4, group=0, zeros=False)
        ),
        "mxfp4": Format(None, write_mxfp4_values, bits=4.25),
    }


DENSE = Format(None, lambda weight: ({"weight": weight}, weight))


def is_quantizable(name: str, shape: tuple[int, ...]) -> bool:
    """Whether tools quantise a tensor: the projections of a layer."""
    return len(shape) == 2 and name.endswith("_proj.weight")


def largest_group(source: Checkpoint) -> int:
    """The largest usual group size of which all inputs of a checkpoint are a multiple."""
    columns = [shape[1] for name, shape in source.shapes().items() if is_quantizable(name, shape)]
    return next(size for size in (128, 64, 32, 16) if not any(count % size for count in columns))


def write_checkpoint(source: Checkpoint, format: Format, directory: Path, rest: Path | None = None) -> None:
    """Write a file for each layer, and one for the rest, unless `rest` is that file of the same model."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"torch_dtype": "float32", **source.config}
    if format.config is not None:
        config["quantization_config"] = format.config
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    files: dict[str, list[str]] = {}
    for name in source.shapes():
        _, is_layer, end = name.partition("layers.")
        files.setdefault(f"layer{end.partition('.')[0]}.safetensors" if is_layer else REST, []).append(name)
    index: dict[str, str] = {}
    for file, names in files.items():
        if file == REST and rest is not None:
            (directory / file).symlink_to(rest.resolve())
            index |= dict.fromkeys(names, file)
            continue
        tensors: Tensors = {}
        for name in names:
            weight = source.read(name)
            if not is_quantizable(name, tuple(weight.shape)):
                tensors[name] = weight
                continue
            coded, _ = format.write(weight.float())
            layer = name.removesuffix("weight")
            tensors |= {layer + end: tensor.contiguous() for end, tensor in coded.items()}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("format", choices=list(formats(128)))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--group", type=int, help="inputs that share a scale in INT4; by default 128 if that fits")
    parser.add_argument("--block", type=int, default=128, help="rows and columns that share a scale in FP8")
    options = parser.parse_args()
    source = open_checkpoint(resolve(options.source))
    group = options.group or largest_group(source)
    write_checkpoint(source, formats(group, options.block)[options.format], options.directory)
    num_bytes = sum(file.stat().st_size for file in options.directory.glob("*.safetensors"))
    print(f"{num_bytes / 1e9:.2f} GB, groups of {group}")


if __name__ == "__main__":
    main()
