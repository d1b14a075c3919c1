"""The log of answers: what a kill leaves of it, and how a job is held."""

from pathlib import Path

import pytest

from infinilm.batch.answer_log import AnswerLog
from infinilm.errors import EngineError


def fill(path: Path, rows: dict[int, bytes], num_rows: int = 6) -> None:
    with AnswerLog(path, 10, num_rows) as log:
        for row, answer in rows.items():
            log.append(row, answer)


def test_whatever_a_kill_leaves_whole_answers_are_kept_and_torn_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "log"
    answers = {12: b'{"a": 1}', 10: b'{"b": "' + b"x" * 50 + b'"}', 15: b"{}"}
    fill(path, answers)
    whole = path.read_bytes()
    ends = [0, *(end + 1 for end, byte in enumerate(whole) if byte == ord("\n"))]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        with AnswerLog(path, 10, 6) as log:
            num_kept = sum(end <= size for end in ends[1:])
            assert [row for row in range(10, 16) if row in log] == sorted([*answers][:num_kept])
            assert path.stat().st_size == ends[num_kept]
            for row in range(10, 16):
                if row not in log:
                    log.append(row, answers.get(row, b"new %d" % row))
            log.write_sorted(tmp_path / "out")
        expected = [answers.get(row, b"new %d" % row) for row in range(10, 16)]
        assert (tmp_path / "out").read_bytes().splitlines() == expected


def test_a_damaged_record_ends_the_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    fill(path, {10: b"one", 11: b"two", 12: b"three"})
    path.write_bytes(path.read_bytes().replace(b"two", b"\0\0\0"))
    with AnswerLog(path, 10, 6) as log:
        assert [row for row in range(10, 16) if row in log] == [10]


def test_a_log_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    with AnswerLog(tmp_path / "log", 0, 1), pytest.raises(EngineError, match="another process is working on"):
        AnswerLog(tmp_path / "log", 0, 1)
    AnswerLog(tmp_path / "log", 0, 1).close()


def test_a_full_disk_keeps_what_is_there(tmp_path: Path) -> None:
    fill(tmp_path / "log", {10: b"one"})
    with AnswerLog(tmp_path / "log", 10, 6) as log, Path("/dev/full").open("ab", buffering=0) as full:
        log._file.close()
        log._file = full
        with pytest.raises(EngineError, match="can't be written"):
            log.append(11, b"two")
    with AnswerLog(tmp_path / "log", 10, 6) as log:
        assert [row for row in range(10, 16) if row in log] == [10]
