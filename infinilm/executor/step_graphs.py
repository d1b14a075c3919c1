"""Steps as CUDA graphs: the whole step, sampling included, launched as one.

There are graphs of steps in which every row decodes, for several numbers of rows, and of small steps with prompts, for
several numbers of tokens. A graph is replayed for every step of its size or less. Missing rows and tokens are padding,
which reads and writes nothing. All of a step's input is one small copy to the device (`kernels/step_inputs.py`).

A graph ends with the tokens drawn or, if drawing needs more than the sampling kernel, with the logits. The first kind
is captured at the start, when no request waits for it; the second kind when it is needed. With several ranks, each rank
captures its own graphs, which include the collectives; only rank 0's graphs include the sampling.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from infinilm.attention import ForwardBatch
from infinilm.attention.batch import IntArray
from infinilm.attention.triton_backend import DecodePlan, MixedPlan, TritonAttention
from infinilm.cache.specs import LatentSpec
from infinilm.kernels.decode_attention import DecodeWorkspace, SharedPrefix
from infinilm.kernels.step_inputs import DecodeInputs, MixedInputs
from infinilm.layers.state_plan import GraphPrompts, GraphStates, StatePlan
from infinilm.models.decoder import skipping_like_layers
from infinilm.sampling import Sampler

if TYPE_CHECKING:
    from infinilm.executor.rank_worker import RankWorker
    from infinilm.executor.step_io import StepBatch

logger = logging.getLogger(__name__)

_untyped: Any = torch.cuda

NUM_STAGING = 4
"""Copies to the device that can be in progress at once; more than there are steps in flight."""
MIN_SHARED_ROWS, MIN_SHARED_TOKENS = 16, 256
"""From these numbers on, a separate kernel that reads a shared prefix once for all rows is worth its launch."""
MIXED_TOKENS = (64, 128, 256, 512, 1024, 2048)
"""Tokens of captured steps with prompts. For larger steps the host launches each kernel: about 24 ms in a small model.
"""
MIXED_TOKEN_BYTES = 5 << 40
"""If tokens times bytes of weights exceed this, a step takes the device longer than the host needs to launch it."""
MIXED_ROWS = (16, 256, 1024)
NO_ROWS: IntArray = np.empty(0, dtype=np.int64)


class Shape(NamedTuple):
    """What a graph was captured for."""

    num_rows: int
    num_tokens: int  # 0: every row decodes
    samples: bool  # or ends with the logits


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: Any
    token_ids: Tensor | None  # [rows] int64
    is_finite: Tensor | None  # [rows] bool
    logits: Tensor | None  # [rows, vocab], instead


def decode_sizes(max_num_rows: int) -> list[int]:
    """Numbers of rows to capture: close together where steps are short, because padding would matter there."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, *range(64, 257, 32), *range(320, 1025, 64)]
    return [size for size in sizes if size < max_num_rows] + [min(max_num_rows, 1024)]


def mixed_sizes(max_num_tokens: int, weight_bytes: int) -> tuple[int, ...]:
    """Numbers of tokens to capture steps with prompts for, always with the smallest."""
    needed = MIXED_TOKENS[: bisect_left(MIXED_TOKENS, max_num_tokens) + 1]
    return needed[:1] + tuple(size for size in needed[1:] if size * weight_bytes <= MIXED_TOKEN_BYTES)


def launch_bound_tokens(sizes: Sequence[int]) -> int:
    """The tokens of the largest graph if larger steps wait for the host; 0 if those take the device longer."""
    return sizes[-1] if sizes[-1] == MIXED_TOKENS[-1] else 0


