"""Which hooks are called, in which order, with which name, and what becomes of what they return."""

from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from narrow import present

from infinilm.debug import POINTS, HookRegistry, RequestRows, is_wanted, names_of
from infinilm.errors import InvalidTypeError, InvalidValueError

X = torch.arange(6.0).view(2, 3)


def names_seen(pattern, *points):
    """The names under which a hook of that pattern is called as a pass goes by these points."""
    registry, seen = HookRegistry(), []
    registry.register_hook(pattern, lambda name, _tensor, _layer: seen.append(name))
    for point in points:
        assert registry.fire(point, X, 0) is None
    return seen


def points_of(layer):
    return [point.replace("{i}", str(layer)) for point in POINTS if "{i}" in point]


def test_a_callback_gets_name_tensor_and_layer():
    registry, calls = HookRegistry(), []
    registry.register_hook("layer3_output", lambda *args: calls.append(args))
    registry.register_hook("logits", lambda *args: calls.append(args))
    assert registry.fire("layer3_output", X, 3) is None
    assert registry.fire("layer30_output", X, 30) is None
    assert registry.fire("logits", X, -1) is None
    assert calls == [("layer3_output", X, 3), ("logits", X, -1)]
    assert calls[0][1] is X


@pytest.mark.parametrize(
    ("point", "names"),
    [
        ("layer0_attention_q_after_proj", ("layer0_attention_q_after_proj", "layer0_q_proj")),
        ("layer7_attention_k_after_proj", ("layer7_attention_k_after_proj", "layer7_k_proj")),
        ("layer123_attention_v_after_proj", ("layer123_attention_v_after_proj", "layer123_v_proj")),
        ("layer0_attention_q_after_rope", ("layer0_attention_q_after_rope",)),
        ("layer0_mlp_gate_proj", ("layer0_mlp_gate_proj",)),
        ("embed_tokens", ("embed_tokens",)),
    ],
)
def test_names_of_points(point, names):
    assert names_of(point) == names
    for name in names:
        assert names_seen(name, point) == [name]
        assert is_wanted([name], point)


def test_the_documented_points():
    assert points_of(5) == [
        "layer5_input_layernorm",
        "layer5_attention_q_after_proj",
        "layer5_attention_k_after_proj",
        "layer5_attention_v_after_proj",
        "layer5_attention_q_after_rope",
        "layer5_attention_k_after_rope",
        "layer5_attention_output",
        "layer5_after_attention_residual",
        "layer5_post_attention_layernorm",
        "layer5_mlp_gate_proj",
        "layer5_mlp_up_proj",
        "layer5_mlp_intermediate",
        "layer5_mlp_output",
        "layer5_output",
    ]
    assert [point for point in POINTS if "{i}" not in point] == ["embed_tokens", "final_norm", "logits"]


PATTERNS = [
    ("*", ["embed_tokens", *points_of(0), *points_of(12), "logits"]),
    (
        "layer*_output",
        [f"layer{i}_{name}" for i in (0, 12) for name in ("attention_output", "mlp_output", "output")],
    ),
    ("layer1*_mlp_output", ["layer12_mlp_output"]),
    ("layer12*after_rope", ["layer12_attention_q_after_rope", "layer12_attention_k_after_rope"]),
    # Both of the point's names match: it is called once, by the main one.
    ("layer0_*q_*proj", ["layer0_attention_q_after_proj"]),
    # Only the alias matches.
    ("*0_q_*", ["layer0_q_proj"]),
    ("layer*_v_proj", ["layer0_v_proj", "layer12_v_proj"]),
    ("*_k_proj*", ["layer0_k_proj", "layer12_k_proj"]),
    ("***logits***", ["logits"]),
    ("e*_*s", ["embed_tokens"]),
    ("layer2_*", []),
]


@pytest.mark.parametrize(("pattern", "names"), PATTERNS)
def test_patterns_match_any_run_of_characters(pattern, names):
    points = ["embed_tokens", *points_of(0), *points_of(12), "logits"]
    assert names_seen(pattern, *points) == names
    assert sum(is_wanted([pattern], point) for point in points) == len(names)
    assert is_wanted(["final_norm", pattern], points[0]) == is_wanted([pattern], points[0])
    assert not is_wanted([], points[0])


