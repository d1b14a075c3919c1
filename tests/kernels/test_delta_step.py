"""The kernels of one token against the torch version, and the delta rule in chunks against token by token."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from infinilm.kernels.delta_rule import delta_rule_chunks, delta_rule_step, normalize
from infinilm.kernels.delta_step import conv_step, delta_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return numbers.to(DEVICE, dtype)


def places() -> dict[str, Tensor]:
    """Three texts: one begins, one stays in its block, one goes on to another."""
    return {
        "sources": torch.tensor([0, 3, 1], device=DEVICE),
        "is_first": torch.tensor([True, False, False], device=DEVICE),
        "targets": torch.tensor([2, 3, 4], device=DEVICE),
    }


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("num_channels", "width"), [(40, 4), (1100, 2)])
def test_convolution(num_channels: int, width: int, dtype: torch.dtype) -> None:
    inputs = random(3, num_channels + 8, dtype=dtype)[:, :num_channels]
    states, weight = random(6, num_channels, width - 1), random(num_channels, 1, width, dtype=dtype)
    where = places()
    before = states[where["sources"]] * ~where["is_first"][:, None, None]
    seen = torch.cat((before, inputs.float().unsqueeze(2)), dim=2)
    convolved = (seen * weight.squeeze(1).float()).sum(2)
    expected = states.clone()
    expected[where["targets"]] = torch.cat((before[:, :, 1:], inputs.float().unsqueeze(2)), dim=2)
    found = conv_step(inputs, states, weight, **where)
    torch.testing.assert_close(found, F.silu(convolved.to(dtype)), rtol=2e-3, atol=2e-3)
    assert torch.equal(states, expected)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("heads", "key_heads", "key_dim", "value_dim"), [(4, 2, 16, 24), (2, 2, 32, 16)])
def test_step(heads: int, key_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    channels = random(3, 2 * key_heads * key_dim + heads * value_dim, dtype=dtype)
    projected = random(3, heads * value_dim + 2 * heads, dtype=dtype)
    gate, rate, change = projected.split((heads * value_dim, heads, heads), dim=1)
    a_log, dt_bias, norm = random(heads), random(heads, seed=1), random(value_dim, dtype=dtype)
    states, where = random(6, heads, key_dim, value_dim), places()
    query, key, value = channels.float().split((key_heads * key_dim,) * 2 + (heads * value_dim,), dim=1)
    query, key = (
        normalize(part.view(3, key_heads, key_dim)).repeat_interleave(heads // key_heads, dim=1)
        for part in (query, key)
    )
    memory = states[where["sources"]] * ~where["is_first"][:, None, None, None]
    decay = -a_log.exp() * F.softplus(change.float() + dt_bias)
    mixed, memory = delta_rule_step(
        query * key_dim**-0.5, key, value.view(3, heads, value_dim), decay, rate.float().sigmoid(), memory
    )
    expected_states = states.clone()
    expected_states[where["targets"]] = memory
    wide = mixed.to(dtype).float()
    normed = (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(dtype) * norm
    expected = (normed.flatten(1) * F.silu(gate.float())).to(dtype)
    found = delta_step(
        channels,
        gate,
        rate,
        change,
        a_log=a_log,
        dt_bias=dt_bias,
        norm=norm,
        eps=1e-6,
        states=states,
        num_key_heads=key_heads,
        **where,
    )
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(states, expected_states, rtol=1e-4, atol=1e-4)


def test_chunks_are_the_rule_token_by_token() -> None:
    """Two texts, of two chunks and of one."""
    heads, num_chunks, size, key_dim, value_dim = 2, 3, 16, 8, 12
    query, key = (normalize(random(num_chunks, heads, size, key_dim, seed=seed)) for seed in range(2))
    value = random(num_chunks, heads, size, value_dim)
    decay, rate = -random(num_chunks, heads, size).abs(), random(num_chunks, heads, size, seed=1).sigmoid()
    state = random(2, heads, key_dim, value_dim)
    order = [
        (torch.tensor(texts, device=DEVICE), torch.tensor(chunks, device=DEVICE))
        for texts, chunks in (([0, 1], [0, 2]), ([0], [1]))
    ]
    outputs, states = delta_rule_chunks(query, key, value, decay, rate, state.clone(), order)
    for text, chunks in ((0, (0, 1)), (1, (2,))):
        now = state[text]
        for chunk in chunks:
            for token in range(size):
                here = (chunk, slice(None), token)
                output, after = delta_rule_step(
                    *(query[here][None], key[here][None], value[here][None], decay[here][None], rate[here][None]),
                    now[None],
                )
                now = after.squeeze(0)
                torch.testing.assert_close(outputs[here], output.squeeze(0), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(states[chunk], now, rtol=1e-4, atol=1e-5)
