"""CPUs: dividing threads between torch and the native library, and a workaround for falsely reported AMX."""

import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from infinilm.attention import AttentionBackend
from infinilm.distributed.shard import PackedShard
from infinilm.kernels import native
from infinilm.layers.formats import DenseWeight, is_native
from infinilm.layers.formats.experts import DenseExperts
from infinilm.models.base import InfinilmModel

logger = logging.getLogger(__name__)

# oneDNN's name of the best instruction set below AMX.
BELOW_AMX = "AVX512_CORE_FP16"
PROBE = "import torch; torch.nn.functional.linear(torch.ones(8, 64).bfloat16(), torch.ones(64, 64).bfloat16())"

MAX_DENSE_SHARE = 0.02
"""Torch multiplies with one thread if its matrices (routers of experts) are at most this share of the packed ones."""


@dataclass(frozen=True, slots=True)
class ThreadUsers:
    """The libraries that compute enough in a step to need threads."""

    torch: bool = True
    native: bool = False

    @classmethod
    def of(cls, model: InfinilmModel, backend: AttentionBackend) -> "ThreadUsers":
        """For a model. The native library multiplies quantised matrices, and those with a fixed order of sums."""
        sizes = {True: 0, False: 0}  # True: matrices of the native library
        for shard in model.weight_targets().values():
            if isinstance(shard, PackedShard) and is_native(shard):
                sizes[True] += math.prod(shard.shape)
        for module in cast(nn.Module, model).modules():
            if isinstance(module, DenseWeight | DenseExperts):
                sizes[module.is_native] += sum(each.numel() for each in module.parameters())
        is_dense = sizes[False] > MAX_DENSE_SHARE * sizes[True]
        return cls(torch=is_dense, native=sizes[True] > 0 or backend.name == "native")

    @contextmanager
    def computing(self, num_threads: int) -> Iterator[None]:
        """Compute with this many threads of torch or of the native library, depending on which has more to compute.

        Idle threads of torch spin, on cores that the native library's threads need.
        """
        library = native.load() if self.native else None
        if library is not None and library.num_threads() != num_threads:
            library.set_num_threads(num_threads)
        before, wanted = torch.get_num_threads(), num_threads if self.torch else 1
        if wanted != before:
            torch.set_num_threads(wanted)
        try:
            yield
        finally:
            if wanted != before:
                torch.set_num_threads(before)


def avoid_false_amx() -> None:
    """Keep oneDNN from using AMX where that kills the process: some virtual machines report AMX but lack it.

    Call this before oneDNN's first use in the process, because it reads the variable then.
    """
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not torch.cpu._is_amx_tile_supported():
        return
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=False)
    if probe.returncode < 0:
        logger.warning("this CPU reports AMX but a test of it crashed; using %s instead", BELOW_AMX)
        os.environ["ONEDNN_MAX_CPU_ISA"] = BELOW_AMX
