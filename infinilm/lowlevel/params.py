"""Checks weights that a caller loads, and cuts them into the ranks' shards."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infinilm.distributed.shard import PackedShard
from infinilm.errors import EngineError, InvalidTypeError, InvalidValueError
from infinilm.lowlevel.infer_input import share_array
from infinilm.models import InfinilmModel
from infinilm.models.quantization import can_be_made

Param = Tensor | npt.NDArray[Any]

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_DTYPE_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
_MAX_LISTED = 20


class ParamTable:
    """The weights of a model, by their names in a Hugging Face checkpoint, and each rank's shard of them."""

    def __init__(self, whole: InfinilmModel, outlines: Sequence[InfinilmModel]) -> None:
        """`outlines` are the ranks' shares of the `whole` model; they need no memory."""
        self._shards = [outline.weight_targets() for outline in outlines]
        self._whole = whole.weight_targets()
        self._is_ignorable = whole.is_ignorable

    def names(self) -> list[str]:
        """The names of all weights."""
        return list(self._whole)

    def check(self, params: Mapping[str, Param], *, is_complete: bool) -> dict[str, Tensor]:
        """Check `params` and return the full weights among them. Tensors that a checkpoint may hold without need are
        left out.

        Anything else is refused. With `is_complete` missing weights are refused, too.
        """
        if not isinstance(params, Mapping):
            raise InvalidTypeError(f"params is a {type(params).__name__}; give a mapping of names to tensors")
        missing = [name for name in self._whole if name not in params]
        if is_complete and missing:
            listed = ", ".join(missing[:_MAX_LISTED]) + (", …" if len(missing) > _MAX_LISTED else "")
            raise InvalidValueError(f"{len(missing)} weights are missing: {listed}; give them all, or use strict=False")
        return {name: self._check(name, param) for name, param in params.items() if self._has(name)}

    def cut(self, name: str, whole: Tensor) -> list[dict[str, Tensor]]:
        """Each rank's shard of a weight, as a view. It is missing for ranks of other pipeline stages."""
        return [{name: shards[name].cut(whole)} if name in shards else {} for shards in self._shards]

    def _has(self, name: str) -> bool:
        if name in self._whole:
            return True
        if isinstance(name, str) and self._is_ignorable(name):
            return False
        raise InvalidValueError(
            f"the model has no weight {name!r}; state_dict_keyname() lists the {len(self._whole)} it has"
        )

    def _check(self, name: str, param: Param) -> Tensor:
        shard = self._whole[name]
        if isinstance(shard, PackedShard) and not can_be_made(shard):
            raise EngineError(
                f"{name} is quantised ({shard.matrix.format}), which can't be made of other numbers; load the model "
                "with quantization='none'"
            )
        if isinstance(param, np.ndarray):
            if param.dtype.kind != "f" or param.itemsize > 8:
                raise InvalidTypeError(f"{name} is an array of {param.dtype}; weights are one of {_DTYPE_NAMES}")
            param = share_array(param)
        if not isinstance(param, Tensor):
            raise InvalidTypeError(f"{name} is a {type(param).__name__}; give a torch tensor or a NumPy array")
        if param.dtype not in DTYPES or param.layout is not torch.strided or param.is_meta:
            raise InvalidTypeError(
                f"{name} is a tensor of {param.dtype} ({param.layout}, {param.device}); weights are dense, and one of "
                f"{_DTYPE_NAMES}"
            )
        full_shape = self._whole[name].full_shape
        if tuple(param.shape) != full_shape:
            raise InvalidValueError(f"{name} has shape {list(param.shape)}; the model's is {list(full_shape)}")
        return param
