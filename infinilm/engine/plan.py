"""What crosses between scheduler and model runner: a plan down, a result up. Plain data, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from infinilm.outputs import TokenLogprobs
from infinilm.sampling_params import RowStart

IntArray = npt.NDArray[np.int64]

NO_TOKEN = -1
"""The result of a row that drew nothing."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """The rows that go from token to token: each computes the one it drew last and draws the next.

    The runner knows what a row drew last, perhaps on the device only. There may be hundreds of rows, so all are arrays.
    """

    rows: IntArray  # [n]
    starts: IntArray  # [n], the places of the tokens to compute
    grown_rows: IntArray  # [g], the rows whose tables get another block …
    new_blocks: IntArray  # [g], … and which

    @classmethod
    def none(cls) -> "Decoding":
        """No rows."""
        empty = np.empty(0, dtype=np.int64)
        return cls(empty, empty, empty, empty)


@dataclass(frozen=True, slots=True)
class RowChunk:
    """A row's part of a prompt, or of a text to be computed again: `token_ids`, which begin at position `start`."""

    row: int
    start: int
    token_ids: Sequence[int]
    new_blocks: Sequence[int]
    """Blocks to append to the row's table."""
    draws: bool
    """Whether these are the last tokens, so that the next one is drawn."""
    prompt_targets: Sequence[int] = ()
    """The prompt tokens at `start + 1` and following whose log-probabilities are wanted, …"""
    num_prompt_logprobs: int = 0
    """… and how many of the most likely tokens at each place."""


@dataclass(frozen=True)
class StepPlan:
    """One step. Rows that ended are dropped first, then `starts` are set up, then tokens computed.

    A row's index in the plan counts the decoding ones first, then the chunks.
    """

    ended_rows: Sequence[int]
    starts: Sequence[RowStart]
    decoding: Decoding
    chunks: Sequence[RowChunk]

    @property
    def num_rows(self) -> int:
        """Rows computed."""
        return len(self.decoding.rows) + len(self.chunks)

    @property
    def num_chunk_tokens(self) -> int:
        """Tokens computed for chunks."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @cached_property
    def draws(self) -> Sequence[int]:
        """The indices of the rows that draw a token."""
        num_decoding = len(self.decoding.rows)
        if not self.chunks:
            return range(num_decoding)
        chunks = [index for index, chunk in enumerate(self.chunks, start=num_decoding) if chunk.draws]
        return [*range(num_decoding), *chunks]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a plan. Everything is by the row's index in the plan."""

    token_ids: Sequence[int]
    """The tokens drawn, or `NO_TOKEN`."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    """What went wrong in single rows; the others are sound."""
