"""Writes a GGUF file again with its matrices in another of GGUF's types, rounded to the nearest.

    python -m benchmarks.quantize_gguf SOURCE.gguf TYPE TARGET.gguf

Metadata, the embedding, the head and the norms stay as they are; with F16 and BF16 the norms alone. Rows that are not
whole blocks of 256, as the K types need them, get the type that llama.cpp takes instead.
"""

import argparse
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from infinilm.loading.gguf import GGML_TYPES, GGUFFile, GGUFTensorInfo
from infinilm.loading.quantize import PLAIN_TYPES, QUANTIZERS, dequantize

INSTEAD = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""The types that replace K types for rows that are not whole blocks."""
OUTER = ("token_embd.weight", "output.weight")
ALIGNMENT = 32
TYPES = {type.name: (number, type) for number, type in GGML_TYPES.items()}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _nibbles(codes: Tensor) -> Tensor:
    low, high = codes.chunk(2, dim=-1)
    return low | (high << 4)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale.float())


def _signed(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The float16 scale, and codes around the middle. The number with the largest magnitude gets the lowest code."""
    middle = 2 ** (bits - 1)
    peak = x.gather(1, x.abs().argmax(1, keepdim=True))
    scale = (peak / -middle).half()
    return scale, (x * _inverse(scale) + middle).round().clamp(0, 2 * middle - 1).to(torch.uint8)


def _fifth_bits(codes: Tensor) -> Tensor:
    """The fifth bits of 32 codes, in four bytes."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((codes >> 4).view(-1, 4, 8) << shifts).sum(2, dtype=torch.uint8)


def to_q4_0(x: Tensor) -> Tensor:
    scale, codes = _signed(x, 4)
    return torch.cat((_bytes(scale), _nibbles(codes)), 1)


def to_q5_0(x: Tensor) -> Tensor:
    scale, codes = _signed(x, 5)
    return torch.cat((_bytes(scale), _fifth_bits(codes), _nibbles(codes & 15)), 1)


def to_q5_1(x: Tensor) -> Tensor:
    low, high = x.aminmax(dim=1, keepdim=True)
    scale, minimum = ((high - low) / 31).half(), low.half()
    codes = ((x - minimum) * _inverse(scale)).round().clamp(0, 31).to(torch.uint8)
    return torch.cat((_bytes(scale), _bytes(minimum), _fifth_bits(codes), _nibbles(codes & 15)), 1)


def _to_k(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The 16 bytes of scales of a Q4_K or Q5_K block, and codes `[n, 8, 32]`."""
    groups, top = x.view(-1, 8, 32), 2**bits - 1
    minimums = -groups.amin(2).clamp(max=0)
    scales = (groups.amax(2) + minimums) / top
    outer, outer_minimum = ((part.amax(1, keepdim=True) / 63).half() for part in (scales, minimums))
    scale = (scales * _inverse(outer)).round().clamp(0, 63).to(torch.uint8)
    minimum = (minimums * _inverse(outer_minimum)).round().clamp(0, 63).to(torch.uint8)
    shifted = groups + (minimum * outer_minimum.float())[..., None]
    codes = (shifted * _inverse(scale * outer.float())[..., None]).round().clamp(0, top).to(torch.uint8)
    first = [part[:, :4] | ((part[:, 4:] >> 4) << 6) for part in (scale, minimum)]
    last = (scale[:, 4:] & 15) | ((minimum[:, 4:] & 15) << 4)
    return torch.cat((_bytes(outer), _bytes(outer_minimum), *first, last), 1), codes


def to_q4_k(x: Tensor) -> Tensor:
    header, codes = _to_k(x, 4)
    return torch.cat((header, _nibbles(codes.view(-1, 4, 64)).flatten(1)), 1)


def to_q5_k(x: Tensor) -> Tensor:
    header, codes = _to_k(x, 5)
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = ((codes >> 4) << shifts).sum(1, dtype=torch.uint8)
    return torch.cat((header, fifth, _nibbles((codes & 15).view(-1, 4, 64)).flatten(1)), 1)


