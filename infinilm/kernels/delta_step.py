"""One token of the gated delta net for each of several texts (see `delta_rule`): two kernels between two products.

Each text reads its state from one block and writes it to another block or the same one. The work is memory-bound: a
state is read and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from infinilm.kernels.early_launch import launches_early, let_next_start, wait_for_inputs

_CHANNELS = 1024  # channels per program of the convolution


def conv_step(
    inputs: Tensor, states: Tensor, weight: Tensor, sources: Tensor, is_first: Tensor, targets: Tensor
) -> Tensor:
    """The causal convolution and silu of one token per text: `[n, channels]`, of the type of `inputs`.

    `inputs` `[n, channels]` (rows may have any stride), `weight` `[channels, 1, width]`, `states` `[blocks, channels,
    width - 1]` float32. Text i continues from block `sources[i]`, unless it `is_first`, and writes its state to block
    `targets[i]`.
    """
    num_rows, num_channels = inputs.shape
    out = torch.empty((num_rows, num_channels), dtype=inputs.dtype, device=inputs.device)
    early = launches_early(inputs.device)
    _conv_kernel[num_rows, triton.cdiv(num_channels, _CHANNELS)](
        inputs,
        states,
        weight,
        sources,
        is_first,
        targets,
        out,
        num_channels,
        inputs.stride(0),
        WIDTH=weight.shape[2],
        CHANNELS=_CHANNELS,
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )
    return out


@triton.jit
def _conv_kernel(
    inputs,
    states,
    weight,
    sources,
    is_first,
    targets,
    out,
    num_channels,
    stride,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row, block of channels)."""
    let_next_start(EARLY)
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channels < num_channels
    wait_for_inputs(EARLY)
    goes_on = tl.load(is_first + row) == 0
    source = states + (tl.load(sources + row) * num_channels + channels) * (WIDTH - 1)
    target = states + (tl.load(targets + row) * num_channels + channels) * (WIDTH - 1)
    total = tl.zeros([CHANNELS], tl.float32)
    for i in tl.static_range(WIDTH - 1):
        before = tl.load(source + i, mask=inside & goes_on, other=0.0)
        total += before * tl.load(weight + channels * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
        if i > 0:  # the overwritten inputs were read already, even if both blocks are the same
            tl.store(target + i - 1, before, mask=inside)
    new = tl.load(inputs + row * stride + channels, mask=inside, other=0.0).to(tl.float32)
    total += new * tl.load(weight + channels * WIDTH + WIDTH - 1, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + WIDTH - 2, new, mask=inside)
    rounded = total.to(out.dtype.element_ty).to(tl.float32)
    activated = rounded / (1.0 + tl.exp(-rounded))
    tl.store(out + row * num_channels + channels, activated.to(out.dtype.element_ty), mask=inside)


def delta_step(
    channels: Tensor,
    gate: Tensor,
    rate: Tensor,
    change: Tensor,
    *,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: float,
    states: Tensor,
    sources: Tensor,
    is_first: Tensor,
    targets: Tensor,
    num_key_heads: int,
) -> Tensor:
    """The delta rule of one token per text, normalised and gated: `[n, heads * value_dim]`.

    `channels` `[n, q, k and v]` are convolved and contiguous. `gate` `[n, heads * value_dim]`, `rate` and `change`
    `[n, heads]` are as projected; their rows have the same stride. `states` is `[blocks, heads, key_dim, value_dim]`
    float32, and used as in `conv_step`.
    """
    num_rows, num_channels = channels.shape
    _, heads, key_dim, value_dim = states.shape
    out = torch.empty((num_rows, heads * value_dim), dtype=channels.dtype, device=channels.device)
    early = launches_early(channels.device)
    _delta_kernel[heads, num_rows](
        channels,
        gate,
        rate,
        change,
        a_log,
        dt_bias,
        norm,
        eps,
        states,
        sources,
        is_first,
        targets,
        out,
        num_channels,
        gate.stride(0),
        key_dim**-0.5,
        HEADS=heads,
        KEY_HEADS=num_key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        PAD_KEY=triton.next_power_of_2(key_dim),
        PAD_VALUE=triton.next_power_of_2(value_dim),
        EARLY=early,
        num_warps=8,
        launch_pdl=early,
    )
    return out


@triton.jit
def _unit(vector):
    return vector * tl.rsqrt(tl.sum(vector * vector) + 1e-6)


@triton.jit
def _delta_kernel(
    channels,
    gate,
    rate,
    change,
    a_log,
    dt_bias,
    norm,
    eps,
    states,
    sources,
    is_first,
    targets,
    out,
    num_channels,
    stride,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAD_KEY: tl.constexpr,
    PAD_VALUE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (value head, row)."""
    let_next_start(EARLY)
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    keys = tl.arange(0, PAD_KEY)
    values = tl.arange(0, PAD_VALUE)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    wait_for_inputs(EARLY)
    goes_on = tl.load(is_first + row) == 0
    own = channels + row * num_channels
    key_head = head // (HEADS // KEY_HEADS)
    query = tl.load(own + key_head * KEY_DIM + keys, mask=is_key, other=0.0).to(tl.float32)
    key = tl.load(own + (KEY_HEADS + key_head) * KEY_DIM + keys, mask=is_key, other=0.0).to(tl.float32)
    value = tl.load(own + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + values, mask=is_value, other=0.0).to(tl.float32)
    rated = tl.load(rate + row * stride + head).to(tl.float32)
    changed = tl.load(change + row * stride + head).to(tl.float32) + tl.load(dt_bias + head)
    inside = is_key[:, None] & is_value[None, :]
    places = head * KEY_DIM * VALUE_DIM + keys[:, None] * VALUE_DIM + values[None, :]
    size = HEADS * KEY_DIM * VALUE_DIM
    state = tl.load(states + tl.load(sources + row) * size + places, mask=inside & goes_on, other=0.0)

    query, key = _unit(query) * scale, _unit(key)
    softplus = tl.where(changed > 20.0, changed, tl.log(1.0 + tl.exp(tl.minimum(changed, 20.0))))
    state *= tl.exp(-tl.exp(tl.load(a_log + head)) * softplus)
    known = tl.sum(key[:, None] * state, 0)
    state += key[:, None] * ((value - known) / (1.0 + tl.exp(-rated)))[None, :]
    tl.store(states + tl.load(targets + row) * size + places, state, mask=inside)

    DTYPE: tl.constexpr = out.dtype.element_ty
    found = tl.sum(query[:, None] * state, 0).to(DTYPE).to(tl.float32)
    found = (found * tl.rsqrt(tl.sum(found * found) / VALUE_DIM + eps)).to(DTYPE).to(tl.float32)
    found = (found * tl.load(norm + values, mask=is_value, other=0.0).to(tl.float32)).to(DTYPE).to(tl.float32)
    wide = tl.load(gate + row * stride + head * VALUE_DIM + values, mask=is_value, other=0.0).to(tl.float32)
    found *= wide / (1.0 + tl.exp(-wide))
    tl.store(out + (row * HEADS + head) * VALUE_DIM + values, found.to(DTYPE), mask=is_value)
