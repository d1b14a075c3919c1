"""Decode steps as CUDA graphs: the whole step, sampling included, launched as one.

A graph is captured for a number of rows the first time that a step needs it, and replayed for every step of as many
rows or fewer: what is missing is padding, which reads and writes nothing. All of a step's input is one small copy to
the device (`kernels/decode_inputs.py`).
"""

import logging
from bisect import bisect_left
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infinilm.attention import ForwardBatch
from infinilm.attention.batch import IntArray
from infinilm.attention.triton_backend import DecodePlan, TritonAttention
from infinilm.engine.rank_worker import RankWorker
from infinilm.kernels.decode_attention import SharedPrefix
from infinilm.kernels.decode_inputs import DecodeInputs, pack_decode_inputs
from infinilm.sampling import Sampler

logger = logging.getLogger(__name__)

_untyped: Any = torch.cuda

NUM_STAGING = 4
"""Copies to the device that can be under way at once; more than there are steps in flight."""
MIN_SHARED_ROWS, MIN_SHARED_TOKENS = 16, 256
"""From here on reading a common beginning once for all rows is worth a kernel of its own."""


def graph_sizes(max_num_rows: int) -> list[int]:
    """Numbers of rows to capture: close together where steps are short and padding would show."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, *range(64, 257, 32), *range(320, 1025, 64)]
    return [size for size in sizes if size < max_num_rows] + [min(max_num_rows, 1024)]


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: Any
    inputs: DecodeInputs
    token_ids: Tensor  # [size] int64
    is_sound: Tensor  # [size] bool


class _Prepared:
    """An attention backend whose plan is made already."""

    def __init__(self, backend: TritonAttention, plan: DecodePlan) -> None:
        self.name = backend.name
        self._backend = backend
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def prepare(self, *_: object, **__: object) -> DecodePlan:
        return self._plan


class DecodeGraphs:
    """Captures and replays decode steps of one rank's worker and the sampler."""

    def __init__(
        self,
        worker: RankWorker,
        sampler: Sampler,
        last_token: Tensor,
        *,
        max_num_rows: int,
        max_blocks: int,
        block_size: int,
    ) -> None:
        assert isinstance(worker.backend, TritonAttention)
        self._worker = worker
        self._backend = worker.backend
        self._sampler = sampler
        self._last_token = last_token
        self._max_blocks = max_blocks
        self._block_size = block_size
        self._sizes = graph_sizes(max_num_rows)
        self._graphs: dict[int, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = _untyped.Stream(worker.device)
        num_values = DecodeInputs.num_values(self._sizes[-1], max_blocks)
        self._staging = [torch.empty(num_values, dtype=torch.int32, pin_memory=True) for _ in range(NUM_STAGING)]
        self._arrays: list[npt.NDArray[np.int32]] = [tensor.numpy() for tensor in self._staging]
        self._num_steps = 0
        config = worker.model.config
        self._workspace = self._backend.workspace(
            self.max_num_rows, config.num_attention_heads, config.head_dim, worker.device
        )

    @property
    def max_num_rows(self) -> int:
        """The largest step that can be a graph."""
        return self._sizes[-1]

    @torch.inference_mode()
    def run(self, ids: IntArray, rows: IntArray, context_lens: IntArray, tables: IntArray) -> tuple[Tensor, Tensor]:
        """Start a step of n rows: the tokens they draw `[n]` and whether those mean anything `[n]`.

        `ids` are the rows' last tokens or `PENDING_TOKEN`, `tables` `[n, blocks]` their blocks. The results are
        overwritten by the next step.
        """
        size = self._sizes[bisect_left(self._sizes, len(rows))]
        graph = self._graphs.get(size) or self.capture(size)
        slot = self._num_steps % NUM_STAGING
        self._num_steps += 1
        num_shared = count_shared(tables, context_lens, self._block_size)
        used = pack_decode_inputs(self._arrays[slot], ids, rows, context_lens, tables, num_shared, size)
        graph.inputs.packed[:used].copy_(self._staging[slot][:used], non_blocking=True)
        graph.graph.replay()
        return graph.token_ids[: len(rows)], graph.is_sound[: len(rows)]

    def capture_first(self) -> None:
        """Capture the smallest step, and the smallest that is computed by the kernels for many rows."""
        large = [size for size in self._sizes if size >= MIN_SHARED_ROWS]
        for size in (1, *large[:1]):
            self.capture(size)

    @torch.inference_mode()
    def capture(self, size: int) -> _Graph:
        """Make the graph of a step of `size` rows."""
        start_time = perf_counter()
        inputs = DecodeInputs(size, self._max_blocks, self._worker.device)
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            self._step(inputs)  # compiles what is new and lets libraries set themselves up
            # Not by torch's context manager, which first empties the allocator's cache and collects garbage.
            graph.capture_begin(pool=self._pool)
            try:
                token_ids, is_sound = self._step(inputs)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._graphs[size] = _Graph(graph, inputs, token_ids, is_sound)
        logger.debug("captured a decode step of %d rows in %.3f s", size, perf_counter() - start_time)
        return self._graphs[size]

    def _step(self, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
        worker = self._worker
        assert worker.cache is not None
        inputs.unpack(self._last_token, self._block_size)
        batch = ForwardBatch(
            inputs.ids, inputs.positions, inputs.slots, inputs.tables, np.empty(0, np.int64), np.empty(0, np.int64)
        )
        shared = SharedPrefix(inputs.num_shared, inputs.tables[0]) if inputs.size >= MIN_SHARED_ROWS else None
        plan = DecodePlan(inputs.tables, inputs.context_lens, inputs.slots, self._workspace, shared)
        hidden = worker.model(batch, worker.cache, _Prepared(self._backend, plan))
        logits = worker.model.compute_logits(hidden)
        token_ids, is_sound = self._sampler.sample_rows(logits, inputs.rows, inputs.context_lens)
        self._last_token[inputs.rows] = token_ids  # padding's row -1 is the spare last one
        return token_ids, is_sound


def count_shared(tables: IntArray, context_lens: IntArray, block_size: int) -> int:
    """How many tokens all rows have in common, in the same blocks; 0 if too few to make use of it."""
    if len(tables) < MIN_SHARED_ROWS:
        return 0
    num_full = int(context_lens.min() - 1) // block_size
    is_same = (tables[:, :num_full] == tables[0, :num_full]).all(axis=0)
    num_same = num_full if is_same.all() else int(is_same.argmin())
    num_tokens = num_same * block_size
    return num_tokens if num_tokens >= MIN_SHARED_TOKENS else 0
