"""Quantised weights for tests: GGML's blocks of random matrices, and what they stand for."""

from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from gguf.constants import GGML_QUANT_SIZES
from torch import Tensor

from infinilm.kernels import native
from infinilm.layers.formats import WeightFormats
from infinilm.models import auto
from infinilm.models.quantization import choose_formats

FORMATS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where the float16 scales of a block begin, in the formats that the gguf package can't make."""

needs_native = pytest.mark.skipif(native.load() is None, reason="the native library was not built")


def pack_as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines on a CPU keep matrices as a GPU does."""

    def choose(checkpoint: Any, model_type: str, **settings: Any) -> WeightFormats:
        return choose_formats(checkpoint, model_type, **{**settings, "device": torch.device("cuda", 0)})

    monkeypatch.setattr(auto, "choose_formats", choose)


def library() -> Any:
    return native.load()


def make_blocks(format: str, rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random rows of a format, uint8 `[rows, bytes]`, and their values `[rows, columns]` by the gguf package."""
    kind = GGMLQuantizationType[format]
    generator = torch.Generator().manual_seed(seed)
    if format not in SCALES:
        raw = torch.from_numpy(quantize((0.1 * torch.randn(rows, columns, generator=generator)).numpy(), kind))
    else:
        block_columns, block_bytes = GGML_QUANT_SIZES[kind]
        blocks = torch.randint(0, 256, (rows, columns // block_columns, block_bytes), generator=generator)
        raw = blocks.to(torch.uint8)
        for start in SCALES[format]:  # small and positive
            scale = torch.rand(raw.shape[:2], generator=generator).mul_(1e-3).half()
            raw[..., start : start + 2] = scale.unsqueeze(-1).view(torch.uint8)
        raw = raw.flatten(1)
    return raw.contiguous(), torch.from_numpy(dequantize(raw.numpy(), kind).reshape(rows, columns).copy())
