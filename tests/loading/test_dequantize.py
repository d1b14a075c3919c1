"""Decoders against the `gguf` package, bit for bit."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as reference
from gguf.quants import quantize

from infinilm.errors import InvalidValueError
from infinilm.loading.gguf import GGML_TYPES, GGMLType
from infinilm.loading.quantize import dequantize

TYPES = {ggml_type.name: ggml_type for ggml_type in GGML_TYPES.values()}
QUANTISED = [name for name, ggml_type in TYPES.items() if ggml_type.block_elements > 1]
# Where the float16 scales lie in a block.
SCALE_BYTES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2],
    "Q6_K": [208], "MXFP4": [],
}  # fmt: skip


def random_blocks(ggml_type: GGMLType, num_blocks: int) -> np.ndarray:
    """Random bytes, but with finite scales of every magnitude and sign, subnormal ones included."""
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (num_blocks, ggml_type.block_bytes), dtype=np.uint8)
    for start in SCALE_BYTES[ggml_type.name]:
        scales = rng.integers(0, 0x7C00, num_blocks, dtype=np.uint16)
        scales |= rng.integers(0, 2, num_blocks, dtype=np.uint16) << 15
        blocks[:, start : start + 2] = scales.view(np.uint8).reshape(-1, 2)
    if ggml_type.name == "MXFP4":  # its first byte is an exponent; larger ones overflow
        blocks[:, 0] %= 251
    return blocks


def bits(values: torch.Tensor | np.ndarray) -> list[int]:
    return np.asarray(values, dtype=np.float32).view(np.uint32).ravel().tolist()


def test_every_readable_type_has_a_scale_table_or_is_plain() -> None:
    assert set(QUANTISED) == set(SCALE_BYTES)
    assert set(TYPES) - set(QUANTISED) == {"F32", "F16", "BF16"}


@pytest.mark.parametrize("name", QUANTISED)
def test_random_blocks_decode_bit_for_bit(name: str) -> None:
    blocks = random_blocks(TYPES[name], 768)
    expected = reference(blocks, GGMLQuantizationType[name])
    assert np.isfinite(expected).all()
    shape = (12, 768 * TYPES[name].block_elements // 12)
    decoded = dequantize(blocks, TYPES[name], shape)
    assert decoded.dtype == np.float32
    assert tuple(decoded.shape) == shape
    assert bits(decoded) == bits(expected)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "BF16", "F16"])
def test_quantised_weights_decode_bit_for_bit(name: str) -> None:
    weights = np.random.default_rng(3).normal(0, 0.02, (16, 96)).astype(np.float32)
    raw = quantize(weights, GGMLQuantizationType[name])
    decoded = dequantize(raw.view(np.uint8), TYPES[name], (16, 96))
    assert bits(decoded) == bits(reference(raw, GGMLQuantizationType[name]))
    assert np.allclose(decoded, weights, atol=0.02)


@pytest.mark.parametrize(("name", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_plain_types_come_as_they_are_stored(name: str, dtype: torch.dtype) -> None:
    values = torch.randn(5, 7, generator=torch.manual_seed(0)).to(dtype)
    decoded = dequantize(values.view(torch.uint8).flatten().numpy(), TYPES[name], (5, 7))
    assert decoded.dtype == (np.float16 if name == "F16" else np.float32)  # NumPy has no bfloat16
    assert torch.equal(torch.from_numpy(decoded).to(dtype), values)
    assert torch.equal(torch.from_numpy(decoded).float(), values.float())


def test_bytes_at_an_odd_address_are_taken() -> None:
    raw = random_blocks(TYPES["Q6_K"], 1).ravel()
    shifted = np.concatenate((np.zeros(1, dtype=np.uint8), raw))[1:]
    assert np.array_equal(dequantize(shifted, TYPES["Q6_K"], (256,)), dequantize(raw, TYPES["Q6_K"], (256,)))


def test_sizes_that_do_not_agree_are_refused() -> None:
    raw = np.zeros(34, dtype=np.uint8)
    with pytest.raises(InvalidValueError, match=r"34 bytes are not a Q8_0 tensor of shape \[2, 32\]"):
        dequantize(raw, TYPES["Q8_0"], (2, 32))
    with pytest.raises(InvalidValueError, match=r"shape \[31\]"):
        dequantize(raw, TYPES["Q8_0"], (31,))
