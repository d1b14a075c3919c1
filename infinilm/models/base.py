"""What the engine asks of a model."""

from typing import Protocol

from torch import Tensor

from infinilm.attention import AttentionBackend, ForwardBatch
from infinilm.cache.paged import PagedKVCache
from infinilm.debug.taps import Taps
from infinilm.distributed.shard import Weights
from infinilm.models.config import ModelConfig


class InfinilmModel(Protocol):
    """A causal language model over a paged KV cache, or one rank's share of it.

    Its life: built with empty weights, filled through `weight_targets`, then called, with
    `compute_logits` after it, for each step.
    """

    @property
    def config(self) -> ModelConfig:
        """The configuration it was built from."""

    def weight_targets(self) -> Weights:
        """The weights to load, by their names in a Hugging Face checkpoint; filling them fills the model."""

    def is_ignorable(self, name: str) -> bool:
        """Whether a checkpoint may hold a tensor of this name though the model has no use for it."""

    def num_bytes(self) -> int:
        """What weights and tables of this rank take."""

    def __call__(
        self, batch: ForwardBatch, cache: PagedKVCache, backend: AttentionBackend, taps: Taps | None = None
    ) -> Tensor:
        """Compute the batch's tokens, storing their keys and values: `[T, hidden]` after the final norm.

        `taps`, if given, are shown the activations as they come about.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The next token's logits for chosen rows of the result: `[n, hidden]` to `[n, vocab]`.

        With several ranks, all must call this; rank 0 alone gets the logits.
        """
