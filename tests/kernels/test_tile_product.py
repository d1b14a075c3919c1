import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packing import FORMATS, make_blocks
from torch import Tensor

from infinilm.distributed.grouped import GroupedFormat
from infinilm.distributed.shard import ShardRange
from infinilm.kernels import tile_product as tile_products
from infinilm.kernels.gemv import gemv_torch
from infinilm.kernels.rounded_product import round_rows, round_rows_torch
from infinilm.kernels.tile_gemv import Tile as OneRowTile
from infinilm.kernels.tile_gemv import can_multiply_one, tile_gemv
from infinilm.kernels.tile_product import Tile, choose_tile, tile_product, untile
from infinilm.kernels.tiles import TiledMatrix, TileFormat, untile_torch
from infinilm.layers.formats import RoundedWeight, TiledWeight
from infinilm.layers.norm import RMSNorm

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
needs_cuda = pytest.mark.skipif(not ON_GPU, reason="needs a GPU: bits are those of its tensor cores")
EPS = 1e-5
GROUPED = [
    GroupedFormat(8, None, "F32"),
    GroupedFormat(8, 128, "BF16"),
    GroupedFormat(4, None, "F16"),
    GroupedFormat(4, 32, "F16", has_zeros=True),
    GroupedFormat(4, 64, "BF16"),
    GroupedFormat(4, 128, "F16", has_zeros=True),
]
NAMES = [*(each.name for each in GROUPED), *FORMATS]


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def make_rows(name: str, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Random packed rows, and their values in float32."""
    format = GroupedFormat.parse(name)
    if format is None:
        return make_blocks(name, rows, columns)
    codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    if format.bits == 4:
        codes = torch.randint(16, (rows, columns), dtype=torch.uint8)
    groups = columns // format.group if format.group else 1
    scales = ((torch.rand(rows, groups) + 0.5) * columns**-0.5 / (8 if format.bits == 4 else 1)).to(format.scale_dtype)
    zeros = torch.randint(16, scales.shape, dtype=torch.uint8) if format.has_zeros else None
    values = codes.float().view(rows, groups, -1)
    if format.bits == 4:
        values -= 8 if zeros is None else zeros.float().unsqueeze(2)
    return format.pack(codes, scales, zeros), (values * scales.float().unsqueeze(2)).flatten(1)


def make_weight(names: list[str], sizes: list[int], columns: int, dtype: torch.dtype) -> tuple[TiledWeight, Tensor]:
    """Random matrices below each other, loaded as from a checkpoint in two pieces, and their values."""
    weight = TiledWeight(names, sizes, columns, dtype=dtype, device=DEVICE)
    values = []
    shards = weight.shards([ShardRange.whole(size) for size in sizes], ShardRange.whole(columns))
    for shard, name, size in zip(shards, names, sizes, strict=True):
        packed, own = make_rows(name, size, columns)
        for rows in torch.arange(size).split(size // 2):
            shard.matrix.load(packed[rows], rows)  # type: ignore[union-attr]
        values.append(own)
    return weight, torch.cat(values)


def matrix_of(weight: TiledWeight) -> TiledMatrix:
    return weight._runs[0].matrix


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_format(name: str) -> None:
    weight, values = make_weight([name], [100], 512, torch.float32)
    matrix = matrix_of(weight)
    assert untile_torch(matrix, torch.float32).cpu().equal(values)
    assert untile(matrix, torch.float16).cpu().equal(values.half())


@pytest.mark.parametrize(
    ("name", "rows"),
    [(NAMES[0], 0), (NAMES[0], 130), (NAMES[4], 30), (NAMES[3], 70), ("Q4_K", 70), *((name, 3) for name in NAMES)],
)
def test_parity(name: str, rows: int) -> None:
    out_size, in_size, dtype = 128, 512 if rows < 64 else 256, torch.float16
    weight, _ = make_weight([name], [out_size], in_size, dtype)
    matrix = matrix_of(weight)
    dense = untile_torch(matrix, torch.float32)
    x, norm = random(rows, in_size, dtype=dtype) / 4, (random(in_size, dtype=dtype), EPS)
    bias, residual = random(out_size, dtype=dtype), random(rows, out_size, dtype=dtype)
    in_splits = Tile(16, 64, 128, 2, in_turn=False, num_warps=4, num_stages=2)
    in_turn = in_splits._replace(lines=128, rows=32, in_turn=True, num_warps=8)
    if ON_GPU:
        torch.cuda.synchronize()
    for options, tile in (
        ({}, in_splits),
        ({"bias": bias}, in_turn),
        ({"residual": residual}, None),
        ({"norm": norm, "is_gated": True}, in_splits),
    ):
        expected = gemv_torch(x, dense.to(dtype), **options).float()
        actual = tile_product(x, matrix, **options, tile=tile).float()
        largest = float(expected.abs().max()) if rows else 1.0
        torch.testing.assert_close(actual, expected, rtol=4e-3, atol=2e-3 * largest)


@needs_cuda
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336)], ids=str)
@pytest.mark.parametrize("name", [NAMES[0], NAMES[1], NAMES[4], NAMES[5], "Q4_K", "Q6_K"])
def test_bits_do_not_depend_on_other_rows(name: str, shape: tuple[int, int]) -> None:
    weight, _ = make_weight([name], [shape[0]], shape[1], torch.bfloat16)
    x = random(700, shape[1], dtype=torch.bfloat16)
    torch.cuda.synchronize()
    expected = tile_product(x, matrix_of(weight), is_ordered=True)
    for rows in (1, 5, 17, 50, 64, 65, 256):
        assert tile_product(x[-rows:], matrix_of(weight), is_ordered=True).equal(expected[-rows:])
        gate = tile_product(x[-rows:], matrix_of(weight), is_gated=True, is_ordered=True)
        assert gate.equal(tile_product(x, matrix_of(weight), is_gated=True, is_ordered=True)[-rows:])


@pytest.mark.parametrize("rows", [1, 5])
def test_layers_of_several_formats(rows: int) -> None:
    """Of three matrices the first two have one format, and their kernels write parts of one result."""
    weight, values = make_weight(["Q4_K", "Q4_K", "Q6_K"], [6, 10, 8], 256, torch.float16)
    assert weight.dequantized().cpu().equal(values.half())
    x, bias = random(rows, 256, dtype=torch.float16), random(24, dtype=torch.float16)
    residual = random(rows, 24, dtype=torch.float16)
    norm = RMSNorm(256, EPS, dtype=torch.float16, device=DEVICE)
    torch.nn.init.uniform_(norm.weight)

    def products() -> list[Tensor]:
        return [
            weight.multiply(x, bias, residual.clone()),
            weight.multiply(x, norm=norm),
            weight.multiply_gated(x, norm),
        ]

    weight._max_kernel_rows = 0
    unpacked = products()
    weight._max_kernel_rows = 256
    for found, expected in zip(products(), unpacked, strict=True):
        torch.testing.assert_close(found, expected, rtol=4e-3, atol=4e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("rows", [1, 5])
def test_inputs_in_another_order(rows: int) -> None:
    """A packed matrix has its columns by group; the products are those of the checkpoint's matrix."""
    dtype, name = torch.float16, GroupedFormat(4, 32, "F16", has_zeros=True, order="0").name
    weight, values = make_weight([name, name], [64, 64], 256, dtype)
    order = torch.randperm(256)
    shards = weight.shards([ShardRange.whole(64)] * 2, ShardRange.whole(256))
    for shard in shards:
        shard.matrix.set_input_order(order.numpy())  # type: ignore[union-attr]
    stored = values[:, order.argsort()]
    assert torch.cat([shard.values() for shard in shards]).equal(stored)  # type: ignore[union-attr]
    x, residual = random(rows, 256, dtype=dtype), random(rows, 128, dtype=dtype)
    norm = RMSNorm(256, EPS, dtype=dtype, device=DEVICE)
    torch.nn.init.uniform_(norm.weight)
    exact = stored.to(DEVICE, dtype)
    for max_rows in (0, 256):
        weight._max_kernel_rows = max_rows
        for is_ordered in (False, True):
            weight._is_ordered = is_ordered
            products = weight.multiply(x, residual=residual.clone()), weight.multiply_gated(x, norm)
            expected = (
                gemv_torch(x, exact, residual=residual),
                gemv_torch(x, exact, norm=(norm.weight, EPS), is_gated=True),
            )
            for found, own in zip(products, expected, strict=True):
                torch.testing.assert_close(found, own, rtol=4e-3, atol=4e-3 * float(own.abs().max()))


def test_rounded_rows() -> None:
    x = random(5, 300, dtype=torch.float16)
    x[3] = 0
    for norm in (None, (random(300, dtype=torch.float16), EPS)):
        rounded, scales = round_rows(x, norm)
        expected, expected_scales = round_rows_torch(x, norm)
        torch.testing.assert_close(scales, expected_scales)
        if ON_GPU:  # Triton's interpreter rounds to 8-bit floats by other rules
            torch.testing.assert_close(rounded.float(), expected.float(), rtol=0.07, atol=1e-2)


@needs_cuda
def test_products_of_many_rounded_rows() -> None:
    name, size = "FP8 row F32 rounded", (512, 1024)
    weight = RoundedWeight(name, [size[0]], size[1], dtype=torch.bfloat16, device=DEVICE)
    packed, values = make_rows(name, *size)
    (shard,) = weight.shards([ShardRange.whole(size[0])], ShardRange.whole(size[1]))
    shard.matrix.load(packed, torch.arange(size[0]))  # type: ignore[union-attr]
    for rows in (1, 2, 30, 600):
        x, residual = random(rows, size[1], dtype=torch.bfloat16), random(rows, size[0], dtype=torch.bfloat16)
        exact = x.float() @ values.to(DEVICE).t()
        gate, up = exact.chunk(2, dim=1)
        for found, expected in (
            (weight.multiply(x), exact),
            (weight.multiply(x, residual=residual.clone()), exact + residual),
            (weight.multiply_gated(x, None), torch.nn.functional.silu(gate) * up),
        ):
            error = (found.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
            assert error < (0.005 if rows == 1 else 0.06), rows


COMPILING = """
import torch
from offline_triton import launched
from infinilm.kernels.tile_product import tile_product, untile
from infinilm.kernels.tiles import TiledMatrix, TileFormat

x = torch.zeros(2, 256, dtype=torch.float16)
matrix = TiledMatrix.empty(TileFormat(8, 0, is_float=True), 128, 256, "cpu")
tile_product(x, matrix)
untile(matrix, torch.float16)
matrix = TiledMatrix.empty(TileFormat(4, 32, has_minimums=True, has_factors=True), 128, 256, "cpu")
tile_product(x, matrix, is_gated=True)
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
    assert run.stdout.split("\n")[0] == str(["_product_kernel", "_untile_kernel", "_product_kernel"])


def test_formats_know_their_tiles() -> None:
    assert [TileFormat(4, group).has_tiles for group in (0, 16, 32, 48, 64, 96, 128)] == [
        *(True, True, True, False, True, False, True)
    ]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float16) for name in NAMES if "FP8" not in name and "row" not in name),
        *((name, torch.bfloat16) for name in (NAMES[3], "Q4_K", "Q6_K")),
    ],
)
def test_parity_of_one_row(name: str, dtype: torch.dtype) -> None:
    out_size, in_size = 128, 768
    matrix = matrix_of(make_weight([name], [out_size], in_size, dtype)[0])
    assert can_multiply_one(matrix.format, dtype)
    dense = untile_torch(matrix, torch.float32)
    x, bias, residual = (random(*shape, dtype=dtype) / 4 for shape in ((1, in_size), (out_size,), (1, out_size)))
    # Triton's interpreter does not round bfloat16 to the nearest, which sums that cancel out would show.
    norm = (random(in_size, dtype=dtype), EPS) if dtype == torch.float16 or ON_GPU else None
    if ON_GPU:
        torch.cuda.synchronize()
    for options, tile in (
        ({"bias": bias, "residual": residual}, OneRowTile(64, 8, 8)),
        ({"norm": norm, "is_gated": True}, None),
    ):
        expected = gemv_torch(x, dense, **options).float()
        actual = tile_gemv(x, matrix, **options, tile=tile).float()
        precision = 4e-3 if dtype == torch.float16 else 2e-2
        torch.testing.assert_close(actual, expected, rtol=precision, atol=precision * float(expected.abs().max()))


@pytest.mark.parametrize("num_rows", [65, 96, 128, 160, 192, 224, 256])
@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 14336), (6144, 4096), (1024, 2048)], ids=str)
def test_programs_for_many_rows_run_at_once(shape: tuple[int, int], num_rows: int) -> None:
    """On an H200, 4-bit codes: two of 128 rows or of four stages fit on each of 132 multiprocessors, else three."""
    lines, inputs = shape
    matrix = TiledMatrix.empty(TileFormat(4, 128, zero=8), lines, inputs, "meta")
    tile = choose_tile(num_rows, lines, matrix, is_ordered=False)
    num_programs = -(-lines // tile.lines) * -(-num_rows // tile.rows) * tile.splits
    assert inputs % tile.splits == 0
    assert num_programs <= 132 * (3 if (tile.rows, tile.num_stages) == (64, 3) else 2)


@pytest.mark.parametrize("options", [{"is_gated": True}, {"bias": True, "residual": True}], ids=str)
def test_rows_beyond_the_largest_tile_may_have_a_launch_of_their_own(
    options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rows, out_size, in_size, dtype = 130, 128, 128, torch.float16
    weight, _ = make_weight([NAMES[5]], [out_size], in_size, dtype)
    x = random(num_rows, in_size, dtype=dtype)
    given = {"bias": random(out_size, dtype=dtype), "residual": random(num_rows, out_size, dtype=dtype)}
    settings: dict = {name: given.get(name, True) for name in options}
    whole = tile_product(x, matrix_of(weight), **settings)
    monkeypatch.setattr(tile_products, "_leaves_rest", lambda rows, *_: rows > 128)
    torch.testing.assert_close(tile_product(x, matrix_of(weight), **settings), whole)


def test_the_rest_of_rows_is_computed_by_itself_where_a_launch_of_it_occupies_the_device() -> None:
    def leaves_rest(num_rows: int, lines: int, **format: bool) -> bool:
        return tile_products._leaves_rest(
            num_rows, lines, TiledMatrix.empty(TileFormat(4, 128, **format), lines, 128, "meta")
        )

    assert [rows for rows in (128, 129, 192, 193, 256) if leaves_rest(rows, 14336)] == [129, 192]
    assert not leaves_rest(160, 4096)
    assert not leaves_rest(160, 14336, has_minimums=True)
