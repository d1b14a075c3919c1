"""Mixtures of experts: the choice of experts, and the products of each row with the matrices of its experts.

A row and one of its experts are a pair; the number of a pair is its place in the flattened `ids` `[T, k]`. Two
products, gate and up with their activation and then down, compute a result for each pair. A last kernel adds the
results of a row.

A program of a product computes some outputs of some rows that chose the same expert, so that the expert's matrices are
read once. With up to `FEW_ROWS` rows, every program reads all `ids` to find its rows. More rows are first sorted by
expert on the device. The number of programs depends only on the number of rows, and programs without work end at once.
So nothing waits for the host, and a CUDA graph can hold all of it.

Every product is summed over its inputs in order, in float32, by matrix instructions. So its bits are the same in all
tiles and for all numbers of rows. The results of a row are added in the order of its `ids`.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from infinilm.kernels.early_launch import launches_early
from infinilm.kernels.experts_kernels import choose_kernel, combine_kernel, count_kernel, place_kernel, product_kernel
from infinilm.kernels.packed_lines import PackedLines
from infinilm.kernels.routing import GELU, ClampedGate, Gate, Routing
from infinilm.kernels.unpack import MAGIC_BITS

FEW_ROWS = 16
"""Up to this many rows are not sorted."""
_SORT_CHUNK = 1024
_COMBINE_BLOCK = 1024


class Tile(NamedTuple):
    """A program of a product: it computes `outputs` outputs of some rows, from `inputs` inputs at a time."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int
    is_swapped: bool = False
    """Whether outputs, 64 or more, are the rows of the matrix instruction, and rows its columns, which can be fewer."""


class Tiles(NamedTuple):
    """How the products of a step are divided."""

    rows: int
    """Rows of a program, all with the same expert. A tensor core takes at least 16."""
    gate_up: Tile
    """Its outputs are counted after the activation, so it reads twice as many lines."""
    down: Tile


TILES: dict[int, Tiles] = {
    0: Tiles(16, gate_up=Tile(16, 256, 2, 4), down=Tile(32, 256, 2, 3)),
    2: Tiles(16, gate_up=Tile(32, 128, 4, 4), down=Tile(64, 128, 4, 4)),
    10: Tiles(32, gate_up=Tile(64, 128, 4, 2), down=Tile(64, 64, 4, 5, is_swapped=True)),
    40: Tiles(64, gate_up=Tile(64, 64, 4, 4), down=Tile(128, 64, 4, 4)),
    500: Tiles(128, gate_up=Tile(64, 64, 8, 4), down=Tile(128, 64, 8, 3)),
}
"""Tiles by the least average number of rows per expert. The tiles of 0 also compute up to `FEW_ROWS` rows."""


def choose_tiles(num_rows: int, top_k: int, num_experts: int) -> Tiles:
    """The tiles for a number of rows."""
    mean = num_rows * top_k / num_experts
    return TILES[max(least for least in TILES if least <= mean)] if num_rows > FEW_ROWS else TILES[0]


