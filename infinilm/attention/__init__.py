"""Attention over the paged KV cache."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from infinilm.attention.batch import ForwardBatch, HostBatch
from infinilm.attention.native_backend import NativeAttention, why_not_native
from infinilm.errors import InvalidValueError
from infinilm.kernels.support import why_no_triton

if TYPE_CHECKING:
    import torch

    from infinilm.attention.backend import AttentionBackend
    from infinilm.attention.torch_backend import TorchAttention

__all__ = [
    "AttentionBackend",
    "ForwardBatch",
    "HostBatch",
    "NativeAttention",
    "TorchAttention",
    "select_backend",
    "why_not_native",
]

logger = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:  # imports what needs torch on first use
    files = {"AttentionBackend": "backend", "TorchAttention": "torch_backend"}
    if name in files:
        return getattr(import_module(f"infinilm.attention.{files[name]}"), name)
    raise AttributeError(f"module 'infinilm.attention' has no attribute {name!r}")


def select_backend(name: str, device: "torch.device | str") -> "AttentionBackend":
    """Make the backend of that name, or with `auto` the best that can serve the device."""
    import torch

    device = torch.device(device)
    # Best first. On a CPU the native library is the best if weights are quantised, which the engine knows: with plain
    # weights its threads and torch's would slow each other down. Triton would run in its interpreter there.
    names = ["triton", "torch", "native"] if device.type == "cuda" else ["torch", "native", "triton"]
    if name not in ("auto", *names):
        raise InvalidValueError(f"attention_backend={name!r} is unknown; use one of auto, {', '.join(names)}")
    reasons: list[str] = []
    for candidate in names if name == "auto" else [name]:
        reason = _why_not(candidate, device)
        if reason is None:
            passed_over = f" ({'; '.join(reasons)})" if reasons else ""
            logger.log(
                logging.INFO if reasons else logging.DEBUG, "attention on %s: %s%s", device, candidate, passed_over
            )
            return _make(candidate)
        reasons.append(f"{candidate}: {reason}")
    raise InvalidValueError(f"attention_backend={name!r} can't serve device {device}: {'; '.join(reasons)}")


def _why_not(name: str, device: "torch.device") -> str | None:
    """The backend's own reason, without importing what the backend needs: Triton may not be installed."""
    return {"triton": why_no_triton, "native": why_not_native}.get(name, lambda _: None)(device)


def _make(name: str) -> "AttentionBackend":
    from infinilm.attention.torch_backend import TorchAttention

    if name == "triton":
        from infinilm.attention.triton_backend import TritonAttention

        return TritonAttention()
    return NativeAttention() if name == "native" else TorchAttention()
