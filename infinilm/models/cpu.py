"""Works around CPUs that report instructions which they do not have."""

import logging
import os
import subprocess
import sys

import torch

logger = logging.getLogger(__name__)

# The best instruction set below AMX, by the name that oneDNN gives it.
BELOW_AMX = "AVX512_CORE_FP16"
PROBE = "import torch; torch.nn.functional.linear(torch.ones(8, 64).bfloat16(), torch.ones(64, 64).bfloat16())"


def avoid_false_amx() -> None:
    """Keep oneDNN from AMX where it kills the process: some virtual machines report it but do not have it.

    Must run before oneDNN's first use in this process, which is when it reads the variable.
    """
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not torch.cpu._is_amx_tile_supported():
        return
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=False)
    if probe.returncode < 0:
        logger.warning("this CPU reports AMX but a test of it crashed; using %s instead", BELOW_AMX)
        os.environ["ONEDNN_MAX_CPU_ISA"] = BELOW_AMX
