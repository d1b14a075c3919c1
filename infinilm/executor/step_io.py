"""What the engine sends to the workers for a step, and what they return. NumPy arrays and plain data, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Self

import numpy as np
import numpy.typing as npt

from infinilm.outputs import TokenLogprobs
from infinilm.sampling_params import RowStart

IntArray = npt.NDArray[np.int64]

LAST_TOKEN = -1
"""In `DecodeRows.token_ids`: the token that the row drew last, which perhaps only the device knows."""
NO_TOKEN = -2
"""In `DecodeRows.token_ids`: the row has fewer draft tokens than others."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows that compute their last token and d draft tokens, and draw after each of them.

    There may be hundreds of rows, so all fields are arrays.
    """

    rows: IntArray  # [n]
    starts: IntArray  # [n], the positions of the first tokens to compute
    token_ids: IntArray  # [n, 1 + d]: LAST_TOKEN or the id, then draft tokens, then NO_TOKEN

    @classmethod
    def none(cls) -> Self:
        empty = np.empty(0, dtype=np.int64)
        return cls(empty, empty, empty.reshape(0, 1))

    @property
    def has_drafts(self) -> bool:
        return bool(self.token_ids.shape[1] > 1)

    @property
    def query_lens(self) -> IntArray:
        """The tokens that each row computes, `[n]`."""
        return np.asarray((self.token_ids != NO_TOKEN).sum(axis=1), dtype=np.int64)

    @property
    def num_tokens(self) -> int:
        return int((self.token_ids != NO_TOKEN).sum()) if self.has_drafts else len(self.rows)


@dataclass(frozen=True, slots=True)
class RowChunk:
    """A row's part of a prompt, or of a text to be recomputed: `token_ids`, from position `start` on."""

    row: int
    start: int
    token_ids: Sequence[int]
    samples: bool
    """Whether these are the last tokens, so that the next one is drawn."""
    prompt_targets: Sequence[int] = ()
    """The prompt tokens at `start + 1` and following whose log-probabilities are wanted, …"""
    num_prompt_logprobs: int = 0
    """… and how many of the most likely tokens at each position."""


@dataclass(frozen=True, slots=True)
class BlockUpdates:
    """Entries of the rows' block tables that change."""

    groups: IntArray  # [g], the groups of layers whose tables they are in
    rows: IntArray  # [g]
    places: IntArray  # [g], indices in the rows' tables
    blocks: IntArray  # [g]


@dataclass(frozen=True)
class StepInput:
    """One step. Rows that ended are dropped first, then `starts` are set up, then tokens computed.

    A row's index in the step counts the decoding rows first, then the chunks.
    """

    ended_rows: Sequence[int]
    starts: Sequence[RowStart]
    blocks: BlockUpdates
    decoding: DecodeRows
    chunks: Sequence[RowChunk]
    samples_on_host: bool = False
    """Whether a row that draws needs more than the sampling kernel: log-probabilities, penalties, masks, …"""
    num_expected_rows: int = 0
    """Sequences running or waiting: the rows that later steps may have. A hint for capturing graphs."""

    @property
    def num_rows(self) -> int:
        return len(self.decoding.rows) + len(self.chunks)

    @cached_property
    def num_chunk_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @cached_property
    def sample_counts(self) -> IntArray:
        """How many tokens each row draws, `[num_rows]`: one per token for decoding rows, 0 or 1 for chunks."""
        decoding = self.decoding
        counts = decoding.query_lens if decoding.has_drafts else np.ones(len(decoding.rows), dtype=np.int64)
        if self.chunks:
            counts = np.concatenate((counts, [chunk.samples for chunk in self.chunks]))
        return counts

    @cached_property
    def num_samples(self) -> int:
        return int(self.sample_counts.sum())

    def accept(self, drawn: Sequence[int]) -> list[Sequence[int]]:
        """The tokens that each row gains, of those `drawn` `[num_samples]`.

        A draft is accepted if the row drew the same token in its place. The token drawn after the last accepted draft
        is the row's last.
        """
        ends = np.cumsum(self.sample_counts).tolist()
        gained = [drawn[end - count : end] for end, count in zip(ends, self.sample_counts.tolist(), strict=True)]
        if self.decoding.has_drafts:
            for index, drafts in enumerate(self.decoding.token_ids[:, 1:].tolist()):
                num_accepted = next((i for i, draft in enumerate(drafts) if draft != gained[index][i]), len(drafts))
                gained[index] = gained[index][: num_accepted + 1]
        return gained


@dataclass(frozen=True)
class StepOutput:
    """What a step computed. Everything is by the row's index in the step."""

    token_ids: Sequence[int]
    """The tokens that rows gained, one row after the other."""
    counts: Sequence[int] | None = None
    """How many tokens each row gained: 0 for a chunk in the middle of a prompt, up to 1 + d for d draft tokens.
    None: one each."""
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Of the tokens gained, where they were asked for."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    """What went wrong in single rows. The others are valid."""

    @classmethod
    def of(cls, gained: Sequence[Sequence[int]]) -> Self:
        """An output without log-probabilities, from each row's tokens."""
        return cls([token_id for tokens in gained for token_id in tokens], [len(tokens) for tokens in gained])

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.counts or ()))

    def tokens_of(self, index: int) -> Sequence[int]:
        """The tokens that a row gained."""
        if self.counts is None:
            return self.token_ids[index : index + 1]
        end = self._ends[index]
        return self.token_ids[end - self.counts[index] : end]
