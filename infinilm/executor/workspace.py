"""Estimates the memory of a rank besides weights and KV cache, before anything is loaded.

On a GPU the estimate decides only whether the model is loaded. Activations and libraries are then measured. Graphs, and
what grows with the length of texts, can't be measured and stay as estimated.

The estimates are for the largest steps that the settings allow, and are too high rather than too low. torch keeps freed
memory in pieces that don't join, so a layer's tensors are counted as if all existed at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from infinilm.cache.specs import kv_heads_per_rank
from infinilm.config import Config
from infinilm.executor.memory import Workspace
from infinilm.executor.step_io import LOGIT_COPIES, PROMPT_LOGITS_AT_ONCE
from infinilm.kernels.support import has_kernels
from infinilm.models import ModelConfig

if TYPE_CHECKING:
    from infinilm.executor.memory import Device, DType
    from infinilm.executor.step_graphs import Shape

GRAPH_BYTES = 2 << 20
"""The GPU driver's copy of a graph, and a few numbers per token that its step begins with."""
LIBRARY_BYTES = 512 << 20
"""cuBLAS keeps up to 64 MiB for each of two streams. Code, mostly of cuBLAS and cuDNN, is loaded to the device when it
is first used."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The largest step of one rank, and how many numbers its tensors have per token."""

    num_tokens: int
    num_rows: int
    """The requests that draw a token."""
    hidden: int
    queries: int
    keys: int
    """The same for values."""
    channels: int
    """The width of a channel mixer."""
    vocab: int
    itemsize: int

    @classmethod
    def of(
        cls, config: Config, model_config: ModelConfig, dtype: "DType", *, max_model_len: int, tp_size: int = 1
    ) -> "StepShape":
        """The largest step that the settings allow."""
        head_dim = model_config.max_head_dim
        return cls(
            num_tokens=min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len),
            num_rows=min(config.max_num_seqs, config.max_num_batched_tokens),
            hidden=model_config.hidden_size,
            queries=model_config.num_attention_heads // tp_size * head_dim,
            keys=kv_heads_per_rank(model_config.num_key_value_heads, tp_size) * head_dim,
            channels=model_config.channel_width(tp_size),
            vocab=model_config.vocab_size,
            itemsize=dtype.itemsize,
        )

    def layer_bytes(self, num_tokens: int) -> int:
        """The tensors of a layer with so many tokens. The next layer uses the same memory."""
        width = (
            2 * self.hidden  # the residual, which is updated in place, and its norm
            + self.queries
            + 2 * self.keys  # queries, keys and values as projected
            + self.queries  # rotated by their positions
            + self.queries  # the results of attention
            + self.channels
        )
        return num_tokens * width * self.itemsize

    def logits_bytes(self) -> int:
        """The logits of a step, as computed and in float32, and their `LOGIT_COPIES`."""
        num_rows = max(self.num_rows, min(self.num_tokens, PROMPT_LOGITS_AT_ONCE))
        computed = self.itemsize if self.itemsize < 4 else 0  # or they are in float32 already
        return num_rows * self.vocab * (computed + 4 + 4 * LOGIT_COPIES)

    def long_prefill_bytes(self) -> int:
        """What `LongPrefill` takes in one layer, besides keys and values. There may be 2 x 2,048 rows of padding.

        These are the queries, their results, the results of one piece of the keys, and a copy of those if cuDNN lays
        them out differently; in float32, the results so far, before and after that piece is added.
        """
        return (self.num_tokens + 2 * 2048) * self.queries * (4 * self.itemsize + 2 * 4)

    def graph_bytes(self, shapes: Sequence["Shape"]) -> int:
        """CUDA graphs of these shapes.

        All graphs share the memory they compute in. Steps are first computed without a graph, on a stream that keeps as
        much. Logits come on top: graphs that end with logits keep them, and if they are captured from small to large,
        each needs new memory because the earlier pieces are too small.
        """
        if not shapes:
            return 0
        largest = self.layer_bytes(max(max(shape.num_tokens, shape.num_rows) for shape in shapes))
        logits = [shape.num_rows * self.vocab * self.itemsize for shape in shapes if not shape.samples]
        return 2 * (largest + max(logits)) + sum(logits) + len(shapes) * GRAPH_BYTES


