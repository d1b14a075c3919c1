"""Attention over the paged KV cache."""

import torch

from infinilm.attention.backend import AttentionBackend
from infinilm.attention.batch import ForwardBatch, HostBatch
from infinilm.attention.torch_backend import TorchAttention
from infinilm.errors import InvalidValueError

__all__ = ["AttentionBackend", "ForwardBatch", "HostBatch", "TorchAttention", "select_backend"]


def select_backend(name: str, device: torch.device | str) -> AttentionBackend:
    """Make the backend of that name, or with `auto` the best that can serve the device."""
    device = torch.device(device)
    # Best first: auto takes the first that can serve.
    backends: list[AttentionBackend] = [TorchAttention()]
    names = [backend.name for backend in backends]
    if name not in ("auto", *names):
        raise InvalidValueError(f"attention_backend={name!r} is unknown; use one of auto, {', '.join(names)}")
    reasons = []
    for backend in backends:
        if name in ("auto", backend.name):
            reason = backend.why_not(device)
            if reason is None:
                return backend
            reasons.append(f"{backend.name}: {reason}")
    raise InvalidValueError(f"attention_backend={name!r} can't serve device {device}: {'; '.join(reasons)}")
