"""The self-check at the start: whether, on this device, a token's bits depend on the other tokens of a step."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from infinilm.attention.batch import HostBatch
from infinilm.cache.paged import Cache
from infinilm.cache.specs import CacheSpec, LatentSpec, StateSpec
from infinilm.layers.formats import DenseWeight, TiledWeight
from infinilm.layers.formats.experts import DenseExperts, Float8Experts, PackedExperts
from infinilm.layers.linear import Linear
from infinilm.layers.moe import SparseMLP

ROW_COUNTS = {"cpu": (1, 3, 5, 17, 24, 70, 130), "cuda": (1, 2, 5, 8, 16, 17, 24, 32, 33, 65, 130, 256)}
"""By kind of device: numbers of rows. Their products are compared with a product of three times the last number."""
LARGE_MATRIX, MAX_LARGE_ROWS = 32_000_000, 17
"""On a CPU, matrices with at least so many elements are compared with only so many rows, to keep the start fast."""
MAX_EXPERT_ROWS = 8192
"""Experts are tried with at most so many rows."""


class MixerTrial(NamedTuple):
    """A trial of token mixers that have one kernel for prompts and another for single tokens."""

    name: str
    num_tokens: int


MIXER_TRIALS: dict[type[CacheSpec], MixerTrial] = {
    LatentSpec: MixerTrial("latent attention", 300),  # more than a chunk of keys
    StateSpec: MixerTrial("recurrent layers", 70),  # several blocks, whose states are large
}
MIN_TRIAL_TOKENS = 9
TRIAL_BLOCK_SIZE = 16
"""The block size of a temporary cache for such a trial."""


def check_products(model: nn.Module, max_step_tokens: int | None = None) -> list[str]:
    """Find the products in which a row's result depends on its place or on the other rows.

    If it helps, dense matrices on a CPU are multiplied piece by piece from now on. Returns the products that still
    fail. The native library's products have a fixed order of summation and are not tried.
    """
    biases: dict[Any, Tensor | None] = {
        module.matrix: module.bias for module in model.modules() if isinstance(module, Linear)
    }
    failing: list[str] = []
    tried: dict[Any, Any] = {}
    for module in model.modules():
        if not isinstance(module, (DenseWeight, TiledWeight, SparseMLP)) or _is_native(module):
            continue
        bias, parameters = biases.get(module), list(module.parameters())
        key = (type(module), *((each.shape, each.dtype) for each in parameters), bias is None)
        is_new = key not in tried
        first = tried.setdefault(key, module)
        if isinstance(module, DenseWeight):
            if is_new and not _is_invariant_in_pieces(module, bias):
                failing.append(f"products with {module.in_features} x {module.out_features}")
            module.is_piecewise = first.is_piecewise
        elif is_new:
            if isinstance(module, SparseMLP):
                trial, name = _Trial.of_experts(module, max_step_tokens), f"{module.routing.num_experts} experts"
            else:
                trial, name = (
                    _Trial.of_matrix(module, bias),
                    f"products with {module.in_features} x {module.out_features}",
                )
            if not trial.passes():
                failing.append(name)
    return failing


def _is_native(module: DenseWeight | TiledWeight | SparseMLP) -> bool:
    """Whether the native library computes the product."""
    if isinstance(module, SparseMLP):
        experts = module.experts.matrix
        is_own = isinstance(experts, PackedExperts | Float8Experts)
        return is_own or (isinstance(experts, DenseExperts) and experts.is_native)
    return isinstance(module, DenseWeight) and module.is_native


def _is_invariant_in_pieces(matrix: DenseWeight, bias: Tensor | None) -> bool:
    """Whether a product is invariant. On a CPU it is multiplied piece by piece if that is needed."""
    trial = _Trial.of_matrix(matrix, bias)
    if trial.passes():
        return True
    matrix.is_piecewise = not matrix.weight.is_cuda
    return matrix.is_piecewise and trial.passes()


@dataclass(frozen=True, slots=True)
class _Trial:
    """A product, and the numbers of rows with which it is tried."""

    multiply: Callable[[Tensor], Tensor]
    num_inputs: int
    device: torch.device
    dtype: torch.dtype
    counts: tuple[int, ...]
    num_copies: int = 3
    """How often the reference product repeats the rows of the largest count."""

    @classmethod
    def of_matrix(cls, matrix: DenseWeight | TiledWeight, bias: Tensor | None) -> "_Trial":
        device = next(matrix.parameters()).device
        counts, num_copies = ROW_COUNTS[device.type], 3
        if device.type == "cpu" and matrix.in_features * matrix.out_features >= LARGE_MATRIX:
            counts, num_copies = (*(count for count in counts if count < MAX_LARGE_ROWS), MAX_LARGE_ROWS), 1
        multiply = partial(matrix.multiply, bias=bias)
        return cls(multiply, matrix.in_features, device, matrix.dtype, counts, num_copies)

    @classmethod
    def of_experts(cls, module: SparseMLP, max_step_tokens: int | None) -> "_Trial":
        """On a GPU, also with the numbers of rows from which experts have other tiles."""
        num_experts, top_k = module.routing.num_experts, module.routing.top_k
        device = next(module.parameters()).device
        counts = set(ROW_COUNTS[device.type])
        if device.type == "cuda":
            from infinilm.kernels.experts import TILES  # which needs Triton

            counts |= {least * num_experts // top_k + 1 for least in TILES}
        max_rows = min(max_step_tokens or MAX_EXPERT_ROWS, MAX_EXPERT_ROWS)
        tried = sorted(count for count in counts if count <= max_rows)
        scores = torch.rand(tried[-1], num_experts, generator=torch.Generator().manual_seed(1))
        weights, ids = (each.to(device) for each in scores.topk(top_k))

        def multiply(x: Tensor) -> Tensor:
            # Only this rank's part of the sum, without the other ranks.
            return module.experts.matrix.mix(x, ids[: len(x)].int(), weights[: len(x)], None)

        return cls(multiply, module.hidden_size, device, module.dtype, tuple(tried), num_copies=1)

    def passes(self) -> bool:
        """Whether a row's result is the same for all numbers of rows and in any place."""
        with torch.inference_mode():
            x = torch.randn(self.counts[-1], self.num_inputs, generator=torch.Generator().manual_seed(0))
            x = x.to(self.device, self.dtype)
            expected = self.multiply(torch.cat([x] * self.num_copies))
            if any(not part.equal(expected[: len(x)]) for part in expected.view(self.num_copies, len(x), -1)):
                return False
            return all(self.multiply(x[:count]).equal(expected[:count]) for count in self.counts)


