"""Paged decode attention against its torch twin.

Unused cache slots and the workspace hold NaN, so a kernel that reads them returns NaN.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from infinilm.errors import InvalidValueError
from infinilm.kernels import decode_attention as kernels
from infinilm.kernels.decode_attention import DecodeWorkspace, SharedPrefix, decode_attention, decode_attention_torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: too large or unknown to the interpreter")
TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """What a call takes."""

    query: Tensor
    cache: Tensor
    tables: Tensor
    context_lens: Tensor
    scale: float
    cap: float | None = None
    sinks: Tensor | None = None

    def rows(self, rows: list[int]) -> "Case":
        """The same cache, with these rows in this order."""
        return replace(
            self, query=self.query[rows], tables=self.tables[rows], context_lens=self.context_lens[rows].contiguous()
        )

    def run(self, window: int | None = None, shared: SharedPrefix | None = None) -> Tensor:
        rows, heads, head_dim = self.query.shape
        workspace = DecodeWorkspace(rows, heads, head_dim, DEVICE)
        workspace.results.fill_(float("nan"))
        workspace.sums.fill_(float("nan"))
        with poisoned_allocations():
            output = decode_attention(
                self.query,
                self.cache,
                self.tables,
                self.context_lens,
                scale=self.scale,
                window=window,
                workspace=workspace,
                shared=shared,
                cap=self.cap,
                sinks=self.sinks,
            )
        assert not workspace.arrivals.any()
        return output

    def expected(self, window: int | None = None) -> Tensor:
        arguments = (self.query, self.cache, self.tables, self.context_lens)
        return decode_attention_torch(*arguments, scale=self.scale, window=window, cap=self.cap, sinks=self.sinks)

    def shared(self, num_tokens: int) -> SharedPrefix:
        """The first row's first blocks, as what all have in common."""
        return SharedPrefix(torch.tensor([num_tokens], dtype=torch.int32, device=DEVICE), self.tables[0].clone())


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after another, those without a chunk too."""
    if DEVICE == "cpu":
        monkeypatch.setattr(kernels, "_parts", lambda _pairs: (2, 64))


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """New tensors hold NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def make_case(
    lens: list[int],
    *,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    shared_tokens: int = 0,
    seed: int = 0,
) -> Case:
    """Rows of these lengths in shuffled blocks, the first `shared_tokens` of all rows in the same."""
    generator = torch.Generator().manual_seed(seed)
    num_shared = shared_tokens // block_size
    num_blocks = [-(-n // block_size) for n in lens]
    order = torch.randperm(sum(num_blocks) + num_shared + 3, generator=generator)
    cache = torch.full((len(order), block_size, 2, kv_heads, head_dim), float("nan"), dtype=dtype)
    tables = torch.full((len(lens), max(num_blocks) + 2), -1, dtype=torch.int32)
    prefix, free = order[:num_shared], iter(order[num_shared:].tolist())
    cache[prefix] = torch.randn(cache[prefix].shape, generator=generator).to(dtype)
    for i, (tokens, blocks) in enumerate(zip(lens, num_blocks, strict=True)):
        for j in range(blocks):
            tables[i, j] = prefix[j] if j < num_shared else next(free)
        for j in range(num_shared, blocks):
            slots = cache[tables[i, j], : tokens - j * block_size]
            slots.copy_(torch.randn(slots.shape, generator=generator))
    query = torch.randn((len(lens), heads, head_dim), generator=generator).to(dtype)
    context_lens = torch.tensor(lens, dtype=torch.int32)
    query, cache, tables, context_lens = (each.to(DEVICE) for each in (query, cache, tables, context_lens))
    return Case(query, cache, tables, context_lens, scale=head_dim**-0.5)


def score_otherwise(case: Case, *, cap: float | None, has_sinks: bool) -> Case:
    """The same with scores that a cap or sinks matter to."""
    sinks = torch.linspace(-3, 6, case.query.shape[1], device=DEVICE) if has_sinks else None
    return replace(case, query=case.query * 3, cap=cap, sinks=sinks)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def test_the_twin_is_attention() -> None:
    case = make_case([37], heads=6, kv_heads=2, head_dim=8)
    key, value = case.cache[case.tables[0, :3].long()].flatten(0, 1)[:37].unbind(1)  # [37, 2, 8]
    for head in range(6):
        weight = ((key[:, head // 3] @ case.query[0, head]) * case.scale).softmax(0)
        torch.testing.assert_close(case.expected()[0, head], weight @ value[:, head // 3])
        last = ((key[-5:, head // 3] @ case.query[0, head]) * case.scale).softmax(0)
        torch.testing.assert_close(case.expected(window=5)[0, head], last @ value[-5:, head // 3])


@pytest.mark.parametrize(
    "lens",
    [
        [1],
        [16],
        [0, 17, 0],
        [63, 64, 65],
        [255, 256, 257],  # one chunk, 2 of 256
        [383, 384, 385],
        [511, 512, 513],  # 2 chunks, 3
        [767, 768, 769],
        [1023, 1024, 1025],
        [900, 100, 0, 2, 300],
        pytest.param([4095, 4096, 4097], marks=needs_cuda),  # 16 chunks of 256, 9 of 512
        pytest.param([8191, 1, 8192, 8193, 16000, 100, 0], marks=needs_cuda),
        pytest.param([int(i) for i in range(40, 2100, 9)], marks=needs_cuda),
    ],
    ids=lambda lens: "-".join(map(str, lens[:7])),
)
@pytest.mark.parametrize("parts", [(1, 1), (4, 64)], ids=lambda parts: f"{parts[0]} parts")
def test_lengths(lens: list[int], parts: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_parts", lambda _pairs: parts)
    case = make_case(lens)
    output = case.run()
    assert_close(output, case.expected())
    assert not output[case.context_lens == 0].any()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [
        (1, 1, 16),
        (4, 2, 32),
        (3, 1, 64),
        (7, 1, 16),
        (16, 2, 96),
        (16, 1, 32),
        (17, 1, 16),
        (4, 1, 128),
        (2, 2, 256),
        pytest.param(32, 8, 128, marks=needs_cuda),
        pytest.param(32, 32, 96, marks=needs_cuda),
        pytest.param(16, 2, 256, marks=needs_cuda),
        pytest.param(14, 2, 64, marks=needs_cuda),
    ],
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=needs_cuda)], ids=str
)
def test_heads_and_types(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    case = make_case([0, 21, 130], heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    assert_close(case.run(), case.expected())


def test_the_twin_caps_scores_and_has_sinks() -> None:
    case = score_otherwise(make_case([37], heads=6, kv_heads=2, head_dim=8), cap=4.0, has_sinks=True)
    assert case.sinks is not None
    key, value = case.cache[case.tables[0, :3].long()].flatten(0, 1)[:37].unbind(1)  # [37, 2, 8]
    for head in range(6):
        score = 4 * torch.tanh((key[:, head // 3] @ case.query[0, head]) * case.scale / 4)
        weight = torch.cat((score, case.sinks[head : head + 1])).softmax(0)[:-1]
        torch.testing.assert_close(case.expected()[0, head], weight @ value[:, head // 3])


@pytest.mark.parametrize(("cap", "has_sinks"), [(4.0, False), (None, True), (4.0, True)])
@pytest.mark.parametrize("heads", [2, 7])
def test_caps_and_sinks(cap: float | None, has_sinks: bool, heads: int) -> None:
    """In one chunk and in several, with a window, and with a shared prefix."""
    case = score_otherwise(make_case([0, 1, 30, 300, 600], heads=heads), cap=cap, has_sinks=has_sinks)
    assert_close(case.run(), case.expected())
    assert_close(case.run(20), case.expected(20))
    case = make_case([290, 261, 0], heads=heads, shared_tokens=256)
    case = score_otherwise(case, cap=cap, has_sinks=has_sinks)
    assert_close(case.run(shared=case.shared(256)), case.expected())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_heads_of_512(dtype: torch.dtype) -> None:
    case = make_case([0, 21, 290], heads=2, head_dim=512, dtype=dtype, shared_tokens=16)
    assert_close(case.run(), case.expected())
    case = case.rows([1, 2])
    assert_close(case.run(shared=case.shared(16)), case.expected())


@pytest.mark.parametrize("block_size", [16, 48, 256])
@pytest.mark.parametrize("window", [None, 1, 50, 1000])
def test_blocks_and_windows(block_size: int, window: int | None) -> None:
    case = make_case([5, 50, 130], block_size=block_size)
    assert_close(case.run(window), case.expected(window))


def test_a_window_does_not_read_before_it() -> None:
    case = make_case([100, 30])
    case.cache[case.tables[0, :4].long()] = float("nan")
    case.cache[case.tables[0, 4], :10] = float("nan")  # 74 of 100 tokens
    output = case.run(26)
    assert output.isfinite().all()
    assert_close(output, case.expected(26))


def test_a_query_inside_a_wider_tensor() -> None:
    case = make_case([40, 90], heads=4, kv_heads=2)
    wide = torch.full((2, 9, 16), float("nan"), device=DEVICE)
    wide[:, 1:5] = case.query
    assert torch.equal(replace(case, query=wide[:, 1:5]).run(), case.run())


@pytest.mark.parametrize("window", [None, 200])
def test_a_row_does_not_depend_on_the_others(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([300, 0, 64, 700, 1], kv_heads=2, heads=4)
    together = case.run(window)
    order = [4, 1, 3, 0, 2]
    assert torch.equal(case.rows(order).run(window), together[order])
    for row in (0, 3):
        assert torch.equal(case.rows([row]).run(window), together[[row]])
    for parts in ((1, 1), (3, 100), (16, 64)):
        monkeypatch.setattr(kernels, "_parts", lambda _pairs, parts=parts: parts)
        assert torch.equal(case.run(window), together)


@needs_cuda
@pytest.mark.parametrize(("heads", "head_dim"), [(8, 128), (16, 128), (4, 64)])
@pytest.mark.parametrize("shared_tokens", [0, 256])
def test_a_row_in_batches_of_all_sizes(heads: int, head_dim: int, shared_tokens: int) -> None:
    own = [1500, 40, 257, 2048, 256, 700, 1, 513, 129, 900] * 29 + [1500, 40, 257, 2048, 256, 700, 1, 513, 129, 5000]
    case = make_case(
        [shared_tokens + n for n in own],
        heads=heads,
        kv_heads=4,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        shared_tokens=shared_tokens,
    )
    shared = case.shared(shared_tokens) if shared_tokens else None
    together = case.run(shared=shared)
    for size in (1, 3, 20, 70, 200):
        rows = list(range(300 - size, 300))
        assert torch.equal(case.rows(rows).run(shared=shared), together[rows])


def test_more_rows_have_fewer_programs_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    parts = [kernels._parts(pairs)[0] for pairs in range(1, 20000, 7)]
    assert parts[0] == 16
    assert parts[-1] == 1
    assert all(first >= second for first, second in pairwise(parts))
    assert set(parts) <= {1, 2, 4, 8, 16}


@pytest.mark.parametrize(
    ("shared_tokens", "heads", "kv_heads"),
    [
        (16, 2, 1),
        (272, 3, 1),
        (2064, 4, 2),
        pytest.param(1024, 16, 8, marks=needs_cuda),
        pytest.param(4096, 32, 8, marks=needs_cuda),
    ],
)
def test_shared_prefix(shared_tokens: int, heads: int, kv_heads: int) -> None:
    own = [1, 0, 100] if DEVICE == "cpu" else [*range(1, 130), 0, 3000]
    lens = [shared_tokens + n if n else 0 for n in own]
    case = make_case(lens, heads=heads, kv_heads=kv_heads, shared_tokens=shared_tokens)
    shared = case.shared(shared_tokens)
    output = case.run(shared=shared)
    assert_close(output, case.expected())
    assert not output[case.context_lens == 0].any()
    assert torch.equal(case.run(shared=shared), output)
    if DEVICE == "cuda":
        assert torch.equal(case.run(), output)
    # Its whole chunks come through the prefix's own table, not through the rows'.
    chunk = 256 if max(lens) < 4096 else 1024
    case.tables[:, : shared_tokens // chunk * chunk // 16] = -1
    assert torch.equal(case.run(shared=shared), output)


def test_own_tokens_beside_a_shared_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    lens = [32 + own for own in (1, 63, 64, 65, 255, 256, 257, 1000)]
    lens += [] if DEVICE == "cpu" else [32 + own for own in (2047, 2048, 2049, 7000)]
    case = make_case(lens, shared_tokens=32)
    together = case.run(shared=case.shared(32))
    assert_close(together, case.expected())
    for parts in ((1, 1), (4, 64)):
        monkeypatch.setattr(kernels, "_parts", lambda _pairs, parts=parts: parts)
        assert torch.equal(case.run(shared=case.shared(32)), together)


@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=needs_cuda), torch.float32], ids=str
)
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 128), (7, 96), (17, 32)])
def test_shared_prefix_heads_and_types(dtype: torch.dtype, heads: int, head_dim: int) -> None:
    case = make_case([49, 0, 64, 50], heads=heads, head_dim=head_dim, dtype=dtype, shared_tokens=48)
    assert_close(case.run(shared=case.shared(48)), case.expected())


def test_sharing_nothing_changes_no_bit() -> None:
    case = make_case([30, 0, 100, 2100])
    assert torch.equal(case.run(shared=case.shared(0)), case.run())


def test_no_rows() -> None:
    case = make_case([1]).rows([])
    assert case.run().shape == (0, 2, 16)


def test_workspace_size() -> None:
    workspace = DecodeWorkspace(3, 4, 24, "cpu")
    held = sum(each.nbytes for each in (workspace.results, workspace.sums, workspace.arrivals))
    assert DecodeWorkspace.num_bytes(3, 4, 24) == held


def test_refusals() -> None:
    case = make_case([20, 20])
    with pytest.raises(InvalidValueError, match=r"window is 8 .* shared=None"):
        case.run(8, case.shared(16))
    with pytest.raises(InvalidValueError, match="contiguous"):
        replace(case, query=case.query.transpose(1, 2).contiguous().transpose(1, 2)).run()
    with pytest.raises(InvalidValueError, match=r"float16.* must agree"):
        replace(case, query=case.query.half()).run()
    with pytest.raises(InvalidValueError, match="1 rows of 2 heads of 16, query has 2 of 2 of 16"):
        decode_attention(
            case.query,
            case.cache,
            case.tables,
            case.context_lens,
            scale=1.0,
            window=None,
            workspace=DecodeWorkspace(1, 2, 16, DEVICE),
        )


@needs_cuda
def test_one_graph_for_all_lengths_with_and_without_a_shared_prefix() -> None:
    lens = [1200, 1030, 0, 2500, 1025] * 8
    case = make_case(lens, heads=16, kv_heads=8, head_dim=128, dtype=torch.bfloat16, shared_tokens=1024)
    shared = case.shared(0)
    workspace = DecodeWorkspace(len(lens), 16, 128, DEVICE)

    def attend() -> Tensor:
        return decode_attention(
            case.query,
            case.cache,
            case.tables,
            case.context_lens,
            scale=case.scale,
            window=None,
            workspace=workspace,
            shared=shared,
        )

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend()
    for shared_tokens, context_lens in [(0, lens), (1024, lens), (0, lens[::-1]), (512, lens)]:
        shared.num_tokens.fill_(shared_tokens)
        # The rows' data stays where it is: with the lengths turned round, rows see fewer tokens, or none.
        fitting = torch.tensor(context_lens, device=DEVICE).minimum(torch.tensor(lens, device=DEVICE))
        case.context_lens.copy_(fitting)
        graph.replay()
        assert torch.equal(output, attend())
        assert_close(output, case.expected())


@needs_cuda
def test_blocks_beyond_32_bits() -> None:
    case = make_case([70], heads=8, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    first = 2**31 // case.cache[0].numel()
    large = torch.empty((first + len(case.cache), *case.cache.shape[1:]), dtype=torch.bfloat16, device=DEVICE)
    large[first:] = case.cache
    tables = case.tables.where(case.tables < 0, case.tables + first)
    assert torch.equal(replace(case, cache=large, tables=tables).run(), case.run())