def choose_experts(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The best experts by the router's `logits` `[T, experts]`, and their weights: int32 and float32 `[T, top_k]`.

    Best first; among equals the lowest id. A `bias` float32 `[experts]` is added to the scores for the choice only.
    """
    (num_rows, num_experts), top_k = logits.shape, routing.top_k
    ids = torch.empty((num_rows, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_rows, top_k), dtype=torch.float32, device=logits.device)
    if num_rows:
        early = launches_early(logits.device)
        choose_kernel[(num_rows,)](
            logits,
            bias,
            ids,
            weights,
            num_experts,
            logits.stride(0),
            routing.scale,
            K=top_k,
            BLOCK_K=triton.next_power_of_2(top_k),
            BLOCK=triton.next_power_of_2(num_experts),
            RENORMALIZES=routing.renormalizes,
            IS_SIGMOID=routing.is_sigmoid,
            GROUPS=routing.num_groups,
            TOP_GROUPS=routing.top_groups,
            GROUP_BEST=routing.group_best,
            BLOCK_GROUPS=triton.next_power_of_2(routing.num_groups),
            EARLY=early,
            num_warps=1,
            launch_pdl=early,
        )
    return ids, weights


def mix_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor | PackedLines,
    down: Tensor | PackedLines,
    residual: Tensor | None = None,
    tiles: Tiles | None = None,
    *,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    gate: Gate = None,
) -> Tensor:
    """The sum of the experts `ids` `[T, k]` of each row of `x` `[T, hidden]`, times their `weights` `[T, k]`.

    `gate_up` is `[experts, 2 * inner, hidden]`, the gate's lines first, `down` `[experts, hidden, inner]`, both
    contiguous; or they are packed, with the lines of all experts one after the other. A row's ids are distinct. The
    `biases` `[experts, 2 * inner]` and `[experts, hidden]` are added to the products. Without a `gate` the activation
    is `silu(gate) * up`. The `residual` `[T, hidden]` is added before the single rounding of the sum; intermediate
    results are rounded to the type of `x`. Pass `tiles` only to measure other tiles than those of `choose_tiles`.
    """
    num_rows, hidden = x.shape
    inner, top_k = down.inputs if isinstance(down, PackedLines) else down.shape[2], ids.shape[1]
    num_experts = len(gate_up.codes) // (2 * inner) if isinstance(gate_up, PackedLines) else len(gate_up)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((num_rows, hidden), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    tiles = tiles or choose_tiles(num_rows, top_k, num_experts)
    num_pairs = num_rows * top_k
    early = launches_early(x.device)
    groups = _group_rows(ids, num_experts, tiles.rows) if num_rows > FEW_ROWS else None
    shared: dict[str, Any] = {
        "K": top_k,
        "BLOCK_K": triton.next_power_of_2(top_k),
        "BLOCK_ROWS": tiles.rows,
        "IS_SORTED": groups is not None,
        "BY_EXPERT": num_pairs > num_experts,
        "WIDEN": x.device.type == "cpu",  # Triton's interpreter has no products of bfloat16 matrices
        "IS_CLAMPED": isinstance(gate, ClampedGate),
        "IS_GELU": gate == GELU,
        "EARLY": early,
        "launch_pdl": early,
    }
    alpha, limit = gate if isinstance(gate, ClampedGate) else (0.0, 0.0)
    num_groups = min(num_pairs, num_experts) if groups is None else len(groups.tiles)
    activated = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    results = torch.empty((num_pairs, hidden), dtype=x.dtype, device=x.device)
    products = (
        (tiles.gate_up, x, gate_up, biases[0], activated, True),
        (tiles.down, activated, down, biases[1], results, False),
    )
    for tile, source, matrix, bias, target, is_gated in products:
        in_size, out_size = source.shape[1], target.shape[1]
        block_in = min(tile.inputs, triton.next_power_of_2(max(16, in_size)))
        parts, layout = _layout(matrix, block_in)
        product_kernel[(triton.cdiv(out_size, tile.outputs), num_groups)](
            source,
            *parts,
            bias,
            target,
            ids,
            None if groups is None else groups.order,
            None if groups is None else groups.tiles,
            num_rows,
            out_size,
            source.stride(0),
            alpha,
            limit,
            MAGIC_BITS,
            IS_GATED=is_gated,
            BLOCK_OUT=tile.outputs,
            BLOCK_IN=block_in,
            IS_SWAPPED=tile.is_swapped,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **layout,
            **shared,
        )
    combine_kernel[(num_rows, triton.cdiv(hidden, _COMBINE_BLOCK))](
        results,
        weights,
        residual,
        out,
        hidden,
        0 if residual is None else residual.stride(0),
        K=top_k,
        BLOCK=_COMBINE_BLOCK,
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )
    return out


def _layout(matrix: Tensor | PackedLines, block_in: int) -> tuple[list[Tensor | None], dict[str, Any]]:
    """The kernel's arguments for a matrix: codes, scales, factors and zeros; and their layout."""
    if isinstance(matrix, PackedLines):
        return [matrix.words(), matrix.scales, matrix.factors, matrix.zeros], matrix.options(block_in)
    dense = dict.fromkeys(("BITS", "GROUP", "RUN", "MIDDLE", "HAS_MINIMUMS"), 0)
    return [matrix, None, None, None], {"IN": matrix.shape[2], **dense}


class _Groups(NamedTuple):
    """Pairs sorted by expert, in groups of limited size."""

    order: Tensor
    """The pairs, sorted by expert: int32 `[T * k]`."""
    tiles: Tensor
    """Each group's expert and its range of `order`: int32 `[groups, 3]`. Unused groups have expert -1."""


def _group_rows(ids: Tensor, num_experts: int, group_rows: int) -> _Groups:
    """Sort pairs by expert without the host: each expert's program finds its pairs."""
    num_pairs = ids.numel()
    # Each expert that has pairs has at most one group that is not full.
    most = min(num_pairs, num_experts) + (num_pairs - min(num_pairs, num_experts)) // group_rows
    counts = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    order = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    tiles = torch.empty((most, 3), dtype=torch.int32, device=ids.device)
    early = launches_early(ids.device)
    options: dict[str, Any] = {"CHUNK": _SORT_CHUNK, "EARLY": early, "num_warps": 4, "launch_pdl": early}
    count_kernel[(num_experts,)](ids, counts, num_pairs, **options)
    place_kernel[(num_experts,)](
        ids,
        counts,
        order,
        tiles,
        num_pairs,
        num_experts,
        most,
        GROUP_ROWS=group_rows,
        BLOCK=triton.next_power_of_2(num_experts),
        **options,
    )
    return _Groups(order, tiles)
