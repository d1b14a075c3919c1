"""Ranks as threads of one process, each with a communication group of its own."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from infinilm.distributed.group import CommunicationGroup, RankInfo, join_store, make_store

T = TypeVar("T")
TIMEOUT_S = 60.0


@contextmanager
def connected(size: int) -> Iterator[list[CommunicationGroup]]:
    """The groups of `size` ranks that have met."""
    store, port = make_store()

    def join(rank: int) -> CommunicationGroup:
        group = CommunicationGroup(RankInfo(rank, size), store if rank == 0 else join_store(port))
        group.join(rendezvous=0)
        return group

    groups = in_threads(join, range(size))
    try:
        yield groups
    finally:
        for group in groups:
            group.leave()


def in_threads(function: Callable[..., T], arguments: "range | list") -> list[T]:
    """What `function` makes of each argument, all of them at the same time."""
    with ThreadPoolExecutor(len(arguments)) as threads:
        futures = [threads.submit(function, argument) for argument in arguments]
        return [future.result(TIMEOUT_S) for future in futures]


def run_ranks(size: int, function: Callable[[CommunicationGroup], T]) -> list[T]:
    """What `function(group)` gives on each rank."""
    with connected(size) as groups:
        return in_threads(function, groups)
