import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from infinilm.distributed.grouped import GroupedFormat
from infinilm.distributed.shard import ShardRange
from infinilm.kernels.gemv import gemv_torch
from infinilm.kernels.grouped_product import MAX_ROWS, grouped_product
from infinilm.kernels.ordered_product import Tile, keep_order, ordered_product
from infinilm.layers.formats import GroupedWeight
from infinilm.layers.norm import RMSNorm

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
needs_cuda = pytest.mark.skipif(not ON_GPU, reason="needs a GPU: bits are those of its tensor cores")
EPS = 1e-5
FORMATS = [
    GroupedFormat(8, None, "F32"),
    GroupedFormat(8, 64, "BF16"),
    GroupedFormat(4, None, "F16"),
    GroupedFormat(4, 32, "F16", has_zeros=True),
    GroupedFormat(4, 64, "BF16"),
]


def random_weight(format: GroupedFormat, rows: int, columns: int, dtype: torch.dtype) -> GroupedWeight:
    """Two matrices below each other, with random codes, loaded as from a checkpoint."""
    weight = GroupedWeight(format.name, [rows // 2, rows // 2], columns, dtype=dtype, device=DEVICE)
    own = ShardRange.whole(rows // 2)
    for shard in weight.shards([own, own], ShardRange.whole(columns)):
        codes = torch.randn(rows // 2, columns).to(torch.float8_e4m3fn)
        if format.bits == 4:
            codes = torch.randint(16, (rows // 2, columns), dtype=torch.uint8)
        groups = columns // format.group if format.group else 1
        scales = (torch.rand(rows // 2, groups) + 0.5) * columns**-0.5 / (8 if format.bits == 4 else 1)
        zeros = torch.randint(16, scales.shape, dtype=torch.uint8)
        shard.matrix.load(format.pack(codes, scales, zeros), torch.arange(rows // 2))  # type: ignore[union-attr]
    return weight


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_the_unpacked_matrix_is_what_was_loaded() -> None:
    codes = torch.tensor([[0, 15, 3, 8] * 8])
    weight = GroupedWeight("INT4 16 F16 zeros", [1], 32, dtype=torch.float32, device="cpu")
    format, zeros = weight.format, torch.tensor([[2, 8]], dtype=torch.uint8)
    (shard,) = weight.shards([ShardRange.whole(1)], ShardRange.whole(32))
    packed = format.pack(codes.to(torch.uint8), torch.tensor([[0.5, 2.0]]), zeros)
    shard.matrix.load(packed, torch.tensor([0]))  # type: ignore[union-attr]
    assert weight.dequantized().tolist() == [[-1.0, 6.5, 0.5, 3.0] * 4 + [-16.0, 14.0, -10.0, 0.0] * 4]
    assert weight.num_bytes == 16 + 4 + 2 == packed.numel()


@pytest.mark.parametrize("rows", [0, 1, 3, 30, 130])
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_parity(dtype: torch.dtype, format: GroupedFormat, rows: int) -> None:
    out_size, in_size = 38, 192
    weight = random_weight(format, out_size, in_size, dtype)
    parts = weight.codes, weight.scales, weight.zeros
    x, norm = random(rows, in_size, dtype=dtype), (random(in_size, dtype=dtype), EPS)
    bias, residual = random(out_size, dtype=dtype), random(rows, out_size, dtype=dtype)
    if ON_GPU:
        torch.cuda.synchronize()
    tile = None if ON_GPU else Tile(64, 64, 4, 2)
    for options in ({}, {"bias": bias}, {"residual": residual}, {"norm": norm, "is_gated": True}):
        expected = gemv_torch(x, weight.dequantized(), **options)
        actual = grouped_product(x, *parts, **options, tile=tile)
        torch.testing.assert_close(actual, expected, rtol=2e-3, atol=4e-3)


@needs_cuda
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336)], ids=str)
@pytest.mark.parametrize("format", [GroupedFormat(8, None, "F32"), GroupedFormat(8, 128, "F32")], ids=str)
def test_bits_are_those_of_the_unpacked_matrix(format: GroupedFormat, shape: tuple[int, int]) -> None:
    weight = random_weight(format, *shape, torch.bfloat16)
    x = random(MAX_ROWS, shape[1], dtype=torch.bfloat16)
    torch.cuda.synchronize()
    keep_order()
    expected = torch.mm(x, weight.dequantized().t())
    assert ordered_product(x[:32], weight.dequantized()).equal(expected[:32])
    for rows in (1, 5, 32, 50, MAX_ROWS):
        assert grouped_product(x[:rows], weight.codes, weight.scales, weight.zeros).equal(expected[:rows])


@pytest.mark.skipif(ON_GPU, reason="kernels are used there anyway")
@pytest.mark.parametrize("format", FORMATS[1:4], ids=lambda format: format.name)
def test_layers_get_the_same_from_the_kernel(format: GroupedFormat) -> None:
    weight = random_weight(format, 16, 64, torch.float32)
    x, norm = random(3, 64, dtype=torch.float32), RMSNorm(64, EPS, dtype=torch.float32, device=DEVICE)
    torch.nn.init.uniform_(norm.weight)
    bias, residual = random(16, dtype=torch.float32), random(3, 16, dtype=torch.float32)

    def products() -> list[Tensor]:
        return [
            weight.multiply(x, bias, residual.clone()),
            weight.multiply(x, norm=norm),
            weight.multiply_gated(x, norm),
        ]

    unpacked = products()
    weight._max_kernel_rows, weight._unpacks_in_kernel = MAX_ROWS, True
    for found, expected in zip(products(), unpacked, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


COMPILING = """
import torch
from offline_triton import launched
from infinilm.kernels.grouped_product import grouped_product

x = torch.zeros(2, 128, dtype=torch.float16)
scales, zeros = torch.zeros(16, 2), torch.zeros(16, 2, dtype=torch.uint8)
grouped_product(x, torch.zeros(16, 128, dtype=torch.float8_e4m3fn), scales, None)
grouped_product(x, torch.zeros(16, 64, dtype=torch.uint8), scales, zeros)
print(launched)
"""


def test_it_compiles_for_hopper() -> None:
    """The interpreter takes more than the compiler does."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, "-c", COMPILING], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[0] == "['_grouped_kernel', '_grouped_kernel']"
