"""`InferEngine`'s caches: changing them while it runs, their edges, and what lies in them."""

import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import save
from engine.infer_cases import assert_greedy, assert_near, expected_logits, reference_of, text
from narrow import present, worker_of

from infinilm.cache import CacheConfig, PagedKVCacheConfig, StaticKVCacheConfig
from infinilm.distributed import DistConfig
from infinilm.engine import InferEngine
from infinilm.errors import EngineError, InvalidTypeError, InvalidValueError

KIND = "bias"
MAX_LEN = 256
TEXT = text(MAX_LEN)
TOKEN_BYTES = 2 * 2 * 4 * 8 * 4
"""Keys and values of 2 layers, 4 kv heads, 8 numbers each, in float32."""


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferEngine]:
    path = save(reference_of(KIND), tmp_path_factory.mktemp(KIND))
    with InferEngine(path, DistConfig(request.param), "cpu") as engine:
        yield engine


def check(engine: InferEngine, start: int, end: int, **fields: object) -> None:
    """Compute tokens `start` to `end` of a text whose beginning is in the cache."""
    output = engine(input_ids=[TEXT[start:end]], cache_lengths=[start], return_logits=True, **fields)
    assert_near(present(output.logits)[0], expected_logits(KIND, TEXT)[start:end])


# --- changing the cache ---

CHANGES: list[tuple[CacheConfig | None, CacheConfig]] = [
    (StaticKVCacheConfig(2, 40), StaticKVCacheConfig(2, 40)),
    (PagedKVCacheConfig(10, 16), PagedKVCacheConfig(10, 16)),
    (PagedKVCacheConfig(3, 64), PagedKVCacheConfig(3, 64)),
    (StaticKVCacheConfig(3), StaticKVCacheConfig(3, MAX_LEN)),
    (None, StaticKVCacheConfig(1, MAX_LEN)),
    (PagedKVCacheConfig(6, 16, dtype="float16"), PagedKVCacheConfig(6, 16, dtype="float16")),
    (PagedKVCacheConfig(40, 16), PagedKVCacheConfig(40, 16)),
    (StaticKVCacheConfig(1, 37), StaticKVCacheConfig(1, 37)),
]


def test_caches_of_all_kinds_and_sizes_one_after_the_other(engine: InferEngine) -> None:
    for given, in_force in CHANGES:
        engine.reset_cache(given)
        assert engine.get_cache_config() == in_force
        assert engine.get_cache_config() is not engine.get_cache_config()
        halves = isinstance(given, PagedKVCacheConfig) and given.dtype == "float16"
        start, rest = (
            present(engine(input_ids=[text(37)[a:b]], cache_lengths=[a], return_logits=True).logits)[0]
            for a, b in ((0, 20), (20, 37))
        )
        error = (torch.cat([start, rest]) - expected_logits(KIND, text(37))).abs().max()
        assert 1e-5 < error < 2e-2 if halves else error < 1e-4


@pytest.mark.parametrize(("dtype", "size"), [(None, 4), ("float32", 4), ("bfloat16", 2)])
def test_sizes_in_bytes_count_what_a_rank_keeps(engine: InferEngine, dtype: str | None, size: int) -> None:
    block_bytes = 16 * TOKEN_BYTES * size // 4 // engine.get_dist_config().tp_size
    engine.reset_cache(PagedKVCacheConfig(max_kv_memory_bytes=5 * block_bytes + 1, dtype=dtype))
    assert engine.get_cache_config() == PagedKVCacheConfig(5, dtype=dtype)
    cache = worker_of(engine._executor).cache
    assert cache is not None
    assert sum(cache.layers[layer].nbytes for layer in range(2)) == 5 * block_bytes


def test_a_cache_of_all_free_memory_is_no_larger_the_second_time(engine: InferEngine) -> None:
    sizes = []
    for _ in range(3):
        engine.reset_cache(PagedKVCacheConfig())
        config = engine.get_cache_config()
        assert isinstance(config, PagedKVCacheConfig)
        sizes.append(present(config.num_blocks))
    assert max(sizes) < 1.5 * min(sizes)  # others may take or free some in between
    check(engine, 0, 20)


