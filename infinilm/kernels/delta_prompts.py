"""Prompts of the gated delta net (see `delta_rule`): all requests of a step in four kernels.

A text is divided into chunks of up to 16 tokens, at multiples of the chunk size in the text. Within a chunk, token i
corrects the state's value for its key after the corrections of all earlier tokens. That is a triangular system, whose
inverse depends on the keys alone. One kernel computes the inverses for all chunks at once. Another kernel goes through
each text's chunks, for each head and some columns of the state, which stay in registers.

A text's state is read from one block and written to each block that the new tokens fill, and to the block they end in.
Tables and lengths are on the device, so a CUDA graph can hold all this.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinilm.kernels.delta_rule import PromptRows

ROWS = tl.constexpr(16)
"""Rows of a tile: the most tokens of a chunk."""
_SCALARS = tl.constexpr(4)
_CONV_TOKENS, _CONV_CHANNELS = 16, 128


class Scan(NamedTuple):
    """A program that goes through a text, for `columns` columns of a head's state."""

    columns: int
    num_warps: int
    num_stages: int


SCAN = Scan(64, 4, 2)


class _Shape:
    """The sizes of a layer's states and a step's chunks."""

    def __init__(self, rows: PromptRows, num_tokens: int, states: Tensor, num_key_heads: int) -> None:
        _, self.heads, self.key_dim, self.value_dim = states.shape
        self.chunk = 16
        while rows.block_size % self.chunk:
            self.chunk //= 2
        self.num_requests = len(rows.context_lens)
        # Request i's chunks are numbered from `query_starts[i] // chunk + 2 * i`, so that all requests' chunks fit.
        self.num_chunks = num_tokens // self.chunk + 2 * self.num_requests
        self.options: dict[str, Any] = {
            "HEADS": self.heads,
            "KEY_HEADS": num_key_heads,
            "KEY_DIM": self.key_dim,
            "PAD_KEY": max(16, triton.next_power_of_2(self.key_dim)),
            "CHUNK": self.chunk,
        }


def conv_prompts(inputs: Tensor, states: Tensor, weight: Tensor, rows: PromptRows, out: Tensor) -> None:
    """Write the causal convolution and silu of the requests' tokens to their rows of `out` `[T, channels]`, contiguous.

    `inputs` `[T, channels]` (rows may have any stride), `weight` `[channels, 1, width]`, `states` `[blocks, channels,
    width - 1]` float32.
    """
    num_tokens, num_channels = inputs.shape
    num_requests = len(rows.context_lens)
    before = states.index_select(0, rows.sources)  # a copy: the kernel may overwrite them
    _conv_kernel[triton.cdiv(num_tokens, _CONV_TOKENS), triton.cdiv(num_channels, _CONV_CHANNELS)](
        inputs,
        before,
        states,
        weight,
        rows.query_starts,
        rows.context_lens,
        rows.tables,
        out,
        num_tokens,
        num_requests,
        num_channels,
        inputs.stride(0),
        rows.tables.stride(0),
        WIDTH=weight.shape[2],
        BLOCK_SIZE=rows.block_size,
        LOG_REQUESTS=num_requests.bit_length(),
        TOKENS=_CONV_TOKENS,
        CHANNELS=_CONV_CHANNELS,
        num_warps=4,
    )


