"""Random matrices in the formats of quantised checkpoints: codes and scales are drawn as they are stored."""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

DEVIATION = 0.02
"""The standard deviation of all values."""
GROUP = 128
# The standard deviations of codes: 8-bit floats as drawn, and uniformly drawn 4-bit or 6-bit integers.
FLOAT_DEVIATION, INT4_DEVIATION, INT6_DEVIATION = 100.0, 4.6, 18.5
LARGEST_FP8 = 448.0
Shape = tuple[int, ...]


class Draw:
    """Draws tensors on a GPU if there is one; results are on the CPU."""

    def __init__(self, seed: int = 0) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._generator = torch.Generator(self._device).manual_seed(seed)

    def normal(self, shape: Shape, deviation: float, dtype: torch.dtype) -> Tensor:
        values = torch.randn(shape, generator=self._generator, device=self._device) * deviation
        largest = LARGEST_FP8 if dtype == torch.float8_e4m3fn else torch.inf
        return values.clamp_(-largest, largest).to(dtype).cpu()

    def scales(self, shape: Shape, middle: float, dtype: torch.dtype) -> Tensor:
        """Numbers from a half to one and a half times `middle`."""
        values = torch.rand(shape, generator=self._generator, device=self._device)
        return values.add_(0.5).mul_(middle).to(dtype).cpu()

    def bytes(self, *shape: int) -> Tensor:
        """uint8, uniformly drawn."""
        drawn = torch.randint(256, shape, generator=self._generator, device=self._device, dtype=torch.uint8)
        return drawn.cpu()

    def words(self, *shape: int) -> Tensor:
        """int32, eight 4-bit codes each."""
        return self.bytes(*shape[:-1], 4 * shape[-1]).view(torch.int32)

    def zeros(self, *shape: int, shift: int = 0) -> Tensor:
        """int32, eight 4-bit zeros each: 7 or 8, minus `shift`."""
        least = torch.tensor(0x11111111 * (7 - shift), dtype=torch.int32)
        return (self.words(*shape) & 0x11111111) + least


def _fp8(draw: Draw, rows: int, columns: int, *, name: str, grid: tuple[int, int]) -> dict[str, Tensor]:
    return {
        "weight": draw.normal((rows, columns), FLOAT_DEVIATION, torch.float8_e4m3fn),
        name: draw.scales(grid, DEVIATION / FLOAT_DEVIATION, torch.float32),
    }


def _fp8_rows(draw: Draw, rows: int, columns: int) -> dict[str, Tensor]:
    return _fp8(draw, rows, columns, name="weight_scale", grid=(rows, 1))


