"""Random histories of sequences over groups of layers with and without windows: who holds what, what is found."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infinilm.cache.specs import blocks_per_row
from infinilm.engine.block_manager import BlockManager
from infinilm.engine.sequence import Sequence
from infinilm.sampling_params import SamplingParams

BLOCK_SIZE, NUM_BLOCKS, MAX_SEQS = 2, 26, 3
GROUPS = [[None], [4], [None, 3], [1, None, 6], [2, 9]]


@dataclass
class Memory:
    """What a device would hold: by group and block, the text up to each of the block's tokens."""

    groups: list[dict[int, list[tuple[int, ...]]]] = field(default_factory=list)


class Histories(RuleBasedStateMachine):
    """Sequences start, compute, share, grow and end. What they see must always be their own text."""

    @initialize(windows=st.sampled_from(GROUPS))
    def begin(self, windows: list[int | None]) -> None:
        self.blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE, windows=windows)
        self.memory = Memory([{} for _ in windows])
        self.live: list[Sequence] = []
        self.count = 0

    @precondition(lambda self: len(self.live) < MAX_SEQS)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24), chunk=st.integers(1, 9))
    def start(self, tokens: list[int], chunk: int) -> None:
        seq = Sequence(self.count, tokens, SamplingParams())
        self.count += 1
        prefix = self.blocks.find_prefix(seq)
        self.check_found(seq, prefix)
        if not self.blocks.can_start(seq, prefix, chunk, 0, self.live):
            return
        self.blocks.start(seq, prefix, chunk)
        seq.row, seq.num_computed = seq.arrival, len(prefix[0]) * BLOCK_SIZE
        self.live.append(seq)
        self.check_sees_own_text(seq)

    def check_found(self, seq: Sequence, prefix: list[list[int]]) -> None:
        """The prefix is the longest of which every group has what the next token sees."""
        longest = (seq.num_tokens - 1) // BLOCK_SIZE
        lengths = []
        for count in range(longest + 1):
            lengths += [count] if all(self.has_all(seq, group, count) for group in range(len(prefix))) else []
        assert {len(table) for table in prefix} == {max(lengths)}

    def has_all(self, seq: Sequence, group: int, count: int) -> bool:
        pool = self.blocks.pools[group]
        keys = [seq.block_key(index, BLOCK_SIZE) for index in range(count)]
        window = pool.window or count * BLOCK_SIZE + 1
        return all(
            pool.find([key])
            for index, key in enumerate(keys)
            if (index + 1) * BLOCK_SIZE > count * BLOCK_SIZE - window + 1
        )

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_tokens=st.integers(1, 9))
    def compute(self, data: st.DataObject, num_tokens: int) -> None:
        """Compute a chunk of known tokens; if there are none, append one and grow."""
        seq = data.draw(st.sampled_from(self.live))
        if seq.num_computed == seq.num_tokens:
            seq.token_ids.append(data.draw(st.integers(0, 1)))
            if seq.num_tokens > self.blocks.capacity(seq):
                if not self.blocks.can_grow(1):
                    seq.token_ids.pop()
                    return
                self.blocks.grow(seq, 1)
        start, wanted = seq.num_computed, min(seq.num_tokens, seq.num_computed + num_tokens)
        self.blocks.extend(seq, wanted)
        end = min(wanted, self.blocks.capacity(seq))
        for group, table in enumerate(seq.block_tables):
            for position in range(start, end):
                held = self.memory.groups[group].setdefault(table[position // BLOCK_SIZE], [()] * BLOCK_SIZE)
                held[position % BLOCK_SIZE] = tuple(seq.token_ids[: position + 1])
        seq.num_computed = end
        self.check_sees_own_text(seq)
        self.blocks.commit(seq, start, end)
        self.check_sees_own_text(seq)
        for group, pool in enumerate(self.blocks.pools):
            if pool.window is not None and end > start:
                num_held = len(seq.block_tables[group]) - seq.num_released[group]
                num_ahead = len(seq.block_tables[group]) - end // BLOCK_SIZE
                assert num_held <= blocks_per_row(pool.window, BLOCK_SIZE) - 3 + num_ahead

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.live))
        self.live.remove(seq)
        self.blocks.release(seq)
        seq.row = None

    @precondition(lambda self: 0 < len(self.live) < MAX_SEQS)
    @rule(data=st.data())
    def follow(self, data: st.DataObject) -> None:
        """Start another answer to a running sequence's prompt."""
        leader = data.draw(st.sampled_from(self.live))
        tokens = leader.token_ids[: leader.num_prompt_tokens]
        seq = Sequence(self.count, tokens, SamplingParams(), leader=leader)
        self.count += 1
        prefix = self.blocks.shared_prefix(seq)
        if not self.blocks.can_start(seq, prefix, 4, 0, self.live):
            return
        self.blocks.start(seq, prefix, 4)
        seq.row, seq.num_computed = seq.arrival, len(prefix[0]) * BLOCK_SIZE
        self.live.append(seq)
        self.check_sees_own_text(seq)

    def check_sees_own_text(self, seq: Sequence) -> None:
        """All that the next token sees of the computed text is the sequence's own, and held by it."""
        for group, pool in enumerate(self.blocks.pools):
            first = max(seq.num_computed - pool.window + 1, 0) if pool.window else 0
            for position in range(first, seq.num_computed):
                index, offset = divmod(position, BLOCK_SIZE)
                assert index >= seq.num_released[group]
                block = seq.block_tables[group][index]
                assert self.memory.groups[group][block][offset] == tuple(seq.token_ids[: position + 1])

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "blocks"):
            self.blocks.check_integrity(self.live)
            for seq in self.live:
                self.check_sees_own_text(seq)
                assert all(0 <= block < NUM_BLOCKS for table in seq.block_tables for block in table)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
