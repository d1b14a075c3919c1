"""InfiniCore's sampling rule: the caller passes the uniform number that decides the draw.

A row is greedy if `temperature`, `top_p` or `random_val` is 0 or `top_k` is 1. Otherwise its logits are sorted in
descending order, equal ones by index, c is the running sum of exp((x − max) / temperature), and the token is the first
i with c[i] ≥ random_val · min(c[top_k − 1], top_p · c[last]).

Sums are computed in integers and then rounded to float32 for all comparisons: a row draws the same in any batch, with
any order of additions, for any number of sorted logits.
"""

from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from infinilm.errors import InvalidTypeError, InvalidValueError
from infinilm.kernels.copies import to_device
from infinilm.sampling.draw import NUM_LEADERS
from infinilm.sampling.sampler import LOWEST_TEMPERATURE, Samples
from infinilm.sampling.truncation import (
    Scale,
    block_topk,
    first_max,
    row_passes,
    sorted_descending,
    total_weights,
    weights_of,
)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
PerRequest = float | Sequence[float] | torch.Tensor | npt.NDArray[Any]  # one number for all, or one per request

HIGHEST_TEMPERATURE = 1e38  # float32 can hold this; higher values draw the same


class UniformValues(TypedDict):
    """The checked values of n requests, as `draw_uniform` takes them."""

    temperature: Floats  # [n], 0 or more
    top_k: Ints  # [n], any integer
    top_p: Floats  # [n], in [0, 1]
    random_val: Floats  # [n], in [0, 1)


def check_uniform(
    num_requests: int, temperature: PerRequest, top_k: PerRequest, top_p: PerRequest, random_val: PerRequest
) -> UniformValues:
    """Convert each setting to one value per request, or raise an error that names the bad value."""
    most, below_one = float(np.finfo(np.float64).max), float(np.nextafter(1, 0))
    return UniformValues(
        temperature=_reals("temperature", temperature, num_requests, most, "0 (greedy) or a positive, finite number"),
        top_k=_broadcast("top_k", top_k, num_requests, "iu").astype(np.int64),
        top_p=_reals("top_p", top_p, num_requests, 1.0, "a number in [0, 1]"),
        random_val=_reals("random_val", random_val, num_requests, below_one, "a number in [0, 1)"),
    )


def draw_uniform(
    logits: torch.Tensor, *, temperature: Floats, top_k: Ints, top_p: Floats, random_val: Floats
) -> Samples:
    """Draw one token per row of `logits` [n, vocab] float32, by values [n] that `check_uniform` has passed.

    A `top_k` of 0 or less, or over the vocabulary, is no limit. Does not wait for the device.
    """
    row_max, token_ids = first_max(logits)
    is_drawn = (temperature > 0) & (top_p > 0) & (random_val > 0) & (top_k != 1)
    for rows in row_passes(logits):
        members = np.arange(len(logits))[rows][is_drawn[rows]]
        if len(members) == 0:
            continue
        (indices,) = to_device(logits.device, members)
        own = UniformValues(
            temperature=temperature[members], top_k=top_k[members], top_p=top_p[members], random_val=random_val[members]
        )
        token_ids[indices] = _draw(logits[indices], row_max[indices].unsqueeze(1), own)
    return Samples(token_ids, row_max.isfinite())


def _draw(logits: torch.Tensor, row_max: torch.Tensor, values: UniformValues) -> torch.Tensor:
    """The tokens [n] of rows that are not greedy; `row_max` [n, 1] is the greatest of each row of `logits`."""
    device, vocab_size = logits.device, logits.shape[1]
    temperature = values["temperature"].clip(LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE)
    scale = Scale(row_max, _column(temperature.astype(np.float32), device))
    top_k = np.where((values["top_k"] > 0) & (values["top_k"] < vocab_size), values["top_k"], vocab_size)
    # No row's draw reaches past its top_k logits.
    num_leaders = int(top_k.max())
    leaders = block_topk(logits, num_leaders)[0] if num_leaders <= NUM_LEADERS else sorted_descending(logits)
    reached = weights_of(leaders, scale).cumsum(dim=-1).to(torch.float32)  # [n, leaders]
    # Without top_p the total is not needed: the sum of the first top_k never exceeds it.
    totals = total_weights(logits, scale).to(torch.float32) if (values["top_p"] < 1).any() else reached[:, -1:]
    top_p = _column(values["top_p"].astype(np.float32), device)
    limits = torch.minimum(reached.gather(1, _column(top_k - 1, device)), top_p * totals)
    goals = _column(values["random_val"].astype(np.float32), device) * limits
    places = torch.searchsorted(reached, goals).clamp_(max=leaders.shape[1] - 1)  # [n, 1]; NaN would go past the end
    # The tokens at `places` of the order whose greatest logits are `leaders`; equal logits are ordered by index.
    chosen = leaders.gather(1, places)
    nth_of_equals = places - (leaders > chosen).sum(dim=-1, keepdim=True) + 1
    num_equals = (logits == chosen).cumsum(dim=-1)
    return torch.searchsorted(num_equals, nth_of_equals).clamp_(max=logits.shape[1] - 1).squeeze(1)


def _column(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    return to_device(device, values)[0].unsqueeze(1)


def _reals(name: str, values: PerRequest, num_requests: int, highest: float, allowed: str) -> Floats:
    """`values` as [n], each from 0 to `highest`."""
    array = _broadcast(name, values, num_requests, "iuf").astype(np.float64)
    is_bad = ~((array >= 0) & (array <= highest))  # NaN is neither
    if is_bad.any():
        index = int(is_bad.argmax())
        raise InvalidValueError(f"{name}={float(array[index])!r} of request {index} is out of range; use {allowed}")
    return array


def _broadcast(name: str, values: PerRequest, num_requests: int, kinds: str) -> npt.NDArray[Any]:
    """`values` as [n], of one of NumPy's `kinds` of numbers."""
    plain = values
    try:
        plain = values.tolist() if isinstance(values, torch.Tensor) else values
        array = np.asarray(plain)
    except (ValueError, TypeError, RuntimeError):  # lists of unequal lengths, tensors without numbers
        raise InvalidTypeError(f"{name}={plain!r} must be one number or one per request") from None
    if array.dtype.kind not in kinds:
        wanted = "a number" if "f" in kinds else "a 64-bit integer"
        raise InvalidTypeError(f"{name}={plain!r} must be {wanted}, or one per request")
    if array.ndim > 0 and array.shape != (num_requests,):
        raise InvalidValueError(
            f"{name} has shape {list(array.shape)} for {num_requests} requests; give one number or [{num_requests}]"
        )
    return np.broadcast_to(array, (num_requests,))
