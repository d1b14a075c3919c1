"""Times latent attention and the gated delta net's prompts on a GPU, by kernels and by torch.

    python -m benchmarks.mixer_speed --sweep

Latent attention has DeepSeek's sizes (rank 512, 64 rotated), the delta net those of Qwen3.5's 4B model. Floors are the
time to read the cache, or inputs, and to write results once, or to multiply, whichever is longer.
"""

import argparse
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from infinilm.attention.batch import HostBatch
from infinilm.attention.torch_backend import TorchAttention
from infinilm.kernels import delta_prompts, latent_attention
from infinilm.kernels.latent_attention import latent_decode, latent_prefill, multiply_heads, store_latents
from infinilm.layers.delta_net import GatedDeltaNet, _Inputs
from infinilm.layers.formats import DENSE
from infinilm.layers.state_plan import PromptStates, _prompt_rows

READ_BYTES_PER_S = 4.26e12
FLOPS_PER_S = 800e12
RANK, ROPE, BLOCK_SIZE = 512, 64, 64


def time_us(work: Callable[[], object], repeats: int = 10) -> float:
    """The median time of `work` in microseconds, launched by the host."""
    for _ in range(2):
        work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(float(start.elapsed_time(end)) * 1000)
    return sorted(times)[repeats // 2]


def report(what: str, kernels: float, torch_us: float, num_bytes: float, flops: float) -> None:
    floor = 1e6 * max(num_bytes / READ_BYTES_PER_S, flops / FLOPS_PER_S)
    print(f"{what:<46} {kernels:>9.1f} {torch_us:>10.1f} {floor:>9.1f} {floor / kernels:>8.0%}", flush=True)


def make_batch(query_len: int, context_len: int, count: int) -> HostBatch:
    """Requests of the same lengths, with blocks in any order."""
    columns = -(-context_len // BLOCK_SIZE)
    tables = np.random.default_rng(0).permutation(count * columns).reshape(count, columns)
    tokens = np.tile(np.arange(context_len - query_len, context_len), count)
    rows = np.repeat(np.arange(count), query_len)
    slots = tables[rows, tokens // BLOCK_SIZE] * BLOCK_SIZE + tokens % BLOCK_SIZE
    lens = (np.full(count, query_len), np.full(count, context_len))
    return HostBatch(np.zeros_like(tokens), tokens, slots, tables, *lens)


def time_latent(heads: int, count: int, query_len: int, context_len: int) -> None:
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    batch = make_batch(query_len, context_len, count)
    on_device = batch.to_device(torch.device("cuda"))
    cache = torch.randn(batch.block_tables.size, BLOCK_SIZE, 1, 1, RANK + ROPE, **kind)
    num_tokens = count * query_len
    query, turned = torch.randn(num_tokens, heads, RANK, **kind), torch.randn(num_tokens, heads, ROPE, **kind)
    tables = on_device.block_tables.int()
    lens = torch.full((count,), context_len, dtype=torch.int32, device="cuda")
    starts = torch.arange(0, num_tokens + 1, query_len, dtype=torch.int32, device="cuda")
    scale = 192**-0.5
    backend = TorchAttention()
    plan = backend.prepare(on_device, block_size=BLOCK_SIZE, windows=[None], dtype=torch.bfloat16)
    whole = torch.cat((query, turned), dim=-1)

    def by_kernels() -> torch.Tensor:
        if query_len == 1:
            return latent_decode(query, turned, cache, tables, lens, scale=scale)
        return latent_prefill(query, turned, cache, tables, starts, lens, scale=scale)

    def by_torch() -> torch.Tensor:
        return backend.attend(whole, cache, plan, scale=scale, window=None)[..., :RANK]

    found, expected = by_kernels().float(), by_torch().float()
    error = float((found - expected).norm() / expected.norm())
    seen = count * (query_len * context_len - query_len * (query_len - 1) / 2)
    num_bytes = (count * context_len * (RANK + ROPE) + num_tokens * heads * (2 * RANK + ROPE)) * 2
    what = f"latent, {heads} heads: {count} x {query_len} of {context_len}, off {error:.0e}"
    report(what, time_us(by_kernels), time_us(by_torch), num_bytes, 2 * seen * heads * (2 * RANK + ROPE))


def time_latent_rest(heads: int, num_tokens: int) -> None:
    """Time the products by head and the store, and torch's products alone."""
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    query, matrix = torch.randn(num_tokens, heads, 192, **kind), torch.randn(heads, 128, RANK, **kind)
    latents, table = torch.randn(num_tokens, RANK + ROPE, **kind), torch.randn(8192, ROPE, device="cuda")
    places = torch.arange(num_tokens, device="cuda")
    cache, weight = torch.empty(num_tokens, 1, 1, 1, RANK + ROPE, **kind), torch.ones(RANK, **kind)
    options: dict[str, Any] = {"weight": weight, "eps": 1e-6, "is_interleaved": True}

    def by_kernels() -> None:
        store_latents(latents, query[..., 128:], places % 8192, table, places, cache, **options)
        multiply_heads(multiply_heads(query[..., :128], matrix), matrix.transpose(1, 2))

    def by_torch() -> None:
        plain = torch.einsum("thd,hdr->thr", query[..., :128], matrix)
        torch.einsum("thr,hdr->thd", plain, matrix)

    num_bytes = (2 * heads * 128 * RANK + num_tokens * heads * 2 * (RANK + 128)) * 2
    what = f"latent, {heads} heads: store and products of {num_tokens}"
    report(what, time_us(by_kernels), time_us(by_torch), num_bytes, 4 * num_tokens * heads * 128 * RANK)


def time_delta(count: int, query_len: int) -> None:
    heads, key_heads, dim = 32, 16, 128
    device = torch.device("cuda")
    sizes: dict[str, Any] = {"num_key_heads": key_heads, "num_value_heads": heads, "key_dim": dim, "value_dim": dim}
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "formats": DENSE}
    layer = GatedDeltaNet(0, 2560, **sizes, conv_width=4, norm_eps=1e-6, **options)
    for parameter in (layer.conv, layer.dt_bias, layer.a_log, layer.norm):
        parameter.normal_()
    batch = make_batch(query_len, query_len, count)
    num_blocks, rows = batch.block_tables.size, np.arange(count)
    widths = [2 * key_heads * dim + heads * dim, heads * dim, heads, heads]
    num_tokens = count * query_len
    projected = torch.randn(num_tokens, sum(widths), dtype=torch.bfloat16, device=device)
    inputs = _Inputs(*torch.split(projected, widths, dim=1))
    states = [torch.zeros(num_blocks, heads, dim, dim, device=device), torch.zeros(num_blocks, widths[0], 3).to(device)]
    where: dict[str, Any] = {"sources": np.full(count, -1), "ends": np.zeros(num_blocks, np.int64)}
    plan = PromptStates.of(rows, batch, batch.block_tables, block_size=BLOCK_SIZE, device=device, **where)
    prompts = _prompt_rows(rows, batch, batch.block_tables, block_size=BLOCK_SIZE, device=device, **where)
    out = torch.empty(num_tokens, heads * dim, dtype=torch.bfloat16, device=device)

    def by_kernels() -> None:
        layer._prompts_by_kernels(prompts, inputs, states, out)

    def by_torch() -> torch.Tensor:
        return layer._compute_prompts(plan, inputs, states)

    by_kernels()
    expected = by_torch().float()
    error = float((out.float() - expected).norm() / expected.norm())
    num_bytes = num_tokens * (sum(widths) + heads * dim) * 2 + num_blocks * heads * dim * dim * 4
    what = f"delta net: {count} x {query_len}, off {error:.0e}"
    report(what, time_us(by_kernels), time_us(by_torch, 3), num_bytes, 6 * num_tokens * heads * dim * dim)


def sweep_latent() -> None:
    """Try other tiles of keys, for few and for many rows of a tile."""
    usual = dict(latent_attention.TILES)
    for rows, tiles in (
        (16, ((32, 4, 3), (32, 8, 2), (64, 4, 2), (64, 8, 2))),
        (32, ((32, 8, 1), (32, 4, 2), (64, 8, 1))),
    ):
        for tile in tiles:
            latent_attention.TILES[rows] = latent_attention.Tile(*tile)
            print(f"tiles of {rows} rows: {tile}")
            if rows == 16:
                attempt(time_latent, 16, 64, 1, 1024)
                attempt(time_latent, 16, 1, 1, 32768)
            else:
                attempt(time_latent, 128, 64, 1, 1024)
                attempt(time_latent, 16, 16, 512, 512)
        latent_attention.TILES.update(usual)


def sweep_delta() -> None:
    usual = delta_prompts.SCAN
    for scan in ((32, 2, 2), (32, 4, 3), (32, 4, 1), (16, 2, 2), (16, 1, 2), (64, 4, 2), (64, 8, 2), (128, 8, 2)):
        delta_prompts.SCAN = delta_prompts.Scan(*scan)
        print(f"programs of {scan}")
        attempt(time_delta, 64, 512)
        attempt(time_delta, 1, 4096)
    delta_prompts.SCAN = usual


def attempt(work: Callable[..., None], *args: int) -> None:
    """Run `work`. If it fails, print the error and return, so that the others still run."""
    try:
        work(*args)
    except Exception:
        print(f"{work.__name__}{args} failed:")
        traceback.print_exc(file=sys.stdout)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try other tiles")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name():<46} {'kernel µs':>9} {'torch µs':>10} {'floor µs':>9} {'of floor':>8}")
    for heads in (16, 128):
        for case in ((1, 1, 4096), (1, 1, 32768), (64, 1, 1024), (256, 1, 1024)):
            attempt(time_latent, heads, *case)
        for case in ((16, 512, 512), (1, 2048, 8192)):
            attempt(time_latent, heads, *case)
        for num_tokens in (1, 64, 2048):
            attempt(time_latent_rest, heads, num_tokens)
    for sizes in ((64, 512), (1, 4096), (8, 64)):
        attempt(time_delta, *sizes)
    if args.sweep:
        sweep_delta()
        sweep_latent()


if __name__ == "__main__":
    main()
