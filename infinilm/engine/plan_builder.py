"""What the scheduler keeps of plans: while it makes one, while it is computed, and when its result is there."""

from dataclasses import dataclass, field
from enum import Enum, auto

from infinilm.engine.plan import Decoding, IntArray, RowChunk, StepPlan
from infinilm.engine.sequence import Sequence
from infinilm.sampling_params import RowStart


@dataclass(frozen=True, slots=True)
class InFlight:
    """A submitted plan and whose rows they are: these may change hands before it is committed."""

    plan: StepPlan
    seqs: list[Sequence]  # by index in the plan
    rows: IntArray  # the same
    row_generations: IntArray  # whose turn it was in each row when planned


@dataclass(frozen=True, slots=True)
class Committed:
    """A plan whose result was taken in."""

    plan: StepPlan
    seqs: list[Sequence]  # by index in the plan
    stale: set[int]
    """Indices of sequences that had ended in the meantime: what the step computed for them means nothing."""


@dataclass(slots=True)
class PlanBuilder:
    """A plan in the making."""

    budget: int
    starts: list[RowStart] = field(default_factory=list)
    decoding: Decoding = field(default_factory=Decoding.none)
    chunks: list[RowChunk] = field(default_factory=list)
    seqs: list[Sequence] = field(default_factory=list)
    new_rows: set[int] = field(default_factory=set)


class Admitted(Enum):
    """What came of trying to start a waiting sequence."""

    STARTED = auto()
    SKIPPED = auto()  # another sequence is computing its prefix
    REFUSED = auto()  # too few blocks or tokens are left


@dataclass(frozen=True, slots=True)
class Decoders:
    """The running sequences that go from token to token, oldest first."""

    seqs: list[Sequence]
    rows: IntArray
