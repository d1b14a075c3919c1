"""Inputs in every form, and the batches they become."""

from typing import Any

import numpy as np
import pytest
import torch

from infinilm.cache import CacheLayout, CacheLimits, PagedKVCacheConfig, StaticKVCacheConfig, layout_of
from infinilm.errors import InvalidTypeError, InvalidValueError
from infinilm.lowlevel.infer_input import Input
from infinilm.lowlevel.prepare_inputs import PreparedInput, lower

VOCAB, MAX_LEN = 100, 64
LIMITS = CacheLimits(MAX_LEN, lambda dtype: 4, 1 << 20)
STATIC = layout_of(StaticKVCacheConfig(max_batch_size=3, max_cache_len=40), LIMITS)  # 3 blocks a row
PAGED = layout_of(PagedKVCacheConfig(num_blocks=8), LIMITS)
FIELDS = ("input_ids", "positions", "slot_mapping", "block_tables", "query_lens", "context_lens")
LAYOUTS = {"static": STATIC, "paged": PAGED, "none": None}


def run(layout: CacheLayout | None, **fields: Any) -> PreparedInput:
    return lower(Input(**fields), layout, vocab_size=VOCAB, max_len=MAX_LEN)


def batch_of(layout: CacheLayout | None, **fields: Any) -> dict[str, list]:
    """The batch as lists."""
    batch = run(layout, **fields).batch
    arrays = {name: getattr(batch, name) for name in FIELDS}
    assert batch.more_slots is batch.more_tables is None, "all groups of layers use the same tables"
    assert all(array.dtype == np.int64 and array.flags.writeable for array in arrays.values())
    return {name: array.tolist() for name, array in arrays.items()}


def expected(*arrays: list) -> dict[str, list]:
    """Ids, positions, slots, block tables, new tokens and context of each request."""
    return dict(zip(FIELDS, arrays, strict=True))


# --- forms, computed by hand ---

