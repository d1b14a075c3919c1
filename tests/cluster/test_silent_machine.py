"""A rank's machine that falls silent: its network namespace, whose link goes down. `make test-cluster`, as root."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Timer

import pytest
import torch

from infinilm.distributed.channel import Channel
from infinilm.errors import WorkerDiedError
from infinilm.executor.processes import ProcessExecutor
from infinilm.executor.rank_process import serve
from infinilm.executor.ray_executor import _wait_for_end
from infinilm.executor.worker_processes import Place, RankProcess
from infinilm.framing import watch_connection

pytestmark = pytest.mark.skipif("INFINILM_TEST_CLUSTER" not in os.environ, reason="slow: make test-cluster")

HOSTS = ("10.97.0.1", "10.97.0.2")
SPACE = f"infinilm-{os.getpid()}"
LINK = f"il{os.getpid() % 10**8}"
SETUP = f"""
    ip netns add {SPACE}
    ip link add {LINK}a type veth peer name {LINK}b
    ip link set {LINK}b netns {SPACE}
    ip addr add {HOSTS[0]}/24 dev {LINK}a
    ip link set {LINK}a up
    ip netns exec {SPACE} ip addr add {HOSTS[1]}/24 dev {LINK}b
    ip netns exec {SPACE} ip link set {LINK}b up
    ip netns exec {SPACE} ip link set lo up
"""


def run_lines(commands: str) -> None:
    for line in commands.strip().splitlines():
        subprocess.run(line.split(), check=True, capture_output=True)


@pytest.fixture
def machine() -> Iterator[None]:
    try:
        run_lines(SETUP)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces can't be made here: {error}")
    yield
    run_lines(f"ip netns del {SPACE}")


class RemoteRank:
    """A rank in the other namespace, over TCP as with Ray."""

    def __init__(self) -> None:
        with socket.create_server((HOSTS[0], 0)) as listener:
            command = ["ip", "netns", "exec", SPACE, sys.executable, __file__, str(listener.getsockname()[1])]
            root = str(Path(__file__).parents[2])
            self._process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": root})
            self.socket, _ = listener.accept()
        watch_connection(self.socket)

    def has_ended(self) -> bool:
        return _wait_for_end(self.socket, 0)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float | None = None) -> None:
        self._process.kill()
        self._process.wait()

    def describe_death(self, title: str) -> str:
        return f"{title} is silent"


class RemoteRanks:
    def place(self, rank: int) -> Place:
        return Place(1, HOSTS[rank], f"node-{rank}", 1)

    def start(self, rank: int) -> RankProcess:
        return RemoteRank()

    def close(self) -> None: ...


def ask_for_ever(executor: ProcessExecutor) -> None:
    while True:
        executor.check_health()


@pytest.mark.usefixtures("machine")
def test_a_silent_machine_is_noticed_in_the_middle_of_a_collective() -> None:
    executor = ProcessExecutor([torch.device("cpu")] * 2, torch.float32, ranks=RemoteRanks())
    group = executor.worker.group
    down = Timer(0.5, run_lines, [f"ip netns exec {SPACE} ip link set {LINK}b down"])
    down.start()
    begin = time.monotonic()
    with pytest.raises(Exception, match="lost its connection"):
        group.all_reduce(torch.ones(3))  # the other rank is not told to take part
    with pytest.raises(WorkerDiedError, match="rank 1 on node node-1 is silent"):
        ask_for_ever(executor)
    elapsed = time.monotonic() - begin - 0.5
    print(f"the silent machine was noticed after {elapsed:.2f} s")
    assert elapsed < 3
    executor.shutdown()


if __name__ == "__main__":
    serve(Channel(socket.create_connection((HOSTS[0], int(sys.argv[1])))))
