"""Who holds which KV cache block, and which blocks can be found again by their content. No torch here."""

from collections import OrderedDict
from collections.abc import Iterable

from infinilm.engine.sequence import BlockKey, Sequence


class BlockManager:
    """A pool of blocks with reference counts and a content index.

    A block is in use (count > 0) or free. A free block may keep its content, findable by its key, until it
    is handed out again. The free blocks in the order they are handed out:

        empty ones | cached ones, least recently used first; of one sequence the last block first,
                     so that what remains is always a usable beginning
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._num_refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of: dict[bytes, int] = {}
        self._content_of: dict[int, BlockKey] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached content or not."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks whose content can be found again, in use or free."""
        return len(self._block_of)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, seq: Sequence) -> list[int]:
        """The cached blocks of the longest known beginning of `seq`.

        The block of the last token is never among them: there must be a token to compute the next from.
        """
        found: list[int] = []
        if not self.enable_prefix_caching or not seq.may_reuse_prefix:
            return found
        for index in range((seq.num_tokens - 1) // self.block_size):
            key = seq.block_key(index, self.block_size)
            block = self._block_of.get(key[0])
            # A hash says "probably"; the tokens say "surely".
            if block is None or self._content_of[block] != key:
                break
            found.append(block)
        return found

    def num_free_beside(self, blocks: Iterable[int]) -> int:
        """Free blocks that remain if `blocks` are taken."""
        return len(self._free) - sum(self._num_refs[block] == 0 for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold blocks that exist already: found by prefix, or shared by another sequence."""
        for block in blocks:
            if self._num_refs[block] == 0:
                del self._free[block]
            self._num_refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hold `count` free blocks, forgetting the content of the least recently used."""
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            if key := self._content_of.pop(block, None):
                del self._block_of[key[0]]
            self._num_refs[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Give up a hold on each of a sequence's blocks."""
        for block in reversed(blocks):
            self._num_refs[block] -= 1
            assert self._num_refs[block] >= 0, f"block {block} was released twice"
            if self._num_refs[block] == 0:
                self._free[block] = None
                if block not in self._content_of:
                    self._free.move_to_end(block, last=False)

    def publish(self, seq: Sequence, start: int, end: int) -> None:
        """Make the blocks findable that became full when tokens `start` to `end` were computed."""
        if not self.enable_prefix_caching:
            return
        for index in range(start // self.block_size, end // self.block_size):
            key = seq.block_key(index, self.block_size)
            if key[0] not in self._block_of:
                block = seq.block_table[index]
                self._block_of[key[0]] = block
                self._content_of[block] = key

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Assert that the counts are those of the live sequences' tables, and that nothing is lost."""
        held = [0] * self.num_blocks
        for seq in live:
            for block in seq.block_table:
                held[block] += 1
        assert held == self._num_refs, "reference counts differ from the block tables"
        assert set(self._free) == {b for b in range(self.num_blocks) if not held[b]}, "free list is wrong"
        assert {key[0]: block for block, key in self._content_of.items()} == self._block_of, "index is wrong"
