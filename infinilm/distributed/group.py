"""Collectives between the ranks of one engine: Gloo between CPUs, NCCL between GPUs, a plug-in's between others.

Groups are objects, not torch's global default group, so a process may have any number of engines.
"""

import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from infinilm.errors import EngineError
from infinilm.framing import watch_connection
from infinilm.platforms import collectives_of

dist: Any = distributed  # its type stubs are incomplete
Store = Any
"""One of torch's stores."""

LOOPBACK = "127.0.0.1"
JOIN_TIMEOUT = timedelta(seconds=3)
"""All ranks join at the same time; one that takes longer is dead or on a very busy machine."""
TIMEOUT = timedelta(minutes=30)


class CommunicationError(EngineError):
    """Another rank can't be reached: it failed or died in the middle of a step."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Which of `size` ranks this is, and the device that it computes on."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - it can't be changed
    host: str = LOOPBACK
    """The address at which other ranks reach it."""


def make_store(host: str = LOOPBACK) -> tuple[Store, int]:
    """Make the rendezvous of ranks on a free port, by default for this machine only. Returns it and its port."""
    listener = socket.socket()
    listener.bind((host, 0))
    listener.listen()
    port: int = listener.getsockname()[1]
    # The store owns the socket from here on.
    store = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=JOIN_TIMEOUT
    )
    return store, port


def join_store(port: int, host: str = LOOPBACK) -> Store:
    """Connect to the rendezvous that another process made."""
    try:
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=JOIN_TIMEOUT)
    except RuntimeError as error:
        raise CommunicationError(f"the ranks' rendezvous at {host}:{port} can't be reached: {error}") from error


class CommunicationGroup:
    """Communication between the ranks of an engine. A group of one rank needs no store.

    Without a store a group is only a description: a rank's share of a model can be built with it, not run.
    With a store ranks can communicate once all have joined. After an error in a collective all have to join again.
    Groups that share a store need different names. `title` is this rank's name in errors.
    """

    def __init__(
        self, info: RankInfo | None = None, store: Store | None = None, name: str = "", title: str | None = None
    ) -> None:
        self.info = info or RankInfo()
        self.rank, self.size = self.info.rank, self.info.size
        self.communicates = self.size > 1 or store is not None
        """Whether collectives run. A group of one with a store runs them too, as larger groups do."""
        self.is_ordered = False
        """Whether `all_reduce` adds in the order of ranks, so that a sum does not depend on its place in the tensor."""
        self._store = store
        self._name = name
        self.title = title or f"rank {self.rank}"
        self._process_group: Any = None
        self._sending: deque[tuple[Any, Tensor]] = deque()  # sends in progress, with the tensors they read
        is_gloo = collectives_of(self.info.device.type) == "gloo"
        self._limit = (TIMEOUT,) if is_gloo else ()  # by default, Gloo's send and receive use the rendezvous's limit

    def join(self, rendezvous: int) -> None:
        """Join the other ranks, which must call this at the same time. Each rendezvous has its own number."""
        if self._store is None:
            raise EngineError(
                f"a group of {self.size} ranks needs a store for the rendezvous; use make_store or join_store"
            )
        self.leave()
        store = dist.PrefixStore(f"{self._name}rendezvous{rendezvous}", self._store)
        backend = collectives_of(self.info.device.type)
        if backend != "gloo":
            self._process_group = _device_group(backend, store, self.rank, self.size)
            return
        options = dist.ProcessGroupGloo._Options()
        options._timeout = JOIN_TIMEOUT
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.info.host)]
        before = _open_sockets()
        try:
            self._process_group = dist.ProcessGroupGloo(store, self.rank, self.size, options)
        except RuntimeError as error:
            raise CommunicationError(f"{self.title} could not join the others: {error}") from error
        if self.info.host != LOOPBACK:
            _watch_connections(number for name, number in _open_sockets().items() if name not in before)
        self._process_group._set_default_timeout(TIMEOUT)

    def abort(self) -> None:
        """Make a GPU stop waiting for another rank. Gloo stops by itself when a rank dies."""
        if self._process_group is not None:
            self._process_group.abort()

    def leave(self) -> None:
        """Disconnect. Ranks that wait for this one in a collective get an error at once."""
        self.abort()
        self._sending.clear()
        self._process_group = None  # now Gloo disconnects: nothing else may refer to it, not even a traceback

    def close(self) -> None:
        """Disconnect for good."""
        self.leave()
        self._store = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Replace each rank's `tensor` by the sum over all ranks."""
        if self.is_ordered and self.size > 2 and tensor.is_floating_point():  # no matter for two ranks or integers
            return self._add_in_order(tensor)
        return self._in_place("allreduce", tensor)

    def _add_in_order(self, tensor: Tensor) -> Tensor:
        """Add in the order of ranks. The libraries' all-reduce adds each rank's part of a tensor in another order."""
        first, *others = self._gather_all(tensor)
        total = first.to(torch.promote_types(first.dtype, torch.float32))
        for part in others:
            total += part
        return tensor.copy_(total)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Every rank's `tensor`, all of one shape, side by side along `dim`."""
        return torch.cat(self._gather_all(tensor), dim) if self.communicates else tensor

    def _gather_all(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's `tensor`, by rank."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._run("allgather", [parts], [tensor])
        return parts

    def gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """The result of `all_gather` on rank 0, an empty tensor on other ranks."""
        if not self.communicates:
            return tensor
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._run("gather", [parts] if parts else [], [tensor], options)
        return torch.cat(parts, dim) if parts else tensor.new_empty(0)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Replace every rank's tensor by the `root` rank's."""
        if not self.communicates:
            return tensor
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._in_place("broadcast", tensor, options)

    def send(self, tensor: Tensor, to: int) -> None:
        """Start to send a tensor to another rank, which may `receive` it later. It must not be written to meanwhile.

        If more sends are in progress than the pipeline has steps in flight, waits for the first.
        """
        tensor = tensor.contiguous()
        with self._connected():
            self._sending.append((self._process_group.send([tensor], to, 0), tensor))
            if len(self._sending) > self.size + 1:
                self._sending.popleft()[0].wait(*self._limit)

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Receive what another rank sent into this contiguous `tensor` of the same shape and type."""
        with self._connected():
            self._process_group.recv([tensor], source, 0).wait(*self._limit)
        return tensor

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.communicates:
            self.all_reduce(torch.zeros(1, device=self.info.device)).item()

    def _in_place(self, name: str, tensor: Tensor, *options: Any) -> Tensor:
        if self.communicates:
            packed = tensor.contiguous()  # Gloo assumes this, and would overwrite other memory
            self._run(name, [packed], *options)
            if packed is not tensor:
                tensor.copy_(packed)
        return tensor

    def _run(self, name: str, *arguments: Any) -> None:
        """Call a method of the process group, and wait until it is done."""
        with self._connected():
            getattr(self._process_group, name)(*arguments).wait()

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Convert the errors of a process group. No name here refers to the group: see `leave`."""
        if self._process_group is None:
            raise CommunicationError(f"{self.title} is not connected to the other {self.size - 1}")
        try:
            yield
        except RuntimeError as error:
            raise CommunicationError(f"{self.title} lost its connection to the others: {error}") from error


def _open_sockets() -> dict[str, int]:
    """The file descriptors of this process's sockets by their names in the system, if the system shows them."""
    found = {}
    for path in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # it was closed meanwhile
            if (name := str(path.readlink())).startswith("socket:"):
                found[name] = int(path.name)
    return found


def _watch_connections(files: Iterable[int]) -> None:
    """Let the kernel end Gloo's connections to machines that are gone: Gloo itself would wait for them."""
    for number in files:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:  # not all are TCP connections
            watch_connection(connection)


def rank_title(rank: int, tp_size: int, num_stages: int) -> str:
    """A rank's name in errors. Ranks are numbered stage by stage."""
    return f"rank {rank} in stage {rank // tp_size}" if num_stages > 1 else f"rank {rank}"


def make_groups(
    rank: int,
    tp_size: int,
    num_stages: int,
    device: torch.device,
    store: Store,
    *,
    host: str = LOOPBACK,
    title: str | None = None,
) -> tuple[CommunicationGroup, CommunicationGroup]:
    """A rank's group in its pipeline stage, and its group of the ranks in the same place of all stages."""
    stage, place = divmod(rank, tp_size)
    title = title or rank_title(rank, tp_size, num_stages)
    group = CommunicationGroup(
        RankInfo(place, tp_size, device, host),
        store if tp_size > 1 or num_stages == 1 else None,
        f"stage{stage}/",
        title,
    )
    across = RankInfo(stage, num_stages, device, host)
    return group, CommunicationGroup(across, store if num_stages > 1 else None, f"place{place}/", title)


def _device_group(backend: str | None, store: Store, rank: int, size: int) -> Any:
    """A process group between devices, of one of torch's own backends or of a plug-in's."""
    name = str(backend).upper()
    if kind := getattr(dist, f"ProcessGroup{name}", None):
        return kind(store, rank, size, kind.Options())
    plugin = dist.Backend._plugins.get(name)
    if plugin is None:
        raise EngineError(f"torch.distributed has no backend {backend!r} for collectives between devices; use one rank")
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, TIMEOUT)
    options = dist.distributed_c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size, options.timeout = store, rank, size, TIMEOUT
    return plugin.creator_fn(options, None)


SINGLE = CommunicationGroup()
"""The group of a model that runs on one device."""
