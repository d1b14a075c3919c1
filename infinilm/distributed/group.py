"""Collectives between the ranks of one engine: Gloo between CPUs, NCCL between GPUs.

Groups are objects, not torch's global default group: a process may hold as many engines as it likes.
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from infinilm.errors import EngineError

dist: Any = distributed  # whose type stubs lack half of what it has
Store = Any
"""One of torch's stores."""

LOOPBACK = "127.0.0.1"
JOIN_TIMEOUT = timedelta(minutes=1)
TIMEOUT = timedelta(minutes=30)


class CommunicationError(EngineError):
    """Another rank can't be reached: it failed or died in the middle of a step."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Which of `size` ranks this is, and the device that it computes on."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - it can't be changed


def make_store() -> tuple[Store, int]:
    """Where ranks meet, on a free port of this machine only; the port is what the others need to know."""
    listener = socket.socket()
    listener.bind((LOOPBACK, 0))
    listener.listen()
    port: int = listener.getsockname()[1]
    # The store owns the socket from here on.
    store = dist.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=JOIN_TIMEOUT
    )
    return store, port


def join_store(port: int) -> Store:
    """The meeting place that another process made."""
    return dist.TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=JOIN_TIMEOUT)


class CommunicationGroup:
    """What the ranks of an engine tell each other. A group of one has nothing to tell and needs no store.

    Without a store a group is a description only: a rank's share of a model can be built with it, not run.
    After an error in a collective a group is of no use any more, on any rank; `rejoin` makes it anew.
    """

    def __init__(self, info: RankInfo | None = None, store: Store | None = None) -> None:
        self.info = info or RankInfo()
        self.rank, self.size = self.info.rank, self.info.size
        self._store = store
        self._num_joins = 0
        self._process_group: Any = None
        if self.size > 1 and store is not None:
            self.rejoin()

    def rejoin(self) -> None:
        """Meet the other ranks, who must be doing the same. Each meeting has a name of its own."""
        if self._store is None:
            raise EngineError(f"a group of {self.size} ranks needs a store to meet at; use make_store or join_store")
        self.leave()
        store = dist.PrefixStore(f"join{self._num_joins}", self._store)
        self._num_joins += 1
        if self.info.device.type == "cuda":
            self._process_group = dist.ProcessGroupNCCL(store, self.rank, self.size, dist.ProcessGroupNCCL.Options())
            return
        options = dist.ProcessGroupGloo._Options()
        options._timeout = JOIN_TIMEOUT
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        self._process_group = dist.ProcessGroupGloo(store, self.rank, self.size, options)
        self._process_group._set_default_timeout(TIMEOUT)

    def leave(self) -> None:
        """Hang up. Ranks that wait for this one in a collective get an error at once."""
        if self._process_group is not None:
            self._process_group.abort()
        self._process_group = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place of each rank's own `tensor`."""
        if self.size > 1:
            self._run(lambda group: group.allreduce([tensor]))
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Every rank's `tensor`, all of one shape, side by side along `dim`."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._run(lambda group: group.allgather([parts], [tensor]))
        return torch.cat(parts, dim)

    def gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """What `all_gather` gives, on rank 0; elsewhere an empty tensor."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._run(lambda group: group.gather([parts] if parts else [], [tensor], options))
        return torch.cat(parts, dim) if parts else tensor.new_empty(0)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """The `root` rank's tensor in place of everybody's."""
        if self.size > 1:
            options = dist.BroadcastOptions()
            options.rootRank = root
            self._run(lambda group: group.broadcast([tensor], options))
        return tensor

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            self._run(lambda group: group.barrier())

    def _run(self, start: Callable[[Any], Any]) -> None:
        if self._process_group is None:
            raise CommunicationError(f"rank {self.rank} is not connected to the other {self.size - 1}")
        try:
            start(self._process_group).wait()
        except RuntimeError as error:
            raise CommunicationError(f"rank {self.rank} lost its connection to the others: {error}") from error


SINGLE = CommunicationGroup()
"""The group of a model that runs on one device."""
