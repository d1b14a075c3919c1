"""Tracks which sequence holds which KV cache block, and finds blocks by their content. Needs no torch."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from itertools import repeat

from infinilm.cache.specs import blocks_per_row
from infinilm.engine.sequence import BlockKey, Sequence, hash_of

BlockUpdate = tuple[int, int, list[int]]
"""A change of a sequence's block tables: the group of layers, the first changed entry, and the blocks from it on."""


class BlockPool:
    """The blocks of one group of layers, with reference counts and a content index.

    A block is in use (count > 0) or free. A free block may keep its content, findable by its key, until it
    is handed out again. Free blocks are handed out in this order:

        empty ones | cached ones, least recently used first; within a sequence the last block first,
                     so that the remaining blocks are always a usable prefix
    """

    def __init__(self, num_blocks: int, block_size: int, window: int | None) -> None:
        self.num_blocks = num_blocks
        self.window = window
        self.blocks_per_row = num_blocks if window is None else blocks_per_row(window, block_size)
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.key_of: dict[int, BlockKey] = {}
        self._block_size = block_size
        self._num_refs = [0] * num_blocks
        self._block_of: dict[BlockKey, int] = {}
        self.changes: dict[bytes, bool] | None = None
        """If not None: the hashes that became findable (True) or were evicted (False). The reader empties it."""

    @property
    def num_cached(self) -> int:
        """Blocks whose content can be found again, in use or free."""
        return len(self._block_of)

    def first_seen(self, position: int) -> int:
        """The index of the first block that the token at `position`, or any later one, sees."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // self._block_size

    def find(self, keys: Iterable[BlockKey]) -> list[int]:
        """The blocks with these contents, up to the first that is missing."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_beside(self, blocks: Iterable[int]) -> int:
        """Free blocks that remain if `blocks` are held."""
        num_refs = self._num_refs
        return len(self.free) - [num_refs[block] for block in blocks].count(0)

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold blocks that exist already: found by prefix, or shared by another sequence."""
        num_refs = self._num_refs
        for block in blocks:
            if num_refs[block] == 0:
                del self.free[block]
            num_refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hold `count` free blocks. Evicts cached content, least recently used first."""
        blocks = []
        for _ in range(count):
            block, _ = self.free.popitem(last=False)
            if key := self.key_of.pop(block, None):
                del self._block_of[key]
                if self.changes is not None:
                    self.changes[hash_of(key)] = False
            self._num_refs[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: List[int]) -> None:
        """Give up a hold on each of a sequence's blocks."""
        num_refs = self._num_refs
        for block in reversed(blocks):
            num_left = num_refs[block] = num_refs[block] - 1
            assert num_left >= 0, f"block {block} was released twice"
            if num_left == 0:
                self.free[block] = None
                if block not in self.key_of:
                    self.free.move_to_end(block, last=False)

    def publish(self, key: BlockKey, block: int) -> None:
        """Make a full block findable."""
        if key not in self._block_of:
            self._block_of[key] = block
            self.key_of[block] = key
            if self.changes is not None:
                self.changes[hash_of(key)] = True

    def check_integrity(self, held_blocks: Iterable[List[int]]) -> None:
        """Assert that the reference counts match the live sequences' tables and that no block is lost."""
        held = [0] * self.num_blocks
        for blocks in held_blocks:
            for block in blocks:
                held[block] += 1
        assert held == self._num_refs, "reference counts differ from the block tables"
        assert set(self.free) == {b for b in range(self.num_blocks) if not held[b]}, "free list is wrong"
        assert {key: block for block, key in self.key_of.items()} == self._block_of, "index is wrong"


