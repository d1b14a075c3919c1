"""The native CPU kernels. No other module imports `infinilm._native`."""

import importlib.util
import logging
import os
import sys
from functools import cache
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from infinilm.errors import EngineError, InvalidValueError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    IntArray = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)

_NAME = "infinilm._native"
_COLUMNS_STEP = 16
"""The library's layers take matrices of floats whose number of inputs is a multiple of this."""


@cache
def load() -> ModuleType | None:
    """The native library, or None if it is not installed. Then torch does its work, and one warning says so.

    The environment variable `INFINILM_NATIVE` is 0 for torch alone, or the path of another build of the library.
    """
    choice = os.environ.get("INFINILM_NATIVE")
    if choice == "0":
        logger.info("INFINILM_NATIVE=0: the CPU runs on torch alone")
        return None
    if choice is not None:
        return _load_build(choice)
    try:
        return importlib.import_module(_NAME)
    except ImportError as error:
        logger.warning(
            "The native CPU kernels are missing (%s): running on torch alone, which is slower. To have them, install "
            "a C++ compiler and Python's headers, then install InfiniLM again: `make native` in a checkout, else "
            "`pip install -v --force-reinstall --no-deps --no-cache-dir`, which shows what hinders it.",
            error,
        )
        return None


def _load_build(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise InvalidValueError(
            f"INFINILM_NATIVE={path!r}: no such file. Set it to 0 for torch alone, or to the path of a built "
            "infinilm/_native.*.so, or leave it unset."
        )
    loader = ExtensionFileLoader(_NAME, path)
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    assert spec is not None
    sys.modules[_NAME] = module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def has_vectors() -> bool:
    """Whether the library uses AVX2 or better on this machine. Then it multiplies floats as fast as torch."""
    library = load()
    return library is not None and library.instruction_set() != "generic"


def load_library() -> Any:
    """The native library. Raises an error if it is not installed."""
    library = load()
    if library is None:
        raise EngineError("the native library, which computes with quantised weights, was not built with the package")
    return library


def arrays_of(*tensors: "Tensor | None") -> "list[npt.NDArray[Any] | None]":
    """Tensors as numpy arrays of the same memory, bfloat16 as uint16, to pass to the library.

    With a tensor the library would call `__dlpack__`, which is Python code, and ignore errors in it: a Ctrl-C would be
    lost.
    """
    return [None if tensor is None else _array_of(tensor.detach()) for tensor in tensors]


def _array_of(tensor: "Tensor") -> "npt.NDArray[Any]":
    import torch

    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def float_matrix(weight: "Tensor", scales: "Tensor | None" = None) -> Any | None:
    """A matrix of floats `[in, out]` for the library's layers, in the same memory; None if they don't support it."""
    if len(weight) % _COLUMNS_STEP or weight.stride(1) != 1:
        return None
    return load_library().float_matrix(*arrays_of(weight, scales))


def draw(logits: "Tensor", settings: "Tensor", rows: "Tensor", positions: "Tensor") -> "tuple[Tensor, Tensor]":
    """The library's draw; `infinilm/sampling/draw.py` defines the arguments and the result."""
    import torch

    library: Any = load()
    token_ids, are_finite = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits), dtype=torch.bool)
    library.draw(*arrays_of(logits.float().contiguous(), settings, rows, positions, token_ids, are_finite))
    return token_ids, are_finite


def draw_arrays(
    logits: "npt.NDArray[np.float32]", settings: "IntArray", rows: "IntArray", positions: "IntArray"
) -> "tuple[IntArray, npt.NDArray[np.bool_]]":
    """The same as `draw`, for arrays."""
    import numpy as np

    token_ids, are_finite = np.empty(len(logits), dtype=np.int64), np.empty(len(logits), dtype=np.bool_)
    load_library().draw(np.ascontiguousarray(logits), settings, rows, positions, token_ids, are_finite)
    return token_ids, are_finite


def keep_arrays(*arrays: "npt.NDArray[Any]") -> "tuple[npt.NDArray[Any], ...]":
    """Contiguous arrays, as the library needs them."""
    import numpy as np

    return tuple(map(np.ascontiguousarray, arrays))