@torch.inference_mode()
def computes_alike(compute: Callable[[HostBatch], Tensor], cache: Cache, vocab_size: int, num_tokens: int) -> bool:
    """Whether two texts of up to `num_tokens` have the same hidden states computed whole, in one step, and in parts.

    `compute` returns a batch's hidden states `[T, hidden]`. The texts use the first blocks of `cache`. Also False if
    the cache is too small for such texts.
    """
    block_size = cache.block_size
    num_blocks = min(min(cache.num_blocks) // 2, -(-num_tokens // block_size))  # of a text
    num_tokens = min(num_tokens, num_blocks * block_size)
    if num_tokens < MIN_TRIAL_TOKENS:
        return False
    ids = np.random.default_rng(0).integers(vocab_size, size=(2, num_tokens))
    tables = np.arange(2 * num_blocks).reshape(2, -1)

    def step(*parts: tuple[int, int, int]) -> list[tuple[int, Tensor]]:
        """Compute parts of texts, given as text, begin and end. Returns each part's text and hidden states."""
        texts, begins, ends = (np.array(column) for column in zip(*parts, strict=True))
        owners = np.repeat(texts, ends - begins)
        places = np.concatenate([np.arange(begin, end) for _, begin, end in parts])
        slots = tables[owners, places // block_size] * block_size + places % block_size
        batch = HostBatch(ids[owners, places], places, slots, tables[texts], ends - begins, ends)
        hidden = torch.split(compute(batch), (ends - begins).tolist())
        return list(zip(texts.tolist(), hidden, strict=True))

    last = num_tokens - 1
    whole = dict(step((0, 0, num_tokens), (1, 0, num_tokens)))
    in_parts = [
        *step((1, 0, 5)),
        *step((0, 0, last - 2), (1, 5, 6)),
        *step((0, last - 2, last - 1), (1, 6, last - 1)),
        *step((1, last - 1, last)),
        *step((0, last - 1, last)),
        *step((1, last, num_tokens), (0, last, num_tokens)),
    ]
    return all(
        torch.cat([hidden for owner, hidden in in_parts if owner == text]).equal(whole[text]) for text in range(2)
    )
