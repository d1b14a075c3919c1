"""How the command line starts, and how it ends when something is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli.cli_driver import Cli

import infinilm
from infinilm.cli.main import run
from infinilm.errors import InvalidValueError


def error_of(cli: Cli, *args: str | Path, stdin: str = "") -> str:
    """The one line that a failing command says, without its label."""
    done = cli(*args, stdin=stdin)
    assert (done.code, done.out) == (2, "")
    (line,) = [line for line in done.err.splitlines() if line and not line.startswith("Loading weights:")]
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--nonsense"], "No such option: --nonsense"),
        (["sing"], "No such command 'sing'"),
        (["generate", "x", "--nonsense"], "No such option: --nonsense"),
        (["generate", "x", "--max-tokens", "many"], "Invalid value for '--max-tokens'"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens=0 is out of range"),
        (["generate", "x", "--top-p", "1.5"], "top_p=1.5 is out of range"),
        (["generate", "x", "--top-k", "-3"], "top_k=-3 is out of range"),
        (["generate", "x", "--temperature", "nan"], "temperature=nan is out of range"),
        (["generate", "x", "--dtype", "int3"], "dtype='int3' is unknown"),
        (["generate", "x", "--device", "npu"], "device='npu': the package torch_npu is not installed; NPU needs"),
        (["generate", "x", "--preset", "warp"], "preset='warp' is unknown"),
        (["generate", "x", "--model", "no/such/model/here"], "'no/such/model/here': no such file or directory"),
        (["generate", "x", "--file", "no-such-file"], "'no-such-file' does not exist"),
        (["generate", "x", "--system", "be nice"], "--system is a message of a chat"),
        (["generate", "x", "--logprobs", "3"], "--logprobs are shown by --json only"),
        (["generate"], "stdin is empty"),
        (["chat", "--max-num-seqs", "3"], "No such option: --max-num-seqs"),
        (["info", "no-such-model"], "'no-such-model' is not known"),
        (["pull", "no-such-model"], "'no-such-model' is not known"),
        (["pull", "smollm2-135m", "--list"], "--list fetches nothing"),
        (["bench", "--workload", "nap"], "workload='nap' is unknown"),
        (["bench", "--peer", "abacus"], "peer='abacus' is unknown"),
        (["bench", "--num-prompts", "0"], "num_prompts=0 is out of range"),
        (["bench", "--shared-prefix-len", "512"], "shared_prefix_len=512 must be less than input_len=128"),
        (["bench", "--repeat", "0"], "Invalid value for '--repeat'"),
        (["verify", "no-such-model"], "'no-such-model' is not known"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(cli: Cli, args: list[str], message: str) -> None:
    assert message in error_of(cli, *args)


def test_a_mistake_on_the_command_line_points_to_the_help(cli: Cli) -> None:
    assert error_of(cli, "info", "--nonsense").endswith("see 'infinilm info --help'")


def test_errors_of_the_engine_are_one_line(cli: Cli, tiny_dir: Path) -> None:
    assert "the prompt has 300 tokens" in error_of(cli, "generate", "-m", tiny_dir, "x" * 300)
    many = ("--num-kvcache-blocks", "1000000000000")
    assert "num_kvcache_blocks=1000000000000 needs" in error_of(cli, "generate", "-m", tiny_dir, *many, "x")


def test_debug_shows_where_an_error_came_from(tiny_dir: Path) -> None:
    with pytest.raises(InvalidValueError, match="top_p=2"):
        run(["--debug", "generate", "-m", str(tiny_dir), "--top-p", "2", "x"])


def test_missing_transformers_says_how_to_get_it(cli: Cli, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for command in (["bench", "--peer", "transformers", "-m"], ["verify"]):
        done = cli(*command, tiny_dir)
        assert done.code == 2
        assert "pip install transformers" in done.err.splitlines()[-1]


def test_version_and_bare_command(cli: Cli) -> None:
    assert cli("--version").out == f"infinilm {infinilm.__version__}\n"
    bare = cli()
    assert bare.code == 0
    for command in ("generate", "chat", "info", "pull", "bench", "verify"):
        assert command in bare.out


def test_help_and_usage_errors_import_no_torch() -> None:
    code = (
        "import sys; from infinilm.cli.main import run\n"
        "run(['generate', '--help']); run(['bench', '--nonsense']); run(['generate', '-m', 'nowhere', 'x'])\n"
        "sys.exit(bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--temperature" in done.stdout


def test_a_reader_that_leaves_early_is_no_error(tiny_dir: Path) -> None:
    command = f"{sys.executable} -m infinilm generate -m {tiny_dir} --json a b c | head -c 20"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == '{"prompt": "a", "pro'
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def run_without_benchmarks(*args: str) -> subprocess.CompletedProcess[str]:
    """The command line where `benchmarks` can't be imported, as with a wheel."""
    code = "import sys; sys.modules['benchmarks'] = None; from infinilm.cli.main import main; main(sys.argv[1:])"
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("args", "command"),
    [
        (["bench", "serve", "--streams", "4"], "bench serve"),
        (["bench", "serve", "--help"], "bench serve"),
        (["bench", "--peer", "llama.cpp"], "--peer llama.cpp"),
    ],
)
def test_a_wheel_says_that_benchmarks_need_the_checkout(args: list[str], command: str) -> None:
    done = run_without_benchmarks(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: {command} is part of the source checkout, not of the wheel; "
        "clone InfiniLM's repository and install it there with: pip install -e .\n"
    )


@pytest.mark.parametrize("args", [["--help"], ["bench", "--help"]])
def test_help_needs_no_benchmarks(args: list[str]) -> None:
    done = run_without_benchmarks(*args)
    assert (done.returncode, done.stderr) == (0, "")
    assert "bench" in done.stdout


def test_plain_options_are_read_without_a_validation_library() -> None:
    args = ["generate", "x", "--temperature", "0.5", "--max-tokens", "1", "--model", "no/such/model/here"]
    code = f"import sys; from infinilm.cli.main import run; print(run({args}), 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["2", "False"], done.stderr
