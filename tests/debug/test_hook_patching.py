"""Replaced activations: they change what comes out as they do in transformers, and bad ones harm nobody."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from checkpoints import make_reference, save
from debug.hook_reference import Edit, Reference, Watched
from torch import Tensor

from infinilm.cache import PagedKVCacheConfig, StaticKVCacheConfig
from infinilm.debug import HookRegistry
from infinilm.distributed import DistConfig
from infinilm.engine import InferEngine
from infinilm.errors import EngineError, InvalidTypeError, InvalidValueError

TEXT = [(5 * i * i + 7 * i + 2) % 160 for i in range(16)]
CHUNKS = [TEXT[:12], TEXT[12:13], TEXT[13:16]]
TABLE = [3, 1]
VECTOR = 3 * torch.randn(64, generator=torch.Generator().manual_seed(1))
EMBEDDINGS = torch.randn(16, 64, generator=torch.Generator().manual_seed(2))


def at(position: int, change: Edit) -> Edit:
    """Change one position only."""

    def edit(x: Tensor, positions: Tensor) -> Tensor:
        is_there = (positions == position).view(-1, *[1] * (x.dim() - 1))
        return torch.where(is_there, change(x, positions), x)

    return edit


def without(columns: slice) -> Edit:
    def edit(x: Tensor, _positions: Tensor) -> Tensor:
        edited = x.clone()
        edited[:, columns] = 0
        return edited

    return edit


EDITS: dict[str, Edit] = {
    "embed_tokens": lambda _x, positions: EMBEDDINGS[positions],
    "layer0_input_layernorm": lambda x, _: x.clamp(-0.5, 0.5),
    "layer0_attention_q_after_proj": without(slice(16, 32)),  # its second head
    "layer1_attention_k_after_proj": without(slice(0, 20)),
    "layer1_attention_v_after_proj": at(3, lambda x, _: x.roll(16, dims=1) + 1),
    "layer1_attention_q_after_rope": lambda x, _: 3 * x.flip(1),
    "layer0_attention_k_after_rope": at(2, lambda x, _: -2 * x.flip(1, 2)),
    "layer0_attention_output": lambda x, _: torch.zeros_like(x),
    "layer0_after_attention_residual": at(4, lambda x, _: x + VECTOR),
    "layer1_post_attention_layernorm": lambda x, _: x.abs(),
    "layer1_mlp_gate_proj": lambda x, _: x.relu(),
    "layer0_mlp_up_proj": lambda x, _: x.roll(30, dims=1),
    "layer0_mlp_intermediate": without(slice(50, 100)),
    "layer0_mlp_output": lambda x, _: 1.5 * x,
    "layer0_output": at(0, lambda x, _: x + VECTOR),
    "layer1_output": at(5, lambda x, _: x + VECTOR),
    "final_norm": lambda x, _: x.flip(1),
    "logits": lambda x, _: x.roll(1, dims=1),
}


@pytest.fixture(scope="module")
def reference():
    return make_reference("llama-gqa")


@pytest.fixture(scope="module")
def checkpoint(reference, tmp_path_factory) -> Path:
    return save(reference, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def one_rank(checkpoint) -> Iterator[InferEngine]:
    with InferEngine(checkpoint, device_type="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def two_ranks(checkpoint) -> Iterator[InferEngine]:
    with InferEngine(checkpoint, DistConfig(2), "cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def four_ranks(checkpoint) -> Iterator[InferEngine]:
    """Each of the two key-value heads is held by two of them."""
    with InferEngine(checkpoint, DistConfig(4), "cpu") as engine:
        yield engine


@pytest.fixture(params=["one_rank", "two_ranks", "four_ranks"])
def engine(request) -> Iterator[InferEngine]:
    engine = request.getfixturevalue(request.param)
    yield engine
    engine.set_hook_registry(None)


on_one_and_two = pytest.mark.parametrize("engine", ["one_rank", "two_ranks"], indirect=True)


def watch(engine: InferEngine, cache_kind: str = "static") -> Watched:
    if cache_kind == "static":
        engine.reset_cache(StaticKVCacheConfig(max_batch_size=1, max_cache_len=32))
        return Watched(engine)
    engine.reset_cache(PagedKVCacheConfig(num_blocks=6, block_size=16))
    return Watched(engine, TABLE)


def hooked(engine: InferEngine, point: str, callback) -> HookRegistry:
    registry = HookRegistry()
    registry.register_hook(point, callback)
    engine.set_hook_registry(registry)
    return registry


def assert_same(ours: Tensor, theirs: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


# --- against transformers ---------------------------------------------------------------------------------


SHARED_OUT = [point for point in EDITS if any(x in point for x in ("_q_", "_k_", "_v_", "gate", "up", "inter"))]
"""Points of which each rank has a piece."""
CASES = [
    *(("one_rank", cache_kind, point) for cache_kind in ("static", "paged") for point in EDITS),
    *(("two_ranks", "paged", point) for point in EDITS),
    *(("four_ranks", "static", point) for point in SHARED_OUT),
]
SEEN = "layer1_output"


@pytest.fixture(scope="module")
def theirs(reference):
    """What transformers makes of the chunks with a point edited in the first so many of them: logits and `SEEN`."""

    @cache
    def run(point: str, num_edited: int) -> list[tuple[Tensor, Tensor]]:
        text = Reference(reference)
        edits = [{point: EDITS[point]}] * num_edited + [{}] * (len(CHUNKS) - num_edited)
        return [(text.run(*each), text.seen[SEEN]) for each in zip(CHUNKS, edits, strict=True)]

    return run


def largest_change(one: list[tuple[Tensor, Tensor]], other: list[tuple[Tensor, Tensor]]) -> float:
    return max(float((a - b).abs().max()) for (a, _), (b, _) in zip(one, other, strict=True))


@pytest.mark.parametrize(("engine", "cache_kind", "point"), CASES, indirect=["engine"])
def test_an_edit_does_what_it_does_in_transformers(engine, theirs, cache_kind, point) -> None:
    expected = theirs(point, 3)
    assert largest_change(expected, theirs(point, 0)) > 0.05, "the edit must do something"
    ours = watch(engine, cache_kind)
    for chunk, (logits, seen) in zip(CHUNKS, expected, strict=True):
        assert_same(ours.run(chunk, {point: EDITS[point]}, see=SEEN), logits)
        assert_same(ours.seen[SEEN], seen)


@pytest.mark.parametrize("kind", ["llama-bias", "qwen3", "mistral"])
@pytest.mark.parametrize("point", [*SHARED_OUT, "layer0_attention_output", "layer0_mlp_output", "final_norm"])
def test_other_architectures(kind, point, references) -> None:
    """Without a cache. Qwen3 norms its queries and keys between projection and rope; its heads are wider."""
    reference, engine = references[kind]
    edits = {point: EDITS[point]}
    assert_same(Watched(engine).run(TEXT, edits), Reference(reference).run(TEXT, edits))


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    found = {}
    for kind in ("llama-bias", "qwen3", "mistral"):
        model = make_reference(kind)
        found[kind] = model, InferEngine(save(model, tmp_path_factory.mktemp(kind)), device_type="cpu")
    yield found
    for _, engine in found.values():
        engine.close()


def test_all_edits_at_once(engine, reference) -> None:
    ours, theirs = watch(engine), Reference(reference)
    assert_same(ours.run(TEXT, EDITS), theirs.run(TEXT, EDITS))
    for name, x in ours.seen.items():
        assert_same(x, theirs.seen[name])


@pytest.mark.parametrize("cache_kind", ["static", "paged"])
@pytest.mark.parametrize("point", ["layer0_attention_k_after_rope", "layer1_attention_v_after_proj", "layer0_output"])
def test_what_was_edited_stays_in_the_cache(engine, theirs, point, cache_kind) -> None:
    """The prompt is edited; the tokens after it, with no hook attached any more, still see what it became."""
    expected = theirs(point, 1)
    assert largest_change(expected[1:], theirs(point, 0)[1:]) > 1e-2
    ours = watch(engine, cache_kind)
    assert_same(ours.run(CHUNKS[0], {point: EDITS[point]}, see=None), expected[0][0])
    for chunk, (logits, _) in zip(CHUNKS[1:], expected[1:], strict=True):
        assert_same(ours.run_unseen(chunk), logits)
    # And it does not stay for the next text.
    ours = watch(engine, cache_kind)
    for chunk, (logits, _) in zip(CHUNKS, theirs(point, 0), strict=True):
        assert_same(ours.run_unseen(chunk), logits)


def test_drawn_tokens_follow_an_edit(engine) -> None:
    watch(engine)
    plain = engine.forward(input_ids=[TEXT], top_k=1).output_ids
    hooked(engine, "logits", lambda _n, x, _l: x.index_fill(1, torch.tensor([77]), 1e4))
    assert engine.forward(input_ids=[TEXT], top_k=1).output_ids.tolist() == [77] != plain.tolist()


def test_hidden_states_follow_an_edit(engine) -> None:
    watch(engine)
    hooked(engine, "final_norm", lambda _n, x, _l: torch.full_like(x, 2.0))
    output = engine.forward(input_ids=[TEXT], return_hidden_states=True)
    assert torch.equal(output.hidden_states, torch.full((1, 16, 64), 2.0))


# --- what may be returned ---------------------------------------------------------------------------------


def doubled(x: Tensor) -> dict[str, Tensor]:
    wide = torch.cat((2 * x, x), dim=1)
    with torch.inference_mode():
        inference = 2 * x
    return {
        "itself": x.mul_(2),
        "a view": wide[:, : x.shape[1]],
        "transposed": (wide[:, : x.shape[1]]).t().contiguous().t(),
        "of another type": 2 * wide[:, x.shape[1] :].double(),
        "with a gradient": 2 * wide[:, x.shape[1] :].clone().requires_grad_(),
        "of inference mode": inference,
    }


RETURNED = ["itself", "a view", "transposed", "of another type", "with a gradient", "of inference mode"]


@on_one_and_two
@pytest.mark.parametrize("point", ["layer0_v_proj", "layer0_mlp_output", "logits"])
@pytest.mark.parametrize("returned", RETURNED)
def test_any_tensor_of_the_shape_is_taken(engine, returned, point) -> None:
    hooked(engine, point, lambda _n, x, _l: x * 2)
    expected = watch(engine).run_unseen(TEXT)
    hooked(engine, point, lambda _n, x, _l: doubled(x)[returned])
    assert torch.equal(watch(engine).run_unseen(TEXT), expected)


def test_one_row_for_all_is_taken(engine, reference) -> None:
    edits = {
        "embed_tokens": lambda x, _: VECTOR.expand_as(x),
        "layer0_k_proj": lambda x, _: x[:1].expand_as(x),
        "layer1_mlp_intermediate": lambda x, _: x[-1:].expand_as(x),
    }
    by_point = {name.replace("_k_proj", "_attention_k_after_proj"): edit for name, edit in edits.items()}
    assert_same(watch(engine).run(TEXT, edits), Reference(reference).run(TEXT, by_point))


# --- what goes wrong --------------------------------------------------------------------------------------


class OwnError(Exception):
    """Takes two arguments: nobody may make it anew from its text."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)


