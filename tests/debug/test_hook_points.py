"""Every point of a pass: when it is seen, what is there, on how many ranks, and that it costs nothing unless wanted."""

import ast
import inspect
import sys
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoints import make_reference, save
from debug.hook_reference import Reference, Watched
from narrow import present, worker_of
from torch.utils._python_dispatch import TorchDispatchMode

from infinilm.cache import PagedKVCacheConfig, StaticKVCacheConfig
from infinilm.debug import ALIASES, POINTS, HookRegistry, RequestRows
from infinilm.distributed import DistConfig
from infinilm.engine import InferEngine
from infinilm.errors import InvalidTypeError, InvalidValueError
from infinilm.layers import attention, mlp
from infinilm.layers.formats import WeightFormats
from infinilm.models import LlamaConfig, causal_lm, decoder

KINDS = ["llama-gqa", "llama-bias", "qwen3", "mistral"]
CACHES = ["none", "static", "paged"]
TABLE = [5, 0, 3]
TEXT = [(7 * i * i + 3 * i + 11) % 160 for i in range(40)]


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(kind):
    return make_reference(kind)


@pytest.fixture(params=CACHES)
def cache(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save(make_reference("llama-gqa"), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def engine(checkpoint) -> Iterator[InferEngine]:
    with InferEngine(checkpoint, device_type="cpu") as engine:
        yield engine


def with_cache(engine: InferEngine, cache: str) -> Watched:
    """A new text in an empty cache; "none": in an engine that never had one."""
    if cache == "static":
        engine.reset_cache(StaticKVCacheConfig(max_batch_size=2, max_cache_len=48))
    elif cache == "paged":
        engine.reset_cache(PagedKVCacheConfig(num_blocks=8, block_size=16))
    return Watched(engine, TABLE if cache == "paged" else None)


def engine_of(reference) -> InferEngine:
    engine = InferEngine(LlamaConfig.from_dict(reference.config.to_dict()), device_type="cpu")
    engine.load_params(reference.state_dict())
    return engine


def names_of_pass(num_layers: int = 2) -> list[str]:
    points = list(POINTS)
    first, last = points.index("layer{i}_input_layernorm"), points.index("layer{i}_output")
    layers = [point.replace("{i}", str(i)) for i in range(num_layers) for point in points[first : last + 1]]
    return [*points[:first], *layers, *points[last + 1 :]]


def documented_shape(name: str, layer: int, **sizes: int) -> list[int]:
    shape = POINTS[name if layer < 0 else name.replace(f"layer{layer}_", "layer{i}_")].split("]")[0]
    return eval(f"{shape}]", dict(sizes))


@pytest.mark.parametrize("all_logits", [False, True])
def test_each_fires_once_a_pass_in_order_with_its_shape(kind, reference, cache, all_logits) -> None:
    """Two requests of 5 and 3 tokens, then (with a cache) one more token of each."""
    config = reference.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = {
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "intermediate": config.intermediate_size,
        "vocab": config.vocab_size,
    }
    passes: list[tuple[dict[str, Any], int]] = [({"input_ids": TEXT[:8], "input_lengths": [5, 3]}, 8)]
    if cache != "none":
        passes.append(({"input_ids": [[1], [2]], "cache_lengths": [5, 3]}, 2))
    registry, seen = HookRegistry(), []
    registry.register_hook("*", lambda name, x, layer: seen.append((name, layer, list(x.shape), x.dtype)))
    with engine_of(reference) as engine:
        with_cache(engine, cache)
        engine.set_hook_registry(registry)
        for fields, num_tokens in passes:
            seen.clear()
            engine.forward(**fields, return_logits=all_logits)
            assert [name for name, *_ in seen] == names_of_pass()
            for name, layer, shape, dtype in seen:
                assert layer == (int(name[5]) if name.startswith("layer") else -1), name
                assert shape == documented_shape(name, layer, T=num_tokens, n=num_tokens if all_logits else 2, **sizes)
                assert dtype == torch.float32


def test_what_is_seen_is_what_transformers_computes(kind, reference, cache) -> None:
    theirs = Reference(reference)
    with engine_of(reference) as engine:
        ours = with_cache(engine, cache)
        # More tokens than mistral's window of 24; without a cache all of them at once.
        chunks = [TEXT] if cache == "none" else [TEXT[:30], TEXT[30:37], TEXT[37:38], TEXT[38:39], TEXT[39:]]
        for chunk in chunks:
            logits, expected = ours.run(chunk), theirs.run(chunk)
            assert set(ours.seen) == set(theirs.seen) == set(names_of_pass())
            for name, x in ours.seen.items():
                assert theirs.seen[name].std() > 0.05, f"{name} must hold something to compare"
                torch.testing.assert_close(x, theirs.seen[name], atol=1e-4, rtol=0, msg=partial("{}: {}".format, name))
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
            assert torch.equal(ours.seen["logits"], logits)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_seen_as_it_is(dtype) -> None:
    config = LlamaConfig.from_dict({**make_reference("llama-gqa").config.to_dict(), "dtype": dtype})
    with InferEngine(config, device_type="cpu") as engine:
        watched = Watched(engine)
        watched.run(TEXT[:4])
        logits = watched.seen.pop("logits")
        assert {x.dtype for x in watched.seen.values()} == {getattr(torch, dtype)}
        assert logits.dtype == torch.float32


# --- names and patterns -----------------------------------------------------------------------------------


def test_aliases_and_patterns(engine) -> None:
    registry = HookRegistry()
    seen: dict[str, dict[tuple[str, int], torch.Tensor]] = {}

    def keep(pattern):
        seen[pattern] = {}
        registry.register_hook(pattern, lambda name, x, layer: seen[pattern].setdefault((name, layer), x))

    layers_output = [f"layer{i}_{part}" for i in (0, 1) for part in ("attention_output", "mlp_output", "output")]
    expected = {
        **{alias.replace("{i}", "1"): [alias.replace("{i}", "1")] for alias in ALIASES.values()},
        **{point.replace("{i}", "1"): [point.replace("{i}", "1")] for point in ALIASES},
        "layer*_k_proj": ["layer0_k_proj", "layer1_k_proj"],
        "layer*_output": layers_output,
        "layer1*": [name for name in names_of_pass() if name.startswith("layer1")],
        "*norm": [name for name in names_of_pass() if name.endswith("norm")],
    }
    for pattern in expected:
        keep(pattern)
    engine.set_hook_registry(registry)
    engine.forward(input_ids=TEXT[:6])
    assert {pattern: [name for name, _ in found] for pattern, found in seen.items()} == expected
    for name, layer in (key for found in seen.values() for key in found):
        assert layer == (int(name[5]) if name.startswith("layer") else -1)
    for point, alias in ((point.replace("{i}", "1"), alias.replace("{i}", "1")) for point, alias in ALIASES.items()):
        assert torch.equal(seen[point][point, 1], seen[alias][alias, 1])


def test_requests_of_a_pass_are_told_apart(engine) -> None:
    """Ragged rows, a mixed step, and the rows of the logits."""
    alone = {}
    for name, text in {"0": TEXT[:5], "1": TEXT[10:13]}.items():
        watched = Watched(engine)
        watched.run(text)
        alone[name] = watched.seen
    registry, seen = HookRegistry(), {}

    def keep(name, x, _layer):
        for r in registry.requests:
            seen[r.request_id, name] = x[r.rows] if name != "logits" else x[r.logits_row]

    registry.register_hook("*", keep)
    engine.set_hook_registry(registry)
    engine.forward(input_ids=[TEXT[:5], [*TEXT[10:13], 0, 0]], input_lengths=[5, 3])
    assert registry.requests == (
        RequestRows("0", 0, slice(0, 5), start=0, logits_row=0),
        RequestRows("1", 0, slice(5, 8), start=0, logits_row=1),
    )
    for (request, name), x in seen.items():
        whole = alone[request][name]
        torch.testing.assert_close(x, whole[-1] if name == "logits" else whole, atol=1e-5, rtol=0)
    engine.reset_cache(StaticKVCacheConfig(max_batch_size=2, max_cache_len=32))
    engine.forward(input_ids=[TEXT[:5]])
    engine.forward(input_ids=[TEXT[5], *TEXT[10:13]], cache_lengths=[5, 0], input_lengths=[6, 3], return_logits=True)
    assert registry.requests == (
        RequestRows("0", 0, slice(0, 1), start=5, logits_row=0),
        RequestRows("1", 0, slice(1, 4), start=0, logits_row=3),
    )
    torch.testing.assert_close(seen["1", "logits"], alone["1"]["logits"][-1], atol=1e-5, rtol=0)


# --- what a hook gets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHES)
def test_what_a_hook_keeps_is_its_own(engine, cache) -> None:
    """It stays as it was, and is an ordinary tensor: it can be written to and take part in autograd."""
    watched = with_cache(engine, cache)
    logits = watched.run(TEXT[:6])
    kept, copies = watched.seen, {name: x.clone() for name, x in watched.seen.items()}
    watched = with_cache(engine, cache)
    watched.run(TEXT[20:26])
    for name, x in kept.items():
        assert torch.equal(x, copies[name]), name
        assert not torch.equal(x, watched.seen[name]), name
        assert not x.is_inference()
        x.requires_grad_().square().sum().backward()
        assert torch.equal(present(x.grad), 2 * x.detach())
        x.detach().zero_()
    watched = with_cache(engine, cache)
    assert torch.equal(watched.run(TEXT[:6]), logits)


def test_writing_into_what_is_shown_changes_nothing(engine) -> None:
    expected = Watched(engine).run_unseen(TEXT[:6])
    registry = HookRegistry()

    def spoil(_name, x, _layer):
        x.zero_()

    registry.register_hook("*", spoil)
    engine.set_hook_registry(registry)
    torch.testing.assert_close(Watched(engine).run_unseen(TEXT[:6]), expected, atol=1e-5, rtol=0)


def test_gradients_can_be_taken_inside_a_hook(engine) -> None:
    registry, gradients = HookRegistry(), []
    weight = torch.ones(64, requires_grad=True)

    def hook(_name, x, _layer):
        (x * weight).sum().backward()
        gradients.append((x.sum(0), present(weight.grad).clone()))

    registry.register_hook("layer0_output", hook)
    engine.set_hook_registry(registry)
    engine.forward(input_ids=TEXT[:6])
    ((expected, gradient),) = gradients
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("bad", [3, "registry", [], HookRegistry])
def test_only_a_registry_can_be_attached(engine, bad) -> None:
    with pytest.raises(InvalidTypeError, match="must be a HookRegistry, or None"):
        engine.set_hook_registry(bad)


# --- ranks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_together_show_what_one_alone_does(engine, checkpoint, num_ranks) -> None:
    """4 heads and 2 key-value heads: on 4 ranks each of the latter is held twice. 160 tokens over 4 ranks."""
    with InferEngine(checkpoint, DistConfig(num_ranks), "cpu") as many:
        for cache in CACHES:
            alone, together = with_cache(engine, cache), with_cache(many, cache)
            for chunk in [TEXT[:12]] if cache == "none" else [TEXT[:12], TEXT[12:13]]:
                alone.run(chunk)
                together.run(chunk)
                assert together.names == alone.names == names_of_pass()
                for name, x in alone.seen.items():
                    torch.testing.assert_close(
                        together.seen[name], x, atol=1e-5, rtol=0, msg=partial("{}: {}".format, name)
                    )
        # Ranks stop only where somebody wants to see something; each of the three may want other points.
        registry, seen = HookRegistry(), []
        registry.register_hook("layer1_v_proj", lambda name, x, _layer: seen.append((name, x)))
        many.set_hook_registry(registry)
        together = with_cache(many, "static")
        together.run_unseen(TEXT[:7])
        with_cache(engine, "static").run_unseen(TEXT[:7])
        ((name, x),) = seen
        assert name == "layer1_v_proj"
        assert x.shape == (7, 32)


# --- no cost ----------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """The operations that torch carries out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class WithoutTaps(ast.NodeTransformer):
    """Answers every question whether there are taps with no, and leaves out what is never reached then."""

    def __init__(self) -> None:
        self.num_answers = 0

    def visit_Compare(self, node: ast.Compare):
        if ast.unparse(node) not in ("taps is None", "taps is not None", "step.taps is None", "step.taps is not None"):
            return node
        self.num_answers += 1
        return ast.Constant(isinstance(node.ops[0], ast.Is))

    def visit_If(self, node: ast.If):
        self.generic_visit(node)
        if not isinstance(node.test, ast.Constant):
            return node
        return node.body if node.test.value else node.orelse

    def visit_FunctionDef(self, node: ast.FunctionDef):
        self.generic_visit(node)
        returns = [i for i, statement in enumerate(node.body) if isinstance(statement, ast.Return)]
        if returns:
            del node.body[returns[0] + 1 :]
        return node


def decoder_without_taps() -> types.ModuleType:
    """The decoder's own sources, less all that has to do with hooks."""
    transformer, forwards = WithoutTaps(), []
    with patch.dict(sys.modules):
        for source in (attention, mlp, decoder, causal_lm):
            tree = ast.fix_missing_locations(transformer.visit(ast.parse(inspect.getsource(source))))
            forwards += [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name == "forward"]
            module = types.ModuleType(source.__name__)
            sys.modules[source.__name__] = module  # those that follow import it from here
            exec(compile(tree, module.__name__, "exec"), module.__dict__)
    assert module.Attention is not attention.Attention, "it must be the one without taps"
    assert transformer.num_answers >= 8
    assert len(forwards) == 4
    assert not any("taps.see" in ast.unparse(forward) for forward in forwards)
    return module


def operations_of(engine: InferEngine) -> list[str]:
    """Of a prefill and a decoding step."""
    watched = with_cache(engine, "static")
    watched.run_unseen(TEXT[:1])  # what is made once is there then
    with Recorder() as recorder:
        watched.run_unseen(TEXT[:6])
        watched.run_unseen(TEXT[6:7])
    return recorder.names


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_without_hooks_a_step_is_what_it_would_be_if_there_were_none(kind, reference, monkeypatch) -> None:
    monkeypatch.setattr(decoder, "is_described", lambda *_: False)  # or all layers would be one call of the library
    with engine_of(reference) as engine:
        operations = operations_of(engine)
        worker = worker_of(engine._executor)
        worker._model = decoder_without_taps().CausalLM(engine.config, formats=WeightFormats(is_ordered=True))
        engine.load_params(reference.state_dict())
        assert operations == operations_of(engine)
        assert len(operations) > 100


def test_a_registry_that_is_gone_or_empty_costs_nothing(engine) -> None:
    never = operations_of(engine)
    registry = HookRegistry()
    registry.register_hook("layer0_output", lambda *_: None)
    engine.set_hook_registry(registry)
    watched = operations_of(engine)
    assert len(watched) > len(never), "the recorder must be able to tell"
    engine.set_hook_registry(None)
    assert operations_of(engine) == never
    engine.set_hook_registry(HookRegistry())
    assert operations_of(engine) == never
    engine.set_hook_registry(registry)
    registry.clear()
    assert operations_of(engine) == never


@pytest.mark.parametrize("pattern", ["layer2_output", "layer7_*"])
def test_a_hook_for_a_layer_that_is_not_there_is_refused(engine: InferEngine, pattern: str) -> None:
    registry = HookRegistry()
    registry.register_hook(pattern, lambda *_: None)
    with pytest.raises(InvalidValueError, match="matches nothing in this model, whose layers are 0 to 1"):
        engine.set_hook_registry(registry)
    registry.clear()
    registry.register_hook("layer1_output", lambda *_: None)
    engine.set_hook_registry(registry)