def _fp8_blocks(draw: Draw, rows: int, columns: int) -> dict[str, Tensor]:
    grid = -(-rows // GROUP), -(-columns // GROUP)
    return _fp8(draw, rows, columns, name="weight_scale_inv", grid=grid)


def _awq(draw: Draw, rows: int, columns: int) -> dict[str, Tensor]:
    return {
        "qweight": draw.words(columns, rows // 8),
        "qzeros": draw.zeros(columns // GROUP, rows // 8),
        "scales": draw.scales((columns // GROUP, rows), DEVIATION / INT4_DEVIATION, torch.float16),
    }


def _gptq(draw: Draw, rows: int, columns: int) -> dict[str, Tensor]:
    return {
        "qweight": draw.words(columns // 8, rows),
        "qzeros": draw.zeros(columns // GROUP, rows // 8, shift=1),
        "scales": draw.scales((columns // GROUP, rows), DEVIATION / INT4_DEVIATION, torch.float16),
        "g_idx": torch.arange(columns, dtype=torch.int32) // GROUP,
    }


def _gptq_in_order(draw: Draw, rows: int, columns: int) -> dict[str, Tensor]:
    """As with `desc_act`. Matrices with equal numbers of inputs have them in the same order."""
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    tensors = _gptq(draw, rows, columns)
    return {**tensors, "g_idx": tensors["g_idx"][order]}


def _int4(draw: Draw, rows: int, columns: int) -> dict[str, Tensor]:
    return {
        "weight_packed": draw.words(rows, columns // 8),
        "weight_scale": draw.scales((rows, columns // GROUP), DEVIATION / INT4_DEVIATION, torch.bfloat16),
        "weight_shape": torch.tensor([rows, columns]),
    }


def _compressed(format: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, **weights},
        "input_activations": inputs,
    }
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


@dataclass(frozen=True, slots=True)
class Quantization:
    """A format of safetensors checkpoints: its `quantization_config`, and the tensors of a matrix by their ends."""

    config: dict[str, Any]
    draw: Callable[[Draw, int, int], dict[str, Tensor]]


QUANTIZATIONS = {
    "fp8": Quantization(
        _compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            num_bits=8,
            type="float",
            strategy="channel",
        ),
        _fp8_rows,
    ),
    "fp8-block": Quantization(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]}, _fp8_blocks
    ),
    "awq": Quantization(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, _awq
    ),
    "gptq": Quantization(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}, _gptq
    ),
    "gptq-order": Quantization(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": True}, _gptq_in_order
    ),
    "int4": Quantization(
        _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP), _int4
    ),
}


def _q4_k(draw: Draw, num_blocks: int) -> Tensor:
    """Blocks of 256. Their sixteen 6-bit factors are from 32 to 47, and minimums half the range of codes."""
    blocks = draw.bytes(num_blocks, 144)
    blocks[:, 4:12] = blocks[:, 4:12] & 0x0F | 0xA0
    scales = draw.scales((num_blocks, 1), DEVIATION / (40 * INT4_DEVIATION), torch.float16)
    blocks[:, :2], blocks[:, 2:4] = scales.view(torch.uint8), (scales * 7.5).view(torch.uint8)
    return blocks


def _q6_k(draw: Draw, num_blocks: int) -> Tensor:
    """Blocks of 256, whose sixteen factors are from 32 to 63."""
    blocks = draw.bytes(num_blocks, 210)
    blocks[:, 192:208] = blocks[:, 192:208] & 0x1F | 0x20
    blocks[:, 208:] = draw.scales((num_blocks, 1), DEVIATION / (48 * INT6_DEVIATION), torch.float16).view(torch.uint8)
    return blocks


@dataclass(frozen=True, slots=True)
class BlockType:
    """One of GGUF's types: its number in files, and how blocks are drawn."""

    number: int
    block_elements: int
    block_bytes: int
    draw: Callable[[Draw, int], Tensor]


_F32 = BlockType(0, 1, 4, lambda _, count: torch.ones(count).view(torch.uint8))
_Q4_K, _Q6_K = BlockType(12, 256, 144, _q4_k), BlockType(14, 256, 210, _q6_k)
_ALIGNMENT = 32
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_q4_k(config: dict[str, Any], shapes: dict[str, Shape], path: Path) -> int:
    """A GGUF file of a Llama: matrices in Q4_K, the head in Q6_K. Returns the bytes of the weights."""
    draw = Draw()
    tensors: list[tuple[str, Shape, BlockType]] = []
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if module in _OUTER:
            stored = _OUTER[module]
        else:
            layer, _, part = module.removeprefix("model.layers.").partition(".")
            stored = f"blk.{layer}.{_PARTS[part]}"
        kind = _F32 if len(shape) == 1 else _Q6_K if stored == "output" else _Q4_K
        tensors.append((f"{stored}.weight", shape, kind))
    with path.open("wb") as file:
        _write_header(file, config, tensors)
        start = file.tell()
        for _, shape, kind in tensors:
            blocks = kind.draw(draw, torch.Size(shape).numel() // kind.block_elements)
            file.write(blocks.numpy().data)
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
        return file.tell() - start


def _write_header(file: BinaryIO, config: dict[str, Any], tensors: list[tuple[str, Shape, BlockType]]) -> None:
    numbers = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]),
    }
    file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(numbers) + 1))
    file.write(_string("general.architecture") + struct.pack("<I", 8) + _string("llama"))
    for key, value in numbers.items():
        packed = struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)
        file.write(_string(f"llama.{key}") + packed)
    offset = 0
    for name, shape, kind in tensors:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        file.write(_string(name) + dims + struct.pack("<IQ", kind.number, offset))
        num_bytes = torch.Size(shape).numel() // kind.block_elements * kind.block_bytes
        offset += num_bytes + -num_bytes % _ALIGNMENT
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()
