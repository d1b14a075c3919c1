"""The gated delta net: a token mixer whose memory of the text is a state of fixed size."""

from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinilm.distributed.group import SINGLE
from infinilm.distributed.shard import Shard, ShardRange, WeightShard
from infinilm.kernels.delta_rule import causal_conv, delta_rule_chunks, delta_rule_step, normalize
from infinilm.kernels.support import has_kernels
from infinilm.layers.formats import LayerOptions, below
from infinilm.layers.linear import ColumnParallelLinear, RowParallelLinear
from infinilm.layers.mixer import ForwardContext, Mixer
from infinilm.layers.norm import RMSNorm
from infinilm.layers.state_plan import PromptStates, StatePlan


class _Inputs(NamedTuple):
    """What the tokens were projected to. Rows may be apart."""

    channels: Tensor  # [T, q, k and v]
    gate: Tensor  # [T, value heads * value_dim]
    rate: Tensor  # [T, value heads]
    change: Tensor  # [T, value heads]

    def select(self, tokens: slice | Tensor) -> "_Inputs":
        return _Inputs(*(part[tokens] for part in self))


class GatedDeltaNet(Mixer):
    """Queries, keys and values pass a short causal convolution, then the gated delta rule (`kernels/delta_rule.py`).

    Its state is `[value_heads, key_dim, value_dim]`, and the last inputs of the convolution, `[channels, width - 1]`.
    Groups of value heads share a query and a key head. The result of each head is normalised and gated.
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
        self._has_kernels = has_kernels(device)
        self.conv = nn.Parameter(torch.empty(num_channels, 1, conv_width, **kind), requires_grad=False)
        self.dt_bias, self.a_log = (
            nn.Parameter(torch.empty(self._heads.length, dtype=torch.float32, device=device), requires_grad=False)
            for _ in range(2)
        )
        self.norm = nn.Parameter(torch.empty(value_dim, **kind), requires_grad=False)

    def forward(
        self, x: Tensor, step: ForwardContext, residual: Tensor | None = None, norm: RMSNorm | None = None
    ) -> Tensor:
        plan = step.plan
        assert isinstance(plan, StatePlan)
        projected = self.projections(x, norm=norm)
        inputs = _Inputs(*projected.split((sum(self._sizes[:3]), *self._sizes[3:]), dim=-1))
        states = step.cache.states[self.layer]
        if plan.places is None:
            mixed = self._step(plan, inputs, states)
        else:
            mixed = projected.new_empty((len(x), self._sizes[3]))
            if len(plan.places):
                mixed[plan.places] = self._step(plan, inputs.select(plan.places), states)
            for prompt in plan.prompts:
                mixed[prompt.tokens] = self._prompt(prompt, inputs.select(prompt.tokens), states)
        if step.taps is not None:
            self._show_states(step, plan, states)
        output: Tensor = self.out(mixed, residual)
        if step.taps is not None:
            step.taps.see("attention_output", output, self.layer)
        return output

    def _step(self, plan: StatePlan, inputs: "_Inputs", states: list[Tensor]) -> Tensor:
        """The requests with one new token: `[n, value heads * value_dim]`."""
        if self._has_kernels:
            return self._step_by_kernels(plan, inputs, states)
        memory, before = (self._read(part, plan) for part in states)
        channels = inputs.channels.float().unsqueeze(1)
        query, key, value = self._heads_of(causal_conv(channels, before.transpose(1, 2), self._weight))
        output, memory = delta_rule_step(
            query.squeeze(1), key.squeeze(1), value.squeeze(1), *self._decay_and_rate(inputs), memory
        )
        states[0][plan.targets] = memory
        states[1][plan.targets] = torch.cat((before[:, :, 1:], channels.transpose(1, 2)), dim=2)
        return self._norm_and_gate(output, inputs.gate)

    def _step_by_kernels(self, plan: StatePlan, inputs: "_Inputs", states: list[Tensor]) -> Tensor:
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

    def _decay_and_rate(self, inputs: "_Inputs") -> tuple[Tensor, Tensor]:
        decay = -self.a_log.exp() * F.softplus(inputs.change.float() + self.dt_bias)
        return decay, inputs.rate.float().sigmoid()

    @staticmethod
    def _read(part: Tensor, plan: StatePlan) -> Tensor:
        found = part[plan.sources]
        return found.masked_fill_(plan.is_first.view(-1, *[1] * (found.dim() - 1)), 0)

    def _prompt(self, prompt: PromptStates, inputs: "_Inputs", states: list[Tensor]) -> Tensor:
        """One request of several new tokens. Chunks end where blocks end."""
        memory, before = (torch.zeros_like(part[0]) if prompt.source < 0 else part[prompt.source] for part in states)
        channels = inputs.channels.float()
        query, key, value = self._heads_of(causal_conv(channels, before.t(), self._weight))
        decay, rate = self._decay_and_rate(inputs)
        size, num_tokens = prompt.chunk_size, len(channels)
        num_before = prompt.start % size  # tokens of the first chunk that were computed earlier
        num_after = -(num_before + num_tokens) % size

        def in_chunks(rows: Tensor) -> Tensor:  # [T, heads, …] to [heads, chunks, tokens, …]
            padded = F.pad(rows, (0, 0) * (rows.dim() - 1) + (num_before, num_after))
            return padded.view(-1, size, *rows.shape[1:]).movedim(2, 0)

        outputs, memories = delta_rule_chunks(
            in_chunks(query), in_chunks(key), in_chunks(value), in_chunks(decay), in_chunks(rate), memory
        )
        padded = torch.cat((before.t(), channels))
        for end, block in prompt.targets:
            states[0][block] = memories[-(-(num_before + end) // size) - 1]
            states[1][block] = padded[end : end + before.shape[1]].t()
        mixed = outputs.movedim(0, 2).flatten(0, 1)[num_before : num_before + num_tokens]
        return self._norm_and_gate(mixed, inputs.gate)

    @property
    def _weight(self) -> Tensor:
        return self.conv.squeeze(1).float()

    def _heads_of(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[…, value heads, dim]` of channels `[…, channels]`."""
        activated = F.silu(convolved.to(self.conv.dtype))
        query, key, value = torch.split(activated, self._sizes[:3], dim=-1)
        query, key = (
            normalize(part.view(*part.shape[:-1], -1, self.key_dim)).repeat_interleave(self._group_size, dim=-2)
            for part in (query, key)
        )
        return query * self.key_dim**-0.5, key, value.view(*value.shape[:-1], -1, self.value_dim).float()

    def _norm_and_gate(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """The heads' results `[n, heads, value_dim]` float32 to `[n, heads * value_dim]` of the gate's type."""
        wide = mixed.to(gate.dtype).float()
        scale = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt_()
        normed = (wide * scale).to(gate.dtype) * self.norm
        return (normed.flatten(1) * F.silu(gate.float())).to(gate.dtype)

    def _show_states(self, step: ForwardContext, plan: StatePlan, states: list[Tensor]) -> None:
        """Show each request's state `[N, heads, key_dim, value_dim]`, those with one new token first."""
        assert step.taps is not None
        ends = [prompt.targets[-1][1] for prompt in plan.prompts if prompt.targets]
        blocks = torch.cat((plan.targets, plan.targets.new_tensor(ends)))
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
