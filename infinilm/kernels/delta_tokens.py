"""The gated delta net token by token (see `delta_rule`), for prompts and single tokens alike.

One kernel computes a text's new tokens in order, for any number of tokens, so that a token has the same bits in any
chunk. It replaces `delta_prompts` and `delta_step` if sums must have one order; prompts take longer.
"""

import triton
import triton.language as tl
from torch import Tensor

from infinilm.kernels.delta_rule import PromptRows

_COLUMNS = 32  # columns of a head's state per program


def delta_tokens(
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
    """The same as `delta_prompts.delta_prompts`."""
    _, heads, key_dim, value_dim = states.shape
    _token_kernel[triton.cdiv(value_dim, _COLUMNS), heads, len(rows.context_lens)](
        channels,
        rate,
        change,
        a_log,
        dt_bias,
        states,
        rows.query_starts,
        rows.context_lens,
        rows.tables,
        rows.sources,
        out,
        channels.shape[1],
        rate.stride(0),
        rows.tables.stride(0),
        key_dim**-0.5,
        HEADS=heads,
        KEY_HEADS=num_key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        PAD_KEY=triton.next_power_of_2(key_dim),
        COLUMNS=_COLUMNS,
        BLOCK_SIZE=rows.block_size,
        num_warps=4,
    )


@triton.jit
def _load_token(
    channels,  # at the token, like rate and change
    rate,
    change,
    is_there,
    key_head,
    head,
    values,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAD_KEY: tl.constexpr,
):
    """A token's query, key, value, rate and change."""
    dims = tl.arange(0, PAD_KEY)
    own = channels + key_head * KEY_DIM + dims
    query = tl.load(own, mask=is_there & (dims < KEY_DIM), other=0.0)
    key = tl.load(own + KEY_HEADS * KEY_DIM, mask=is_there & (dims < KEY_DIM), other=0.0)
    own = channels + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + values
    value = tl.load(own, mask=is_there & (values < VALUE_DIM), other=0.0)
    rated, changed = tl.load(rate + head, mask=is_there, other=0.0), tl.load(change + head, mask=is_there, other=0.0)
    return query, key, value, rated, changed


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["query_starts", "context_lens", "tables", "sources"],
)
def _token_kernel(
    channels,
    rate,
    change,
    a_log,
    dt_bias,
    states,
    query_starts,
    context_lens,
    tables,
    sources,
    out,
    num_channels,
    stride,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAD_KEY: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program (columns, head, request): goes through the request's new tokens."""
    head = tl.program_id(1)
    request = tl.program_id(2)
    begin, end = tl.load(query_starts + request), tl.load(query_starts + request + 1)
    context_len = tl.load(context_lens + request)
    if (context_len == 0) | (begin >= end):
        return
    dims = tl.arange(0, PAD_KEY)
    values = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    start = context_len - (end - begin)
    size = HEADS * KEY_DIM * VALUE_DIM
    places = head * KEY_DIM * VALUE_DIM + dims[:, None] * VALUE_DIM + values[None, :]
    inside = (dims < KEY_DIM)[:, None] & (values < VALUE_DIM)[None, :]
    source = tl.load(sources + request).to(tl.int64) * size
    state = tl.load(states + source + places, mask=inside & (start > 0), other=0.0)
    rise = -tl.exp(tl.load(a_log + head))
    bias = tl.load(dt_bias + head)
    key_head = head // (HEADS // KEY_HEADS)
    table = tables + request.to(tl.int64) * table_stride
    channels += begin * num_channels
    rate += begin * stride
    change += begin * stride
    targets = out + begin * (HEADS * VALUE_DIM) + head * VALUE_DIM + values
    query, key, value, rated, changed = _load_token(
        channels, rate, change, True, key_head, head, values, KEY_HEADS, KEY_DIM, VALUE_DIM, PAD_KEY
    )
    for position in range(start + 1, context_len + 1):  # the number of tokens that the state has seen afterwards
        wide_query, wide_key, wide_value = query.to(tl.float32), key.to(tl.float32), value.to(tl.float32)
        beta = 1.0 / (1.0 + tl.exp(-rated.to(tl.float32)))
        moved = changed.to(tl.float32) + bias
        channels += num_channels
        rate += stride
        change += stride
        is_last = position == context_len
        # The next token is loaded while this one is computed.
        query, key, value, rated, changed = _load_token(
            channels, rate, change, not is_last, key_head, head, values, KEY_HEADS, KEY_DIM, VALUE_DIM, PAD_KEY
        )
        wide_query *= tl.rsqrt(tl.sum(wide_query * wide_query) + 1e-6) * scale
        wide_key *= tl.rsqrt(tl.sum(wide_key * wide_key) + 1e-6)
        softplus = tl.where(moved > 20.0, moved, tl.log(1.0 + tl.exp(tl.minimum(moved, 20.0))))
        state *= tl.exp(rise * softplus)
        known = tl.sum(wide_key[:, None] * state, 0)
        state += wide_key[:, None] * ((wide_value - known) * beta)[None, :]
        found = tl.sum(wide_query[:, None] * state, 0)
        tl.store(targets, found.to(out.dtype.element_ty), mask=values < VALUE_DIM)
        targets += HEADS * VALUE_DIM
        if (position % BLOCK_SIZE == 0) | is_last:
            block = tl.load(table + (position - 1) // BLOCK_SIZE - start // BLOCK_SIZE).to(tl.int64)
            tl.store(states + block * size + places, state, mask=inside & (block >= 0))