def delta_prompts(
    channels: Tensor,
    rate: Tensor,
    change: Tensor,
    *,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    num_key_heads: int,
    rows: PromptRows,
    out: Tensor,
) -> None:
    """Write the delta rule of the requests' tokens to their rows of `out` `[T, heads, value_dim]`, contiguous.

    `channels` `[T, q, k and v]` are convolved and contiguous. `rate` and `change` `[T, heads]` are as projected; their
    rows have the same stride. `states` is `[blocks, heads, key_dim, value_dim]` float32.
    """
    shape = _Shape(rows, len(channels), states, num_key_heads)
    kind: dict[str, Any] = {"dtype": torch.float32, "device": channels.device}
    matrices = torch.empty((shape.num_chunks, shape.heads, 2, 16, 16), **kind)
    scalars = torch.empty((shape.num_chunks, shape.heads, _SCALARS.value, 16), **kind)
    precision = "ieee" if channels.dtype == torch.float32 else "tf32"
    _chunk_kernel[shape.num_chunks, shape.heads](
        channels,
        rate,
        change,
        a_log,
        dt_bias,
        rows.query_starts,
        rows.context_lens,
        matrices,
        scalars,
        shape.num_requests,
        channels.shape[1],
        rate.stride(0),
        shape.key_dim**-0.5,
        PRECISION=precision,
        num_warps=1,
        **shape.options,
    )
    columns = min(SCAN.columns, max(16, triton.next_power_of_2(shape.value_dim)))
    _scan_kernel[triton.cdiv(shape.value_dim, columns), shape.heads, shape.num_requests](
        channels,
        matrices,
        scalars,
        states,
        rows.query_starts,
        rows.context_lens,
        rows.tables,
        rows.sources,
        out,
        channels.shape[1],
        rows.tables.stride(0),
        VALUE_DIM=shape.value_dim,
        BLOCK_SIZE=rows.block_size,
        COLUMNS=columns,
        PRECISION=precision,
        num_warps=SCAN.num_warps,
        num_stages=SCAN.num_stages,
        **shape.options,
    )


def gate_prompts(mixed: Tensor, gate: Tensor, norm: Tensor, eps: float, rows: PromptRows, out: Tensor) -> None:
    """Write `mixed` `[T, heads, value_dim]`, normalised and gated, to the requests' rows of `out`
    `[T, heads * value_dim]`."""
    num_tokens, heads, value_dim = mixed.shape
    num_requests = len(rows.context_lens)
    pad = triton.next_power_of_2(value_dim)
    together = max(1, 1024 // pad)
    _gate_kernel[num_tokens, triton.cdiv(heads, together)](
        mixed,
        gate,
        norm,
        rows.query_starts,
        rows.context_lens,
        out,
        num_requests,
        gate.stride(0),
        eps,
        HEADS=heads,
        VALUE_DIM=value_dim,
        PAD_VALUE=pad,
        TOGETHER=together,
        LOG_REQUESTS=num_requests.bit_length(),
        num_warps=4,
    )


@triton.jit
def _owner(query_starts, num_requests, tokens, LOG_REQUESTS: tl.constexpr):
    """The last request that begins at or before each of `tokens`, a tensor or a number."""
    low = tokens * 0
    high = low + num_requests
    for _ in tl.static_range(LOG_REQUESTS):
        middle = (low + high) // 2
        is_before = (tl.load(query_starts + middle) <= tokens) & (middle > low)
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, tl.maximum(middle, low + 1))
    return low


