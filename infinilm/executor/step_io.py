"""A step's input and output, and the rows from which a worker gathers the batch.

NumPy arrays and plain data, no torch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Self

import numpy as np
import numpy.typing as npt

from infinilm.attention.batch import HostBatch
from infinilm.outputs import TokenLogprobs
from infinilm.sampling_params import RowStart

IntArray = npt.NDArray[np.int64]

LAST_TOKEN = -1
"""In `DecodeRows.token_ids`: the token that the row drew last, which may be known only on the device."""
NO_TOKEN = -2
"""In `DecodeRows.token_ids`: the row has fewer draft tokens than others."""

# Prompt log-probabilities need logits for every prompt token; this many at a time bounds their memory.
PROMPT_LOGITS_AT_ONCE = 256

LOGIT_COPIES = 3
"""Float32 copies of the logits that log-probabilities or penalties of all rows take, besides the logits."""


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
    """The prompt tokens from `start + 1` on whose log-probabilities are wanted."""
    num_prompt_logprobs: int = 0
    """How many of the most likely tokens are wanted at each of these positions."""


@dataclass(frozen=True, slots=True)
class BlockUpdates:
    """Entries of the rows' block tables that change."""

    groups: IntArray  # [g], the groups of layers whose tables they are in
    rows: IntArray  # [g]
    places: IntArray  # [g], indices in the rows' tables
    blocks: IntArray  # [g]


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Permission to decode the step's rows for several steps, each with the tokens of the one before.

    A worker may end the run after any step. It ends the run after a step in which a row draws a stop token.
    """

    max_steps: int = 1
    is_stop: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(1, dtype=np.bool_))
    """By token id: whether it ends an answer. Ids beyond the array do not."""
    is_awaited: Callable[[], bool] = lambda: False
    """Whether other work waits, so that the run has to end."""
    is_watched: bool = True
    """Whether tokens are read as they arrive, so that the run has to be short."""


ONE_STEP = DecodeRun()


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
    run: DecodeRun = ONE_STEP
    """How far workers that support runs may go on. Others compute one step."""

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
        """The tokens that each row gains from the tokens `drawn` `[num_samples]`.

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
    """The results of a step, by the row's index in the step."""

    token_ids: Sequence[int]
    """The tokens that rows gained, one row after the other."""
    counts: Sequence[int] | None = None
    """How many tokens each row gained: 0 for a chunk in the middle of a prompt, up to 1 + d for d draft tokens.
    None: one each."""
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Log-probabilities of the tokens gained, for rows that asked for them."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    """Errors of single rows. The other rows are valid."""
    num_steps: int = 1
    """How many steps of a `DecodeRun` were computed. Each row gained so many tokens."""

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


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step's tokens and the places where it draws."""

    tokens: HostBatch
    token_rows: IntArray  # [T], the row of each token
    num_decoding: int  # leading rows that have one token each
    sample_places: IntArray  # [S], the tokens after which a token is drawn

    @property
    def sample_rows(self) -> IntArray:
        return self.token_rows[self.sample_places]

    @property
    def sample_positions(self) -> IntArray:
        """The positions of the tokens to draw, `[S]`."""
        return self.tokens.positions[self.sample_places] + 1


