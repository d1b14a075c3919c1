import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packing import FORMATS, make_blocks
from torch import Tensor

from infinilm.distributed.ggml_blocks import BLOCK_FORMATS
from infinilm.distributed.shard import ShardRange
from infinilm.kernels.block_product import block_product, unpack_blocks
from infinilm.kernels.gemv import gemv_torch
from infinilm.kernels.grouped_product import MAX_ROWS
from infinilm.kernels.ordered_product import Tile
from infinilm.kernels.packed_blocks import PackedBlocks, unpack_blocks_torch
from infinilm.layers.formats import BlockWeight

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
EPS = 1e-5


def packed(format: str, rows: int, columns: int) -> tuple[PackedBlocks, Tensor]:
    """A random matrix, and its values by the gguf package."""
    own = BLOCK_FORMATS[format]
    blocks, values = make_blocks(format, rows, columns)
    kinds = (torch.int32, own.scale_dtype, own.factor_dtype)
    parts = [part.contiguous().view(kind).to(DEVICE) for part, kind in zip(own.rearrange(blocks), kinds, strict=False)]
    factors = parts[2] if own.has_factors else None
    return PackedBlocks(parts[0], parts[1], factors, own.bits, own.group, own.middle), values


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_unpacked_values_are_those_of_the_format(format: str, dtype: torch.dtype) -> None:
    columns = 768 if "K" in format else 416
    matrix, values = packed(format, 19, columns)
    assert unpack_blocks_torch(matrix, dtype).cpu().equal(values.to(dtype))
    if ON_GPU or dtype != torch.bfloat16:  # Triton's interpreter cuts bfloat16 off
        assert unpack_blocks(matrix, dtype).cpu().equal(values.to(dtype))
    num_bytes = sum(BLOCK_FORMATS[format].sizes(columns))
    assert num_bytes * 19 == sum(part.nbytes for part in matrix[:3] if isinstance(part, Tensor))


@pytest.mark.parametrize(
    ("format", "rows"), [("Q4_K", 130), ("Q4_K", 30), ("Q6_K", 30), ("Q4_0", 0), *((format, 3) for format in FORMATS)]
)
def test_parity(format: str, rows: int) -> None:
    out_size, in_size, dtype = 38, 256, torch.float16
    matrix, _ = packed(format, out_size, in_size)
    x, norm = random(rows, in_size, dtype=dtype), (random(in_size, dtype=dtype), EPS)
    bias, residual = random(out_size, dtype=dtype), random(rows, out_size, dtype=dtype)
    if ON_GPU:
        torch.cuda.synchronize()
    tile = None if ON_GPU else Tile(64, 128, 4, 2)
    for options in ({}, {"bias": bias}, {"residual": residual}, {"norm": norm, "is_gated": True}):
        expected = gemv_torch(x, unpack_blocks_torch(matrix, dtype), **options)
        actual = block_product(x, matrix, **options, tile=tile)
        torch.testing.assert_close(actual, expected, rtol=2e-3, atol=4e-3)


@pytest.mark.parametrize("rows", [1, 5])
def test_layers_of_several_formats(rows: int) -> None:
    """Of three matrices the first two have one format, and their kernels write parts of one result."""
    formats, sizes, columns = ["Q4_K", "Q4_K", "Q6_K"], [6, 10, 8], 256
    weight = BlockWeight(formats, sizes, columns, dtype=torch.float32, device=DEVICE)
    values = []
    shards = weight.shards([ShardRange.whole(size) for size in sizes], ShardRange.whole(columns))
    for shard, format, size in zip(shards, formats, sizes, strict=True):
        blocks, own = make_blocks(format, size, columns)
        shard.matrix.load(blocks, torch.arange(size))  # type: ignore[union-attr]
        values.append(own)
    assert weight.dequantized().cpu().equal(torch.cat(values))
    x, bias = random(rows, columns, dtype=torch.float32), random(24, dtype=torch.float32)
    residual = random(rows, 24, dtype=torch.float32)
    expected = gemv_torch(x, weight.dequantized(), bias=bias, residual=residual)
    gate, up = gemv_torch(x, weight.dequantized()).chunk(2, dim=1)
    weight._max_kernel_rows = MAX_ROWS
    torch.testing.assert_close(weight.multiply(x, bias, residual.clone()), expected, rtol=1e-4, atol=1e-4)
    activated = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(weight.multiply_gated(x, None), activated, rtol=1e-4, atol=1e-4)


COMPILING = """
import torch
from offline_triton import launched
from infinilm.kernels.block_product import block_product, unpack_blocks
from infinilm.kernels.packed_blocks import PackedBlocks

x, codes = torch.zeros(2, 256, dtype=torch.float16), torch.zeros(16, 64, dtype=torch.int32)
scales, factors = torch.zeros(16, 8, dtype=torch.int16), torch.zeros(16, 1, dtype=torch.int32)
block_product(x, PackedBlocks(codes[:, :32], scales, factors, 4, 32, 0))
unpack_blocks(PackedBlocks(codes, scales.int(), None, 8, 32, 0), torch.float16)
print(launched)
"""


def test_they_compile_for_hopper() -> None:
    """The interpreter takes more than the compiler does."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, "-c", COMPILING], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[0] == "['_block_kernel', '_unpack_kernel']"
