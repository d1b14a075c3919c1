"""The sampler's operations on logits on a torch device."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infinilm.kernels.copies import to_device, to_pinned
from infinilm.kernels.penalties import find_penalize
from infinilm.kernels.support import has_kernels
from infinilm.sampling.draw import find_draw
from infinilm.sampling.logprobs import logprobs_of


class DeviceArrays:
    """Operations over all rows of `logits` [n, vocab]; `HostArrays` has the same for arrays in the host's memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.upload: Callable[..., tuple[Tensor, ...]] = partial(to_device, device)
        """Copies arrays of one type to the device, without waiting."""
        self.draw = find_draw(device)
        self.penalize = find_penalize(device)
        # By byte of a mask: which of its eight tokens are forbidden, [256, 8].
        bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
        self._is_forbidden = (bits == 0).to(device)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))

    def to_float32(self, logits: Tensor) -> Tensor:
        """The logits in float32, which may be overwritten."""
        if not has_kernels(self.device):
            return logits.float()
        from infinilm.kernels.cast import to_float32  # which needs Triton

        return to_float32(logits)

    def copy(self, logits: Tensor) -> Tensor:
        return logits.clone()

    def add(self, target: Tensor, indices: Tensor, values: Tensor) -> None:
        """Add to the numbers at some `indices`, counted through all rows, in place."""
        target.view(-1).index_add_(0, indices, values.to(target.dtype))

    def forbid(self, logits: Tensor, indices: npt.NDArray[np.int64]) -> None:
        """Set logits to -inf; indices are counted through all rows."""
        logits.view(-1).index_fill_(0, self.upload(indices)[0], -torch.inf)

    def forbid_masked(self, logits: Tensor, indices: npt.NDArray[np.int64], masks: npt.NDArray[np.int32]) -> None:
        """Set logits of the rows `indices` to -inf where the bits of their masks are 0."""
        (packed,) = self.upload(masks)
        parts = self._is_forbidden.index_select(0, packed.view(torch.uint8).flatten().int())  # [k * vocab / 8, 8]
        is_forbidden = parts.view(len(masks), -1)[:, : logits.shape[1]]
        if len(indices) == len(logits):
            logits.masked_fill_(is_forbidden, -torch.inf)
        else:
            (places,) = self.upload(indices)
            logits[places] = logits[places].masked_fill_(is_forbidden, -torch.inf)

    def logprobs(self, logits: Tensor, targets: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
        """See `Logprobs`."""
        found = logprobs_of(logits, targets, num_top)
        return found.ids, found.values

    def reader(self, token_ids: Tensor) -> Callable[[], list[int]]:
        """A function that returns the tokens later. A GPU copies them meanwhile."""
        if self.device.type != "cuda":
            return token_ids.tolist
        copy, event = to_pinned(token_ids), torch.cuda.current_stream().record_event()

        def read() -> list[int]:
            event.synchronize()
            token_list: list[int] = copy.tolist()
            return token_list

        return read

    def tensor(self, logits: Tensor) -> Tensor:
        """A row's logits, for a caller's function."""
        return logits