@on_one_and_two
@pytest.mark.parametrize("point", ["embed_tokens", "layer0_q_proj", "layer1_attention_output", "final_norm", "logits"])
def test_what_a_hook_raises_ends_the_pass(engine, point) -> None:
    ours = watch(engine)
    expected = ours.run_unseen(CHUNKS[0])
    decoded = ours.run_unseen(CHUNKS[1])
    error, calls = OwnError(3, "mine"), []

    def fail(name, _x, _layer):
        calls.append(name)
        raise error

    registry = hooked(engine, point, fail)
    ours = watch(engine)
    with pytest.raises(OwnError) as caught:
        ours.run_unseen(CHUNKS[0])
    assert caught.value is error
    assert calls == [point]
    # The engine works on: with hooks, and without.
    registry.clear()
    assert torch.equal(ours.run_unseen(CHUNKS[0]), expected)
    engine.set_hook_registry(None)
    assert torch.equal(ours.run_unseen(CHUNKS[1]), decoded)


@on_one_and_two
@pytest.mark.parametrize(
    ("result", "kind", "message"),
    [
        (1.0, InvalidTypeError, "hook at layer1_output returned float; return None"),
        ([[0.0] * 64] * 12, InvalidTypeError, "hook at layer1_output returned list; return None"),
        (torch.zeros(64, 12), InvalidValueError, r"returned shape \[64, 12\] for \[12, 64\]; return None"),
        (torch.zeros(1, 64), InvalidValueError, r"returned shape \[1, 64\] for \[12, 64\]; return None"),
    ],
)
def test_a_bad_replacement_ends_the_pass(engine, result, kind, message) -> None:
    expected = watch(engine).run_unseen(CHUNKS[0])
    hooked(engine, "layer1_output", lambda *_: result)
    ours = watch(engine)
    with pytest.raises(kind, match=message):
        ours.run_unseen(CHUNKS[0])
    engine.set_hook_registry(None)
    assert torch.equal(ours.run_unseen(CHUNKS[0]), expected)


