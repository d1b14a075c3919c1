"""Ranks somewhere else than in processes of this host: who gets which place, and what is said of those that fail."""

import socket
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread

import pytest
import torch

from infinilm import LLM, InferEngine
from infinilm.distributed import group
from infinilm.distributed.channel import Channel, Message
from infinilm.errors import CheckpointError, InvalidValueError, WorkerDiedError
from infinilm.executor import processes
from infinilm.executor.commands import Command
from infinilm.executor.processes import ProcessExecutor
from infinilm.executor.rank_worker import RankWorker
from infinilm.executor.ray_executor import _Bundle, assign
from infinilm.executor.wire import handle_call
from infinilm.executor.worker_processes import Place, RankProcess
from infinilm.framing import ChannelClosedError
from infinilm.ray_cluster import Node

NODES = [Node(letter * 32, f"10.0.0.{number}", {}) for number, letter in enumerate("abc")]


@pytest.mark.parametrize(
    ("nodes", "tp_size", "num_stages", "expected"),
    [
        ("abab", 2, 2, "bbaa"),  # the driver is rank 2, and the last stage is on its node
        ("abcc", 4, 1, "accb"),
        ("abc", 1, 3, "bca"),
        ("a", 1, 1, "a"),
    ],
)
def test_stages_stay_together_and_the_drivers_on_its_node(
    nodes: str, tp_size: int, num_stages: int, expected: str
) -> None:
    by_name = {node.node_id[0]: node for node in NODES}
    bundles = [_Bundle(number, by_name[name]) for number, name in enumerate(nodes)]
    placed = assign(bundles, tp_size, num_stages)
    assert "".join(placed[rank].node.node_id[0] for rank in range(len(nodes))) == expected
    assert placed[tp_size * (num_stages - 1)].number == 0
    assert {bundle.number for bundle in placed.values()} == set(range(len(nodes)))


class SilentRank:
    """A rank that starts and never joins the others."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self._channel = Channel(theirs)
        Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        with suppress(ChannelClosedError):
            while True:
                if self._channel.receive().values["command"] == Command.INIT:
                    self._channel.send(Message({"free_bytes": 1 << 30}))

    def has_ended(self) -> bool:
        return False

    def kill(self) -> None:
        self._channel.close()

    def wait(self, timeout_s: float | None = None) -> None: ...
    def describe_death(self, title: str) -> str:
        return f"{title} died"


class SilentRanks:
    def place(self, rank: int) -> Place:
        return Place(2, node=f"node-{rank} (10.0.0.{rank})")

    def start(self, rank: int) -> RankProcess:
        return SilentRank()

    def close(self) -> None: ...


def test_a_rank_that_does_not_join_is_named_with_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "JOIN_LIMIT_S", 0.3)
    monkeypatch.setattr(group, "JOIN_TIMEOUT", timedelta(seconds=0.5))
    devices = [torch.device("cpu")] * 2
    with pytest.raises(
        WorkerDiedError, match=r"rank 1 on node node-1 \(10.0.0.1\) could not join the others within 0.3 s"
    ):
        ProcessExecutor(devices, torch.float32, ranks=SilentRanks())


def test_ray_that_is_missing_or_not_reachable_is_named(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(InvalidValueError, match=r"no Ray cluster is reachable at '127.0.0.1:1'.*RAY_ADDRESS"):
        LLM(tiny_dir, executor="ray", tensor_parallel_size=2, device="cpu")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvalidValueError, match=r"pip install 'infinilm\[cluster\]'"):
        LLM(tiny_dir, executor="ray", tensor_parallel_size=2, device="cpu")
    with pytest.raises(InvalidValueError, match="executor='rays'"):
        InferEngine(tiny_dir, executor="rays")


def test_a_model_that_a_node_does_not_have_is_named_with_the_rank() -> None:
    own = group.CommunicationGroup(title="rank 3 on node abc (10.0.0.2)")
    message = Message({"source": "/no/such/model", "registration": None})
    with pytest.raises(CheckpointError, match=r"rank 3 on node abc \(10.0.0.2\) has no /no/such/model; .* put "):
        handle_call(RankWorker(own, torch.float32), Command.LOAD, message)
