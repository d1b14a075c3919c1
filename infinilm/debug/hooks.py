"""Hooks: user functions that read a model's activations and may replace them."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from infinilm.errors import InvalidTypeError, InvalidValueError

Callback = Callable[[str, Tensor, int], Tensor | None]
"""Called with the point's name, its tensor and the layer's index, −1 outside layers. Returns a replacement of the same
shape, or None.
"""

POINTS = {
    "embed_tokens": "[T, hidden]",
    "layer{i}_input_layernorm": "[T, hidden]",
    "layer{i}_attention_q_after_proj": "[T, heads * head_dim]",
    "layer{i}_attention_k_after_proj": "[T, kv_heads * head_dim]",
    "layer{i}_attention_v_after_proj": "[T, kv_heads * head_dim]",
    "layer{i}_attention_q_after_rope": "[T, heads, head_dim]",
    "layer{i}_attention_k_after_rope": "[T, kv_heads, head_dim]",
    "layer{i}_attention_output": "[T, hidden], after o_proj, before the residual is added",
    "layer{i}_after_attention_residual": "[T, hidden]",
    "layer{i}_post_attention_layernorm": "[T, hidden]",
    "layer{i}_mlp_gate_proj": "[T, intermediate]",
    "layer{i}_mlp_up_proj": "[T, intermediate]",
    "layer{i}_mlp_intermediate": "[T, intermediate]",
    "layer{i}_mlp_output": "[T, hidden], before the residual is added",
    "layer{i}_output": "[T, hidden]",
    "final_norm": "[T, hidden]",
    "logits": "[n, vocab] float32, a row per request that draws, if any, or per token if all logits were asked for",
}
"""Every point of a forward pass and the shape of its tensor, in order. `{i}` is the layer's index; T counts the step's
tokens, all requests concatenated (`HookRegistry.requests` has their rows).
"""

EXPERT_POINTS = {
    "layer{i}_router_logits": "[T, experts]",
    "layer{i}_expert_ids": "[T, experts per token] int32, best first; a row's are different",
}
"""Points of layers with experts. They replace the points of an MLP's gate, up and intermediate."""

STATE_POINTS = {
    "layer{i}_state": "[N, heads, key_dim, value_dim] float32, a state per request",
}
"""Points of recurrent layers. They replace the points of queries, keys and values."""

ALIASES = {f"layer{{i}}_attention_{x}_after_proj": f"layer{{i}}_{x}_proj" for x in "qkv"}
"""Alternative names of some points."""

_ALL_POINTS = (*POINTS, *EXPERT_POINTS, *STATE_POINTS)
_NAMES = (*_ALL_POINTS, *ALIASES.values())


def names_of(point: str) -> tuple[str, ...]:
    """The name of a point, and its alias if it has one."""
    index = re.search("[0-9]+", point)
    if index is None:
        return (point,)
    alias = ALIASES.get(point.replace(index[0], "{i}"))
    return (point,) if alias is None else (point, alias.replace("{i}", index[0]))


def is_wanted(patterns: Iterable[str], point: str) -> bool:
    """Whether any of the names or patterns matches the point or its alias."""
    return any(_match(pattern, point) is not None for pattern in patterns)


@dataclass(frozen=True, slots=True)
class RequestRows:
    """The rows of one request in the tensors of a step."""

    request_id: str
    answer: int
    """Index of the request's answer, 0 unless n > 1."""
    rows: slice
    """Its rows in every [T, …] tensor."""
    start: int
    """The position of its first token in this step."""
    logits_row: int | None
    """Its row in `logits`; None if it draws nothing in this step."""