FORMS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "static prefill": (
        "static",
        {"input_ids": [[1, 2, 3], [4, 5, 6]]},
        expected([1, 2, 3, 4, 5, 6], [0, 1, 2] * 2, [0, 1, 2, 48, 49, 50], [[0], [3]], [3, 3], [3, 3]),
    ),
    "static decode, each row at its own length": (
        "static",
        {"input_ids": [[7], [8], [9]], "cache_lengths": [3, 20, 39]},
        expected([7, 8, 9], [3, 20, 39], [3, 68, 135], [[0, -1, -1], [3, 4, -1], [6, 7, 8]], [1, 1, 1], [4, 21, 40]),
    ),
    "static rows padded on the right": (
        "static",
        {"input_ids": [[1, 2, 3], [4, -100, 999]], "input_lengths": [3, 1]},
        expected([1, 2, 3, 4], [0, 1, 2, 0], [0, 1, 2, 48], [[0], [3]], [3, 1], [3, 1]),
    ),
    "static prefill beside decode": (
        "static",
        {"input_ids": [[1, 2, 3], [4, 0, 0]], "input_lengths": [3, 17], "cache_lengths": [0, 16]},
        expected([1, 2, 3, 4], [0, 1, 2, 16], [0, 1, 2, 64], [[0, -1], [3, 4]], [3, 1], [3, 17]),
    ),
    "static, one row without its brackets": (
        "static",
        {"input_ids": [5, 6]},
        expected([5, 6], [0, 1], [0, 1], [[0]], [2], [2]),
    ),
    "static, end to end": (
        "static",
        {"input_ids": [[1, 2, 3]], "input_offsets": [0, 2], "cache_lengths": [0, 5]},
        expected([1, 2, 3], [0, 1, 5], [0, 1, 53], [[0], [3]], [2, 1], [2, 6]),
    ),
    "paged, one request": (
        "paged",
        {"input_ids": [[1, 2]], "block_tables": [[5, -1]]},
        expected([1, 2], [0, 1], [80, 81], [[5]], [2], [2]),
    ),
    "paged, prefill and decode end to end": (
        "paged",
        {
            "input_ids": [[1, 2, 3, 4]],
            "input_offsets": [0, 3, 4],
            "input_lengths": [3, 18],
            "block_tables": [[7, -1], [2, 0]],
        },
        expected([1, 2, 3, 4], [0, 1, 2, 17], [112, 113, 114, 1], [[7, -1], [2, 0]], [3, 1], [3, 18]),
    ),
    "paged, a chunk behind a prefix": (
        "paged",
        {"input_ids": [1, 2, 3], "cache_lengths": [15], "block_tables": [[4, 1, 6]]},
        expected([1, 2, 3], [15, 16, 17], [79, 16, 17], [[4, 1]], [3], [18]),
    ),
    "paged, as many tokens as requests": (
        "paged",
        {"input_ids": [[1, 2]], "cache_lengths": [4, 16], "block_tables": [[1, -1], [3, 2]]},
        expected([1, 2], [4, 16], [20, 32], [[1, -1], [3, 2]], [1, 1], [5, 17]),
    ),
    "paged, rows without tables": (
        "paged",
        {"input_ids": [[1, 2, 3, 4], [5, 6, 7, 8]], "position_ids": [[0, 1, 2, 3], [0, 1, 2, 3]]},
        expected([1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3] * 2, [0, 1, 2, 3, 64, 65, 66, 67], [[0], [4]], [4, 4], [4, 4]),
    ),
    "no cache, rows": (
        "none",
        {"input_ids": [[1, 2], [3, 4]]},
        expected([1, 2, 3, 4], [0, 1, 0, 1], [0, 1, 16, 17], [[0], [1]], [2, 2], [2, 2]),
    ),
    "no cache, end to end": (
        "none",
        {"input_ids": list(range(20)), "input_lengths": [17, 3]},
        expected(
            list(range(20)),
            [*range(17), 0, 1, 2],
            [*range(17), 32, 33, 34],
            [[0, 1], [2, -1]],
            [17, 3],
            [17, 3],
        ),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_batches_written_out_by_hand(name: str) -> None:
    layout, fields, batch = FORMS[name]
    assert batch_of(LAYOUTS[layout], **fields) == batch


# --- the same thing said in other words ---

MIXED = {
    "input_ids": [[1, 2, 3, 4, 5]],
    "input_offsets": [0, 3, 4, 5],
    "input_lengths": [3, 18, 7],
    "cache_lengths": [0, 17, 6],
    "block_tables": [[7, -1], [2, 0], [1, -1]],
    "position_ids": [[0, 1, 2, 17, 6]],
    "slot_mapping": [112, 113, 114, 1, 22],
}


@pytest.mark.parametrize(
    "changes",
    [
        {"input_ids": [1, 2, 3, 4, 5]},
        {"input_offsets": [0, 3, 4]},
        {"input_offsets": None},
        {"cache_lengths": None},
        {"input_lengths": None},
        {"position_ids": None},
        {"position_ids": [0, 1, 2, 17, 6]},
        {"slot_mapping": None},
        {"slot_mapping": [[112, 113, 114, 1, 22]]},
        {"block_tables": [[7, -1, 99], [2, 0, -1], [1, 3, -1]]},
        {"input_offsets": None, "position_ids": None, "slot_mapping": None},
        {"cache_lengths": None, "position_ids": None, "slot_mapping": None},
        {"input_lengths": None, "position_ids": None, "slot_mapping": None},
        {"cache_lengths": None, "past_kv_lengths": [0, 17, 6]},
        {"cache_lengths": None, "past_sequence_lengths": [0, 17, 6]},
        {"input_lengths": None, "total_kv_lengths": [3, 18, 7]},
        {"input_lengths": None, "total_sequence_lengths": [3, 18, 7]},
        {
            "input_ids": [[1, 2, 3], [4, 0, 0], [5, 0, 0]],
            "input_offsets": None,
            "position_ids": [[0, 1, 2], [17, 0, 0], [6, 0, 0]],
        },
        {
            "input_ids": [[1, 2, 3], [4, 0, 0], [5, 0, 0]],
            "input_offsets": [0, 3, 6],
            "position_ids": None,
            "slot_mapping": [[112, 113, 114], [1, -1, -1], [22, 22, 22]],
        },
    ],
    ids=str,
)
def test_defaults_and_explicit_values_agree(changes: dict[str, Any]) -> None:
    assert batch_of(PAGED, **{**MIXED, **changes}) == batch_of(PAGED, **MIXED)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(5))
