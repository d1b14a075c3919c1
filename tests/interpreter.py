"""Importing this before any kernel lets kernels run without a GPU, in Triton's interpreter."""

import os
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_for_new_numpy(tensor: Any, scope: Any) -> None:
        """The interpreter's scalars are arrays of one element, which NumPy 2.4 no longer takes as integers."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_for_new_numpy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
