"""Draws tokens from logits and settings, with the same result on every device: the torch version, the kernels'
reference.

A draw takes `logits` [n, vocab], `settings` [rows, 5] int64 (`DRAW_SETTINGS`), and the `rows` and `positions` of n
draws, both [n] int64. It returns token ids [n] int64, and whether each row's greatest logit was finite, [n] bool; where
it was not, the token is undefined.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infinilm.kernels import native
from infinilm.sampling.noise import draw_keys, gumbel_argmax, token_parts
from infinilm.sampling.settings import DRAW_SETTINGS
from infinilm.sampling.truncation import (
    Limits,
    Scale,
    block_topk,
    find_cutoffs,
    first_max,
    sorted_descending,
    total_weights,
)

Draw: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Settings: TypeAlias = npt.NDArray[np.void]  # rows of `DRAW_SETTINGS`

NUM_LEADERS = 256  # most truncated distributions have fewer tokens


def find_draw(device: torch.device) -> Draw:
    if device.type == "cuda":
        from infinilm.kernels.sampling import draw  # Triton is for GPUs

        return draw
    return draw_torch if native.load() is None else native.draw


def draw_torch(logits: Tensor, settings: Tensor, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The reference, on a CPU: greedy, unlimited and truncated rows are drawn separately."""
    logits = logits.float()
    num_rows, vocab_size = logits.shape
    own = settings[rows].numpy().view(DRAW_SETTINGS).squeeze(1)
    is_greedy = own["temperature"] == 0
    is_limited = (own["top_k"] < vocab_size) | (own["top_p"] < 1) | (own["log_min_p"] > -np.inf)
    token_ids = torch.empty(num_rows, dtype=torch.int64)
    scores = torch.empty(num_rows)
    for draw, is_member in (
        (_draw_greedy, is_greedy),
        (_draw_freely, ~is_greedy & ~is_limited),
        (_draw_truncated, ~is_greedy & is_limited),
    ):
        members = np.flatnonzero(is_member)
        if len(members) > 0:
            places = torch.from_numpy(members)
            chosen = logits if len(members) == num_rows else logits[places]
            scores[places], token_ids[places] = draw(chosen, own[members], positions.numpy()[members])
    return token_ids, scores.isfinite()


def _draw_greedy(logits: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return first_max(logits)


def _draw_freely(logits: Tensor, settings: Settings, positions: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """The scores and tokens, both [n], drawn from the whole distributions."""
    keys = torch.from_numpy(draw_keys(settings["scrambled_seed"], positions))
    return gumbel_argmax(logits, _scale_of(logits, settings), None, _parts(logits.shape[1]), keys)


def _draw_truncated(logits: Tensor, settings: Settings, positions: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """The scores and tokens, both [n], drawn from what top-k, top-p and min-p leave."""
    vocab_size = logits.shape[1]
    keys = torch.from_numpy(draw_keys(settings["scrambled_seed"], positions))
    scale, limits = _scale_of(logits, settings), _limits_of(settings, vocab_size)
    leaders, leader_ids = block_topk(logits, min(NUM_LEADERS, vocab_size))
    # The total weights of rows with top-p and no top-k; 0 elsewhere.
    totals = torch.zeros(len(logits), 1, dtype=torch.int64)
    rows = torch.from_numpy(np.flatnonzero((settings["top_p"] < 1) & (settings["top_k"] >= vocab_size)))
    if len(rows) > 0:
        totals[rows] = total_weights(logits[rows], scale.select(rows))
    cutoffs, is_enough = find_cutoffs(leaders, vocab_size, scale, limits, totals)
    scores, columns = gumbel_argmax(leaders, scale, cutoffs, _parts(vocab_size)[leader_ids], keys)
    token_ids = leader_ids.gather(1, columns.unsqueeze(1)).squeeze(1)
    if not is_enough.all():
        rest = (~is_enough).nonzero().squeeze(1)
        others, scale, limits = logits[rest], scale.select(rest), limits.select(rest)
        cutoffs, _ = find_cutoffs(sorted_descending(others), vocab_size, scale, limits, None)
        scores[rest], token_ids[rest] = gumbel_argmax(others, scale, cutoffs, _parts(vocab_size), keys[rest])
    return scores, token_ids


def _scale_of(logits: Tensor, settings: Settings) -> Scale:
    return Scale.of(logits, _column(settings["temperature"].astype(np.float32)))


def _limits_of(settings: Settings, vocab_size: int) -> Limits:
    top_k, top_p, log_min_p = settings["top_k"], settings["top_p"], settings["log_min_p"].astype(np.float32)
    return Limits(
        top_k=_column(top_k) if (top_k < vocab_size).any() else None,
        top_p=_column(top_p) if (top_p < 1).any() else None,
        log_min_p=_column(log_min_p) if (log_min_p > -np.inf).any() else None,
    )


def _column(values: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).unsqueeze(1)


@lru_cache(maxsize=2)
def _parts(vocab_size: int) -> Tensor:
    return token_parts(vocab_size, torch.device("cpu"))