@triton.jit(
    do_not_specialize=["num_tokens", "num_requests", "table_stride"],
    do_not_specialize_on_alignment=["query_starts", "context_lens", "tables"],
)
def _conv_kernel(
    inputs,
    before,
    states,
    weight,
    query_starts,
    context_lens,
    tables,
    out,
    num_tokens,
    num_requests,
    num_channels,
    stride,
    table_stride,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LOG_REQUESTS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Program (block of tokens, block of channels)."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    request = _owner(query_starts, num_requests, tokens, LOG_REQUESTS)
    begin, end = tl.load(query_starts + request), tl.load(query_starts + request + 1)
    context_len = tl.load(context_lens + request)
    is_own = (tokens < num_tokens) & (tokens < end) & (context_len > 0)
    offset = tokens - begin
    position = context_len - end + tokens
    start = context_len - (end - begin)
    inside = is_own[:, None] & (channels < num_channels)
    # States are kept after the last token of a block, and after the last token of the request.
    is_kept = is_own & (((position + 1) % BLOCK_SIZE == 0) | (tokens == end - 1))
    column = position // BLOCK_SIZE - start // BLOCK_SIZE
    block = tl.load(tables + request.to(tl.int64) * table_stride + column, mask=is_kept, other=-1)
    is_kept = is_kept & (block >= 0)
    target = states + (block.to(tl.int64)[:, None] * num_channels + channels) * (WIDTH - 1)
    source = before + (request.to(tl.int64)[:, None] * num_channels + channels) * (WIDTH - 1)
    own = inputs + tokens.to(tl.int64)[:, None] * stride + channels
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for tap in tl.static_range(WIDTH):
        reached = offset + tap - (WIDTH - 1)
        is_new = (reached >= 0)[:, None]
        new = tl.load(own + (tap - (WIDTH - 1)) * stride, mask=inside & is_new, other=0.0).to(tl.float32)
        if tap < WIDTH - 1:
            mask = inside & (reached < 0)[:, None] & (start > 0)[:, None]
            new = tl.where(is_new, new, tl.load(source + (WIDTH - 1 + reached)[:, None], mask=mask, other=0.0))
        factor = tl.load(weight + channels * WIDTH + tap, mask=channels < num_channels, other=0.0)
        total += new * factor.to(tl.float32)
        if tap > 0:
            tl.store(target + tap - 1, new, mask=is_kept[:, None] & (channels < num_channels))
    rounded = total.to(out.dtype.element_ty).to(tl.float32)
    activated = (rounded / (1.0 + tl.exp(-rounded))).to(out.dtype.element_ty)
    tl.store(out + tokens.to(tl.int64)[:, None] * num_channels + channels, activated, mask=inside)


@triton.jit
def _chunk_tokens(begin, end, context_len, index, CHUNK: tl.constexpr):
    """The first token of a request's chunk, and the end of the chunk, as places in the batch."""
    start = context_len - (end - begin)
    shift = begin - start  # from places in the text to places in the batch
    first_chunk = start // CHUNK
    first = tl.maximum((first_chunk + index) * CHUNK, start)
    return first + shift, tl.minimum((first_chunk + index + 1) * CHUNK, context_len) + shift


@triton.jit(do_not_specialize=["num_requests"], do_not_specialize_on_alignment=["query_starts", "context_lens"])
def _chunk_kernel(
    channels,
    rate,
    change,
    a_log,
    dt_bias,
    query_starts,
    context_lens,
    matrices,
    scalars,
    num_requests,
    num_channels,
    stride,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PAD_KEY: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (chunk, head): computes all that does not depend on the state.

    That is the inverse of the system, the weights with which queries see the chunk's corrections, and for each token
    the logarithm of the decay so far, the rate, and the factors that give query and key their lengths.
    """
    number = tl.program_id(0)
    head = tl.program_id(1)
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // CHUNK + 2 * middle <= number:
            low = middle
        else:
            high = middle
    begin, end = tl.load(query_starts + low), tl.load(query_starts + low + 1)
    context_len = tl.load(context_lens + low)
    first, last = _chunk_tokens(begin, end, context_len, number - begin // CHUNK - 2 * low, CHUNK)
    if (context_len == 0) | (first >= last):
        return
    rows = tl.arange(0, ROWS)
    tokens = (first + rows).to(tl.int64)
    is_token = first + rows < last
    dims = tl.arange(0, PAD_KEY)
    mask = is_token[:, None] & (dims < KEY_DIM)[None, :]
    key_head = head // (HEADS // KEY_HEADS)
    own = channels + tokens[:, None] * num_channels + key_head * KEY_DIM + dims[None, :]
    query = tl.load(own, mask=mask, other=0.0).to(tl.float32)
    key = tl.load(own + KEY_HEADS * KEY_DIM, mask=mask, other=0.0).to(tl.float32)
    query_length = tl.rsqrt(tl.sum(query * query, 1) + 1e-6) * scale
    key_length = tl.rsqrt(tl.sum(key * key, 1) + 1e-6)
    rated = tl.load(rate + tokens * stride + head, mask=is_token, other=0.0).to(tl.float32)
    rated = tl.where(is_token, 1.0 / (1.0 + tl.exp(-rated)), 0.0)
    changed = tl.load(change + tokens * stride + head, mask=is_token, other=0.0).to(tl.float32)
    changed += tl.load(dt_bias + head)
    softplus = tl.where(changed > 20.0, changed, tl.log(1.0 + tl.exp(tl.minimum(changed, 20.0))))
    total = tl.cumsum(tl.where(is_token, -tl.exp(tl.load(a_log + head)) * softplus, 0.0), 0)

    query, key = query * query_length[:, None], key * key_length[:, None]
    columns = rows[None, :]
    fades = tl.where(rows[:, None] >= columns, tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0)), 0.0)
    seen = tl.dot(query, key.trans(), input_precision=PRECISION) * fades
    system = tl.dot(key, key.trans(), input_precision=PRECISION) * fades * rated[:, None]
    # Row by row: a row of the inverse is the identity's row minus the system's row times the previous rows.
    inverse = tl.where(rows[:, None] == columns, 1.0, 0.0)
    for i in tl.static_range(1, CHUNK):
        line = tl.sum(tl.where((rows[:, None] == i) & (columns < i), system, 0.0), 0)  # [columns]
        product = tl.sum(line[:, None] * inverse, 0)
        inverse = tl.where(rows[:, None] == i, inverse - product[None, :], inverse)

    place = number.to(tl.int64) * HEADS + head
    square = rows[:, None] * ROWS + columns
    tl.store(matrices + place * (2 * ROWS * ROWS) + square, inverse)
    tl.store(matrices + place * (2 * ROWS * ROWS) + ROWS * ROWS + square, seen)
    scalars += place * (_SCALARS * ROWS) + rows
    tl.store(scalars, total)
    tl.store(scalars + ROWS, rated)
    tl.store(scalars + 2 * ROWS, query_length)
    tl.store(scalars + 3 * ROWS, key_length)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["query_starts", "context_lens", "tables", "sources"],
)
def _scan_kernel(
    channels,
    matrices,
    scalars,
    states,
    query_starts,
    context_lens,
    tables,
    sources,
    out,
    num_channels,
    table_stride,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAD_KEY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (columns, head, request): goes through the request's chunks."""
    head = tl.program_id(1)
    request = tl.program_id(2)
    begin, end = tl.load(query_starts + request), tl.load(query_starts + request + 1)
    context_len = tl.load(context_lens + request)
    if (context_len == 0) | (begin >= end):
        return
    rows, dims = tl.arange(0, ROWS), tl.arange(0, PAD_KEY)
    values = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_value = dims < KEY_DIM, values < VALUE_DIM
    start = context_len - (end - begin)
    size = HEADS * KEY_DIM * VALUE_DIM
    places = head * KEY_DIM * VALUE_DIM + dims[:, None] * VALUE_DIM + values[None, :]
    inside = is_key[:, None] & is_value[None, :]
    source = tl.load(sources + request).to(tl.int64) * size
    state = tl.load(states + source + places, mask=inside & (start > 0), other=0.0)
    key_head = head // (HEADS // KEY_HEADS)
    queries = channels + key_head * KEY_DIM + dims[None, :]
    keys = queries + KEY_HEADS * KEY_DIM
    own_values = channels + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + values[None, :]
    targets = out + head * VALUE_DIM + values[None, :]
    table = tables + request.to(tl.int64) * table_stride
    square = rows[:, None] * ROWS + rows[None, :]
    first_number = begin // CHUNK + 2 * request
    num_chunks = (context_len - 1) // CHUNK - start // CHUNK + 1
    for index in range(num_chunks):
        first, last = _chunk_tokens(begin, end, context_len, index, CHUNK)
        tokens = (first + rows).to(tl.int64)[:, None]
        is_token = (first + rows < last)[:, None]
        mask = is_token & is_key[None, :]
        query = tl.load(queries + tokens * num_channels, mask=mask, other=0.0).to(tl.float32)
        key = tl.load(keys + tokens * num_channels, mask=mask, other=0.0).to(tl.float32)
        mask = is_token & is_value[None, :]
        value = tl.load(own_values + tokens * num_channels, mask=mask, other=0.0).to(tl.float32)
        place = (first_number + index).to(tl.int64) * HEADS + head
        inverse = tl.load(matrices + place * (2 * ROWS * ROWS) + square)
        seen = tl.load(matrices + place * (2 * ROWS * ROWS) + ROWS * ROWS + square)
        own = scalars + place * (_SCALARS * ROWS) + rows
        total, rated = tl.load(own), tl.load(own + ROWS)
        query_length, key_length = tl.load(own + 2 * ROWS), tl.load(own + 3 * ROWS)
        whole = tl.min(total, 0)  # the last one: totals never increase
        faded = tl.exp(total)
        known = tl.dot(key * (key_length * faded)[:, None], state, input_precision=PRECISION)
        change = tl.dot(inverse, (value - known) * rated[:, None], input_precision=PRECISION)
        found = tl.dot(query * (query_length * faded)[:, None], state, input_precision=PRECISION)
        found = tl.dot(seen, change, found, input_precision=PRECISION)
        tl.store(targets + tokens * (HEADS * VALUE_DIM), found.to(out.dtype.element_ty), mask=mask)
        left = key * (key_length * tl.exp(whole - total))[:, None]
        state = tl.dot(left.trans(), change, state * tl.exp(whole), input_precision=PRECISION)
        position = last + context_len - end  # the position of the token after the chunk
        if (position % BLOCK_SIZE == 0) | (last == end):
            block = tl.load(table + (position - 1) // BLOCK_SIZE - start // BLOCK_SIZE).to(tl.int64)
            tl.store(states + block * size + places, state, mask=inside & (block >= 0))


@triton.jit(do_not_specialize=["num_requests"], do_not_specialize_on_alignment=["query_starts", "context_lens"])
def _gate_kernel(
    mixed,
    gate,
    norm,
    query_starts,
    context_lens,
    out,
    num_requests,
    stride,
    eps,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAD_VALUE: tl.constexpr,
    TOGETHER: tl.constexpr,
    LOG_REQUESTS: tl.constexpr,
):
    """Program (token, some heads)."""
    token = tl.program_id(0)
    request = _owner(query_starts, num_requests, token, LOG_REQUESTS)
    if (token >= tl.load(query_starts + request + 1)) | (tl.load(context_lens + request) == 0):
        return
    heads = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)[:, None]
    values = tl.arange(0, PAD_VALUE)[None, :]
    inside = (heads < HEADS) & (values < VALUE_DIM)
    places = heads * VALUE_DIM + values
    row = token.to(tl.int64) * (HEADS * VALUE_DIM)
    DTYPE: tl.constexpr = out.dtype.element_ty
    found = tl.load(mixed + row + places, mask=inside, other=0.0).to(tl.float32)
    found = (found * tl.rsqrt(tl.sum(found * found, 1) / VALUE_DIM + eps)[:, None]).to(DTYPE).to(tl.float32)
    found = (found * tl.load(norm + values, mask=values < VALUE_DIM, other=0.0).to(tl.float32)).to(DTYPE)
    wide = tl.load(gate + token.to(tl.int64) * stride + places, mask=inside, other=0.0).to(tl.float32)
    found = (found.to(tl.float32) * (wide / (1.0 + tl.exp(-wide)))).to(DTYPE)
    tl.store(out + row + places, found, mask=inside)
