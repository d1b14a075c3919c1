"""What `generate` returns."""

from dataclasses import dataclass

from torch import Tensor

from infinilm.generation.timings import GenerationTimings


@dataclass(frozen=True, slots=True, eq=False)
class GenerationOutput:
    """The answers to a batch of prompts, in their order."""

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
