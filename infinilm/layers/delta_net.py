"""The gated delta net: a recurrent token mixer with a state of fixed size."""

from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinilm.distributed.group import SINGLE
from infinilm.distributed.shard import Shard, ShardRange, WeightShard
from infinilm.kernels import native
from infinilm.kernels.delta_rule import PromptRows, causal_conv, delta_rule_chunks, delta_rule_step, normalize
from infinilm.kernels.support import has_kernels
from infinilm.layers.formats import LayerOptions, below
from infinilm.layers.linear import ColumnParallelLinear, RowParallelLinear
from infinilm.layers.mixer import ForwardContext, Mixer
from infinilm.layers.norm import RMSNorm
from infinilm.layers.state_plan import PromptStates, StatePlan


class _Inputs(NamedTuple):
    """The tokens' projections. Their rows need not be contiguous in memory."""

    channels: Tensor  # [T, q, k and v]
    gate: Tensor  # [T, value heads * value_dim]
    rate: Tensor  # [T, value heads]
    change: Tensor  # [T, value heads]


class GatedDeltaNet(Mixer):
    """Queries, keys and values pass a short causal convolution, then the gated delta rule (`kernels/delta_rule.py`).

    The state is `[value_heads, key_dim, value_dim]`, plus the last inputs of the convolution, `[channels, width - 1]`.
    Groups of value heads share a query and a key head. Each head's result is normalised and gated.
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        *,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_width: int,
        norm_eps: float,
        prefix: str = "linear_attn.",
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(layer, prefix)
        options = below(options, prefix)
        group = options.get("group", SINGLE)
        kind: dict[str, Any] = {"dtype": options["dtype"], "device": options["device"]}
        self.key_dim, self.value_dim, self.eps = key_dim, value_dim, norm_eps
        keys, values = num_key_heads * key_dim, num_value_heads * value_dim
        self.projections = ColumnParallelLinear(
            hidden_size,
            {
                **{f"in_proj_{name}": keys for name in "qk"},
                **{f"in_proj_{name}": values for name in "vz"},
                **{f"in_proj_{name}": num_value_heads for name in "ba"},
            },
            bias=False,
            **options,
        )
        self.out = RowParallelLinear(values, {"out_proj": hidden_size}, bias=False, **options)
        self._heads = ShardRange.share("linear_num_value_heads", num_value_heads, group.rank, group.size)
        ShardRange.share("linear_num_key_heads", num_key_heads, group.rank, group.size)
        self._sizes = [piece.length for piece in self.projections.outputs.values()]
        self._group_size = num_value_heads // num_key_heads
        num_channels = sum(self._sizes[:3])
        device = options["device"]
        self._has_kernels, self._is_ordered = has_kernels(device), options["formats"].is_ordered
        self.conv = nn.Parameter(torch.empty(num_channels, 1, conv_width, **kind), requires_grad=False)
        self.dt_bias, self.a_log = (
            nn.Parameter(torch.empty(self._heads.length, dtype=torch.float32, device=device), requires_grad=False)
            for _ in range(2)
        )
        self.norm = nn.Parameter(torch.empty(value_dim, **kind), requires_grad=False)

    def forward(
        self, x: Tensor, step: ForwardContext, residual: Tensor | None = None, norm: RMSNorm | None = None
    ) -> Tensor:
        projected = self.projections(x, norm=norm)
        mix = self._mix_by_library if step.backend.name == "native" else self._mix
        mixed = mix(projected, step)
        if step.taps is not None:
            self._show_states(step)
        output: Tensor = self.out(mixed, residual)
        if step.taps is not None:
            step.taps.see("attention_output", output, self.layer)
        return output

    def _mix(self, projected: Tensor, step: ForwardContext) -> Tensor:
        """Compute the result from the tokens' projections: `[T, value heads * value_dim]`."""
        plan, states = step.plan, step.cache.states[self.layer]
        assert isinstance(plan, StatePlan)
        if plan.places is None:
            return self._step(plan, self._split(projected), states)
        assert plan.prompts is not None
        mixed = projected.new_empty((len(projected), self._sizes[3]))
        if len(plan.places):
            mixed[plan.places] = self._step(plan, self._split(projected[plan.places]), states)
        if isinstance(plan.prompts, PromptRows):
            self._prompts_by_kernels(plan.prompts, self._split(projected), states, mixed)
        else:
            places = plan.prompts.places
            mixed[places] = self._compute_prompts(plan.prompts, self._split(projected[places]), states)
        return mixed

    def _mix_by_library(self, projected: Tensor, step: ForwardContext) -> Tensor:
        """The same by the native library, token by token, so that chunking a text does not change any bit."""
        conv = self._weight.t().contiguous()
        decay, dt_bias, norm = -self.a_log.exp(), self.dt_bias, self.norm.float()
        numbers = dict(
            zip(("conv", "decay", "dt_bias", "norm"), native.arrays_of(conv, decay, dt_bias, norm), strict=True)
        )
        heads = native.load_library().DeltaHeads(
            key_heads=self._heads.length // self._group_size,
            value_heads=self._heads.length,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            eps=self.eps,
            **numbers,
        )
        rows = projected.float().contiguous()
        (array,) = native.arrays_of(rows)
        first = heads.run(array, step.cache.native, step.cache.native_place(self.layer), step.plan)
        return rows[:, first : first + self._sizes[3]].to(projected.dtype)

    def _split(self, projected: Tensor) -> "_Inputs":
        return _Inputs(*torch.split(projected, [sum(self._sizes[:3]), *self._sizes[3:]], dim=-1))

    def _step(self, plan: StatePlan, inputs: "_Inputs", states: list[Tensor]) -> Tensor:
        """Compute the requests with one new token: `[n, value heads * value_dim]`."""
        if self._has_kernels:
            return self._step_by_kernels(plan, inputs, states)
        memory, before = (self._read(part, plan) for part in states)
        seen = torch.cat((before, inputs.channels.float().unsqueeze(2)), dim=2)  # [n, channels, width]
        query, key, value = self._heads_of((seen * self._weight).sum(2))
        output, memory = delta_rule_step(query, key, value, *self._decay_and_rate(inputs), memory)
        states[0][plan.targets] = memory
        states[1][plan.targets] = seen[:, :, 1:]
        return self._norm_and_gate(output, inputs.gate)

    def _step_by_kernels(self, plan: StatePlan, inputs: "_Inputs", states: list[Tensor]) -> Tensor:
        if self._is_ordered:  # use the same kernels for one token as for several
            out = torch.empty(inputs.gate.shape, dtype=inputs.gate.dtype, device=inputs.gate.device)
            self._prompts_by_kernels(plan.singles, inputs, states, out)
            return out
        from infinilm.kernels.delta_step import conv_step, delta_step

        places = {"sources": plan.sources, "is_first": plan.is_first, "targets": plan.targets}
        return delta_step(
            conv_step(inputs.channels, states[1], self.conv, **places),
            inputs.gate,
            inputs.rate,
            inputs.change,
            a_log=self.a_log,
            dt_bias=self.dt_bias,
            norm=self.norm,
            eps=self.eps,
            states=states[0],
            num_key_heads=self._heads.length // self._group_size,
            **places,
        )

    def _prompts_by_kernels(self, rows: PromptRows, inputs: "_Inputs", states: list[Tensor], out: Tensor) -> None:
        """Compute the requests with several new tokens into their rows of `out` `[T, value heads * value_dim]`."""
        from infinilm.kernels.delta_prompts import conv_prompts, delta_prompts, gate_prompts
        from infinilm.kernels.delta_tokens import delta_tokens

        rule = delta_tokens if self._is_ordered else delta_prompts
        channels = torch.empty(inputs.channels.shape, dtype=out.dtype, device=out.device)
        conv_prompts(inputs.channels, states[1], self.conv, rows, channels)
        mixed = torch.empty((len(out), self._heads.length, self.value_dim), dtype=out.dtype, device=out.device)
        rule(
            channels,
            inputs.rate,
            inputs.change,
            a_log=self.a_log,
            dt_bias=self.dt_bias,
            states=states[0],
            num_key_heads=self._heads.length // self._group_size,
            rows=rows,
            out=mixed,
        )
        gate_prompts(mixed, inputs.gate, self.norm, self.eps, rows, out)

    def _decay_and_rate(self, inputs: "_Inputs") -> tuple[Tensor, Tensor]:
        decay = -self.a_log.exp() * F.softplus(inputs.change.float() + self.dt_bias)
        return decay, inputs.rate.float().sigmoid()

    @staticmethod
    def _read(part: Tensor, plan: StatePlan | PromptStates) -> Tensor:
        """The states that texts continue from; zeros for new texts."""
        found = part[plan.sources]
        return found.masked_fill_(plan.is_first.view(-1, *[1] * (found.dim() - 1)), 0)

    def _compute_prompts(self, prompts: PromptStates, inputs: "_Inputs", states: list[Tensor]) -> Tensor:
        """Compute the requests with several new tokens: `[P, value heads * value_dim]`."""
        memory, before = (self._read(part, prompts) for part in states)
        channels = torch.cat((before.transpose(1, 2).flatten(0, 1), inputs.channels.float()))
        width = self.conv.shape[2]
        heads = self._heads_of(causal_conv(channels, prompts.conv_places(width), self._weight))
        shape = (prompts.num_chunks, prompts.chunk_size)

        def in_chunks(rows: Tensor) -> Tensor:  # [P, heads, …] to [chunks, heads, tokens, …]
            padded = rows.new_zeros((shape[0] * shape[1], *rows.shape[1:]))
            padded[prompts.chunk_places] = rows
            return padded.view(*shape, *rows.shape[1:]).transpose(1, 2)

        query, key, value, decay, rate = map(in_chunks, (*heads, *self._decay_and_rate(inputs)))
        outputs, memories = delta_rule_chunks(query, key, value, decay, rate, memory, prompts.order)
        states[0][prompts.targets] = memories[prompts.target_chunks]
        states[1][prompts.targets] = channels[prompts.kept_inputs(width)].transpose(1, 2)
        mixed = outputs.transpose(1, 2).flatten(0, 1)[prompts.chunk_places]
        return self._norm_and_gate(mixed, inputs.gate)

    @property
    def _weight(self) -> Tensor:
        return self.conv.squeeze(1).float()

    def _heads_of(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split channels `[…, channels]` into queries, keys and values `[…, value heads, dim]`."""
        activated = F.silu(convolved.to(self.conv.dtype))
        query, key, value = torch.split(activated, self._sizes[:3], dim=-1)
        query, key = (
            normalize(part.view(*part.shape[:-1], -1, self.key_dim)).repeat_interleave(self._group_size, dim=-2)
            for part in (query, key)
        )
        return query * self.key_dim**-0.5, key, value.view(*value.shape[:-1], -1, self.value_dim).float()

    def _norm_and_gate(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """The heads' results `[n, heads, value_dim]` float32 to `[n, heads * value_dim]` in the gate's type."""
        wide = mixed.to(gate.dtype).float()
        scale = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt_()
        normed = (wide * scale).to(gate.dtype) * self.norm
        return (normed.flatten(1) * F.silu(gate.float())).to(gate.dtype)

    def _show_states(self, step: ForwardContext) -> None:
        """Show each request's state `[N, heads, key_dim, value_dim]` to hooks."""
        assert step.taps is not None
        states, tables = step.cache.states[self.layer], step.batch.block_tables
        lasts = torch.from_numpy((step.batch.context_lens - 1) // step.cache.block_size)
        blocks = tables.gather(1, lasts.to(tables.device).unsqueeze(1)).squeeze(1)
        shown = states[0][blocks]
        step.taps.see("state", shown, self.layer, is_shared_out=True)
        states[0][blocks] = shown

    def weight_targets(self, prefix: str) -> dict[str, Shard]:
        own = prefix + self.prefix
        targets = self.projections.weight_targets(own) | self.out.weight_targets(own)
        first = 0
        for name, piece in zip("qkv", self.projections.outputs.values(), strict=False):
            rows = self.conv[first : first + piece.length]
            rest = (ShardRange.whole(1), ShardRange.whole(self.conv.shape[2]))
            targets[f"{own}conv1d_{name}.weight"] = WeightShard.of(rows, piece, *rest)
            first += piece.length
        targets[f"{own}dt_bias"] = WeightShard.of(self.dt_bias, self._heads)
        targets[f"{own}A_log"] = WeightShard.of(self.a_log, self._heads)
        targets[f"{own}norm.weight"] = WeightShard.whole(self.norm)
        return targets
