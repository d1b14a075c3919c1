"""Gated delta nets and latent attention in the native library against torch's, in one step and token by token."""

from typing import Any

import numpy as np
import pytest
import torch
from native.test_native_decoder import BLOCK_SIZE, EPS, HIDDEN, NUM_BLOCKS, make_batch, make_rotary, norm, turn
from native.test_native_decoder import Kind as Turning
from native.test_native_matrix import make_matrix
from torch import Tensor

from infinilm.kernels.delta_rule import delta_rule_step, normalize
from infinilm.kernels.packed import packed_linear

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, WIDTH = 2, 4, 24, 40, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
HEADS, RANK, QUERY_RANK, PLAIN_DIM, HEAD_VALUE_DIM, ROPE_DIM = 6, 72, 32, 20, 16, 16
STEPS = ([(0, 40), (0, 3)], [(40, 1), (3, 30)], [(41, 2), (33, 1)])


def make_linear(native: Any, rows: int, columns: int, seed: int) -> tuple[Any, Tensor]:
    matrix, weight = make_matrix(native, "Q8_0", rows, columns, seed)
    return native.Linear([matrix], None), weight


def make_decoder(native: Any, mixer: Any) -> Any:
    """A layer whose channel mixer adds nothing."""
    gate_up, down = (native.Linear([native.Matrix("Q8_0", *shape)], None) for shape in ((64, HIDDEN), (HIDDEN, 32)))
    mlp = native.MLP(gate_up=gate_up, down=down, activation="silu")
    norms = dict.fromkeys(("before_tokens", "after_tokens", "before_channels", "after_channels"))
    layer = native.Layer(mixer, mlp, **norms | {"before_tokens": torch.ones(HIDDEN)}, eps=EPS, residual_scale=1.0)
    return native.Decoder([layer], None, EPS)


def run(native: Any, decoder: Any, cache: Any, steps: Any, inputs: list[Tensor]) -> list[Tensor]:
    """The results of steps of requests with (cached, new) tokens; `inputs` are by request."""
    results: list[list[Tensor]] = [[] for _ in inputs]
    for chunks in steps:
        hidden = torch.cat([inputs[i][cached : cached + new] for i, (cached, new) in enumerate(chunks)])
        batch = make_batch(chunks)
        step = native.Step(
            batch.positions, batch.slot_mapping, batch.block_tables, batch.query_lens, batch.context_lens
        )
        decoder.forward(hidden, cache, [step])
        for i, part in enumerate(hidden.split([new for _, new in chunks])):
            results[i].append(part)
    return [torch.cat(parts) for parts in results]


