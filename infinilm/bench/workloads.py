"""What is measured: prompts of token ids and how many tokens to generate for each."""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

from infinilm.checks import check_integer
from infinilm.errors import InvalidValueError


@dataclass(frozen=True, slots=True)
class Workload:
    """So many prompts of one length, each answered with one number of tokens, whatever they are."""

    name: str
    num_prompts: int
    input_len: int
    output_len: int
    shared_prefix_len: int = 0
    """How many tokens at their beginning all prompts have in common."""
    concurrency: int = 0
    """Requests at a time. 0: all at once."""

    def __post_init__(self) -> None:
        for field in ("num_prompts", "input_len", "output_len"):
            check_integer(field, getattr(self, field), low=1)
        check_integer("concurrency", self.concurrency, low=0)
        check_integer("shared_prefix_len", self.shared_prefix_len, low=0)
        if self.shared_prefix_len >= self.input_len:
            raise InvalidValueError(
                f"shared_prefix_len={self.shared_prefix_len} must be less than input_len={self.input_len}"
            )

    @property
    def batch_size(self) -> int:
        """Requests at a time."""
        return min(self.concurrency or self.num_prompts, self.num_prompts)

    def prompts(self, vocab_size: int, repeat: int) -> list[list[int]]:
        """Token ids that look random, the same on every machine, and others in each repeat.

        Nothing of an earlier repeat is in the prefix cache.
        """
        random = Random(f"{self.name}/{repeat}")
        prefix = random.choices(range(vocab_size), k=self.shared_prefix_len)
        own_len = self.input_len - self.shared_prefix_len
        return [prefix + random.choices(range(vocab_size), k=own_len) for _ in range(self.num_prompts)]

    def __str__(self) -> str:
        shared = f" ({self.shared_prefix_len} shared)" if self.shared_prefix_len else ""
        few = f", {self.batch_size} at a time" if self.batch_size < self.num_prompts else ""
        return f"{self.name}: {self.num_prompts} × {self.input_len} in{shared}, {self.output_len} out{few}"


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        workload.name: workload
        for workload in (
            Workload("single", num_prompts=1, input_len=128, output_len=64),
            Workload("batch", num_prompts=8, input_len=128, output_len=64),
            Workload("prefill", num_prompts=1, input_len=512, output_len=1),
            Workload("prefix", num_prompts=8, input_len=288, output_len=16, shared_prefix_len=256),
            Workload("custom", num_prompts=4, input_len=64, output_len=64),
        )
    }
)
"""The ready-made ones; `custom` is a beginning for one's own."""