class Rows:
    """The block tables of rows, from which a step's batch is gathered. A row lives as long as its sequence runs."""

    def __init__(self, num_groups: int, max_num_rows: int, max_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        # By group of layers: the rows' block tables. A row is filled with -1 before its first use, so that unused rows
        # take no memory.
        self.tables = np.empty((num_groups, max_num_rows, max_blocks), dtype=np.int64)
        self._are_filled = np.zeros(max_num_rows, dtype=np.bool_)

    def update(self, step: StepInput) -> None:
        """Forget the rows that ended, and note new blocks."""
        for row in step.ended_rows:
            self.tables[:, row] = -1
        updates = step.blocks
        for row in set(updates.rows[~self._are_filled[updates.rows]].tolist()):
            self.tables[:, row], self._are_filled[row] = -1, True
        self.tables[updates.groups, updates.rows, updates.places] = updates.blocks

    def gather(self, step: StepInput) -> StepBatch:
        """The step's batch. Tokens known only on the device are `LAST_TOKEN`."""
        decoding = step.decoding
        rows, starts, input_ids = decoding.rows, decoding.starts, decoding.token_ids.ravel()
        num_decoding = len(rows)
        query_lens = np.ones(len(rows), dtype=np.int64)
        if decoding.has_drafts:
            query_lens = decoding.query_lens
            input_ids = input_ids[input_ids != NO_TOKEN]
            num_decoding = 0  # rows of several tokens are computed as chunks are
        if step.chunks:
            tokens = chain.from_iterable(chunk.token_ids for chunk in step.chunks)
            input_ids = np.concatenate((input_ids, np.fromiter(tokens, np.int64, step.num_chunk_tokens)))
            rows = np.concatenate((rows, [chunk.row for chunk in step.chunks]))
            starts = np.concatenate((starts, [chunk.start for chunk in step.chunks]))
            query_lens = np.concatenate((query_lens, [len(chunk.token_ids) for chunk in step.chunks]))
        context_lens = starts + query_lens
        positions, token_rows, sample_places, last_lens = starts, rows, np.arange(len(rows)), None
        if step.chunks or decoding.has_drafts:
            ends = np.cumsum(query_lens)
            positions = np.arange(len(input_ids)) + np.repeat(context_lens - ends, query_lens)
            token_rows = np.repeat(rows, query_lens)
            counts = step.sample_counts
            sample_places = np.arange(step.num_samples) + np.repeat(ends - np.cumsum(counts), counts)
            has_targets = [False] * len(decoding.rows) + [bool(chunk.prompt_targets) for chunk in step.chunks]
            lens = np.where(has_targets, query_lens, counts)
            last_lens = None if np.array_equal(lens, query_lens) else lens
        blocks, offsets = np.divmod(positions, self._block_size)
        num_columns = -(-int(context_lens.max()) // self._block_size)
        slots = [own[token_rows, blocks] * self._block_size + offsets for own in self.tables]
        tables = [own[rows, :num_columns] for own in self.tables]
        batch = HostBatch(input_ids, positions, slots[0], tables[0], query_lens, context_lens, last_lens)
        if len(tables) > 1:
            batch = replace(batch, more_slots=np.stack(slots[1:]), more_tables=np.stack(tables[1:]))
        return StepBatch(batch, token_rows, num_decoding, sample_places)


def wants_prompt_logprobs(step: StepInput) -> bool:
    """Whether log-probabilities of prompt tokens are asked for."""
    return any(chunk.prompt_targets for chunk in step.chunks)


def prompt_logprobs(step: StepInput, batch: StepBatch) -> Iterator[tuple[int, IntArray, Sequence[int], int]]:
    """Prompt tokens whose log-probabilities are wanted, some at a time: the row's index in the step, the places in the
    batch whose logits predict them, the tokens, and how many of the most likely tokens are wanted, too."""
    firsts = np.cumsum(batch.tokens.query_lens) - batch.tokens.query_lens
    for index, chunk in enumerate(step.chunks, start=len(step.decoding.rows)):
        for start in range(0, len(chunk.prompt_targets), PROMPT_LOGITS_AT_ONCE):
            targets = chunk.prompt_targets[start : start + PROMPT_LOGITS_AT_ONCE]
            yield index, firsts[index] + start + np.arange(len(targets)), targets, chunk.num_prompt_logprobs


def make_output(
    step: StepInput,
    token_ids: Sequence[int],
    logprobs: Mapping[int, TokenLogprobs],
    errors: Mapping[int, Exception],
    prompt_logprobs: dict[int, list[TokenLogprobs]],
) -> StepOutput:
    """The output of the tokens drawn; `logprobs` and `errors` are by the index of the sample."""
    if step.num_samples == 0:
        return StepOutput((), [0] * step.num_rows, prompt_logprobs=prompt_logprobs)
    if step.num_samples == step.num_rows and not step.decoding.has_drafts:
        by_row = {index: [entry] for index, entry in logprobs.items()}
        return StepOutput(token_ids, None, by_row, prompt_logprobs, dict(errors))
    gained = step.accept(token_ids)
    counts = step.sample_counts
    firsts = np.cumsum(counts) - counts
    rows = np.repeat(np.arange(len(counts)), counts)  # by sample
    row_logprobs: dict[int, list[TokenLogprobs]] = {}
    row_errors: dict[int, Exception] = {}
    for index in sorted({int(rows[sample]) for sample in (*logprobs, *errors)}):
        samples = range(int(firsts[index]), int(firsts[index]) + len(gained[index]))
        if samples.start in logprobs:
            row_logprobs[index] = [logprobs[sample] for sample in samples]
        if error := next((errors[sample] for sample in samples if sample in errors), None):
            row_errors[index] = error
    output = StepOutput.of(gained)
    return StepOutput(output.token_ids, output.counts, row_logprobs, prompt_logprobs, row_errors)
