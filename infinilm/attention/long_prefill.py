"""Attention of long prompts through cuDNN, which on Hopper is 1.5 times as fast as Triton's kernel.

cuDNN makes a plan for each shape of queries and keys, which takes some tenths of a second. It does not know cached
prefixes or blocks. So only a few shapes are used, and requests are padded to fit into them:

                 key 0     first_row                      num_keys
    first_row    ┌─────────┬──────────────────────────────┐
                 │ pieces  │╲   padding                   │
    cached       │ of 8192 ├───╲──────────────────────────┤
                 │ and     │      ╲    new tokens         │
    context      │ 2048    ├─────────╲────────────────────┤
                 │ keys    │   padding  ╲                 │
                 └─────────┴──────────────────────────────┘

The right part is causal attention among the tokens from `first_row` on. Queries that are not new are padding, and their
results are thrown away; only padding sees keys after the context. The left part has the keys that all queries see. They
are attended to piece by piece, and the results are merged by their sums of exponentials. `first_row` and the square's
size are multiples of 2048, so no piece is cut short.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infinilm.attention.batch import IntArray
from infinilm.kernels.merge_attention import merge_attention

logger = logging.getLogger(__name__)

# In pairs of query and key. With fewer, a plan would pay off only after hundreds of prompts: for 8,192 new tokens cuDNN
# saves 6 ms over the 28 layers of a model of 0.6 billion parameters.
_MIN_PAIRS = 8192 * 8192 // 2
# How many pairs may be computed per pair that is needed; at 1.5 cuDNN's advantage would be gone.
_MAX_WASTE = 1.25
_STEP = 2048
_PIECE = 8192

PartialAttention = Callable[..., tuple[Tensor, Tensor]]
"""`attention(query, key, value, *, scale, is_causal)`, see `cudnn_attention`."""


class CudnnRefusedError(Exception):
    """cuDNN can't compute the given attention."""


@dataclass(frozen=True, slots=True)
class Cover:
    """What is computed for one request; see the drawing."""

    first_row: int  # where the square begins, in the request
    num_rows: int  # its size, in tokens

    @property
    def num_pairs(self) -> int:
        """Queries times keys, without the half of the square that the causal mask hides."""
        return self.num_rows * self.num_rows // 2 + self.num_rows * self.first_row


class LongPrefill:
    """Finds requests that are long enough and computes their attention, if the device and cuDNN support it."""

    def __init__(
        self,
        *,
        min_pairs: int = _MIN_PAIRS,
        step: int = _STEP,
        piece: int = _PIECE,
        attention: PartialAttention | None = None,
    ) -> None:
        """Arguments other than the defaults are for tests. `attention` replaces cuDNN's, on any device."""
        self._min_pairs = min_pairs
        self._step = step
        self._piece = piece
        self._attention = attention or cudnn_attention
        self._needs_cudnn = attention is None
        self._refusal: str | None = None

    def covers(self, query_lens: IntArray, context_lens: IntArray) -> dict[int, Cover]:
        """What to compute for each request that is long enough, by its place in the batch."""
        num_pairs = (context_lens**2 - (context_lens - query_lens) ** 2) // 2
        found = {}
        for request in np.flatnonzero(num_pairs >= self._min_pairs).tolist():
            num_cached = int(context_lens[request] - query_lens[request])
            # One square for everything needs one plan and no merging, so it is tried first.
            for first_row in (0, num_cached // self._step * self._step):
                num_rows = -(-int(context_lens[request] - first_row) // self._step) * self._step
                cover = Cover(first_row, num_rows)
                if cover.num_pairs <= _MAX_WASTE * num_pairs[request]:
                    found[request] = cover
                    break
        return found

    def why_not(self, query: Tensor) -> str | None:
        """Why such queries can't be attended; None if they can."""
        if self._refusal is not None or not self._needs_cudnn:
            return self._refusal
        if query.device.type != "cuda":
            return f"cuDNN does not run on {query.device}"
        if torch.cuda.get_device_capability(query.device)[0] not in (9, 10):
            return "cuDNN is not known to be faster on this device"
        if query.dtype not in (torch.bfloat16, torch.float16) or query.shape[2] > 128 or query.shape[2] % 8:
            return f"cuDNN takes no {query.dtype} heads of {query.shape[2]}"
        return None

    def attend(self, query: Tensor, gathered: Tensor, cover: Cover, *, context_len: int, scale: float) -> Tensor | None:
        """Attend one request's new tokens `[new, heads, head_dim]` to the keys and values of its tokens up to the end
        of the cover, `[num_keys, 2, kv_heads, head_dim]`. Returns the same shape as the query.

        Returns None if cuDNN refuses. That is logged, and cuDNN is not tried again.
        """
        try:
            return self._attend(query, gathered, cover, context_len=context_len, scale=scale)
        except CudnnRefusedError as error:
            self._refusal = f"cuDNN refuses: {error}"
            logger.warning("long prompts are attended by Triton, more slowly: %s", self._refusal)
            return None

    def _attend(self, query: Tensor, gathered: Tensor, cover: Cover, *, context_len: int, scale: float) -> Tensor:
        first, num_keys = cover.first_row, len(gathered)
        key, value = gathered.unbind(1)  # [num_keys, kv_heads, head_dim]
        own = slice(context_len - len(query) - first, context_len - first)
        rows = query.new_empty(cover.num_rows, *query.shape[1:])
        rows[own] = query

        def attend(begin: int, end: int, *, is_causal: bool) -> tuple[Tensor, Tensor]:
            return self._attention(rows, key[begin:end], value[begin:end], scale=scale, is_causal=is_causal)

        output, log_sums = attend(first, num_keys, is_causal=True)
        for begin, end in self._pieces(first):
            part = attend(begin, end, is_causal=False)
            dtype = query.dtype if end == first else torch.float32
            output, log_sums = merge_attention(output, log_sums, *part, dtype=dtype)
        return output[own]

    def _pieces(self, end: int) -> Iterator[tuple[int, int]]:
        """Cut keys 0 to `end`, a multiple of the step, into as few pieces of two sizes as possible."""
        begin = 0
        while begin < end:
            size = self._piece if end - begin >= self._piece else self._step
            yield begin, begin + size
            begin += size


def cudnn_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of `query` `[T, heads, head_dim]` to `key` and `value` `[keys, kv_heads, head_dim]`.

    Returns the output, like the query, and the natural logarithms of the sums of exponentials, `[heads, T]` float32,
    which torch's `scaled_dot_product_attention` does not return. They are always requested: that costs almost nothing,
    and a call without them would need its own plan.
    """
    query, key, value = (each.unsqueeze(0).transpose(1, 2) for each in (query, key, value))
    try:
        output, log_sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, is_causal, False, scale=scale
        )
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CudnnRefusedError(str(error)) from error
    return output[0].transpose(0, 1).contiguous(), log_sums.reshape(query.shape[1:3])
