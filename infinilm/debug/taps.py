"""Shows a forward pass's activations to hooks, on one rank or many."""

from collections.abc import Sequence

import torch
from torch import Tensor

from infinilm.debug.hooks import HookRegistry, is_wanted
from infinilm.debug.remote import RemoteHooks
from infinilm.distributed.group import SINGLE, CommunicationGroup


class Taps:
    """Shows activations to a registry's hooks and writes replacements back.

    Every rank has the same `patterns`, so all of them stop at the same points. Only rank 0 has the `registry`, or in
    the earlier stages of a pipeline a `RemoteHooks`.
    """

    def __init__(
        self, patterns: Sequence[str], registry: HookRegistry | RemoteHooks | None, group: CommunicationGroup
    ) -> None:
        self._patterns = patterns
        self._registry = registry
        self._group = group

    def see(
        self, point: str, tensor: Tensor, layer: int = -1, *, is_shared_out: bool = False, num_copies: int = 1
    ) -> None:
        """Show `tensor` `[T, …]`; a replacement is written into it.

        If `is_shared_out`, ranks hold parts of a whole along dimension 1, and hooks see the whole; `num_copies`
        consecutive ranks hold the same part.
        """
        name = point if layer < 0 else f"layer{layer}_{point}"
        if not is_wanted(self._patterns, name):
            return
        if self._group.size == 1:
            replacement = self.fire(name, tensor, layer)
        else:
            num_pieces = self._group.size // num_copies if is_shared_out else 1
            whole = tensor if num_pieces == 1 else self._whole(tensor, num_copies)
            replacement = self._broadcast(self.fire(name, whole, layer), tensor, num_pieces)
        if replacement is not None:
            tensor.copy_(replacement)

    def fire(self, name: str, tensor: Tensor, layer: int) -> Tensor | None:
        """Call the hooks of a point, on the rank that has access to them."""
        if self._registry is None:
            return None
        # Hooks may keep the tensor, so they get a copy, made outside of inference mode.
        with torch.inference_mode(False):
            return self._registry.fire(name, tensor.clone(), layer)

    def _whole(self, piece: Tensor, num_copies: int) -> Tensor:
        """All parts concatenated, on rank 0."""
        gathered = self._group.gather(piece, dim=1)
        if num_copies == 1 or self._group.rank > 0:
            return gathered
        return torch.cat(gathered.chunk(self._group.size, dim=1)[::num_copies], dim=1)

    def _broadcast(self, replacement: Tensor | None, piece: Tensor, num_pieces: int) -> Tensor | None:
        """Broadcast rank 0's `replacement`: each rank gets its own part of it, or None."""
        flag = torch.tensor([replacement is not None], dtype=torch.int32, device=piece.device)
        if not self._group.broadcast(flag).item():
            return None
        if replacement is None:
            replacement = piece.new_empty(len(piece), num_pieces * piece.shape[1], *piece.shape[2:])
        whole = self._group.broadcast(replacement.contiguous())
        return whole.chunk(num_pieces, dim=1)[self._group.rank * num_pieces // self._group.size]


def show_logits(logits: Tensor, registry: HookRegistry | None) -> None:
    """Show rank 0's logits `[n, vocab]`; a replacement is written into them."""
    if registry is not None:
        Taps(registry.patterns(), registry, SINGLE).see("logits", logits)
