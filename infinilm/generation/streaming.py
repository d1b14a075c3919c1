"""Handing out tokens as they come."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from infinilm.errors import InvalidTypeError


@runtime_checkable
class Streamer(Protocol):
    """transformers' streamer interface: `put` gets the prompt first and then each step's tokens."""

    def put(self, value: Tensor) -> None:
        """Receive the prompt `[batch, seq]` or the new tokens `[batch]`, int64 on the CPU."""

    def end(self) -> None:
        """Called after the last token."""


class TokenStream:
    """Passes tokens to a `Streamer`, to a function of each step's new tokens, or to nothing."""

    def __init__(self, streamer: Streamer | Callable[[list[int]], object] | None) -> None:
        if not (streamer is None or isinstance(streamer, Streamer) or callable(streamer)):
            raise InvalidTypeError(
                f"streamer={streamer!r} must have the methods put and end, or be a function of the new token ids"
            )
        self._streamer = streamer

    def start(self, prompt: Tensor) -> None:
        """Pass the prompt `[batch, seq]` to a `Streamer`; a function does not get it."""
        if isinstance(self._streamer, Streamer):
            self._streamer.put(prompt)

    def put(self, token_ids: list[int]) -> None:
        """Pass the new token of each row."""
        if isinstance(self._streamer, Streamer):
            self._streamer.put(torch.tensor(token_ids))
        elif self._streamer is not None:
            self._streamer(token_ids)

    def end(self) -> None:
        """Tell a `Streamer` that there are no more tokens."""
        if isinstance(self._streamer, Streamer):
            self._streamer.end()