def test_padded_rows_are_the_same_as_end_to_end(layout: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    new, cached = rng.integers(1, 9, 3), rng.integers(0, 20, 3) * (layout != "none")
    ids = rng.integers(0, VOCAB, (3, 8))
    packed = np.concatenate([row[:n] for row, n in zip(ids, new, strict=True)])
    lengths = {"cache_lengths": cached, "input_lengths": cached + new}
    offsets = np.cumsum([0, *new])
    rows = batch_of(LAYOUTS[layout], input_ids=ids, **lengths)
    assert rows == batch_of(LAYOUTS[layout], input_ids=packed, input_offsets=offsets, **lengths)
    assert rows == batch_of(LAYOUTS[layout], input_ids=packed[None], **lengths)


@pytest.mark.parametrize("lengths", [[9, 20], [2, 20], [2, 4], [4, 4]])
def test_what_a_row_is_too_short_to_bring_is_cached(lengths: list[int]) -> None:
    ids = [[1, 2, 3, 4], [5, 6, 7, 8]]
    cached = [max(n - 4, 0) for n in lengths]
    assert batch_of(STATIC, input_ids=ids, input_lengths=lengths) == batch_of(
        STATIC, input_ids=ids, input_lengths=lengths, cache_lengths=cached
    )


def test_positions_feed_the_rotary_embedding_alone() -> None:
    ids = [[1, 2], [3, 4]]
    plain = batch_of(STATIC, input_ids=ids)
    for given in ([30, 31], [[30, 31]], [[30, 31], [30, 31]]):
        assert batch_of(STATIC, input_ids=ids, position_ids=given) == plain | {"positions": [30, 31, 30, 31]}


def test_negative_slots_are_kept() -> None:
    assert batch_of(PAGED, input_ids=[1, 2, 3], slot_mapping=[-1, 127, -7])["slot_mapping"] == [-1, 127, -7]


def test_a_layout_whose_rows_share_blocks_reads_them_and_writes_its_own() -> None:
    layout = CacheLayout(3, 16, lambda n: np.array([[0, 1], [0, 2]])[:n], takes_tables=False)
    batch = batch_of(layout, input_ids=[[1], [2]], cache_lengths=[16, 16])
    assert batch == expected([1, 2], [16, 16], [16, 32], [[0, 1], [0, 2]], [1, 1], [17, 17])
    with pytest.raises(InvalidValueError, match="slot 0 of the cache would be written by 2 tokens"):
        batch_of(layout, input_ids=[[1], [2]])


def test_no_cache_gets_just_enough_blocks() -> None:
    lowered = run(None, input_ids=list(range(40)), input_offsets=[0, 17, 33])
    assert (lowered.layout.num_blocks, lowered.layout.block_size, lowered.num_requests) == (4, 16, 3)
    assert run(STATIC, input_ids=[1]).layout is STATIC


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.uint32])
def test_every_kind_of_integer_is_taken(dtype: torch.dtype) -> None:
    ids, lengths = [[1, 2], [3, 4]], [0, 1]
    assert batch_of(
        STATIC, input_ids=torch.tensor(ids, dtype=dtype), cache_lengths=torch.tensor(lengths, dtype=dtype)
    ) == batch_of(STATIC, input_ids=ids, cache_lengths=lengths)


def test_ids_are_not_copied_and_fields_are_read_anew() -> None:
    ids, lengths = torch.tensor([[1, 2]]), np.array([3])
    given = Input(input_ids=ids, cache_lengths=lengths)
    batch = lower(given, STATIC, vocab_size=VOCAB, max_len=MAX_LEN).batch
    assert batch.input_ids.ctypes.data == ids.data_ptr()
    lengths[0] = 5
    assert lower(given, STATIC, vocab_size=VOCAB, max_len=MAX_LEN).batch.positions.tolist() == [5, 6]


# --- back into the input's shape ---


@pytest.mark.parametrize(
    ("fields", "result"),
    [
        ({"input_ids": [[1, 2, 3]]}, [[[0, 1], [2, 3], [4, 5]]]),
        ({"input_ids": [1, 2, 3]}, [[0, 1], [2, 3], [4, 5]]),
        ({"input_ids": [1, 2, 3], "input_offsets": [0, 2]}, [[0, 1], [2, 3], [4, 5]]),
        ({"input_ids": [[1, 9], [2, 3]], "input_lengths": [1, 2]}, [[[0, 1], [0, 0]], [[2, 3], [4, 5]]]),
        ({"input_ids": [1, 2, 3, 9, 9], "input_lengths": [3]}, [[0, 1], [2, 3], [4, 5], [0, 0], [0, 0]]),
    ],
)
def test_results_come_back_in_the_shape_of_the_input(fields: dict[str, Any], result: list) -> None:
    results = torch.arange(6).view(3, 2)
    assert run(STATIC, **fields).restore(results).tolist() == result


