"""Starting a kernel while the one before it still runs: programmatic dependent launch, on Hopper and later.

Between two small kernels of a stream a GPU is idle for about a microsecond, as long as many of them take. A kernel
that is launched early is brought onto the device, and may load what no kernel writes (weights), while the one before
it finishes. All its programs call `let_next_start` first of all, and `wait_for_inputs` before they read what an
earlier kernel wrote and before they write anything; after that everything is as if it had been launched the usual
way. Graphs keep this.

    _kernel[grid](…, EARLY=launches_early(device), launch_pdl=launches_early(device))

What is loaded before the wait must not come from a kernel that may still run: whoever changes weights waits for the
device before computing with them.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def launches_early(device: torch.device) -> bool:
    """Whether kernels on this device can be launched early."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """Let the next kernel be brought onto the device, once all programs of this one have been."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Wait until all kernels before this one have finished and what they wrote can be read."""
    if EARLY:
        gdc_wait()


@triton.jit
def loaded_ahead(values, EARLY: tl.constexpr):
    """The `values` of a load before the wait, to be used from here on.

    Otherwise the compiler begins to unpack 16-bit numbers right after their load, and so waits for them there. They
    must come to a thread in pairs, as they do from rows of a multiple of 16.
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
