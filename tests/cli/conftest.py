"""The command line, run inside this process: quick, as torch is imported only once."""

import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cli.cli_driver import Cli, Done

from infinilm.cli.main import run


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are slower with threads than without."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command line inside this process; its stdin is not a terminal."""
    monkeypatch.setattr(logging.getLogger("infinilm"), "level", logging.WARNING)

    def call(*args: str | Path, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = run([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return call
