"""What random histories can't reach: hash collisions, and the order in which blocks are forgotten."""

import pytest

from infinilm.engine import sequence
from infinilm.engine.block_manager import BlockManager
from infinilm.engine.sequence import Sequence
from infinilm.sampling_params import SamplingParams


def make_sequence(tokens: list[int]) -> Sequence:
    return Sequence(0, tokens, SamplingParams())


def compute(blocks: BlockManager, tokens: list[int]) -> Sequence:
    """A sequence whose blocks are all computed and findable."""
    seq = make_sequence(tokens)
    blocks.start(seq, [[]], len(tokens))
    blocks.publish(seq, 0, len(tokens))
    return seq


def test_a_hash_collision_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "hash_of", lambda data: b"same")
    blocks = BlockManager(8, 2)
    compute(blocks, [1, 2, 3, 4, 5])
    assert blocks.find_prefix(make_sequence([1, 2, 3, 4, 9])) == [[0, 1]]
    assert blocks.find_prefix(make_sequence([1, 2, 5, 6, 9])) == [[0]]
    assert blocks.find_prefix(make_sequence([5, 6, 3, 4, 9])) == [[]]


def test_keys_are_the_same_in_whatever_order_they_are_asked_for() -> None:
    """They are made several at a time, while the text grows."""
    tokens = list(range(1, 24))
    at_once = make_sequence(tokens)
    at_once.block_key(10, 2)
    growing = make_sequence(tokens[:7])
    growing.block_key(0, 2)
    growing.block_key(1, 2)
    growing.token_ids += tokens[7:]
    keys = [growing.block_key(index, 2) for index in range(11)]
    assert keys == [at_once.block_key(index, 2) for index in range(11)]
    assert len(set(keys)) == 11
    assert [sequence.hash_of(key) for key in keys] == sequence.block_hashes(tokens, b"", 2)


def test_a_block_is_found_only_behind_its_own_beginning() -> None:
    blocks = BlockManager(8, 2)
    compute(blocks, [1, 1, 7, 7])
    compute(blocks, [2, 2, 9, 9])
    assert blocks.find_prefix(make_sequence([1, 1, 7, 7, 5])) == [[0, 1]]
    assert blocks.find_prefix(make_sequence([2, 2, 7, 7, 5])) == [[2]]
    assert blocks.find_prefix(make_sequence([7, 7, 5])) == [[]]


def test_the_last_tokens_block_is_never_reused_whole() -> None:
    blocks = BlockManager(8, 2)
    compute(blocks, [1, 2, 3, 4])
    assert blocks.find_prefix(make_sequence([1, 2, 3, 4])) == [[0]]
    assert blocks.find_prefix(make_sequence([1, 2, 3, 4, 5])) == [[0, 1]]


def test_forgetting_goes_from_the_least_recently_used_and_from_the_end() -> None:
    blocks = BlockManager(6, 1)
    old, new = compute(blocks, [1, 2]), compute(blocks, [3, 4])
    (old_table,), (new_table,), (pool,) = old.block_tables, new.block_tables, blocks.pools
    blocks.release(old)
    blocks.release(new)
    assert blocks.num_free == 6
    assert pool.allocate(2) == [4, 5], "empty blocks first"
    assert pool.allocate(1) == [old_table[1]], "then the end of the oldest text"
    assert blocks.find_prefix(make_sequence([1, 2, 9])) == [[old_table[0]]], "its beginning is still there"
    pool.hold([old_table[0]])
    assert pool.allocate(2) == [new_table[1], new_table[0]], "a block in use is never handed out"
    assert blocks.num_free == 0
    assert blocks.num_cached == 1


def test_releasing_twice_is_noticed() -> None:
    (pool,) = BlockManager(2, 1).pools
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(table)
