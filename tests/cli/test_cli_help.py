"""The help pages, and what is written while a command works."""

import io
import logging
import re
import sys
from pathlib import Path

import pytest
from cli.cli_driver import Cli

from infinilm import LLM, SamplingParams
from infinilm.cli.display import AnswerWriter
from infinilm.engine.stats import EngineStats, ProgressBar

COMMANDS = [[], ["generate"], ["chat"], ["serve"], ["info"], ["pull"], ["verify"], ["bench"], ["bench", "serve"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_is_plain_and_has_no_placeholders(cli: Cli, command: list[str]) -> None:
    done = cli(*command, "-h")
    assert (done.code, done.err) == (0, "")
    assert done.out == cli(*command, "--help").out
    assert not re.search(r"<\w+>|None|INTEGER|\[default", done.out)
    assert max(map(len, done.out.splitlines())) <= 80


def test_limits_are_listed_with_units(cli: Cli) -> None:
    shown = cli("serve", "--limit", "help").out
    assert re.search(r"max_body_bytes +8,388,608 +bytes ", shown)
    assert re.search(r"request_timeout +600.0 +seconds ", shown)
    refused = cli("serve", "--limit", "max_request=3")
    assert refused.code == 2
    assert "unknown limit 'max_request'; did you mean 'max_requests'?" in refused.err


@pytest.mark.parametrize(
    ("command", "package", "remedy"),
    [
        (["serve", "nowhere"], "uvicorn", "pip install 'infinilm[serve]'"),
        (["bench", "--peer", "transformers", "-m", "nowhere"], "transformers", "pip install transformers"),
        (["bench", "--peer", "llama.cpp", "-m", "nowhere"], "llama_cpp", "pip install 'infinilm[peers]'"),
        (["bench", "serve", "--plot", "x.png"], "matplotlib", "pip install 'infinilm[plot]'"),
        (["verify", "nowhere"], "transformers", "pip install transformers"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:-1]),
)
def test_a_missing_package_is_told_before_the_model_is_looked_for(
    cli: Cli, command: list[str], package: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    done = cli(*command)
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert line.startswith("error: ")
    assert line.endswith(remedy)


def test_verbose_says_where_the_memory_goes(cli: Cli, tiny_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = ("generate", "-m", tiny_dir, "-n", "1", "x")
    cli(*command)
    assert "memory on cpu" not in caplog.text
    try:
        cli(*command, "--verbose")
    finally:
        logging.getLogger("infinilm").setLevel(logging.WARNING)
    assert re.search(r"memory on cpu: .* weights .* conversations \(KV cache\) .* tokens in .* blocks", caplog.text)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(text: str, width: int, *, size: int = 1) -> str:
    """What a terminal shows of a text that comes in parts of some size."""
    screen = Screen()
    writer = AnswerWriter(screen, width)
    for start in range(0, len(text), size):
        writer.write(text[start : start + size])
    writer.end()
    return screen.getvalue()


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one two three", "one two\nthree\n"),
        ("one two  \n\n  three", "one two\n\n  three\n"),
        ("exactly8 x", "exactly8\nx\n"),
        ("def f():\n    return 1", "def f():\n    return\n1\n"),
        ("abcdefghijklmnop q", "abcdefgh\nijklmnop\nq\n"),
        ("日本語の文章です", "日本語の\n文章です\n"),
        ("a\x1b[2Jb", "a�[2Jb\n"),
        ("", "\n"),
    ],
)
def test_lines_end_between_words(text: str, shown: str, size: int) -> None:
    assert written(text, 8, size=size) == shown


def test_a_file_gets_the_answer_unchanged() -> None:
    file = io.StringIO()
    writer = AnswerWriter(file, 8)
    writer.write("one two three \x1b")
    assert file.getvalue() == "one two three \x1b"


def test_the_bar_counts_finished_prompts_and_generated_tokens(
    tiny_dir: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["a long prompt of many tokens", "b", "c"]
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (40, 2, 20)]
    expected = llm.generate(prompts, params, use_tqdm=False)
    capsys.readouterr()
    llm.generate(prompts, params, use_tqdm=True)
    last = capsys.readouterr().err.split("\r")[-1]
    num_written = sum(len(output.token_ids) for output in expected)
    assert "3 of 3 prompts done" in last
    assert re.search(rf"wrote {num_written} \([\d.,]+/s\)", last)


def test_the_bar_counts_what_has_ended_in_any_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinilm.engine.stats.perf_counter", iter([10.0, 12.0]).__next__)
    stats = EngineStats(num_decode_tokens=100, num_prefill_tokens=7, num_finished=5)
    with ProgressBar(stats, 3, is_shown=True) as bar:
        stats.num_decode_tokens, stats.num_prefill_tokens, stats.num_finished = 150, 19, 7
        bar.update()
    last = capsys.readouterr().err.split("\r")[-1]
    assert "2 of 3 prompts done" in last
    assert "read 12 tokens, wrote 50 (25.0/s)" in last
