"""Importing this before any kernel lets kernels run without a GPU, in Triton's interpreter."""

import os
from typing import Any

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

    import triton.language as tl
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_for_new_numpy(tensor: Any, scope: Any) -> None:
        """The interpreter's scalars are arrays of one element, which NumPy 2.4 no longer takes as integers."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    _create_dot = interpreter.InterpreterBuilder.create_dot

    def _create_exact_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        """A product summed in float64 and then rounded, so that a row has the same bits in any company, as on a GPU.

        The order in which NumPy sums depends on the processor and on the number of rows.
        """
        if d.data.dtype != np.float32:
            return _create_dot(self, a, b, d, *options)
        zeros = interpreter.TensorHandle(np.zeros(d.data.shape), tl.float64)
        exact = _create_dot(self, a, b, zeros, *options)
        return interpreter.TensorHandle(exact.data.astype(np.float32) + d.data, d.dtype.scalar)

    interpreter._patch_lang_tensor = _patch_for_new_numpy
    interpreter.InterpreterBuilder.create_dot = _create_exact_dot

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
