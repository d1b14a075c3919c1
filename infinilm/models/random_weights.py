"""Random weights for a model that is built from a configuration alone."""

import torch
from xxhash import xxh3_64_intdigest

from infinilm.distributed.shard import Weights, dense_weights


@torch.no_grad()
def fill_randomly(weights: Weights, std: float, seed: int = 0) -> None:
    """Set norms to 1, biases to 0, and matrices to random numbers with standard deviation `std`.

    A weight depends on its name and the seed, not on the number of ranks: every rank makes the full weight and takes
    its shard.
    """
    for name, shard in dense_weights(weights).items():
        if name.endswith("bias"):
            shard.tensor.zero_()
        elif len(shard.full_shape) == 1:
            shard.tensor.fill_(1)
        else:
            generator = torch.Generator().manual_seed(xxh3_64_intdigest(f"{seed}/{name}".encode()) % 2**63)
            shard.tensor.copy_(shard.cut(torch.randn(shard.full_shape, generator=generator)).mul_(std))