def test_memory_is_used_again_where_it_suffices_and_is_empty(engine: InferEngine) -> None:
    def layer() -> torch.Tensor:
        cache = worker_of(engine._executor).cache
        assert cache is not None
        return cache.layers[0]

    engine.reset_cache(PagedKVCacheConfig(16))
    memory = layer().data_ptr()
    for config in (
        PagedKVCacheConfig(16),
        StaticKVCacheConfig(2, 128),
        PagedKVCacheConfig(4, 16, dtype="float16"),
        StaticKVCacheConfig(1, 250),
        PagedKVCacheConfig(4, 64),
    ):
        engine.reset_cache(config)
        assert layer().data_ptr() == memory
        assert not layer().any()
        engine(input_ids=[text(17)])
        assert layer().any()


def test_a_cache_that_is_refused_leaves_the_old_one_and_its_contents(engine: InferEngine) -> None:
    engine.reset_cache(StaticKVCacheConfig(2, 64))
    check(engine, 0, 20)
    refused: list[tuple[object, type[Exception], str]] = [
        (StaticKVCacheConfig(10**9, 64), InvalidValueError, r"max_batch_size=1000000000.*GiB are free.*smaller cache"),
        (PagedKVCacheConfig(10**12), InvalidValueError, r"num_blocks=1000000000000.*GiB are free"),
        (PagedKVCacheConfig(max_kv_memory_bytes=10**15), InvalidValueError, "are free for it"),
        (PagedKVCacheConfig(max_kv_memory_bytes=1), InvalidValueError, "max_kv_memory_bytes is .*1 bytes"),
        (StaticKVCacheConfig(1, MAX_LEN + 1), InvalidValueError, "max_cache_len=257 is more than the 256 tokens"),
        ("paged", InvalidTypeError, "cache_config='paged' must be a CacheConfig"),
        (PagedKVCacheConfig, InvalidTypeError, "must be a CacheConfig"),
    ]
    for config, error, message in refused:
        with pytest.raises(error, match=message):
            engine.reset_cache(config)  # type: ignore[arg-type]
        assert engine.get_cache_config() == StaticKVCacheConfig(2, 64)
    for cached in range(20, 30):
        check(engine, cached, cached + 1)


def test_a_rank_without_memory_is_reported_and_the_engine_works_on(tmp_path: Path) -> None:
    path = save(reference_of(KIND), tmp_path)
    others = children()
    with InferEngine(path, DistConfig(2), "cpu", PagedKVCacheConfig(4)) as engine:
        (rank1,) = children() - others
        num_bytes = int(Path(f"/proc/{rank1}/statm").read_text().split()[0]) * resource.getpagesize()
        limits = resource.prlimit(rank1, resource.RLIMIT_AS, (num_bytes + (100 << 20), resource.RLIM_INFINITY))
        large = PagedKVCacheConfig(max_kv_memory_bytes=1 << 30)
        with pytest.raises(EngineError, match=r"cpu has no 1\.00 GiB for a KV cache: .*; ask for a smaller one"):
            engine.reset_cache(large)
        assert engine.get_cache_config() is None
        assert_near(engine(input_ids=TEXT, return_logits=True).logits, expected_logits(KIND, TEXT))
        with pytest.raises(InvalidValueError, match="no cache is configured"):
            check(engine, 20, 21)
        resource.prlimit(rank1, resource.RLIMIT_AS, limits)
        engine.reset_cache(large)
        check(engine, 0, 20)
        check(engine, 20, 40)


def children() -> set[int]:
    """The processes that this one started."""
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


# --- long runs and edges ---