class HookRegistry:
    """Hooks by name or pattern, for `set_hook_registry`.

    A callback gets a tensor that it may keep. To change an activation it returns a tensor; writing into its argument
    has no effect. A callback may register and remove hooks. A removed hook is not called any more. A point that no hook
    wanted when the step began is shown from the next step on.
    """

    def __init__(self) -> None:
        self.requests: tuple[RequestRows, ...] = ()
        """The requests of the running step: `for r in registry.requests: tensor[r.rows]`. Set by the engine."""
        self.has_replaced = False
        """Whether a hook has replaced an activation since `begin_step`."""
        self._num_layers: dict[int, int] = {}
        """The number of models that it is attached to, by number of layers."""
        # Replaced, never mutated: iterations over it stay valid.
        self._hooks: tuple[tuple[str, Callback], ...] = ()

    def register_hook(self, name_or_pattern: str, callback: Callback) -> None:
        """Call `callback` at the point of that name, or at all that the pattern matches: `*` matches any characters.

        Hooks of one point are called in order of registration. A name or pattern that no point of the model matches is
        refused: here, if the registry is attached to a model, or else when it is attached.
        """
        if not isinstance(name_or_pattern, str):
            raise InvalidTypeError(f"the hook's name {name_or_pattern!r} must be a string")
        if not callable(callback):
            raise InvalidTypeError(
                f"the hook for {name_or_pattern!r} is {type(callback).__name__}; "
                "it must be a function of (name, tensor, layer_idx)"
            )
        if not _can_match(name_or_pattern):
            raise InvalidValueError(
                f"no point can match {name_or_pattern!r}; "
                f"use * or these names, with the layer's index for {{i}}: {', '.join(_NAMES)}"
            )
        for num_layers in self._num_layers:
            _check_pattern(name_or_pattern, num_layers)
        self._hooks = (*self._hooks, (name_or_pattern, callback))

    def remove(self, name: str) -> None:
        """Remove all hooks that were registered under this name or pattern."""
        if name not in self.patterns():
            registered = ", ".join(map(repr, self.patterns())) or "none"
            raise InvalidValueError(f"no hook is registered as {name!r}; those registered: {registered}")
        self._hooks = tuple(hook for hook in self._hooks if hook[0] != name)

    def clear(self) -> None:
        """Remove all hooks."""
        self._hooks = ()

    def has_hooks(self) -> bool:
        """Whether any hook is registered."""
        return bool(self._hooks)

    def patterns(self) -> tuple[str, ...]:
        """The names and patterns that hooks are registered under, in order, each once."""
        return tuple(dict.fromkeys(pattern for pattern, _ in self._hooks))

    def begin_step(self, requests: tuple[RequestRows, ...]) -> None:
        """Set the requests of the step that begins; for engines."""
        self.requests = requests
        self.has_replaced = False

    def fire(self, point: str, tensor: Tensor, layer_idx: int) -> Tensor | None:
        """Call every hook that matches the point, each with the previous one's result; None if nothing was replaced.

        A hook that only matches the alias is called with the alias. Exceptions of a callback propagate.
        """
        replacement = None
        for pattern, callback in self._hooks:
            name = _match(pattern, point)
            if name is None:
                continue
            result = callback(name, tensor if replacement is None else replacement, layer_idx)
            if result is not None:
                replacement = _checked(result, tensor, name)
                self.has_replaced = True
        return replacement


def _checked(result: object, tensor: Tensor, name: str) -> Tensor:
    """A hook's result, converted to replace `tensor`."""
    remedy = "return None to leave the activation as it is, or a tensor of its shape to replace it"
    if not isinstance(result, Tensor):
        raise InvalidTypeError(f"the hook at {name} returned {type(result).__name__}; {remedy}")
    if result.shape != tensor.shape:
        raise InvalidValueError(
            f"the hook at {name} returned shape {list(result.shape)} for {list(tensor.shape)}; {remedy}"
        )
    return result.detach().to(tensor)


def _match(pattern: str, point: str) -> str | None:
    """The first of the point's names that the pattern matches."""
    expression = ".*".join(re.escape(part) for part in re.split(r"\*+", pattern))
    return next((name for name in names_of(point) if re.fullmatch(expression, name)), None)


def _can_match(pattern: str) -> bool:
    """Whether the pattern matches a point of some layer.

    Names contain no digits except the layer's index, so all digits of a pattern belong to it. They are the index to
    try, with a 1 before them if they are not a valid index.
    """
    digits = "".join(re.findall("[0-9]", pattern))
    index = digits if re.fullmatch("0|[1-9][0-9]*", digits) else f"1{digits}"
    return any(is_wanted([pattern], point.replace("{i}", index)) for point in _ALL_POINTS)


def attach(registry: object, current: HookRegistry | None, num_layers: int) -> HookRegistry | None:
    """The registry that replaces `current` in a model of `num_layers`; None: no hooks.

    Raises unless it is a `HookRegistry` whose hooks all match a point of the model.
    """
    if registry is not None and not isinstance(registry, HookRegistry):
        raise InvalidTypeError(f"registry={registry!r} must be a HookRegistry, or None for no hooks")
    for pattern in registry.patterns() if registry is not None else ():
        _check_pattern(pattern, num_layers)
    if current is not None:
        current._num_layers[num_layers] -= 1
        if not current._num_layers[num_layers]:
            del current._num_layers[num_layers]
    if registry is not None:
        registry._num_layers[num_layers] = registry._num_layers.get(num_layers, 0) + 1
    return registry


def _check_pattern(pattern: str, num_layers: int) -> None:
    """Refuse a name or pattern that matches no point of a model of `num_layers`."""
    points = {point.replace("{i}", str(layer)) for point in _ALL_POINTS for layer in range(num_layers)}
    if not any(_match(pattern, point) is not None for point in points):
        names = [name.replace("{i}", f"{{0 to {num_layers - 1}}}") for name in _NAMES]
        raise InvalidValueError(
            f"the hook {pattern!r} matches nothing in this model, whose layers are 0 to {num_layers - 1}; its points "
            f"are {', '.join(names)}"
        )
