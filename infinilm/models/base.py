"""The interface between the engine and a model."""

from typing import Protocol

from torch import Tensor

from infinilm.attention import AttentionBackend, ForwardBatch
from infinilm.cache.paged import Cache
from infinilm.debug.taps import Taps
from infinilm.distributed.shard import Weights
from infinilm.models.config import ModelConfig
from infinilm.models.stages import Stage


class InfinilmModel(Protocol):
    """A causal language model over a paged KV cache, or one rank's share of it.

    It is built with empty weights, which are loaded through `weight_targets`. Each step calls the model, then
    `compute_logits`.
    """

    @property
    def config(self) -> ModelConfig:
        """The configuration it was built from."""

    def weight_targets(self) -> Weights:
        """All weights, by their names in a Hugging Face checkpoint."""

    def is_ignorable(self, name: str) -> bool:
        """Whether a checkpoint may hold a tensor of this name that the model does not use."""

    def num_bytes(self) -> int:
        """The bytes of this rank's weights and tables."""

    def __call__(
        self, batch: ForwardBatch, cache: Cache, backend: AttentionBackend, taps: Taps | None = None
    ) -> Tensor:
        """Compute the batch's tokens and store their keys and values. Returns `[T, hidden]`, after the final norm.

        `taps`, if given, show the activations to hooks.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The next token's logits for some rows of the model's result: `[n, hidden]` to `[n, vocab]`.

        All ranks must call this; only rank 0 gets the logits.
        """


class StagedModel(InfinilmModel, Protocol):
    """One pipeline stage of a model. Only the last stage has `compute_logits`."""

    @property
    def stage(self) -> Stage:
        """The stage and its layers."""

    def __call__(
        self,
        batch: ForwardBatch,
        cache: Cache,
        backend: AttentionBackend,
        taps: Taps | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """See `InfinilmModel`. `hidden` `[T, hidden]` is the previous stage's result. Only the last stage applies the
        final norm."""
