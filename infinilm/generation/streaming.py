"""Handing out tokens as they come."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from infinilm.errors import InvalidTypeError


@runtime_checkable
class Streamer(Protocol):
    """What transformers' streamers are: `put` gets the prompt first and then each step's tokens."""

    def put(self, value: Tensor) -> None:
        """Take the prompt `[batch, seq]` or the new tokens `[batch]`, int64 on the CPU."""

    def end(self) -> None:
        """There is no more."""


class TokenStream:
    """Feeds a `Streamer`, a function that takes each step's new tokens as a list, or nobody."""

    def __init__(self, streamer: Streamer | Callable[[list[int]], object] | None) -> None:
        if not (streamer is None or isinstance(streamer, Streamer) or callable(streamer)):
            raise InvalidTypeError(
                f"streamer={streamer!r} must have the methods put and end, or be a function of the new token ids"
            )
        self._streamer = streamer

    def start(self, prompt: Tensor) -> None:
        """The prompt `[batch, seq]`, which a function is not told."""
        if isinstance(self._streamer, Streamer):
            self._streamer.put(prompt)

    def put(self, token_ids: list[int]) -> None:
        """The new token of each row."""
        if isinstance(self._streamer, Streamer):
            self._streamer.put(torch.tensor(token_ids))
        elif self._streamer is not None:
            self._streamer(token_ids)

    def end(self) -> None:
        """There is no more."""
        if isinstance(self._streamer, Streamer):
            self._streamer.end()
