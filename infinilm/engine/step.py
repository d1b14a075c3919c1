"""One step from `Scheduler.schedule` to `Scheduler.commit`."""

from dataclasses import dataclass, field
from enum import Enum, auto

from infinilm.engine.block_manager import BlockUpdate
from infinilm.engine.sequence import Sequence
from infinilm.executor.executor import StepHandle
from infinilm.executor.step_io import DecodeRows, IntArray, RowChunk, StepInput
from infinilm.sampling_params import RowStart


@dataclass(slots=True)
class Step:
    """What a step computes, and for which sequences. A row may get another sequence before the commit."""

    input: StepInput
    seqs: list[Sequence]  # by index in the step
    rows: IntArray  # [num_rows]
    row_generations: IntArray  # [num_rows], as they were when the step was planned
    handle: StepHandle | None = None  # set when it is submitted
    stale: set[int] = field(default_factory=set)
    """After the commit: indices of sequences that ended before it. The step's output for them is meaningless."""


@dataclass(slots=True)
class StepBuilder:
    """A step that is being planned."""

    budget: int
    starts: list[RowStart] = field(default_factory=list)
    decoding: DecodeRows = field(default_factory=DecodeRows.none)
    chunks: list[RowChunk] = field(default_factory=list)
    seqs: list[Sequence] = field(default_factory=list)
    new_blocks: list[tuple[int, BlockUpdate]] = field(default_factory=list)
    """Rows, and the changes of their block tables."""
    lacks_blocks: bool = False
    """Whether a prompt got fewer tokens than the budget allows, because blocks ran out."""


class Admitted(Enum):
    """The result of trying to start a waiting sequence."""

    STARTED = auto()
    SKIPPED = auto()  # another sequence is computing its prefix
    REFUSED = auto()  # too few blocks or tokens are left


@dataclass(frozen=True, slots=True)
class Decoders:
    """The decoding sequences, longest texts first, because their attention takes longest."""

    seqs: list[Sequence]
    rows: IntArray