def estimate_workspace(
    config: Config,
    model_config: ModelConfig,
    dtype: "DType",
    device: "Device",
    *,
    max_model_len: int,
    tp_size: int = 1,
) -> Workspace:
    """The memory of each rank besides weights and KV cache, for texts of up to `max_model_len` tokens."""
    shape = StepShape.of(config, model_config, dtype, max_model_len=max_model_len, tp_size=tp_size)
    attention_bytes, prefill_bytes, gathered_bytes = 0, 0, 0
    graphs: list[Shape] = []
    if _has_triton(config, device):
        heads = model_config.num_attention_heads // tp_size
        attention_bytes = decode_attention_bytes(shape.num_rows, heads, model_config.max_head_dim)
        if _attends_long(shape, model_config.max_head_dim, dtype, device, max_model_len):
            prefill_bytes = shape.long_prefill_bytes()
            gathered_bytes = 2 * shape.keys * shape.itemsize
        if uses_graphs(config, device):
            graphs = graph_shapes(shape.num_rows, shape.num_tokens)
    angle_bytes = 4 * model_config.max_head_dim
    # Bytes per block: in a step's tables as int64 and as int32; in the tables of graphs as copied and as used.
    table_bytes = (8 + 4) * shape.num_rows + (4 + 4) * graph_table_rows(graphs)
    return Workspace(
        # Logits are computed after the last layer, when the memory of long prompts is free again.
        activations=shape.layer_bytes(shape.num_tokens) + max(shape.logits_bytes(), prefill_bytes),
        attention=attention_bytes,
        graphs=shape.graph_bytes(graphs),
        libraries=LIBRARY_BYTES if device.type != "cpu" else 0,
        per_position=angle_bytes + gathered_bytes + -(-table_bytes // config.kvcache_block_size),
    )


def uses_graphs(config: Config, device: "Device") -> bool:
    """Whether decode steps should be CUDA graphs."""
    return not config.enforce_eager and _has_triton(config, device)


def decode_attention_bytes(num_rows: int, heads: int, head_dim: int) -> int:
    """The workspaces of decode attention.

    Each is twice as large as the one before, until one fits all rows. Earlier ones are kept, because graphs may use
    them. Together they take less than twice the last one.
    """
    from infinilm.kernels.decode_attention import DecodeWorkspace  # which needs Triton

    return 2 * DecodeWorkspace.num_bytes(max(64, 1 << (num_rows - 1).bit_length()), heads, head_dim)


def graph_shapes(num_rows: int, num_tokens: int) -> list["Shape"]:
    """All graphs that may be captured for steps of up to so many rows and tokens."""
    from infinilm.executor.step_graphs import Shape, decode_sizes, mixed_shapes, mixed_sizes  # which needs Triton

    sizes = [(size, 0) for size in decode_sizes(num_rows)]
    sizes += mixed_shapes(num_rows, mixed_sizes(num_tokens, 0))
    return [Shape(*size, samples) for size in sizes for samples in (True, False)]


def graph_table_rows(shapes: Sequence["Shape"]) -> int:
    """The rows of block tables in graphs' inputs. Graphs of decode steps share theirs."""
    decoding = max((shape.num_rows for shape in shapes if shape.num_tokens == 0), default=0)
    mixed = {(shape.num_rows, shape.num_tokens) for shape in shapes if shape.num_tokens > 0}
    return decoding + sum(num_rows for num_rows, _ in mixed)


def _has_triton(config: Config, device: "Device") -> bool:
    return config.attention_backend != "torch" and has_kernels(str(device))


def _attends_long(shape: StepShape, head_dim: int, dtype: "DType", device: "Device", max_model_len: int) -> bool:
    """Whether `LongPrefill` computes any step of a prompt that is divided into the largest possible chunks."""
    import torch

    from infinilm.attention.long_prefill import LongPrefill  # which needs Triton

    long_prefill, kind = LongPrefill(), cast(Any, {"dtype": dtype, "device": device})
    if long_prefill.why_not(torch.empty(0, 1, head_dim, **kind)) is not None:
        return False
    chunk = min(shape.num_tokens, max_model_len)
    ends = np.arange(chunk, min(max_model_len, max(chunk, 1 << 20)) + 1, chunk)  # later chunks are like the last
    return bool(long_prefill.covers(np.full_like(ends, chunk), ends))
