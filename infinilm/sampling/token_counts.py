"""Token counts of the prompt and answer of each penalised row, as one table on the device."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from infinilm.kernels.copies import to_device
from infinilm.kernels.penalties import IN_PROMPT, find_penalize


class TokenCounts:
    """Counts and penalties by slot. A slot belongs to one row; the table doubles when all are used."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._penalize = find_penalize(device)
        self._counts = torch.empty(0, vocab_size, dtype=torch.int32, device=device)  # [slots, vocab]
        self._penalties = torch.empty(0, 3, device=device)  # [slots, 3]: repetition, frequency, presence
        self._free: list[int] = []

    def start(self, penalties: Sequence[float], prompt_ids: Sequence[int], output_ids: Sequence[int]) -> int:
        """Allocate a slot for a row with these three penalties and this text."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        (self._penalties[slot],) = to_device(self._device, np.array(penalties, dtype=np.float32))
        texts = (np.array(prompt_ids, dtype=np.int64), np.array(output_ids, dtype=np.int64))
        in_prompt, drawn = to_device(self._device, *texts)
        counts = self._counts[slot].zero_()
        counts.index_fill_(0, in_prompt, IN_PROMPT)
        counts.index_add_(0, drawn, torch.ones_like(drawn, dtype=torch.int32))
        return slot

    def end(self, slot: int) -> None:
        self._free.append(slot)

    def penalize(self, logits: Tensor, places: Tensor, slots: Tensor) -> None:
        """Penalise the rows `places` [k] of `logits` [n, vocab] float32, which have `slots` [k], in place."""
        self._penalize(logits, places, slots, self._counts, self._penalties)

    def record(self, slots: Tensor, token_ids: Tensor) -> None:
        """Count `token_ids` [k], drawn by the rows that have `slots` [k]."""
        ones = torch.ones_like(token_ids, dtype=torch.int32)
        self._counts.view(-1).index_add_(0, slots * self._vocab_size + token_ids, ones)

    def _grow(self) -> None:
        num_slots = len(self._counts)
        num_new = max(num_slots, 1)
        self._counts = torch.cat((self._counts, self._counts.new_zeros(num_new, self._vocab_size)))
        self._penalties = torch.cat((self._penalties, self._penalties.new_ones(num_new, 3)))
        self._free = list(range(num_slots, num_slots + num_new))