def test_rows_of_different_lengths_decode_side_by_side(engine: InferEngine) -> None:
    engine.reset_cache(StaticKVCacheConfig(4, 100))
    lengths = np.array([3, 16, 31, 47])
    prompts = [text(int(length)) for length in lengths]
    ids = np.zeros((4, 47), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    drawn = [engine(input_ids=ids, input_lengths=lengths, temperature=0).output_ids]
    for _ in range(50):
        drawn.append(engine(input_ids=drawn[-1][:, None], cache_lengths=lengths, temperature=0).output_ids)
        lengths = lengths + 1
    for row, answer in enumerate(torch.stack(drawn, dim=1).tolist()):
        assert_greedy(KIND, prompts[row], answer)


def test_a_row_begins_anew_while_another_goes_on(engine: InferEngine) -> None:
    engine.reset_cache(StaticKVCacheConfig(2, 64))
    first, second, third = text(40), text(50), text(12)
    engine(input_ids=[first, second[:40]])
    ids = np.zeros((2, 12), dtype=np.int64)
    ids[0], ids[1, :10] = third, second[40:]
    output = engine(input_ids=ids, cache_lengths=[0, 40], input_lengths=[12, 50], return_logits=True)
    assert_near(present(output.logits)[0], expected_logits(KIND, third))
    assert_near(present(output.logits)[1, :10], expected_logits(KIND, second)[40:])


@pytest.mark.parametrize("config", [StaticKVCacheConfig(2), PagedKVCacheConfig(16, 16), PagedKVCacheConfig(2, 256)])
def test_a_text_may_be_as_long_as_the_model_takes(engine: InferEngine, config: CacheConfig) -> None:
    engine.reset_cache(config)
    check(engine, 0, MAX_LEN)
    engine.reset_cache(config)
    check(engine, 0, MAX_LEN - 1)
    check(engine, MAX_LEN - 1, MAX_LEN)
    with pytest.raises(InvalidValueError, match=r"request 0 has 257 tokens.*the model takes 256; give fewer"):
        engine(input_ids=[[1]], cache_lengths=[MAX_LEN])
    check(engine, MAX_LEN - 1, MAX_LEN)


def test_a_row_may_be_as_long_as_the_cache_was_made(engine: InferEngine) -> None:
    engine.reset_cache(StaticKVCacheConfig(1, 20))  # which leaves 12 unused in its second block
    check(engine, 0, 19)
    check(engine, 19, 20)
    with pytest.raises(InvalidValueError, match=r"request 0 has 21 tokens.*max_cache_len = 20"):
        engine(input_ids=[[1]], cache_lengths=[20])
    check(engine, 19, 20)


@pytest.mark.parametrize("config", [StaticKVCacheConfig(1, 64), PagedKVCacheConfig(4, 16)])
@pytest.mark.parametrize("cached", [1, 15, 16, 17, 31, 32, 33])
def test_block_boundaries(engine: InferEngine, config: CacheConfig, cached: int) -> None:
    engine.reset_cache(config)
    check(engine, 0, cached)
    check(engine, cached, cached + 1)
    check(engine, cached + 1, 50)


# --- what the caller decides ---


def test_tokens_that_are_not_to_be_written_are_not(engine: InferEngine) -> None:
    engine.reset_cache(PagedKVCacheConfig(6))
    table = [[4, 1, 3]]
    check(engine, 0, 40, block_tables=table)
    # Computed once more, from what is there, and without writing it again.
    check(engine, 30, 40, block_tables=table, slot_mapping=[-1] * 10)
    # Another text in the same blocks would overwrite them.
    engine(input_ids=[text(38)], block_tables=table, slot_mapping=np.full(38, -5))
    check(engine, 39, 40, block_tables=table)
    engine(input_ids=[text(38)], block_tables=table)
    with pytest.raises(AssertionError, match="not close"):
        check(engine, 39, 40, block_tables=table)


def test_requests_may_share_blocks_of_a_common_prefix(engine: InferEngine) -> None:
    engine.reset_cache(PagedKVCacheConfig(8))
    prefix, first, second = text(32), text(5), text(7)
    engine(input_ids=prefix, block_tables=[[6, 2]])
    output = engine(
        input_ids=[*first, *second],
        input_offsets=[0, 5],
        cache_lengths=[32, 32],
        block_tables=[[6, 2, 0], [6, 2, 5]],
        return_logits=True,
    )
    expected = [expected_logits(KIND, (*prefix, *rest))[32:] for rest in (first, second)]
    assert_near(output.logits, torch.cat(expected))


@pytest.mark.parametrize("config", [StaticKVCacheConfig(2, 64), PagedKVCacheConfig(8)])
def test_positions_turn_queries_and_keys_and_nothing_else(engine: InferEngine, config: CacheConfig) -> None:
    """Rotary embedding knows differences only: the same text further on is the same, a stretched one is not."""
    engine.reset_cache(config)
    rows = [text(30), text(31)[1:]]
    plain = present(engine(input_ids=rows, return_logits=True).logits)
    places = np.arange(30)
    for positions in (places + 90, [places + 90], [places + 7, places + 226]):
        assert_near(engine(input_ids=rows, position_ids=positions, return_logits=True).logits, plain)
    stretched = present(engine(input_ids=rows, position_ids=2 * places, return_logits=True).logits)
    assert (stretched - plain).abs().max() > 0.1
    decoded = [[1], [2]]
    here = present(engine(input_ids=rows, position_ids=places, return_logits=True).logits)
    assert here.equal(plain)
    expected = present(engine(input_ids=decoded, cache_lengths=[30, 30], return_logits=True).logits)
    explicit = present(engine(input_ids=decoded, cache_lengths=[30, 30], position_ids=[30], return_logits=True).logits)
    assert explicit.equal(expected)