class BlockManager:
    """The pools of all groups of layers, and each sequence's block tables in them.

    All tables of a sequence have one entry per `block_size` tokens. A group without a window holds blocks for the whole
    known text from the start. A group with a window gets blocks as tokens are planned, and releases blocks that no
    later token can see. The sequence holds the table's entries from `seq.num_released[group]` on. Earlier entries have
    no meaning but must be valid block numbers: where a tile begins before the window, a kernel loads such a block and
    masks it.
    """

    def __init__(
        self,
        num_blocks: int | List[int],
        block_size: int,
        *,
        windows: List[int | None] = (None,),
        enable_prefix_caching: bool = True,
    ) -> None:
        """`windows` and `num_blocks` have one entry per group; `num_blocks` may be one number for all."""
        counts = [num_blocks] * len(windows) if isinstance(num_blocks, int) else num_blocks
        self.pools = [BlockPool(count, block_size, window) for count, window in zip(counts, windows, strict=True)]
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_blocks = sum(counts)
        self._windowed = [(group, pool) for group, pool in enumerate(self.pools) if pool.window is not None]

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached content or not, over all groups."""
        return sum(len(pool.free) for pool in self.pools)

    @property
    def num_cached(self) -> int:
        """Blocks whose content can be found again, in use or free, over all groups."""
        return sum(pool.num_cached for pool in self.pools)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def watch(self) -> dict[bytes, bool]:
        """Start to record changes of the prefix cache, in a dict that the reader empties (see `BlockPool.changes`).

        Covers only the first group without a window, or else the first group. This is an estimate, for routing.
        """
        pool = next((pool for pool in self.pools if pool.window is None), self.pools[0])
        pool.changes = {}
        return pool.changes

    # --- prefixes ---------------------------------------------------------------------------------------

    def find_prefix(self, seq: Sequence) -> list[list[int]]:
        """The cached blocks of the longest cached prefix of `seq`: one list per group, all of the same length.

        A group with a window needs only the blocks that the next token sees; earlier entries are 0. The block of the
        last token is never included: at least one token must be computed to draw the next.
        """
        if not self.enable_prefix_caching or not seq.may_reuse_prefix:
            return [[] for _ in self.pools]
        count = (seq.num_tokens - 1) // self.block_size
        found: list[list[int]] = [[] for _ in self.pools]
        for group, pool in enumerate(self.pools):
            if pool.window is None:
                found[group] = pool.find(self._keys(seq, range(count)))
                count = len(found[group])
        is_complete = False
        while not is_complete:
            is_complete = True
            for group, pool in self._windowed:
                # Search backwards: any shorter prefix that contains the missing block needs it, too.
                first = pool.first_seen(count * self.block_size)
                blocks = pool.find(self._keys(seq, range(count - 1, first - 1, -1)))
                found[group] = [0] * first + blocks[::-1]
                if num_missing := count - first - len(blocks):
                    count, is_complete = first + num_missing - 1, False
        return [blocks[:count] for blocks in found]

    def _keys(self, seq: Sequence, indices: range) -> Iterator[BlockKey]:
        return map(seq.block_key, indices, repeat(self.block_size))

    def shared_prefix(self, seq: Sequence) -> list[list[int]]:
        """By group: existing blocks that hold a prefix of the sequence, its leader's or cached ones."""
        leader = seq.leader
        if leader is not None and leader.row is not None:
            count = min(leader.num_computed, seq.num_prompt_tokens - 1) // self.block_size
            num_released = (pool.first_seen(count * self.block_size) for pool in self.pools)
            if all(map(int.__le__, leader.num_released, num_released)):
                return [table[:count] for table in leader.block_tables]
        return self.find_prefix(seq)

    def publish(self, seq: Sequence, start: int, end: int) -> None:
        """Make the blocks findable that became full with tokens `start` to `end`."""
        if not self.enable_prefix_caching:
            return
        for index in range(start // self.block_size, end // self.block_size):
            key = seq.block_key(index, self.block_size)
            for pool, table, num_released in zip(self.pools, seq.block_tables, seq.num_released, strict=True):
                if index >= num_released:
                    pool.publish(key, table[index])

    # --- holding and releasing --------------------------------------------------------------------------

    def can_start(
        self, seq: Sequence, prefix: List[List[int]], chunk: int, num_spare: int, prefilling: Iterable[Sequence]
    ) -> bool:
        """Whether every group has enough blocks to start a waiting sequence with a chunk of `chunk` tokens.

        `num_spare` blocks must remain free, and the blocks that `prefilling` sequences still need.
        """
        for group, pool in enumerate(self.pools):
            num_found = len(prefix[group])
            held = prefix[group][pool.first_seen(num_found * self.block_size) :]
            needed = self.blocks_for(seq.num_tokens) - num_found
            if pool.window is not None:
                needed = min(needed, pool.blocks_per_row + self.blocks_for(chunk), pool.num_blocks - len(held))
                needed += sum(self._row_blocks(other, group) - self._num_held(other, group) for other in prefilling)
            if needed + num_spare > pool.num_free_beside(held):
                return False
        return True

    def fits_beside(self, seq: Sequence, older: Sequence, younger: List[Sequence], num_spare: int) -> bool:
        """Whether the pools have room for the waiting `older` together with `seq` and the running `younger` ones."""
        for group, pool in enumerate(self.pools):
            needed = self._row_blocks(older, group) + self._row_blocks(seq, group) + num_spare
            if needed + sum(self._row_blocks(other, group) for other in younger) > pool.num_blocks:
                return False
        return True

    def _num_held(self, seq: Sequence, group: int) -> int:
        return len(seq.block_tables[group]) - seq.num_released[group] if seq.row is not None else 0

    def _row_blocks(self, seq: Sequence, group: int) -> int:
        """The most blocks that a sequence holds at one time until its known text is computed."""
        num_held, pool = self._num_held(seq, group), self.pools[group]
        if pool.window is None and num_held:
            return num_held
        return max(num_held, min(self.blocks_for(seq.num_tokens), pool.blocks_per_row))

    def start(self, seq: Sequence, prefix: List[List[int]], chunk: int) -> list[BlockUpdate]:
        """Hold the blocks of a prefix and new ones for the rest; with a window, only for the next `chunk` tokens."""
        num_tokens = len(prefix[0]) * self.block_size
        seq.num_released = [pool.first_seen(num_tokens) for pool in self.pools]
        seq.block_tables = [list(table) for table in prefix]
        for pool, table, num_released in zip(self.pools, seq.block_tables, seq.num_released, strict=True):
            pool.hold(table[num_released:])
            if pool.window is None:
                table.extend(pool.allocate(self.blocks_for(seq.num_tokens) - len(table)))
        self.extend(seq, min(seq.num_tokens, num_tokens + chunk))
        return [(group, 0, table.copy()) for group, table in enumerate(seq.block_tables)]

    def extend(self, seq: Sequence, end: int) -> list[BlockUpdate]:
        """In groups with a window, hold blocks for the tokens before `end`, or for as many as the free blocks allow."""
        if not self._windowed:
            return []
        num_missing = self.blocks_for(end) - len(seq.block_tables[self._windowed[0][0]])
        count = min(num_missing, *(len(pool.free) for _, pool in self._windowed))
        return [self._append(seq, group, count) for group, _ in self._windowed] if count > 0 else []

    def _append(self, seq: Sequence, group: int, count: int) -> BlockUpdate:
        table, blocks = seq.block_tables[group], self.pools[group].allocate(count)
        table += blocks
        return group, len(table) - count, blocks

    def capacity(self, seq: Sequence) -> int:
        """Tokens that the sequence's tables have blocks for."""
        return min(map(len, seq.block_tables)) * self.block_size

    def can_grow(self, count: int) -> bool:
        """Whether there are `count` free blocks in each group."""
        return all(count <= len(pool.free) for pool in self.pools)

    def grow(self, seq: Sequence, count: int) -> list[BlockUpdate]:
        """Give a sequence `count` more blocks in each group."""
        return [self._append(seq, group, count) for group in range(len(self.pools))]

    def commit(self, seq: Sequence, start: int, end: int) -> None:
        """Publish the blocks that tokens `start` to `end` filled, and release blocks that later tokens don't see.

        Steps in flight begin at `end` or later, so they see none of the released blocks. One extra block is kept,
        because a sequence that shares this one's text up to the last full block sees it.
        """
        if seq.may_publish:
            self.publish(seq, start, end)
        for group, pool in self._windowed:
            first, num_released = pool.first_seen(end) - 1, seq.num_released[group]
            if first > num_released:
                pool.release(seq.block_tables[group][num_released:first])
                seq.num_released[group] = first

    def release(self, seq: Sequence) -> None:
        """Give up all blocks of a sequence."""
        for pool, table, num_released in zip(self.pools, seq.block_tables, seq.num_released, strict=True):
            pool.release(table[num_released:])
        seq.block_tables, seq.num_released = [], []

    def check_integrity(self, live: List[Sequence]) -> None:
        """Assert for every group that reference counts match the live sequences' tables and that no block is lost."""
        for group, pool in enumerate(self.pools):
            pool.check_integrity(seq.block_tables[group][seq.num_released[group] :] for seq in live)
