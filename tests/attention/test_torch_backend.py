"""The torch backend against attention written out in float64: it is what all other backends are checked against."""

import numpy as np
import pytest
import torch

from infinilm.attention import ForwardBatch, TorchAttention, select_backend, torch_backend
from infinilm.errors import InvalidValueError
from infinilm.kernels.nonfinite import mark_nonfinite

KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 2, 3, 16, 16, 40
SCALE = HEAD_DIM**-0.5


def naive(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    *,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`query` `[new, heads, dim]` are the last tokens of `key` and `value` `[context, kv_heads, dim]`."""
    output = torch.empty(query.shape, dtype=torch.float64)
    for i in range(len(query)):
        place = len(key) - len(query) + i
        first = 0 if window is None else max(0, place - window + 1)
        for head in range(query.shape[1]):
            keys, values = (x[first : place + 1, head // GROUP].double() for x in (key, value))
            scores = keys @ query[i, head].double() * SCALE
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].double()))
            output[i, head] = torch.softmax(scores, dim=0)[: len(keys)] @ values
    return output


def run(
    query_lens: list[int],
    context_lens: list[int],
    window: int | None,
    *,
    in_order: bool,
    unused: float = 1e4,
    bad_tokens: tuple[tuple[int, int], ...] = (),
    bad: float = float("nan"),
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple:
    """Attend random requests through a cache whose unused slots hold `unused`. Returns ours and the naive result.

    The key and value of token `t` of request `r` hold a `bad` number for each `(r, t)` of `bad_tokens`.
    """
    generator = torch.Generator().manual_seed(len(query_lens) + sum(context_lens))
    cache = torch.full((NUM_BLOCKS, BLOCK_SIZE, 2, KV_HEADS, HEAD_DIM), unused)
    order = list(range(NUM_BLOCKS)) if in_order else torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    width = max(-(-n // BLOCK_SIZE) for n in context_lens)
    tables = torch.full((len(query_lens), width), -1)
    query, new, slots, expected = [], [], [], []
    for row, (num_new, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        blocks = [order.pop(0) for _ in range(-(-context // BLOCK_SIZE))]
        tables[row, : len(blocks)] = torch.tensor(blocks)
        q = torch.randn(num_new, KV_HEADS * GROUP, HEAD_DIM, generator=generator)
        kv = torch.randn(context, 2, KV_HEADS, HEAD_DIM, generator=generator)
        for token in [t for r, t in bad_tokens if r == row]:
            kv[token, :, :, 3] = bad
        places = [blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(context)]
        cache.flatten(0, 1)[places[: context - num_new]] = mark_nonfinite(kv[: context - num_new])
        query.append(q)
        new.append(kv[context - num_new :])
        slots += places[context - num_new :]
        expected.append(naive(q, kv[:, 0], kv[:, 1], window, cap=cap, sinks=sinks))
    lens = np.array(query_lens, dtype=np.int64)
    batch = ForwardBatch(
        input_ids=torch.zeros(sum(query_lens), dtype=torch.int64),
        positions=torch.zeros(sum(query_lens), dtype=torch.int64),
        slot_mapping=torch.tensor(slots),
        block_tables=tables,
        query_lens=lens,
        context_lens=np.array(context_lens, dtype=np.int64),
    )
    backend = TorchAttention()
    plan = backend.prepare(batch, block_size=BLOCK_SIZE, windows={window}, dtype=torch.float32)
    backend.store(torch.cat(new), cache, plan)
    ours = backend.attend(torch.cat(query), cache, plan, scale=SCALE, window=window, cap=cap, sinks=sinks)
    return ours, torch.cat(expected).float()


CASES = {
    "one token": ([1], [1]),
    "decode at block borders": ([1, 1, 1, 1], [15, 16, 17, 32]),
    "decode of very different lengths": ([1, 1, 1], [2, 300, 40]),
    "prefill": ([33], [33]),
    "chunk behind a prefix": ([20], [77]),
    "everything at once": ([1, 20, 5, 1, 16], [50, 20, 60, 3, 32]),
}


@pytest.mark.parametrize("window", [None, 1, 10, 16, 33, 1000])
@pytest.mark.parametrize("in_order", [False, True], ids=["shuffled", "in order"])
@pytest.mark.parametrize("case", CASES)
def test_equals_attention_written_out(case: str, window: int | None, in_order: bool) -> None:
    ours, expected = run(*CASES[case], window, in_order=in_order)
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize(("cap", "has_sinks"), [(1.5, False), (None, True), (1.5, True)])
@pytest.mark.parametrize("case", CASES)
def test_caps_and_sinks(
    case: str, cap: float | None, has_sinks: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cap is not None:
        monkeypatch.setattr(torch_backend, "_MAX_SCORES", 100)  # a few tokens at a time
    sinks = torch.linspace(-2, 3, KV_HEADS * GROUP) if has_sinks else None
    ours, expected = run(*CASES[case], window, in_order=False, unused=float("nan"), cap=cap, sinks=sinks)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 10, 33])
@pytest.mark.parametrize("in_order", [False, True], ids=["shuffled", "in order"])
@pytest.mark.parametrize("unused", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("case", CASES)
def test_slots_of_others_may_hold_anything(case: str, unused: float, in_order: bool, window: int | None) -> None:
    """A request that computed NaN leaves it in the cache: 0 * NaN and NaN - inf are NaN."""
    ours, expected = run(*CASES[case], window, in_order=in_order, unused=unused)
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("query_lens", "context_lens", "bad_tokens"),
    [
        ([40], [40], ((0, 21),)),
        ([20], [77], ((0, 66),)),
        ([20], [77], ((0, 60), (0, 70))),
        ([1, 20, 5], [50, 20, 60], ((0, 20), (1, 7), (2, 48))),
    ],
)
def test_a_bad_number_reaches_only_tokens_that_see_it(query_lens, context_lens, bad_tokens, bad, window) -> None:
    """Earlier tokens of the same prompt stay as they are: other requests may share their blocks."""
    ours, expected = run(query_lens, context_lens, window, in_order=False, bad_tokens=bad_tokens, bad=bad)
    is_bad = ~expected.isfinite().flatten(1).all(1)
    assert is_bad.any()
    assert not is_bad.all()
    assert (~ours[is_bad].isfinite()).flatten(1).any(1).all()
    torch.testing.assert_close(ours[~is_bad], expected[~is_bad], atol=2e-5, rtol=0)


def test_a_negative_slot_is_not_written() -> None:
    cache = torch.zeros(4, BLOCK_SIZE, 2, KV_HEADS, HEAD_DIM)
    batch = ForwardBatch(
        input_ids=torch.zeros(3, dtype=torch.int64),
        positions=torch.arange(3),
        slot_mapping=torch.tensor([5, -1, 7]),
        block_tables=torch.tensor([[0]]),
        query_lens=np.array([3]),
        context_lens=np.array([3]),
    )
    backend = TorchAttention()
    plan = backend.prepare(batch, block_size=BLOCK_SIZE, windows={None}, dtype=torch.float32)
    backend.store(torch.ones(3, 2, KV_HEADS, HEAD_DIM), cache, plan)
    written = cache.flatten(0, 1).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert written == [5, 7]


def test_backends_are_chosen_by_name() -> None:
    assert select_backend("auto", "cpu").name == "torch"
    with pytest.raises(InvalidValueError, match="attention_backend='warp' is unknown; use one of auto, torch"):
        select_backend("warp", "cpu")
