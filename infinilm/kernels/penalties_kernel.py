"""`penalties.penalize_torch` as one kernel."""

import triton
import triton.language as tl
from torch import Tensor

from infinilm.kernels.penalties import IN_PROMPT

_IN_PROMPT = tl.constexpr(IN_PROMPT)
_BLOCK = tl.constexpr(4096)


@triton.jit
def _penalize_kernel(logits, logits_stride, places, slots, counts, penalties, vocab_size):
    """Program (row, block of the vocabulary). Only the logits of tokens seen are read and written."""
    index = tl.program_id(0)
    row = logits + tl.load(places + index) * logits_stride
    slot = tl.load(slots + index)
    token_ids = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    count = tl.load(counts + slot * vocab_size + token_ids, mask=token_ids < vocab_size, other=0)
    is_seen = count != 0
    repetition = tl.load(penalties + slot * 3)
    frequency = tl.load(penalties + slot * 3 + 1)
    presence = tl.load(penalties + slot * 3 + 2)
    values = tl.load(row + token_ids, mask=is_seen, other=0.0)
    values = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
    num_drawn = (count & (_IN_PROMPT - 1)).to(tl.float32)
    values -= frequency * num_drawn
    values -= tl.where(num_drawn > 0, presence, 0.0)
    tl.store(row + token_ids, values, mask=is_seen)


def penalize(logits: Tensor, places: Tensor, slots: Tensor, counts: Tensor, penalties: Tensor) -> None:
    vocab_size = logits.shape[1]
    _penalize_kernel[len(places), triton.cdiv(vocab_size, _BLOCK.value)](
        logits,
        logits.stride(0),
        places,
        slots,
        counts,
        penalties,
        vocab_size,
        num_warps=8,
        enable_fp_fusion=False,  # products are rounded before they are subtracted, as in torch
    )
