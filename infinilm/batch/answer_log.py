"""The answers of an unfinished job, in the order in which they were computed.

A record is `row checksum answer` and a newline, written by one call. A killed process leaves whole records and at most
one torn record at the end, which the next process drops.
"""

import fcntl
import os
import time
from array import array
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self
from zlib import crc32

from infinilm.errors import EngineError

LOCK_WAIT_S = 30.0


def lock(file: BinaryIO, path: Path, wait_s: float = 0.0) -> None:
    """Lock a file for this process, until it ends."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise EngineError(f"another process is working on {path.parent}; wait for it, or stop it") from None
            time.sleep(0.1)


class AnswerLog:
    """The answers to the rows from `first` up to `first + num_rows`. One process at a time can open it."""

    def __init__(self, path: Path, first: int, num_rows: int, *, wait_s: float = 0.0) -> None:
        self._path = path
        self._first = first
        self._places = array("q", [-1]) * num_rows
        """By row: where its answer begins in the file, or -1."""
        self.num_done = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b", buffering=0)
        try:
            lock(self._file, path, wait_s)
            self._end = self._read()
            self._file.truncate(self._end)
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> int:
        """Find the answers, up to the first record that is not whole. Returns the end of the whole ones."""
        end = 0
        with self._open_to_read() as file:
            for record in file:
                head, _, answer = record.partition(b" ")
                checksum, _, answer = answer.partition(b" ")
                if not record.endswith(b"\n") or checksum != b"%08x" % crc32(answer[:-1]):
                    break
                self._note(int(head), end + len(record) - len(answer))
                end += len(record)
        return end

    def _open_to_read(self) -> BinaryIO:
        file = open(self._file.fileno(), "rb", closefd=False)  # noqa: SIM115 (the file is open already)
        file.seek(0)
        return file

    def _note(self, row: int, place: int) -> None:
        assert self._places[row - self._first] < 0, f"row {row} is answered twice"
        self._places[row - self._first] = place
        self.num_done += 1

    def __contains__(self, row: int) -> bool:
        return self._places[row - self._first] >= 0

    def append(self, row: int, answer: bytes) -> None:
        """Keep the answer to a row: one line, without its newline."""
        record = b"%d %08x %s\n" % (row, crc32(answer), answer)
        try:
            num_written = self._file.write(record)
        except OSError as error:
            raise EngineError(f"{self._path} can't be written: {error}; what it holds is kept") from error
        if num_written != len(record):
            raise EngineError(f"{self._path} can't be written: the disk is full; what it holds is kept")
        self._note(row, self._end + len(record) - len(answer) - 1)
        self._end += len(record)

    def write_sorted(self, output: Path) -> None:
        """Write all answers to a file, in the order of their rows. The file appears atomically."""
        unfinished = self._path.with_suffix(".tmp")
        with self._open_to_read() as source, unfinished.open("wb") as target:
            for place in self._places:
                assert place >= 0
                source.seek(place)
                target.write(source.readline())
            target.flush()
            os.fsync(target.fileno())
        unfinished.replace(output)
        sync_directory(output.parent)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
