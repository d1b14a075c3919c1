"""The results of `generate`, and the interface of streamers."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, slots=True)
class GenerationTimings:
    """Counts and times of one call of `generate`.

    Counts are over all rows. Times exclude the streamer and the tokenizer.
    """

    batch_size: int
    num_prompt_tokens: int
    num_new_tokens: int
    """The number of new tokens, without padding."""
    num_steps: int
    ttft_s: float
    """Time to first token: the prefill, including drawing the first token of each row."""
    decode_s: float
    """The time of all steps after the first."""

    @property
    def mean_itl_s(self) -> float | None:
        """Inter-token latency: the mean time of the steps after the first; None if there were none."""
        return self.decode_s / (self.num_steps - 1) if self.num_steps > 1 else None

    @property
    def prefill_tokens_per_s(self) -> float:
        """The prompt tokens of all rows per second of prefill."""
        return self.num_prompt_tokens / self.ttft_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """The new tokens of all rows, except each row's first, per second of decoding; None without decode steps."""
        return (self.num_new_tokens - self.batch_size) / self.decode_s if self.num_steps > 1 else None

    def __str__(self) -> str:
        prompt = (
            f"prompt tokens: {self.num_prompt_tokens}, first new one after {self.ttft_s * 1e3:.1f} ms "
            f"({self.prefill_tokens_per_s:.1f} tokens/s); new tokens: {self.num_new_tokens}"
        )
        if self.mean_itl_s is None:
            return prompt
        return f"{prompt}, {self.mean_itl_s * 1e3:.1f} ms per step ({self.decode_tokens_per_s:.1f} tokens/s)"


@dataclass(frozen=True, slots=True, eq=False)
class GenerationOutput:
    """The answers to a batch of prompts, in the order of the prompts."""

    token_ids: list[list[int]]
    """The new tokens of each row, including the one that ended it."""
    sequences: Tensor
    """`[batch, prompt + new]` int64 on the CPU; rows that ended early are padded with the end token."""
    text: list[str] | None
    """Each row's new text, without the end token; None without a tokenizer."""
    timings: GenerationTimings

    def __str__(self) -> str:
        answers = self.token_ids if self.text is None else self.text
        return "\n".join([*map(str, answers), f"[{self.timings}]"])


@runtime_checkable
class Streamer(Protocol):
    """transformers' streamer interface: `put` gets the prompt first and then each step's tokens."""

    def put(self, value: Tensor) -> None:
        """Receive the prompt `[batch, seq]` or the new tokens `[batch]`, int64 on the CPU."""

    def end(self) -> None:
        """Called after the last token."""
