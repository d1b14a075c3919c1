"""The greatest logits of each row, found through the maxima of small blocks.

A row's k greatest values lie in the k blocks with the greatest maxima. Maxima of blocks are quick to
take, so nearly all of the vocabulary is looked at only once, by the fastest instruction there is for it.
"""

import torch

BLOCK = 32


def first_max(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The greatest value and its first index, both [n], of each row of `values` [n, vocab]; NaN for a row with NaN."""
    num_rows, vocab_size = values.shape
    if vocab_size % BLOCK:
        best = values.max(dim=-1)
        return best.values, best.indices
    blocks = values.view(num_rows, -1, BLOCK)
    best_block = blocks.amax(dim=-1).max(dim=-1).indices  # [n]
    best = blocks.gather(1, best_block.view(-1, 1, 1).expand(-1, 1, BLOCK)).squeeze(1).max(dim=-1)
    return best.values, best_block * BLOCK + best.indices


def block_topk(
    values: torch.Tensor, count: int, maxima: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` greatest values, best first, and their indices, both [n, count], of `values` [n, vocab].

    `maxima` [n, vocab / BLOCK] are the blocks' greatest values, if known already.
    """
    num_rows, vocab_size = values.shape
    if vocab_size % BLOCK or vocab_size <= 2 * count * BLOCK:
        best = values.topk(count)
        return best.values, best.indices
    if maxima is None:
        maxima = values.view(num_rows, -1, BLOCK).amax(dim=-1)
    blocks = maxima.topk(count, sorted=False).indices  # [n, count]
    within = torch.arange(BLOCK, device=values.device)
    indices = (blocks.unsqueeze(-1) * BLOCK + within).flatten(1)  # [n, count * BLOCK]
    best = values.gather(1, indices).topk(count)
    return best.values, indices.gather(1, best.indices)
