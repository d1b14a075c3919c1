"""Child processes: their messages, their end, and what happens when their parent ends."""

import os
import signal
from collections.abc import Iterator

import pytest
from processes import eventually, script

from infinilm.framing import ChannelClosedError, FrameSocket
from infinilm.processes import ChildProcess


@pytest.fixture
def child() -> Iterator[tuple[ChildProcess, FrameSocket]]:
    process = ChildProcess("child_module", output="echo")
    frames = FrameSocket(process.socket)
    assert frames.receive_frame() == b"ready"
    yield process, frames
    process.kill()
    process.wait()
    frames.close()


def test_the_end_is_described_by_exit_code_and_last_words(
    child: tuple[ChildProcess, FrameSocket], capsys: pytest.CaptureFixture[str]
) -> None:
    process, frames = child
    assert not process.has_ended()
    frames.send_frame(b"fail")
    assert process.wait(30) == 3
    assert process.has_ended()
    assert process.describe_end() == "ended with exit code 3; its last words: the last words"
    assert capsys.readouterr().err == "first words\nthe last words\n"
    with pytest.raises(ChannelClosedError):
        frames.receive_frame()


def test_the_end_is_described_by_a_signal(child: tuple[ChildProcess, FrameSocket]) -> None:
    process, _ = child
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(30) == -9
    assert process.describe_end() == "was killed by SIGKILL; was the machine out of memory?"


def test_a_process_that_does_not_end_in_time_is_killed(child: tuple[ChildProcess, FrameSocket]) -> None:
    process, frames = child
    frames.send_frame(b"sleep")
    assert process.wait(0.1) == -9


def test_interrupts_of_a_terminal_do_not_reach_it(child: tuple[ChildProcess, FrameSocket]) -> None:
    process, _ = child
    assert os.getpgid(process.pid) != os.getpgrp()


START_IN_THREAD = """
import time
from threading import Thread
from infinilm.framing import FrameSocket
from infinilm.processes import ChildProcess

started = []

def start():
    started.append(ChildProcess("child_module"))
    FrameSocket(started[0].socket).receive_frame()

thread = Thread(target=start)
if IN_THREAD:
    thread.start()
    thread.join()
else:
    start()
FrameSocket(started[0].socket).send_frame(b"sleep")
print(started[0].pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("in_thread", [True, False], ids=["started in a thread", "started in the main thread"])
def test_a_child_ends_with_its_parent_and_not_with_a_thread(in_thread: bool) -> None:
    with script(START_IN_THREAD.replace("IN_THREAD", str(in_thread))) as parent:
        pid = int(parent.read())
        assert not eventually(lambda: not is_running(pid), 0.5)
        os.kill(parent.pid, signal.SIGKILL)
        assert eventually(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