@on_one_and_two
def test_ctrl_c_in_a_hook_leaves_a_sound_engine(engine) -> None:
    expected = watch(engine).run_unseen(CHUNKS[0])

    def interrupt(*_):
        raise KeyboardInterrupt

    hooked(engine, "layer0_mlp_intermediate", interrupt)
    ours = watch(engine)
    with pytest.raises(KeyboardInterrupt):
        ours.run_unseen(CHUNKS[0])
    engine.set_hook_registry(None)
    assert torch.equal(ours.run_unseen(CHUNKS[0]), expected)


CALLS = {
    "forward": lambda engine: engine.forward(input_ids=[[1, 2, 3, 4]]),
    "generate": lambda engine: engine.generate([[1, 2, 3]], max_new_tokens=2),
    "reset_cache": lambda engine: engine.reset_cache(PagedKVCacheConfig(num_blocks=9, block_size=32)),
    "load_param": lambda engine: engine.load_param("model.norm.weight", torch.zeros(64)),
    "state_dict": lambda engine: engine.state_dict(),
}


@on_one_and_two
@pytest.mark.parametrize("call", CALLS)
def test_a_hook_can_not_call_the_engine(engine, call) -> None:
    """It gets an error at once; if it catches that, the pass goes on as if nothing had been tried."""
    ours = watch(engine)
    expected, decoded = ours.run_unseen(CHUNKS[0]), ours.run_unseen(CHUNKS[1])
    hooked(engine, "layer0_output", lambda *_: CALLS[call](engine))
    with pytest.raises(EngineError, match=r"in the middle of another call.*not from a hook"):
        watch(engine).run_unseen(CHUNKS[0])
    seen = []

    def try_it(*_):
        with pytest.raises(EngineError, match="in the middle of another call"):
            CALLS[call](engine)
        seen.append(registry.requests)

    ours = watch(engine)
    registry = hooked(engine, "*", try_it)
    config = engine.get_cache_config()
    assert_same(ours.run_unseen(CHUNKS[0]), expected, atol=1e-5)
    assert engine.get_cache_config() == config
    assert len(seen) == 31
    assert {(r.rows.stop, r.start) for requests in seen for r in requests} == {(12, 0)}
    engine.set_hook_registry(None)
    assert_same(ours.run_unseen(CHUNKS[1]), decoded, atol=1e-5)


def test_closing_from_a_hook_ends_the_pass(checkpoint) -> None:
    engine = InferEngine(checkpoint, DistConfig(2), "cpu")
    hooked(engine, "layer0_output", lambda *_: engine.close())
    for _ in range(2):
        with pytest.raises(EngineError, match="the engine was closed; make a new one"):
            engine.forward(input_ids=[TEXT])
