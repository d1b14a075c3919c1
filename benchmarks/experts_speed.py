"""Times the kernels of a layer of experts on a GPU, and tries other tiles.

    python -m benchmarks.experts_speed                     # all numbers of rows with the tiles of kernels/experts.py
    python -m benchmarks.experts_speed --rows 256 2048 --sweep --seconds 90 # the best tiles for each

The default shape is Qwen3-30B-A3B's. Layers are computed one after the other in one CUDA graph, each with experts of
its own choice, so that matrices come from memory and not from the L2 cache. The floor is the time to read the matrices
of the chosen experts once, or to multiply, whichever is longer.
"""

import argparse
from collections.abc import Callable, Iterator
from itertools import product
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from infinilm.kernels.experts import FEW_ROWS, Tile, Tiles, choose_experts, choose_tiles, mix_experts
from infinilm.kernels.precompile import compile_together
from infinilm.kernels.routing import Routing

READ_BYTES_PER_S = 4.26e12
"""The best memory read rate of an H200."""
FLOPS_PER_S = 800e12
"""Its best rate of bfloat16 products."""
MAX_SHARED_BYTES = 227 << 10


class Layer:
    """Inputs of a layer, which choose different experts."""

    def __init__(self, num_rows: int, args: argparse.Namespace) -> None:
        self.args, self.num_rows = args, num_rows
        self.inputs = []
        for seed in range(args.layers):
            generator = torch.Generator("cuda").manual_seed(seed)
            x = torch.randn(num_rows, args.hidden, generator=generator, device="cuda").bfloat16()
            logits = torch.randn(num_rows, args.experts, generator=generator, device="cuda").bfloat16()
            self.inputs.append(
                (x, logits, *choose_experts(logits, Routing(args.experts, args.top_k, renormalizes=True)))
            )

    def cost(self) -> tuple[float, float]:
        """The bytes of matrices that a layer reads, on average, and its operations."""
        expert_size = 3 * int(self.args.inner) * int(self.args.hidden)
        num_chosen = sum(len(set(ids.flatten().tolist())) for _, _, ids, _ in self.inputs) / len(self.inputs)
        return num_chosen * expert_size * 2, 2.0 * self.num_rows * int(self.args.top_k) * expert_size