def test_every_match_is_called_once_in_the_order_of_registration():
    registry, calls = HookRegistry(), []
    for pattern in ("*", "layer1_q_proj", "layer1_attention_q_after_proj", "layer0*", "layer1_q_proj"):
        registry.register_hook(pattern, partial(lambda pattern, name, _t, _l: calls.append((pattern, name)), pattern))
    registry.fire("layer1_attention_q_after_proj", X, 1)
    assert calls == [
        ("*", "layer1_attention_q_after_proj"),
        ("layer1_q_proj", "layer1_q_proj"),
        ("layer1_attention_q_after_proj", "layer1_attention_q_after_proj"),
        ("layer1_q_proj", "layer1_q_proj"),
    ]
    assert registry.patterns() == ("*", "layer1_q_proj", "layer1_attention_q_after_proj", "layer0*")


def test_each_hook_sees_what_the_one_before_left():
    registry, seen = HookRegistry(), []
    registry.register_hook("logits", lambda _n, tensor, _l: tensor + 1)
    registry.register_hook("*", lambda _n, tensor, _l: seen.append(tensor.clone()))
    registry.register_hook("log*", lambda _n, tensor, _l: tensor * 10)
    before = X.clone()
    result = registry.fire("logits", X, -1)
    assert torch.equal(seen[0], X + 1)
    assert torch.equal(present(result), (X + 1) * 10)
    assert torch.equal(X, before)


def test_the_tensor_itself_can_be_returned():
    registry = HookRegistry()
    registry.register_hook("logits", lambda _n, tensor, _l: tensor.neg_())
    tensor = X.clone()
    assert torch.equal(present(registry.fire("logits", tensor, -1)), -X)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bfloat16])
def test_a_replacement_gets_the_dtype_of_what_it_replaces(dtype):
    registry, seen = HookRegistry(), []
    registry.register_hook("logits", lambda _n, tensor, _l: tensor.to(dtype) + 1)
    registry.register_hook("logits", lambda _n, tensor, _l: seen.append(tensor.dtype))
    result = present(registry.fire("logits", X.half(), -1))
    assert result.dtype == torch.float16
    assert result.tolist() == (X + 1).tolist()
    assert seen == [torch.float16]


def test_a_replacement_is_cut_off_from_its_gradient():
    registry, weight = HookRegistry(), torch.ones(3, requires_grad=True)
    registry.register_hook("logits", lambda _n, tensor, _l: tensor * weight)
    assert not present(registry.fire("logits", X, -1)).requires_grad


@pytest.mark.parametrize("bad", [1.0, [[0.0] * 3] * 2, X.numpy(), True, "x"])
def test_a_result_that_is_no_tensor_is_refused(bad):
    registry = HookRegistry()
    registry.register_hook("layer4_q_proj", lambda *_: bad)
    with pytest.raises(InvalidTypeError, match=rf"hook at layer4_q_proj returned {type(bad).__name__}; return None"):
        registry.fire("layer4_attention_q_after_proj", X, 4)


@pytest.mark.parametrize("shape", [(3, 2), (2, 4), (6,), (1, 2, 3), ()])
def test_a_result_of_another_shape_is_refused(shape):
    registry = HookRegistry()
    registry.register_hook("final*", lambda *_: torch.zeros(shape))
    with pytest.raises(InvalidValueError) as caught:
        registry.fire("final_norm", X, -1)
    assert f"hook at final_norm returned shape {list(shape)} for [2, 3]; return None" in str(caught.value)


def test_what_a_callback_raises_comes_out_and_ends_the_call():
    registry, error, calls = HookRegistry(), KeyError("mine"), []

    def fail(*_):
        raise error

    registry.register_hook("logits", fail)
    registry.register_hook("logits", lambda *args: calls.append(args))
    with pytest.raises(KeyError) as caught:
        registry.fire("logits", X, -1)
    assert caught.value is error
    assert calls == []
    assert registry.patterns() == ("logits",)


def test_callbacks_may_change_the_registry():
    registry, calls = HookRegistry(), []

    def once(name, _tensor, _layer):
        calls.append("once")
        registry.remove("logits")
        registry.register_hook("*", lambda *_: calls.append("new"))

    registry.register_hook("logits", once)
    registry.register_hook("logits", lambda *_: calls.append("second"))
    registry.fire("logits", X, -1)
    assert calls == ["once", "second"]
    registry.fire("logits", X, -1)
    assert calls == ["once", "second", "new"]
    registry.register_hook("final_norm", lambda *_: registry.clear())
    registry.fire("final_norm", X, -1)
    assert calls == ["once", "second", "new", "new"]
    assert not registry.has_hooks()