# --- what is refused ---

TWO = [[1, 2], [3, 4]]
BAD_INPUTS = [
    # input_ids
    ("paged", {}, "input_ids is missing or empty"),
    ("paged", {"input_ids": []}, "input_ids is missing or empty"),
    ("paged", {"input_ids": [[], []]}, "input_ids is missing or empty"),
    ("paged", {"input_ids": [[[1]]]}, r"input_ids of shape \[1, 1, 1\] has 3 dimensions; give 1 or 2"),
    ("paged", {"input_ids": torch.tensor(1)}, "input_ids.*0 dimensions"),
    ("paged", {"input_ids": [[1, 2], [3, 100]]}, "input_ids holds 100 in row 1, column 1.*use 0 to 99"),
    ("static", {"input_ids": [[1, 2], [-3, 4]], "input_lengths": [1, 2]}, "input_ids holds -3 in row 1, column 0"),
    ("static", {"input_ids": [[1]] * 4}, "4 requests.*max_batch_size=3"),
    # who brings how much
    ("static", {"input_ids": TWO, "cache_lengths": [1]}, "input_ids has 2 rows.*of 1 requests"),
    ("paged", {"input_ids": TWO, "block_tables": [[0]] * 3}, "input_ids has 2 rows.*of 3 requests"),
    ("paged", {"input_ids": TWO, "cache_lengths": [1, 1], "input_lengths": [3]}, "cache_lengths of 2, input_lengths"),
    ("static", {"input_ids": TWO, "cache_lengths": [[0, 0]]}, r"cache_lengths of shape \[1, 2\]"),
    ("static", {"input_ids": TWO, "cache_lengths": [0, -1]}, r"cache_lengths\[1\]=-1 must be 0 or more"),
    ("static", {"input_ids": TWO, "cache_lengths": [0, 5], "input_lengths": [2, 5]}, "request 1 brings 0 new.*1 to 2"),
    ("static", {"input_ids": TWO, "cache_lengths": [0, 5], "input_lengths": [3, 6]}, "request 0 brings 3 new.*1 to 2"),
    ("static", {"input_ids": TWO, "input_lengths": [2, 0]}, r"request 1 brings 0 new.*input_lengths\[1\]=0"),
    ("paged", {"input_ids": [1, 2, 3], "cache_lengths": [0, 0]}, "3 tokens of 2 requests.*give input_offsets"),
    ("paged", {"input_ids": [1, 2, 3], "input_lengths": [2, 5]}, r"3 tokens.*\[2, 5\] new ones, 7 in all"),
    (
        "paged",
        {"input_ids": [1, 2, 3], "input_lengths": [9, 0], "cache_lengths": [6, 0]},
        "request 1 brings 0 new tokens",
    ),
    ("paged", {"input_ids": [1, 2, 3], "cache_lengths": [-1], "input_offsets": [0]}, r"cache_lengths\[0\]=-1"),
    (
        "paged",
        {"input_ids": [1, 2, 3], "input_lengths": [1, 1], "input_offsets": [0, 2]},
        r"input_lengths\[0\]=1.* 2 new",
    ),
    (
        "paged",
        {"input_ids": [1, 2, 3], "input_lengths": [2, 5], "cache_lengths": [0, 3], "input_offsets": [0, 2]},
        r"input_lengths\[1\]=5 does not go with cache_lengths\[1\]=3 and the 1 new",
    ),
    # input_offsets
    (
        "paged",
        {"input_ids": [1, 2, 3], "input_offsets": [1, 3]},
        r"input_offsets=\[1, 3\] does not divide 3.*start at 0",
    ),
    ("paged", {"input_ids": [1, 2, 3], "input_offsets": [0, 2, 2]}, r"input_offsets=\[0, 2, 2\]"),
    ("paged", {"input_ids": [1, 2, 3], "input_offsets": [0, 4]}, r"input_offsets=\[0, 4\]"),
    ("paged", {"input_ids": [1, 2, 3], "input_offsets": []}, r"input_offsets=\[\]"),
    (
        "paged",
        {"input_ids": [1, 2, 3], "input_offsets": [0, 2], "cache_lengths": [0]},
        r"input_offsets=\[0, 2\].*end at 3",
    ),
    (
        "paged",
        {"input_ids": [1, 2, 3], "input_offsets": [0], "cache_lengths": [0, 0]},
        "input_offsets has 1 entries for 2",
    ),
    (
        "paged",
        {"input_ids": TWO, "input_offsets": [0, 1]},
        r"input_offsets=\[0, 1\] is not where the 2 rows of 2 tokens",
    ),
    # lengths
    ("paged", {"input_ids": [[1]], "cache_lengths": [64]}, "request 0 has 65 tokens, 64 cached.*the model takes 64"),
    ("paged", {"input_ids": [[1]], "cache_lengths": [2**63 - 1]}, "9223372036854775807 cached.*the model takes 64"),
    ("static", {"input_ids": [[1], [1]], "cache_lengths": [0, 40]}, "request 1 has 41.*max_cache_len = 40"),
    ("none", {"input_ids": TWO, "cache_lengths": [0, 3]}, "3 tokens of request 1.*no cache is configured"),
    ("none", {"input_ids": TWO, "input_lengths": [2, 3]}, "1 tokens of request 1.*no cache is configured"),
    # position_ids
    ("static", {"input_ids": TWO, "position_ids": [0, 1, 2]}, r"position_ids of shape \[3\].*\[2, 2\], or \[2\]"),
    ("static", {"input_ids": TWO, "position_ids": [0, 64]}, "position_ids holds 64; use 0 to 63"),
    ("static", {"input_ids": TWO, "position_ids": [0, -1]}, "position_ids holds -1"),
    # block_tables
    ("static", {"input_ids": TWO, "block_tables": [[0], [1]]}, "block_tables was given, but the rows of this cache"),
    ("none", {"input_ids": TWO, "block_tables": [[0], [1]]}, "block_tables was given, but no cache is configured"),
    ("paged", {"input_ids": [1], "block_tables": [0]}, r"block_tables of shape \[1\] has 1 dimensions; give 2"),
    ("paged", {"input_ids": TWO, "block_tables": [[0], [8]]}, r"block_tables\[1, 0\]=8 is no block.*use 0 to 7"),
    (
        "paged",
        {"input_ids": TWO, "cache_lengths": [0, 15], "block_tables": [[0, -1], [1, -1]]},
        r"block_tables\[1, 1\]=-1.*request 1 needs 2 of them for its 17 tokens",
    ),
    (
        "paged",
        {"input_ids": TWO, "cache_lengths": [0, 15], "block_tables": [[0], [1]]},
        "request 1 needs 2 blocks of 16 for its 17 tokens, but block_tables gives each request 1; add columns",
    ),
    (
        "paged",
        {"input_ids": [[1]] * 5, "cache_lengths": [0, 0, 0, 0, 16]},
        "request 4 needs 2.*the cache gives.*1; give",
    ),
    ("paged", {"input_ids": [[1]] * 9}, "9 requests without block_tables"),
    # slot_mapping
    ("static", {"input_ids": TWO, "slot_mapping": [0, 1, 2, 3]}, "slot_mapping was given, but the rows"),
    ("none", {"input_ids": TWO, "slot_mapping": [0, 1, 2, 3]}, "slot_mapping was given, but no cache"),
    ("paged", {"input_ids": TWO, "slot_mapping": [0, 1]}, r"slot_mapping of shape \[2\].*each of the 4 new tokens"),
    (
        "paged",
        {"input_ids": TWO, "slot_mapping": [0, 1, 2, 128]},
        "slot_mapping holds 128, but the cache has 128 slots",
    ),
    ("paged", {"input_ids": TWO, "slot_mapping": [0, 1, 2, 1]}, "slot 1 of the cache would be written by 2 tokens"),
    ("paged", {"input_ids": TWO, "block_tables": [[3], [3]]}, "slot 48 of the cache would be written by 2 tokens"),
]


@pytest.mark.parametrize(("layout", "fields", "message"), BAD_INPUTS, ids=lambda value: str(value)[:60])
def test_bad_inputs_are_refused(layout: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        run(LAYOUTS[layout], **fields)


@pytest.mark.parametrize("name", ["return_logits", "return_hidden_states"])
def test_flags_are_true_or_false(name: str) -> None:
    with pytest.raises(InvalidTypeError, match=f"{name}=1 must be True or False"):
        run(STATIC, input_ids=[1], **{name: 1})