def to_q6_k(x: Tensor) -> Tensor:
    groups = x.view(-1, 16, 16)
    scales = groups.gather(2, groups.abs().argmax(2, keepdim=True))[..., 0] / -32
    outer = (scales.abs().amax(1, keepdim=True) / 127).half()
    scale = (scales * _inverse(outer)).round().clamp(-127, 127).to(torch.int8)
    codes = (groups * _inverse(scale * outer.float())[..., None] + 32).round().clamp(0, 63).to(torch.uint8)
    halves = codes.view(-1, 2, 128)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    upper = ((halves >> 4).view(-1, 2, 4, 32) << shifts).sum(2, dtype=torch.uint8)
    return torch.cat((_nibbles(halves & 15).flatten(1), upper.flatten(1), _bytes(scale), _bytes(outer)), 1)


WRITERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": to_q4_0,
    "Q4_1": lambda x: torch.from_numpy(QUANTIZERS["Q4_1"](x.numpy())),
    "Q5_0": to_q5_0,
    "Q5_1": to_q5_1,
    "Q8_0": lambda x: torch.from_numpy(QUANTIZERS["Q8_0"](x.numpy())),
    "Q4_K": to_q4_k,
    "Q5_K": to_q5_k,
    "Q6_K": to_q6_k,
    "F16": lambda x: _bytes(x.half()),
    "BF16": lambda x: _bytes(x.bfloat16()),
}
"""Each takes float32 blocks `[n, block elements]` and returns their bytes, uint8 `[n, block bytes]`."""


def type_for(name: str, shape: tuple[int, ...], asked: str) -> str | None:
    """The type that a tensor gets. None: it keeps its own."""
    if len(shape) != 2 or (name in OUTER and asked not in PLAIN_TYPES):
        return None
    return asked if shape[1] % TYPES[asked][1].block_elements == 0 else INSTEAD[asked]


def _convert(file: GGUFFile, tensor: GGUFTensorInfo, asked: str) -> bytes:
    """A tensor's data in its new type."""
    own = tensor.ggml_type
    sizes = (*tensor.shape[:-1], tensor.shape[-1] // own.block_elements)
    raw = file.read_blocks(tensor, (0,) * len(sizes), sizes)
    chosen = type_for(tensor.name, tensor.shape, asked)
    if chosen is None:
        return raw.tobytes()
    _, target = TYPES[chosen]
    values = torch.from_numpy(dequantize(raw, own, tensor.shape)).float()
    return WRITERS[chosen](values.view(-1, target.block_elements)).numpy().tobytes()


def write_gguf(source: Path, asked: str, target: Path) -> None:
    with closing(GGUFFile(source)) as file, target.open("wb") as written:
        infos, offset = [], 0
        for name, tensor in file.tensors.items():
            number, kind = TYPES[type_for(name, tensor.shape, asked) or tensor.ggml_type.name]
            dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
            infos.append(_string(name) + dims + struct.pack("<IQ", number, offset))
            num_bytes = torch.Size(tensor.shape).numel() // kind.block_elements * kind.block_bytes
            offset += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        head = _read_metadata(source, file) + b"".join(infos)
        written.write(head + bytes(-len(head) % ALIGNMENT))
        for tensor in file.tensors.values():
            content = _convert(file, tensor, asked)
            written.write(content + bytes(-len(content) % ALIGNMENT))


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _read_metadata(path: Path, file: GGUFFile) -> bytes:
    """Everything before the descriptions of tensors, which begin with the first one's name."""
    start = path.read_bytes()[: min(tensor.offset for tensor in file.tensors.values())]
    return start[: start.rindex(_string(next(iter(file.tensors))))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("type", choices=list(WRITERS))
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    write_gguf(options.source, options.type, options.target)


if __name__ == "__main__":
    main()
