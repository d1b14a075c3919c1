"""Computes the logits of every position of a text, and the distance between the logits of two models."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm import LLM
from infinilm.attention import HostBatch
from infinilm.executor.local import LocalExecutor
from infinilm.executor.native_worker import NativeWorker
from infinilm.executor.rank_worker import ForwardInput

Floats = npt.NDArray[np.floating[Any]]
SLICE = 64
"""Positions compared at a time: in float64 all of them would take gigabytes."""


class Ours:
    """The model as `LLM` runs it, asked for every token's logits."""

    def __init__(self, engine: LLM) -> None:
        self.engine = engine

    def logits(self, token_ids: Sequence[int], rows: int) -> Floats:
        """The logits of each next token: `[tokens, vocab]`. `rows` tokens are computed at a time."""
        found: list[Floats] = []
        ids, block_size = np.array(token_ids), self.engine.memory.block_size
        for start in range(0, len(ids), rows):
            end = min(start + rows, len(ids))
            places = np.arange(start, end)
            batch = HostBatch(  # nothing else runs, so the text lies in the cache's first blocks, in order
                input_ids=ids[start:end],
                positions=places,
                slot_mapping=places,
                block_tables=np.arange(-(-end // block_size))[None],
                query_lens=np.array([end - start]),
                context_lens=np.array([end]),
            )
            found.append(self._compute(batch))
        return np.concatenate(found)

    def _compute(self, batch: HostBatch) -> Floats:
        executor = self.engine.executor
        worker = executor.worker if isinstance(executor, LocalExecutor) else None
        if isinstance(worker, NativeWorker):  # has no forward passes of its own
            assert worker.cache is not None
            with worker.computing():
                hidden = worker.model.forward(batch, batch.input_ids, worker.cache)
                return worker.model.compute_logits(hidden)
        output = executor.forward(ForwardInput(batch, np.arange(len(batch.input_ids))))
        return np.asarray(output.logits.numpy(force=True).copy())


@dataclass(slots=True)
class Distance:
    """The distance of two models at the positions of all texts, in nats."""

    divergences: list[float] = field(default_factory=list)
    surprises: list[float] = field(default_factory=list)
    """Minus the log-probability of each token of the text."""
    num_same_top: int = 0

    def add(self, reference: Floats, logits: Floats, following: npt.NDArray[np.int64]) -> None:
        """Add positions: the logits `[n, vocab]` of both models, and the token that follows each position."""
        for start in range(0, len(following), SLICE):
            rows = slice(start, start + SLICE)
            expected, found = log_softmax(reference[rows]), log_softmax(logits[rows])
            self.divergences += (np.exp(expected) * (expected - found)).sum(axis=1).tolist()
            self.surprises += (-np.take_along_axis(found, following[rows, None], axis=1)[:, 0]).tolist()
            self.num_same_top += int((expected.argmax(axis=1) == found.argmax(axis=1)).sum())

    @property
    def perplexity(self) -> float:
        """The perplexity of the texts."""
        return float(np.exp(np.mean(self.surprises)))

    def summary(self, reference: "Distance") -> dict[str, float]:
        """The figures, compared with those of the reference."""
        return {
            "mean_kl": float(np.mean(self.divergences)),
            "mean_kl_error": float(np.std(self.divergences) / np.sqrt(len(self.divergences))),
            "p99_kl": float(np.percentile(self.divergences, 99)),
            "max_kl": max(self.divergences),
            "perplexity": self.perplexity,
            "perplexity_change": self.perplexity / reference.perplexity - 1,
            "same_top": self.num_same_top / len(self.divergences),
        }


def log_softmax(logits: Floats) -> npt.NDArray[np.float64]:
    """Log-probabilities `[n, vocab]` in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