def mixed_shapes(max_num_rows: int, token_sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Numbers of rows and tokens to capture steps with prompts for. Each row has at least one token."""
    row_sizes = sorted({min(size, max_num_rows) for size in MIXED_ROWS})
    return [(rows, size) for size in token_sizes for fewer, rows in pairwise([0, *row_sizes]) if size > fewer]


class StepGraphs:
    """Captures and replays steps of one rank's worker and the sampler."""

    def __init__(
        self,
        worker: "RankWorker",
        sampler: Sampler | None,
        last_token: Tensor,
        *,
        max_num_rows: int,
        max_num_tokens: int,
        max_blocks: int,
    ) -> None:
        assert isinstance(worker.backend, TritonAttention)
        assert worker.cache is not None
        self._worker = worker
        self._backend = worker.backend
        self._cache = worker.cache
        self._sampler = sampler
        self._last_token = last_token
        self._max_blocks = max_blocks
        self._block_size = worker.cache.block_size
        self._sizes = decode_sizes(max_num_rows)
        self._mixed_rows = sorted({min(size, max_num_rows) for size in MIXED_ROWS})
        self._mixed_tokens = mixed_sizes(max_num_tokens, worker.model.num_bytes())
        self.launch_bound_tokens = launch_bound_tokens(self._mixed_tokens)
        self._graphs: dict[Shape, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = _untyped.Stream(worker.device)
        self._decode_inputs = DecodeInputs(self._sizes[-1], max_blocks, worker.device)
        self._mixed_inputs: dict[tuple[int, int], MixedInputs] = {}
        num_values = max(
            DecodeInputs.num_values(self._sizes[-1], max_blocks),
            MixedInputs.num_values(self._mixed_tokens[-1], self._mixed_rows[-1], max_blocks),
        )
        self._staging = [torch.empty(num_values, dtype=torch.int32, pin_memory=True) for _ in range(NUM_STAGING)]
        self._num_steps = 0
        groups = range(len(self._cache.groups))
        (self._group,) = (group for group in groups if group not in self._cache.state_ends)  # of attention layers
        self._prompt_states: dict[tuple[int, int, int], GraphPrompts] = {}
        self._states = {
            group: GraphStates(self._sizes[-1], self._cache, group, NUM_STAGING) for group in self._cache.state_ends
        }
        self._workspace: DecodeWorkspace | None = None
        if not isinstance(self._cache.groups[self._group].spec, LatentSpec):  # latent attention needs none
            config = worker.model.config
            self._workspace = self._backend.workspace(
                self._sizes[-1], config.num_attention_heads // worker.group.size, config.max_head_dim, worker.device
            )

    # --- running ----------------------------------------------------------------------------------------

    def can_run(self, batch: "StepBatch") -> bool:
        """Whether there is, or can be, a graph of such a step."""
        tokens, num_rows = batch.tokens, len(batch.tokens.query_lens)
        if num_rows == batch.num_decoding:
            return num_rows <= self._sizes[-1]
        return (
            max(num_rows, len(batch.sample_places)) <= self._mixed_rows[-1]
            and len(tokens.input_ids) <= self._mixed_tokens[-1]
            and not self._backend.has_long(tokens.query_lens, tokens.context_lens)
        )

    def run(self, batch: "StepBatch") -> tuple[Tensor, Tensor]:
        """Start a step. Returns the tokens drawn `[S]` and whether their logits were finite `[S]`.

        The next step overwrites the results.
        """
        num_samples = len(batch.sample_places)
        graph = self._launch(batch, samples=True)
        assert graph.token_ids is not None
        assert graph.is_finite is not None
        return graph.token_ids[:num_samples], graph.is_finite[:num_samples]

    def run_to_logits(self, batch: "StepBatch") -> Tensor:
        """Start a step that ends with the logits `[S, vocab]` of the tokens to draw."""
        logits = self._launch(batch, samples=False).logits
        assert logits is not None
        return logits[: len(batch.sample_places)]

    @torch.inference_mode()
    def _launch(self, batch: "StepBatch", *, samples: bool) -> _Graph:
        staging = self._staging[self._num_steps % NUM_STAGING]
        self._num_steps += 1
        tokens, num_rows = batch.tokens, len(batch.tokens.query_lens)
        if batch.num_decoding == num_rows:
            shape = self._choose_size(num_rows, samples=samples)
            inputs = self._decode_inputs.first(shape.num_rows)
            tables = tokens.tables_of(self._group)
            num_shared = count_shared(tables, tokens.context_lens, self._block_size)
            used = inputs.pack(staging.numpy(), batch.token_rows, tokens.context_lens, tables, num_shared)
            packed = inputs.packed
        else:
            largest = max(num_rows, len(batch.sample_places))
            num_rows = self._mixed_rows[bisect_left(self._mixed_rows, largest)]
            num_tokens = self._mixed_tokens[bisect_left(self._mixed_tokens, len(tokens.input_ids))]
            shape = Shape(num_rows, num_tokens, samples)
            mixed = self._mixed(num_tokens, num_rows)
            used = mixed.pack(
                staging.numpy(),
                ids=tokens.input_ids,
                token_rows=batch.token_rows,
                positions=tokens.positions,
                slots=tokens.slots_of(self._group),
                sample_rows=batch.sample_rows,
                sample_places=batch.sample_places,
                sample_positions=batch.sample_positions,
                query_lens=tokens.query_lens,
                context_lens=tokens.context_lens,
                tables=tokens.tables_of(self._group),
                num_decoding=batch.num_decoding,
            )
            packed = mixed.packed
        graph = self._graphs.get(shape) or self._capture(shape)
        packed[:used].copy_(staging[:used], non_blocking=True)
        for group, states in self._states.items():
            if shape.num_tokens == 0:
                states.fill(tokens.tables_of(group), tokens.context_lens, shape.num_rows)
            else:
                self._prompts(shape, group).fill(tokens, tokens.tables_of(group), batch.num_decoding)
        graph.graph.replay()
        return graph

    def _choose_size(self, num_rows: int, *, samples: bool) -> Shape:
        """The size for so many decoding rows, or one up to twice as large if that saves capturing another graph now.

        Kernels for few rows are made for their number, so these get no larger graph.
        """
        best = bisect_left(self._sizes, num_rows)
        shapes = [Shape(size, 0, samples) for size in self._sizes[best:] if size <= 2 * self._sizes[best]]
        if shapes[0].num_rows < MIN_SHARED_ROWS:
            return shapes[0]
        return next((shape for shape in shapes if shape in self._graphs), shapes[0])

    def _mixed(self, num_tokens: int, num_rows: int) -> MixedInputs:
        key = (num_tokens, num_rows)
        if key not in self._mixed_inputs:
            self._mixed_inputs[key] = MixedInputs(num_tokens, num_rows, self._max_blocks, self._worker.device)
        return self._mixed_inputs[key]

    def _prompts(self, shape: Shape, group: int) -> GraphPrompts:
        """What graphs of that shape read for a group of recurrent layers."""
        key = (shape.num_tokens, shape.num_rows, group)
        if key not in self._prompt_states:
            self._prompt_states[key] = GraphPrompts(*key[:2], self._cache, group, NUM_STAGING)
        return self._prompt_states[key]

    # --- capturing --------------------------------------------------------------------------------------

    def _usual_shapes(self) -> list[Shape]:
        """All steps that end with the tokens drawn. The largest come first, so that the others find enough memory."""
        mixed = [Shape(*sizes, True) for sizes in mixed_shapes(self._mixed_rows[-1], self._mixed_tokens)]
        return [*reversed(mixed), *(Shape(size, 0, True) for size in reversed(self._sizes))]

    @torch.inference_mode()
    def compute_all(self) -> None:
        """Compute the steps of `capture_all` without capturing them, which compiles and loads their kernels.

        Only one of several layers with the same kernels is computed.
        """
        with skipping_like_layers(self._worker.model):
            for shape in self._usual_shapes():
                self._empty_step(shape)()

    def capture_all(self) -> None:
        """Capture all usual steps, which `compute_all` has computed in this process."""
        for index, shape in enumerate(self._usual_shapes()):
            # Libraries initialise for the stream at the first one.
            graph = self._capture(shape, is_new=index == 0)
            graph.graph.replay()  # the first launch takes longest

    @torch.inference_mode()
    def _capture(self, shape: Shape, *, is_new: bool = True) -> _Graph:
        start_time = perf_counter()
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            step = self._empty_step(shape)
            if is_new:
                step()  # compiles new kernels and initialises libraries
            # torch's context manager would first empty the allocator's cache and collect garbage.
            graph.capture_begin(pool=self._pool)
            try:
                outputs = step()
            except BaseException:
                with suppress(RuntimeError):  # it would only report a consequence of this error
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._graphs[shape] = _Graph(graph, *outputs)
        logger.debug("captured %s in %.3f s", shape, perf_counter() - start_time)
        return self._graphs[shape]

    def _empty_step(self, shape: Shape) -> "Callable[[], StepOutputs]":
        """The computation of a step of that shape. Its inputs are all padding so far."""
        for states in self._states.values():
            states.clear()
        if shape.num_tokens == 0:
            decoding = self._decode_inputs.first(shape.num_rows)
            decoding.clear()
            return partial(self._decode_step, decoding, shape)
        for group in self._states:
            self._prompts(shape, group).clear()
        mixed = self._mixed(shape.num_tokens, shape.num_rows)
        mixed.clear()
        return partial(self._mixed_step, mixed, shape)

    def _decode_step(self, inputs: DecodeInputs, shape: Shape) -> "StepOutputs":
        inputs.unpack(self._last_token, self._block_size)
        shared = SharedPrefix(inputs.num_shared, inputs.tables[0]) if shape.num_rows >= MIN_SHARED_ROWS else None
        plan = DecodePlan(inputs.tables, inputs.context_lens, inputs.slots, self._workspace, shared)
        states = {group: each.first(shape.num_rows) for group, each in self._states.items()}
        hidden = self._forward(inputs, plan, states)
        return self._finish(hidden, inputs.rows, inputs.context_lens, samples=shape.samples)

    def _mixed_step(self, inputs: MixedInputs, shape: Shape) -> "StepOutputs":
        inputs.unpack(self._last_token)
        # Any row may be decoding; decoding rows come first, with one token each. What other rows leave there is
        # overwritten.
        decoding = slice(0, min(shape.num_rows, shape.num_tokens))
        plan = MixedPlan(
            slots=inputs.slots,
            tables=inputs.tables,
            query_starts=inputs.query_starts,
            context_lens=inputs.prefill_lens,
            short_context_lens=inputs.prefill_lens,
            has_short=True,
            long=(),
            decode=DecodePlan(
                inputs.tables[decoding], inputs.decode_lens[decoding], inputs.slots[decoding], self._workspace
            ),
            decode_tokens=decoding,
        )
        states = {group: self._prompts(shape, group).plan() for group in self._states}
        hidden = self._forward(inputs, plan, states)[inputs.sample_places]
        return self._finish(hidden, inputs.sample_rows, inputs.sample_positions, samples=shape.samples)

    def _forward(
        self, inputs: DecodeInputs | MixedInputs, plan: DecodePlan | MixedPlan, states: dict[int, StatePlan]
    ) -> Tensor:
        batch = ForwardBatch(
            *(inputs.ids, inputs.positions, inputs.slots, inputs.tables, NO_ROWS, NO_ROWS, plan), state_plans=states
        )
        return self._worker.model(batch, self._cache, self._backend)

    def _finish(self, hidden: Tensor, rows: Tensor, positions: Tensor, *, samples: bool) -> "StepOutputs":
        logits = self._worker.model.compute_logits(hidden)
        if not samples:
            return None, None, logits
        if self._sampler is None:  # rank 0 samples
            token_ids, is_finite = torch.empty_like(rows), torch.empty_like(rows, dtype=torch.bool)
        else:
            token_ids, is_finite = self._sampler.sample_rows(logits, rows, positions)
        self._worker.group.broadcast(token_ids)
        self._last_token[rows] = token_ids  # padding's row -1 is the spare last one
        return token_ids, is_finite, None


StepOutputs = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Token ids, whether their logits were finite, logits: as in `_Graph`."""


def count_shared(tables: IntArray, context_lens: IntArray, block_size: int) -> int:
    """The number of tokens that all rows share, in the same blocks; 0 if there are too few rows or tokens."""
    if len(tables) < MIN_SHARED_ROWS:
        return 0
    num_full = int(context_lens.min() - 1) // block_size
    is_same = (tables[:, :num_full] == tables[0, :num_full]).all(axis=0)
    num_same = num_full if is_same.all() else int(is_same.argmin())
    num_tokens = num_same * block_size
    return num_tokens if num_tokens >= MIN_SHARED_TOKENS else 0