def graph_us(work: Callable[[], object], num_layers: int, repeats: int = 10) -> float:
    """Microseconds of one of `num_layers` layers of `work`, in a CUDA graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1000 / repeats / num_layers


def time_mix(layer: Layer, gate_up: Tensor, down: Tensor, tiles: Tiles | None = None) -> float:
    def work() -> None:
        for x, _, ids, weights in layer.inputs:
            mix_experts(x, ids, weights, gate_up, down, x, tiles)

    return graph_us(work, len(layer.inputs))


def time_choice(layer: Layer) -> float:
    routing = Routing(layer.args.experts, layer.args.top_k, renormalizes=True)

    def work() -> None:
        for _, logits, _, _ in layer.inputs:
            choose_experts(logits, routing)

    return graph_us(work, len(layer.inputs))


def candidates(rows: int, is_gated: bool) -> Iterator[Tile]:
    """Tiles that fit into shared memory and registers, with as many stages as leave room for one program or for two."""
    outputs, inputs = ((32, 64, 128), (64, 128)) if rows <= 32 else ((64, 128, 256), (64, 128))
    for out, size, num_warps, is_swapped in product(outputs, inputs, (4, 8), (False, True)):
        lines = out * (1 + is_gated)
        per_thread = rows * lines // (num_warps * 32)  # numbers in registers
        is_small = num_warps == 8 and per_thread < 32
        if per_thread > 128 or is_small or (is_swapped and (rows > 32 or out < 64)) or lines * size > 256 * 128:
            continue
        most = [MAX_SHARED_BYTES // programs // ((rows + lines) * size * 2) for programs in (1, 2)]
        for num_stages in sorted({min(stages, 5) for stages in most if stages >= 2}):
            yield Tile(out, size, num_warps, num_stages, is_swapped)


def sweep(layer: Layer, gate_up: Tensor, down: Tensor, until: float) -> None:
    """Try other tiles, one product at a time, and print the best. Kernels are compiled in parallel."""
    best = choose_tiles(layer.num_rows, layer.args.top_k, len(down))
    x, _, ids, weights = layer.inputs[0]
    expected = mix_experts(x, ids, weights, gate_up, down)
    mean = layer.num_rows * layer.args.top_k / len(down)
    groups = [best.rows] if layer.num_rows <= FEW_ROWS else [rows for rows in (16, 32, 64, 128) if rows / 4 <= mean]
    all_tiles = [
        (rows, part, tile)
        for rows in groups[-2:]
        for part in ("gate_up", "down")
        for tile in candidates(rows, part == "gate_up")
    ]

    def compute(tiles: Tiles) -> Tensor | None:
        try:
            return mix_experts(x, ids, weights, gate_up, down, None, tiles)
        except Exception as error:  # a tile that the compiler or the device can't take
            print(f"    {tiles}: {str(error).splitlines()[0][:100]}", flush=True)
            return None

    compile_together(lambda: [compute(_with(best._replace(rows=rows), part, tile)) for rows, part, tile in all_tiles])
    found: dict[tuple[int, str], list[tuple[float, Tile, bool]]] = {}
    for rows, part, tile in all_tiles:
        if perf_counter() > until:
            print("    out of time")
            break
        tiles = _with(best._replace(rows=rows), part, tile)
        result = compute(tiles)
        if result is not None:
            us = time_mix(layer, gate_up, down, tiles)
            found.setdefault((rows, part), []).append((us, tile, result.equal(expected)))
    for (rows, part), times in found.items():
        for us, tile, is_same in sorted(times)[:3]:
            print(f"    groups of {rows}, {part}: {us:7.1f} µs {tuple(tile)}{'' if is_same else ', OTHER BITS'}")
    for rows in dict.fromkeys(rows for rows, _ in found):
        own = Tiles(rows, *(min(found[rows, part])[1] for part in ("gate_up", "down") if (rows, part) in found))
        print(f"    {time_mix(layer, gate_up, down, own):7.1f} µs {own}", flush=True)


def _with(tiles: Tiles, part: str, tile: Tile) -> Tiles:
    return tiles._replace(gate_up=tile) if part == "gate_up" else tiles._replace(down=tile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 16, 64, 256, 2048])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8, help="layers in the graph, with other choices each")
    parser.add_argument("--sweep", action="store_true", help="try other tiles")
    parser.add_argument("--seconds", type=float, default=3600, help="after which no more tiles are tried")
    args = parser.parse_args()
    until = perf_counter() + args.seconds
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    gate_up = torch.randn(args.experts, 2 * args.inner, args.hidden, **kind).mul_(args.hidden**-0.5)
    down = torch.randn(args.experts, args.hidden, args.inner, **kind).mul_(args.inner**-0.5)
    print(f"{torch.cuda.get_device_name()}, {args.experts} experts of {args.inner}, {args.top_k} per row")
    print(f"{'rows':>6} {'choice µs':>10} {'mix µs':>8} {'floor µs':>9} {'of floor':>9} {'GB/s':>7} {'TFLOP/s':>8}")
    for num_rows in args.rows:
        layer = Layer(num_rows, args)
        us, (num_bytes, flops) = time_mix(layer, gate_up, down), layer.cost()
        floor = 1e6 * max(num_bytes / READ_BYTES_PER_S, flops / FLOPS_PER_S)
        print(
            f"{num_rows:>6} {time_choice(layer):>10.1f} {us:>8.1f} {floor:>9.1f} {floor / us:>8.0%} "
            f"{num_bytes / us / 1e3:>7.0f} {flops / us / 1e6:>8.0f}",
            flush=True,
        )
        if args.sweep:
            sweep(layer, gate_up, down, until)


if __name__ == "__main__":
    main()
