"""What a process has: children, ranks, files, threads, sockets. And scripts to have them in."""

import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

TESTS = Path(__file__).parent
TIME_LIMIT_S = 90.0
"""What runs longer hangs."""


def children(pid: int) -> list[int]:
    """The processes that a process has started and that have not ended, in the order of their start."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            for child in (task / "children").read_text().split():
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                found[int(child)] = int(fields[19])  # its start time
    return sorted(found, key=lambda child: (found[child], child))


def ranks(pid: int | None = None) -> list[int]:
    """The processes of ranks 1, 2, … of the engines of a process (this one)."""
    return [child for child in children(pid or os.getpid()) if is_rank(child)]


def is_rank(pid: int) -> bool:
    """Whether a process is there and is a rank's."""
    try:
        return b"infinilm.executor.rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def listening() -> dict[str, str]:
    """Where processes of this machine listen, `address:port` as the kernel writes it, by the socket's inode."""
    tables = Path("/proc/net/tcp").read_text().splitlines()[1:] + Path("/proc/net/tcp6").read_text().splitlines()[1:]
    return {fields[9]: fields[1] for line in tables if (fields := line.split())[3] == "0A"}


def ports_of(pid: int) -> set[str]:
    """Where one process listens."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    return {address for inode, address in listening().items() if inode in inodes}


@dataclass(frozen=True)
class Belongings:
    """What a process holds, by number."""

    files: int
    threads: int
    children: int
    ports: int
    shared_memory: int

    @classmethod
    def now(cls) -> "Belongings":
        """Those of this process."""
        return cls(
            len(list(Path("/proc/self/fd").iterdir())),
            len(list(Path("/proc/self/task").iterdir())),
            len(children(os.getpid())),
            len(ports_of(os.getpid())),
            len(shared_memory()),
        )


def shared_memory() -> set[str]:
    """What libraries that compute in several processes have in shared memory."""
    prefixes = ("torch", "gloo", "nccl", "psm_", "sem.")
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(prefixes)}


def resident_bytes() -> int:
    """The memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether it comes true in this time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@contextmanager
def time_limit() -> Iterator[None]:
    """End this process, saying where it hangs, if the block does."""
    faulthandler.dump_traceback_later(TIME_LIMIT_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class Script:
    """Python code in a process of its own, in a process group of its own as a shell would give it."""

    def __init__(self, code: str, *arguments: object, temporary: Path | None = None) -> None:
        environment = {**os.environ, "PYTHONPATH": str(TESTS)}
        if temporary is not None:
            environment["TMPDIR"] = str(temporary)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            process_group=0,
        )
        self._timer = Timer(TIME_LIMIT_S, self.process.kill)
        self._timer.start()

    @property
    def pid(self) -> int:
        """Its process."""
        return self.process.pid

    def read(self) -> str:
        """The next line it prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().rstrip("\n")
        if not line and self.process.poll() is not None:
            raise AssertionError(f"the script ended with {self.process.returncode}: {self.process.communicate()[1]}")
        return line

    def interrupt(self) -> None:
        """What Ctrl-C in a terminal does."""
        os.killpg(self.pid, signal.SIGINT)

    def end(self) -> tuple[int, str, str]:
        """Exit code, output and errors, once it and all that hold its output have ended."""
        out, errors = self.process.communicate(timeout=TIME_LIMIT_S)
        return self.process.returncode, out, errors

    def kill(self) -> None:
        """End it, if it still runs."""
        self._timer.cancel()
        self.process.kill()
        self.process.communicate()


@contextmanager
def script(code: str, *arguments: object, temporary: Path | None = None) -> Iterator[Script]:
    """A script, which is killed if it still runs at the end of the block."""
    running = Script(code, *arguments, temporary=temporary)
    try:
        yield running
    finally:
        running.kill()