def test_remove_and_clear():
    registry, calls = HookRegistry(), []
    assert not registry.has_hooks()
    assert registry.patterns() == ()
    for pattern in ("logits", "log*", "logits", "*"):
        registry.register_hook(pattern, lambda *_, pattern=pattern: calls.append(pattern))
    registry.remove("logits")
    assert registry.patterns() == ("log*", "*")
    registry.remove("*")
    registry.fire("logits", X, -1)
    assert calls == ["log*"]
    assert registry.has_hooks()
    registry.clear()
    assert not registry.has_hooks()
    assert registry.fire("logits", X, -1) is None
    assert calls == ["log*"]


def test_removing_what_is_not_there_is_refused():
    registry = HookRegistry()
    with pytest.raises(InvalidValueError, match="no hook is registered as 'logits'; those registered: none"):
        registry.remove("logits")
    registry.register_hook("layer*", print)
    registry.register_hook("final_norm", print)
    # A hook goes by what it was registered as, not by what that matches.
    with pytest.raises(InvalidValueError, match=r"as 'layer0_output'; those registered: 'layer\*', 'final_norm'"):
        registry.remove("layer0_output")
    assert registry.patterns() == ("layer*", "final_norm")


GOOD = [
    "layer0_output",
    "layer10_output",
    "layer123456_q_proj",
    "layer*",
    "layer*0_output",
    "layer*00_output",
    "layer*007*_output",
    "layer1*2*3_mlp*",
    "*5*",
    "*_proj",
    "*",
]
BAD = [
    "",
    "layer_output",
    "layer0_outputs",
    "layer0",
    "layer{i}_output",
    "layer-1_output",
    "layer00_output",
    "layer007_output",
    "layer0*5_output",
    "layer٣_output",
    "layer0_attention_q_after_prj",
    "layer0_attention_v_after_rope",
    "layer0_o_proj",
    "layer*_norm",
    "Layer0_output",
    " logits",
    "logits\n",
    "log?ts",
    "[l]ogits",
    "log.ts",
    "logits|final_norm",
    "logits0",
    "*logits_*",
    "1*layer*",
]


@pytest.mark.parametrize("name", GOOD)
def test_names_that_some_point_has_are_taken(name):
    registry = HookRegistry()
    registry.register_hook(name, print)
    assert registry.patterns() == (name,)


@pytest.mark.parametrize("name", BAD)
def test_names_that_no_point_has_are_refused(name):
    registry = HookRegistry()
    with pytest.raises(InvalidValueError) as caught:
        registry.register_hook(name, print)
    message = str(caught.value)
    assert f"no point can match {name!r}" in message
    for point in ("embed_tokens", "layer{i}_mlp_up_proj", "layer{i}_q_proj", "logits"):
        assert point in message
    assert not registry.has_hooks()


@given(st.lists(st.sampled_from(["layer", "_q_", "_output", "0", "1", "7", "*", "*"]), max_size=6))
@settings(max_examples=200, deadline=None)
def test_a_name_is_taken_if_some_point_matches_it(parts):
    name = "".join(parts)
    assume(sum(part.isdigit() for part in parts) <= 2)  # of so few digits, an index up to 199 decides
    points = ["embed_tokens", "final_norm", "logits", *(point for layer in range(200) for point in points_of(layer))]
    registry = HookRegistry()
    if any(is_wanted([name], point) for point in points):
        registry.register_hook(name, print)
    else:
        with pytest.raises(InvalidValueError, match="no point can match"):
            registry.register_hook(name, print)


@pytest.mark.parametrize("name", [None, 3, b"logits", ("logits",)])
def test_names_are_strings(name):
    with pytest.raises(InvalidTypeError, match=r"the hook's name .* must be a string"):
        HookRegistry().register_hook(name, print)


@pytest.mark.parametrize("callback", [None, "print", X])
def test_callbacks_can_be_called(callback):
    with pytest.raises(InvalidTypeError, match=rf"the hook for 'logits' is {type(callback).__name__}; it must be"):
        HookRegistry().register_hook("logits", callback)


def test_rows_tell_requests_apart():
    registry, seen = HookRegistry(), {}
    assert registry.requests == ()

    def keep(_name, tensor, _layer):
        for r in registry.requests:
            seen[r.request_id, r.answer] = tensor[r.rows].tolist()

    registry.register_hook("layer0_output", keep)
    registry.requests = (
        RequestRows("a", answer=0, rows=slice(0, 1), start=7, logits_row=0),
        RequestRows("b", answer=1, rows=slice(1, 3), start=0, logits_row=None),
    )
    registry.fire("layer0_output", torch.tensor([[1.0], [2.0], [3.0]]), 0)
    assert seen == {("a", 0): [[1.0]], ("b", 1): [[2.0], [3.0]]}
