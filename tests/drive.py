"""Drives a model without the engine: builds batches from token lists and block tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from infinilm.attention import AttentionBackend, ForwardBatch, TorchAttention
from infinilm.attention.batch import HostBatch
from infinilm.cache.paged import PagedKVCache
from infinilm.models import CausalLM


def make_batch(
    chunks: Sequence[Sequence[int]],
    starts: Sequence[int],
    tables: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device | str = "cpu",
) -> ForwardBatch:
    """Request i computes `chunks[i]`, which begin at position `starts[i]`, in the blocks `tables[i]`."""
    positions = [start + i for start, chunk in zip(starts, chunks, strict=True) for i in range(len(chunk))]
    owners = [request for request, chunk in enumerate(chunks) for _ in chunk]
    slots = [
        tables[request][position // block_size] * block_size + position % block_size
        for request, position in zip(owners, positions, strict=True)
    ]
    width = max(len(table) for table in tables)
    query_lens = np.array([len(chunk) for chunk in chunks], dtype=np.int64)
    batch = HostBatch(
        input_ids=np.array([token for chunk in chunks for token in chunk], dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        slot_mapping=np.array(slots, dtype=np.int64),
        block_tables=np.array([[*table, *[-1] * (width - len(table))] for table in tables], dtype=np.int64),
        query_lens=query_lens,
        context_lens=query_lens + np.array(starts, dtype=np.int64),
    )
    return batch.to_device(torch.device(device))


@dataclass
class Driver:
    """One model and cache; blocks are handed out in shuffled order, so that none of a request lie in a row."""

    model: CausalLM
    block_size: int = 16
    num_blocks: int = 64
    backend: AttentionBackend = field(default_factory=TorchAttention)
    seed: int = 0

    def __post_init__(self) -> None:
        config = self.model.config
        self.cache = PagedKVCache(
            config.cache_specs(),
            self.num_blocks,
            self.block_size,
            dtype=self.model.dtype,
            device=next(self.model.parameters()).device,
        )
        self.free = np.random.default_rng(self.seed).permutation(self.num_blocks).tolist()
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    @torch.inference_mode()
    def step(self, chunks: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        """Compute the next tokens of some requests, by name: logits `[new tokens, vocab]` for each."""
        starts = []
        for name, chunk in chunks.items():
            table = self.tables.setdefault(name, [])
            starts.append(self.lengths.get(name, 0))
            self.lengths[name] = starts[-1] + len(chunk)
            while len(table) * self.block_size < self.lengths[name]:
                table.append(self.free.pop())
        tables = [self.tables[name] for name in chunks]
        batch = make_batch(list(chunks.values()), starts, tables, self.block_size, self.cache.device)
        logits = self.model.compute_logits(self.model(batch, self.cache, self.backend)).float()
        parts = torch.split(logits, [len(chunk) for chunk in chunks.values()])
        return dict(zip(chunks, parts, strict=True))

    def run(self, tokens: Sequence[int], chunk: int | None = None, name: str = "request") -> torch.Tensor:
        """Compute one request's tokens, `chunk` at a time: logits `[tokens, vocab]`."""
        size = chunk or len(tokens)
        return torch.cat([self.step({name: tokens[i : i + size]})[name] for i in range(0, len(tokens), size)])