class DeltaNetCase:
    def __init__(self, native: Any) -> None:
        torch.manual_seed(0)
        values = VALUE_HEADS * VALUE_DIM
        into, self.into = make_linear(native, CHANNELS + values + 2 * VALUE_HEADS, HIDDEN, 1)
        out, self.out = make_linear(native, HIDDEN, values, 2)
        self.conv, self.decay = torch.randn(WIDTH, CHANNELS), -torch.rand(VALUE_HEADS)
        self.bias, self.norm = torch.randn(VALUE_HEADS), torch.rand(VALUE_DIM)
        sizes = {"key_heads": KEY_HEADS, "value_heads": VALUE_HEADS, "key_dim": KEY_DIM, "value_dim": VALUE_DIM}
        heads = native.DeltaHeads(**sizes, conv=self.conv, decay=self.decay, dt_bias=self.bias, norm=self.norm, eps=EPS)
        self.mixer = native.DeltaNet(in_=into, out=out, heads=heads)
        self.native, self.decoder = native, make_decoder(native, self.mixer)

    def cache(self) -> Any:
        states = torch.zeros(NUM_BLOCKS + 1, VALUE_HEADS, KEY_DIM, VALUE_DIM)
        inputs = torch.zeros(NUM_BLOCKS + 1, CHANNELS, WIDTH - 1)
        arrays = [states, inputs, np.zeros(NUM_BLOCKS, dtype=np.int64)]
        return self.native.Cache([arrays], block_size=BLOCK_SIZE)

    def expected(self, hidden: Tensor) -> Tensor:
        """A text's tokens one by one."""
        state = torch.zeros(1, VALUE_HEADS, KEY_DIM, VALUE_DIM)
        sizes = [CHANNELS, VALUE_HEADS * VALUE_DIM, VALUE_HEADS, VALUE_HEADS]
        rows, gate, rate, change = packed_linear(norm(hidden, torch.ones(HIDDEN)), self.into).split(sizes, dim=1)
        padded = torch.cat((torch.zeros(WIDTH - 1, CHANNELS), rows))
        convolved = torch.stack([padded[i : i + len(rows)] * self.conv[i] for i in range(WIDTH)]).sum(0)
        keys = KEY_HEADS * KEY_DIM
        q, k, v = torch.nn.functional.silu(convolved).split([keys, keys, VALUE_HEADS * VALUE_DIM], dim=1)
        q, k = (normalize(x.view(len(x), KEY_HEADS, -1)).repeat_interleave(VALUE_HEADS // KEY_HEADS, 1) for x in (q, k))
        decay = self.decay * torch.nn.functional.softplus(change + self.bias)
        outputs = []
        for t in range(len(rows)):
            token = (q[t : t + 1] * KEY_DIM**-0.5, k[t : t + 1], v[t].view(1, VALUE_HEADS, -1))
            output, state = delta_rule_step(*token, decay[t : t + 1], rate[t : t + 1].sigmoid(), state)
            outputs.append(output)
        mixed = norm(torch.cat(outputs), self.norm).flatten(1) * torch.nn.functional.silu(gate)
        return hidden + packed_linear(mixed, self.out)


class LatentCase:
    def __init__(self, native: Any, has_query_rank: bool) -> None:
        torch.manual_seed(0)
        query_dim, self.query_rank = PLAIN_DIM + ROPE_DIM, QUERY_RANK if has_query_rank else 0
        latents, self.latents = make_linear(native, self.query_rank + RANK + ROPE_DIM, HIDDEN, 1)
        query, self.query = make_linear(native, HEADS * query_dim, self.query_rank or HIDDEN, 2)
        out, self.out = make_linear(native, HIDDEN, HEADS * HEAD_VALUE_DIM, 3)
        self.expansion = torch.randn(HEADS * (PLAIN_DIM + HEAD_VALUE_DIM), RANK)
        self.norm, self.query_norm = torch.rand(RANK), torch.rand(QUERY_RANK) if has_query_rank else None
        self.turning, self.scale = Turning(rotary_dim=ROPE_DIM, is_interleaved=True), 0.2
        heads = native.LatentHeads(
            count=HEADS, rank=RANK, plain_dim=PLAIN_DIM, value_dim=HEAD_VALUE_DIM, rotary=make_rotary(ROPE_DIM),
            is_interleaved=True, expansion=self.expansion, norm=self.norm, eps=EPS, scale=self.scale,
        )  # fmt: skip
        self.mixer = native.LatentAttention(
            latents=latents, query=query, out=out, heads=heads, query_norm=self.query_norm
        )
        self.native, self.decoder = native, make_decoder(native, self.mixer)

    def cache(self) -> Any:
        return self.native.Cache([torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 1, 1, RANK + ROPE_DIM)])

    def expected(self, hidden: Tensor) -> Tensor:
        """All heads' keys and values made from the latent vectors."""
        x, positions = norm(hidden, torch.ones(HIDDEN)), torch.arange(len(hidden))
        for_query, latent, key = packed_linear(x, self.latents).split([self.query_rank, RANK, ROPE_DIM], dim=1)
        query = packed_linear(norm(for_query, self.query_norm) if self.query_rank else x, self.query)
        plain, turned = query.view(len(x), HEADS, -1).split([PLAIN_DIM, ROPE_DIM], dim=-1)
        turned, key = turn(turned, positions, self.turning), turn(key[:, None], positions, self.turning)
        made = (norm(latent, self.norm) @ self.expansion.T).view(len(x), HEADS, -1)
        keys, values = made.split([PLAIN_DIM, HEAD_VALUE_DIM], dim=-1)
        scores = torch.einsum("thd,shd->hts", plain, keys) + torch.einsum("thd,sd->hts", turned, key[:, 0])
        is_later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        weights = (scores * self.scale).masked_fill(is_later, -torch.inf).softmax(-1)
        mixed = torch.einsum("hts,shd->thd", weights, values).flatten(1)
        return hidden + packed_linear(mixed, self.out)


CASES = {
    "delta net": DeltaNetCase,
    "latents": lambda native: LatentCase(native, False),
    "latents, small queries": lambda native: LatentCase(native, True),
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_mixers_equal_torch(native: Any, make: Any) -> None:
    case = make(native)
    inputs = [torch.randn(43, HIDDEN), torch.randn(34, HIDDEN)]
    results = run(native, case.decoder, case.cache(), STEPS, inputs)
    for found, hidden in zip(results, inputs, strict=True):
        expected = case.expected(hidden)
        assert (expected - hidden).norm() > 0.1 * hidden.norm()
        assert (found - expected).norm() < 1e-3 * (expected - hidden).norm()


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_chunks_company_and_threads_change_nothing(native: Any, make: Any) -> None:
    case = make(native)
    inputs = [torch.randn(43, HIDDEN), torch.randn(34, HIDDEN)]
    together = run(native, case.decoder, case.cache(), STEPS, inputs)
    native.set_num_threads(3)
    whole = run(native, case.decoder, case.cache(), ([(0, 43)],), inputs[:1])
    one_by_one = run(native, case.decoder, case.cache(), [[(i, 1)] for i in range(43)], inputs[:1])
    assert whole[0].equal(together[0])
    assert one_by_one[0].equal(together[0])


def test_a_text_goes_on_from_kept_states_only(native: Any) -> None:
    case = DeltaNetCase(native)
    cache, hidden = case.cache(), [torch.randn(43, HIDDEN)]
    run(native, case.decoder, cache, ([(0, 20)],), hidden)
    with pytest.raises(ValueError, match="goes on after a token whose recurrent state is not kept"):
        run(native, case.decoder, cache, ([(19, 2)],), hidden)
    # The end of a full block is kept.
    after = run(native, case.decoder, cache, ([(16, 20)],), hidden)
    assert after[0].equal(run(native, case.decoder, case.cache(), ([(0, 36)],), hidden)[0][16:])


def test_what_does_not_fit_is_refused(native: Any) -> None:
    delta_net, latents = DeltaNetCase(native), LatentCase(native, False)
    hidden = [torch.randn(3, HIDDEN)]
    for case, other in ((delta_net, latents), (latents, delta_net)):
        with pytest.raises(ValueError, match="a cache does not fit its layer"):
            run(native, case.decoder, other.cache(), ([(0, 3)],), hidden)
    with pytest.raises(ValueError, match="needs a block_size"):
        native.Cache([[torch.zeros(2, 1, 1, 1), torch.zeros(2, 1, 1), np.zeros(1, dtype=np.int64)]])
