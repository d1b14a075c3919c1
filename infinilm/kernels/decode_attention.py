"""Attention of one new token per row over a paged KV cache, for decode steps."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from infinilm.errors import InvalidValueError
from infinilm.kernels.attention_order import IN_ORDER, LOG2_E, MAX_CHUNKS, NO_WINDOW, key_tile
from infinilm.kernels.decode_attention_kernels import decode_kernel, shared_kernel
from infinilm.kernels.early_launch import launches_early
from infinilm.kernels.fp8_cache import DTYPE as FP8
from infinilm.kernels.fp8_cache import as_pairs, decoded_cache

_RESULTS: int = MAX_CHUNKS.value

# Query heads per program for a shared prefix. 64 is the least for which Hopper's tensor cores are fast; float32 does
# not use them, and would run out of registers.
_SHARED_QUERIES = 64
_SHARED_QUERIES_FLOAT32 = 16
# Programs that divide the chunks of a shared prefix. They are launched even if nothing is shared, which takes time.
_SHARED_PARTS = 4
# Half of a tensor core's rows, which are then computed twice. That takes fewer registers than padding with zeros.
_MIN_QUERIES = 8
# Numbers of an output that are added up at a time: four per thread, as many as one load takes.
_COMBINED = 512
# With a cache of 8-bit floats programs wait for instructions rather than memory. Smaller programs, of which more fit.
_OF_CODES = {"num_warps": 2}
# Numbers of the output per program for a shared prefix: with 4 warps, 128 per thread.
_MAX_SHARED_OUTPUT = 64 * 256


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The blocks that all rows begin with. It is on the device, so one CUDA graph works with and without a prefix."""

    num_tokens: Tensor  # [1] int32, a multiple of the block size, below all context lengths except 0; 0: none shared
    table: Tensor  # [max_blocks] int32, the first num_tokens / block_size of them valid


class DecodeWorkspace:
    """Partial results of one call, which the call's last program combines.

    All layers and graphs that run one after another share one workspace; two streams need one each.
    """

    def __init__(self, max_rows: int, heads: int, head_dim: int, device: torch.device | str) -> None:
        self.max_rows, self.heads, self.head_dim = max_rows, heads, head_dim
        shape = (max_rows, heads, _RESULTS)
        self.results = torch.empty((*shape, head_dim), dtype=torch.float32, device=device)
        # The sum of the weights and the largest score of each result.
        self.sums = torch.empty((*shape, 2), dtype=torch.float32, device=device)
        self.arrivals = torch.zeros((max_rows, heads), dtype=torch.int32, device=device)  # all 0 between calls

    @staticmethod
    def num_bytes(max_rows: int, heads: int, head_dim: int) -> int:
        return max_rows * heads * 4 * (_RESULTS * (head_dim + 2) + 1)

    def check(self, rows: int, heads: int, head_dim: int) -> None:
        if rows > self.max_rows or heads > self.heads or head_dim > self.head_dim:
            raise InvalidValueError(
                f"workspace is for {self.max_rows} rows of {self.heads} heads of {self.head_dim}, query has "
                f"{rows} of {heads} of {head_dim}; make a DecodeWorkspace of that size"
            )


