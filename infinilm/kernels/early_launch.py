"""Starting a kernel while the one before it still runs: programmatic dependent launch, on Hopper and later.

Between two small kernels of a stream a GPU is idle for about a microsecond, as long as many kernels take. A kernel
that is launched early is loaded onto the device, and may load data that no kernel writes (weights), while the previous
one finishes. All its programs first call `let_next_start`, and call `wait_for_inputs` before they read the results of
an earlier kernel or write anything. CUDA graphs preserve this.

    _kernel[grid](…, EARLY=launches_early(device), launch_pdl=launches_early(device))

Data loaded before the wait must not come from a kernel that may still run: code that changes weights synchronises with
the device before computing with them.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from infinilm.kernels.support import capability_of


def launches_early(device: torch.device) -> bool:
    return device.type == "cuda" and capability_of(device) >= (9, 0)


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """Let the next kernel be loaded onto the device, once all programs of this one have been."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Wait until all earlier kernels have finished and their results can be read."""
    if EARLY:
        gdc_wait()


@triton.jit
def loaded_ahead(values, EARLY: tl.constexpr):
    """The `values` of a load before the wait, for use after this call.

    Without this call the compiler unpacks 16-bit numbers right after their load, and so waits for them there. A thread
    must have them in pairs, which is the case in rows of a multiple of 16.
    """
    if EARLY:
        values = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;",
            "=r,r",
            [values],
            dtype=values.dtype,
            is_pure=False,
            pack=32 // values.dtype.primitive_bitwidth,
        )
    return values
