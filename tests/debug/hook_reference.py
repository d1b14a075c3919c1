"""transformers' activations under our points' names, seen and edited; and the same for an engine of ours."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from narrow import present
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from infinilm.debug import HookRegistry
from infinilm.engine import InferEngine

Edit = Callable[[Tensor, Tensor], Tensor]
"""From an activation `[T, …]` and its tokens' positions `[T]` to what takes its place."""
Edits = Mapping[str, Edit]
"""By the points' names."""


class Reference:
    """One text in a model of transformers, computed in as many passes as one likes."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.seen: dict[str, Tensor] = {}
        """What was at each point in the last pass, before it was edited."""
        self._cache = None
        self._num_computed = 0
        self._edits: Edits = {}

    @torch.no_grad()
    def run(self, tokens: Sequence[int], edits: Edits | None = None) -> Tensor:
        """Compute the next tokens: logits `[T, vocab]`."""
        self.seen, self._edits = {}, edits or {}
        self._positions = torch.arange(self._num_computed, self._num_computed + len(tokens))
        self._num_computed += len(tokens)
        with ExitStack() as hooks:
            for handle in self._hook():
                hooks.callback(handle.remove)
            output = self.model(
                torch.tensor([tokens]),
                position_ids=self._positions[None],
                past_key_values=self._cache,
                use_cache=True,
            )
        self._cache = output.past_key_values
        assert set(self._edits) <= set(self.seen)
        return output.logits[0]

    def _visit(self, name: str, x: Tensor) -> Tensor:
        """Note `x` `[1, T, …]`; returns it as edited."""
        self.seen[name] = x[0].clone()
        return self._edits[name](x[0], self._positions)[None] if name in self._edits else x

    def _hook(self):
        def on_output(module, name):
            return module.register_forward_hook(lambda _module, _args, output: self._visit(name, output))

        body = self.model.model
        yield on_output(body.embed_tokens, "embed_tokens")
        for i, layer in enumerate(body.layers):
            prefix = f"layer{i}_"
            attention, mlp = layer.self_attn, layer.mlp
            yield on_output(layer.input_layernorm, f"{prefix}input_layernorm")
            for x in "qkv":
                yield on_output(getattr(attention, f"{x}_proj"), f"{prefix}attention_{x}_after_proj")
            for x in "qk":
                last = getattr(attention, f"{x}_norm", None) or getattr(attention, f"{x}_proj")
                yield self._on_turned(last, f"{prefix}attention_{x}_after_rope", attention.head_dim)
            yield on_output(attention.o_proj, f"{prefix}attention_output")
            yield from self._on_residual(layer, f"{prefix}after_attention_residual")
            yield on_output(layer.post_attention_layernorm, f"{prefix}post_attention_layernorm")
            yield on_output(mlp.gate_proj, f"{prefix}mlp_gate_proj")
            yield on_output(mlp.up_proj, f"{prefix}mlp_up_proj")
            yield mlp.down_proj.register_forward_pre_hook(
                lambda _module, args, name=f"{prefix}mlp_intermediate": (self._visit(name, args[0]),)
            )
            yield on_output(mlp.down_proj, f"{prefix}mlp_output")
            yield on_output(layer, f"{prefix}output")
        yield on_output(body.norm, "final_norm")
        yield on_output(self.model.lm_head, "logits")

    def _on_turned(self, module, name: str, head_dim: int):
        """Queries and keys are turned inside of attention, where no module is: turn them here, and an edit back."""

        def hook(_module, _args, output):
            cos, sin = self.model.model.rotary_emb(output, self._positions[None])
            heads = output.view(1, len(self._positions), -1, head_dim)
            turned, _ = apply_rotary_pos_emb(heads, heads, cos, sin, unsqueeze_dim=2)
            edited = self._visit(name, turned)
            if edited is turned:
                return output
            return apply_rotary_pos_emb(edited, edited, cos, -sin, unsqueeze_dim=2)[0].reshape(output.shape)

        return module.register_forward_hook(hook)

    def _on_residual(self, layer, name: str):
        """The sum has no module either: it is seen where it goes into, and edited by what is added."""
        before: list[Tensor] = []

        def add(_module, _args, output):
            residual = before.pop()
            return self._visit(name, residual + output) - residual if name in self._edits else output

        def note(_module, args):
            self.seen.setdefault(name, args[0][0].clone())

        yield layer.input_layernorm.register_forward_pre_hook(lambda _module, args: before.append(args[0]))
        yield layer.self_attn.o_proj.register_forward_hook(add)
        yield layer.post_attention_layernorm.register_forward_pre_hook(note)


class Watched:
    """One text in an engine of ours. `table` are its blocks, where the cache is a paged one."""

    def __init__(self, engine: InferEngine, table: Sequence[int] | None = None) -> None:
        self.seen: dict[str, Tensor] = {}
        self.names: list[str] = []
        self._engine = engine
        self._table = table
        self._num_computed = 0

    def run(self, tokens: Sequence[int], edits: Edits | None = None, see: str | None = "*") -> Tensor:
        """Compute the next tokens, seeing points and editing some: logits `[T, vocab]`."""
        self.seen, self.names = {}, []
        registry = HookRegistry()

        def note(name, tensor, _layer):
            self.names.append(name)
            self.seen[name] = tensor

        if see is not None:
            registry.register_hook(see, note)
        for point, edit in (edits or {}).items():
            registry.register_hook(point, partial(lambda edit, _n, x, _l: edit(x, self._positions(registry)), edit))
        self._engine.set_hook_registry(registry)
        try:
            return self.run_unseen(tokens)
        finally:
            self._engine.set_hook_registry(None)

    def run_unseen(self, tokens: Sequence[int]) -> Tensor:
        """Compute the next tokens: logits `[T, vocab]`."""
        fields: dict[str, Any] = {} if self._table is None else {"block_tables": [self._table]}
        if self._num_computed:
            fields["cache_lengths"] = [self._num_computed]
        output = self._engine.forward(input_ids=[list(tokens)], return_logits=True, **fields)
        self._num_computed += len(tokens)
        return present(output.logits)[0].clone()

    @staticmethod
    def _positions(registry: HookRegistry) -> Tensor:
        (request,) = registry.requests
        return torch.arange(request.start, request.start + request.rows.stop - request.rows.start)