def decode_attention(
    query: Tensor,
    cache: Tensor,
    tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None,
    workspace: DecodeWorkspace,
    shared: SharedPrefix | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Attend one new token per row to the row's tokens in the cache, its own key and value included.

    `query` is `[B, heads, head_dim]` (rows may have any stride), `cache` `[blocks, block_size, 2, kv_heads, head_dim]`.
    `tables` `[B, max_blocks]` int32 has the blocks of each row, `context_lens` `[B]` int32 the number of tokens in
    them; a row of 0 tokens gives zeros. With a `window` only the last `window` tokens are seen and read. Returns
    `[B, heads, head_dim]` of the query's type.

    Whole chunks of a `shared` prefix are read through its own table, all other tokens through `tables`. A prefix can't
    be shared with a window, because a window soon covers only a row's own tokens.

    With a `cap` scores are `cap * tanh(score / cap)`. `sinks` `[heads]` float32 are scores of a key without a value.

    A cache of 8-bit floats has `scales` (`fp8_cache.py`); any other cache has the query's type.
    """
    _check_layout(query, cache, scales, tables)
    workspace.check(*query.shape)
    if shared is not None and window is not None:
        raise InvalidValueError(f"window is {window} and a prefix is shared; pass shared=None where there is a window")
    rows, heads, _ = query.shape
    kv_heads = cache.shape[3]
    output = query.new_empty(query.shape)
    if rows == 0:
        return output
    options = _options(query, cache)
    if scales is not None:
        cache, scales = as_pairs(cache, scales)
    scale *= LOG2_E.value
    if cap is not None:
        cap *= LOG2_E.value
    if shared is not None:
        _attend_shared(query, cache, scales, context_lens, shared, workspace, scale, cap, options)
    pad_group = triton.next_power_of_2(heads // kv_heads)
    num_parts, min_tokens = _parts(rows * kv_heads)
    decode_kernel[kv_heads, num_parts, rows](
        query,
        cache,
        scales,
        tables,
        context_lens,
        None if shared is None else shared.num_tokens,
        workspace.results,
        workspace.sums,
        workspace.arrivals,
        output,
        sinks,
        scale,
        cap,
        NO_WINDOW.value if window is None else window,
        min_tokens,
        query.stride(0),
        tables.stride(0),
        PAD_GROUP=max(_MIN_QUERIES, pad_group),
        COMBINED_HEADS=min(pad_group, max(1, _COMBINED // options["PAD_DIM"])),
        num_stages=3,
        **(options if scales is None else options | _OF_CODES),
    )
    return output


def _attend_shared(
    query: Tensor,
    cache: Tensor,
    scales: Tensor | None,
    context_lens: Tensor,
    shared: SharedPrefix,
    workspace: DecodeWorkspace,
    scale: float,
    cap: float | None,
    options: dict[str, Any],
) -> None:
    """Write the queries' results for the shared prefix to the workspace."""
    rows, heads, _ = query.shape
    kv_heads = cache.shape[3]
    pad_group = triton.next_power_of_2(heads // kv_heads)
    queries = _SHARED_QUERIES_FLOAT32 if query.dtype == torch.float32 else _SHARED_QUERIES
    queries = min(queries, _MAX_SHARED_OUTPUT // options["PAD_DIM"])
    shared_kernel[kv_heads, triton.cdiv(rows * pad_group, queries), _SHARED_PARTS](
        query,
        cache,
        scales,
        shared.table,
        shared.num_tokens,
        context_lens,
        workspace.results,
        workspace.sums,
        rows,
        scale,
        cap,
        query.stride(0),
        PAD_GROUP=pad_group,
        QUERIES=queries,
        num_stages=2,  # with three, only one program would fit on a multiprocessor
        **options,
    )


def _options(query: Tensor, cache: Tensor) -> dict[str, Any]:
    """The options of both kernels. They must not depend on the number of rows, so that no row's result does."""
    _, heads, head_dim = query.shape
    block_size, _, kv_heads, _ = cache.shape[1:]
    # A matrix instruction takes 16 columns. 8-bit floats are multiplied as two halves.
    pad_dim = max(16 if cache.element_size() > 1 else 32, triton.next_power_of_2(head_dim))
    early = launches_early(query.device)
    return {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "HEAD_DIM": head_dim,
        "PAD_DIM": pad_dim,
        "BLOCK_SIZE": block_size,
        "TILE": key_tile(query.dtype, head_dim),
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "EARLY": early,
        "num_warps": 4,
        "launch_pdl": early,
        **IN_ORDER,
    }


def _parts(pairs: int) -> tuple[int, int]:
    """How many programs, a power of 2, may share one of `pairs` rows and kv heads, and the least tokens of each
    program.

    Few rows occupy the device only if every chunk is a program of its own. With many rows, short rows are best read by
    one program each. Long rows are still shared by a few programs, because the step waits for the last one. Programs
    with nothing to do take time, too, so there are no more than needed.
    """
    for limit, num_parts, min_tokens in ((64, 16, 64), (256, 8, 192), (1024, 4, 384), (8192, 2, 512)):
        if pairs <= limit:
            return num_parts, min_tokens
    return 1, 1


def _check_layout(query: Tensor, cache: Tensor, scales: Tensor | None, tables: Tensor) -> None:
    _, heads, head_dim = query.shape
    dtype = query.dtype if scales is None else FP8
    if heads % cache.shape[3] != 0 or head_dim != cache.shape[4] or cache.dtype != dtype:
        raise InvalidValueError(
            f"query is {list(query.shape)} of {query.dtype}, cache {list(cache.shape)} of {cache.dtype}; their types "
            "and head_dim must agree, and heads be a multiple of kv_heads"
        )
    if query.stride()[1:] != (head_dim, 1) or not cache.is_contiguous() or tables.stride(1) != 1:
        raise InvalidValueError(
            f"query, cache and tables have strides {query.stride()}, {cache.stride()} and {tables.stride()}; "
            "make them contiguous (rows of query and tables may be apart)"
        )


def decode_attention_torch(
    query: Tensor,
    cache: Tensor,
    tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """The reference; it needs no workspace and reads a shared prefix once per row."""
    rows, heads, head_dim = query.shape
    kv_heads = cache.shape[3]
    tokens = decoded_cache(cache, scales)[tables.clamp(min=0)].flatten(1, 2)  # [B, tokens, 2, kv_heads, head_dim]
    position = torch.arange(tokens.shape[1], device=cache.device)
    visible = position < context_lens[:, None]
    if window is not None:
        visible &= position >= context_lens[:, None] - window
    # Memory past a row's end is undefined, and a weight of 0 does not cancel infinities.
    key, value = tokens.float().masked_fill(~visible[:, :, None, None, None], 0.0).unbind(2)
    score = torch.einsum("bkgd,btkd->bkgt", query.float().view(rows, kv_heads, -1, head_dim), key) * scale
    if cap is not None:
        score = cap * torch.tanh(score / cap)
    score = score.masked_fill(~visible[:, None, None, :], float("-inf"))
    if sinks is not None:
        score = torch.cat((score, sinks.view(1, kv_heads, -1, 1).expand(rows, -1, -1, -1)), dim=-1)
    weight = score.softmax(-1)[..., : tokens.shape[1]].nan_to_num(0.0)  # NaN if a row has no tokens
    return torch.einsum("bkgt,btkd->bkgd", weight, value).reshape(rows, heads, head_dim).to(query.dtype)
