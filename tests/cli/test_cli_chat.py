"""`infinilm chat`, through a pipe and in a terminal of its own."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from codecs import getincrementaldecoder
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_reference, save
from cli.cli_driver import Cli
from tiny_tokenizer import save_tokenizer

from infinilm import LLM, SamplingParams
from infinilm.cli.answering import CtrlC
from infinilm.cli.display import visible

GREEDY = SamplingParams(temperature=0, max_tokens=10)
OPTIONS = ("--temperature", "0", "--max-tokens", "10")


def as_messages(*messages: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in messages]


def answer(llm: LLM, *messages: tuple[str, str]) -> str:
    return llm.chat(as_messages(*messages), GREEDY, use_tqdm=False)[0].text


def count_tokens(llm: LLM, *messages: tuple[str, str]) -> int:
    return len(llm.chat_prompt(as_messages(*messages)))


def test_each_line_is_answered_with_what_was_said_before(cli: Cli, tiny_dir: Path, llm: LLM) -> None:
    first = answer(llm, ("user", "hi"))
    second = answer(llm, ("user", "hi"), ("assistant", first), ("user", "and you?"))
    done = cli("chat", "-m", tiny_dir, *OPTIONS, stdin="hi\n\nand you?\n")
    assert (done.code, done.out) == (0, f"{first}\n{second}\n")
    assert done.err.count("Cut off after 10 tokens; /max-tokens changes that.") == 2


def test_commands_change_the_conversation(cli: Cli, tiny_dir: Path, llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    brief = answer(llm, ("system", "be brief"), ("user", "hi"))
    again = answer(llm, ("system", "be brief"), ("user", "hi"), ("assistant", brief), ("user", "again"))
    lines = ["/system be brief", "hi", f"/save {file}", "/reset", "hi", f"/load {file}", "again", "/exit", "unheard"]
    done = cli("chat", "-m", tiny_dir, *OPTIONS, stdin="\n".join(lines))
    assert done.out == f"{brief}\n{brief}\n{again}\n"
    assert "Saved 3 messages" in done.err
    assert "The system message stays." in done.err
    saved = json.loads(file.read_text())["messages"]
    assert [message["role"] for message in saved] == ["system", "user", "assistant"]
    assert saved[2]["content"] == brief


def test_commands_that_show_and_set(cli: Cli, tiny_dir: Path) -> None:
    lines = ["/max-tokens 3", "/temperature 0.25", "hi", "/history", "/stats", "/model", "/help", "/quit"]
    done = cli("chat", "-m", tiny_dir, "--seed", "1", stdin="\n".join(lines))
    assert "Tokens per answer: at most 3" in done.err
    assert "Temperature: 0.25" in done.err
    assert "user: hi" in done.err
    assert re.search(r"last answer +3 tokens · TTFT .* tokens/s", done.err)
    assert "llama, 2 layers of 64" in done.err
    for command in ("/reset", "/system", "/save", "/load", "/max-tokens", "/exit"):
        assert command in done.err


def test_mistakes_do_not_end_the_chat(cli: Cli, tiny_dir: Path, llm: LLM) -> None:
    lines = ["/nothing", "/reset now", "/temperature hot", "/max-tokens 0", "/load", "/load nowhere", "x" * 400, "hi"]
    done = cli("chat", "-m", tiny_dir, *OPTIONS, stdin="\n".join(lines))
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    for error, message in zip(
        errors,
        (
            "there is no command /nothing",
            "/reset takes no argument",
            "'hot' is not a number",
            "max_tokens=0 is out of range",
            "/load needs the name of a file",
            "nowhere can't be read",
            "the prompt has",
        ),
        strict=True,
    ):
        assert message in error
    assert done.out == answer(llm, ("user", "hi")) + "\n"


def test_a_conversation_that_grows_too_long_loses_its_oldest_turns(cli: Cli, tiny_dir: Path, llm: LLM) -> None:
    messages = ["one", "two", "three", "four"]
    done = cli("chat", "-m", tiny_dir, *OPTIONS, "--max-model-len", "80", "--system", "S", stdin="\n".join(messages))

    turns: list[tuple[str, str]] = []
    answers = []
    num_dropped = 0
    for message in messages:
        turns.append(("user", message))
        while count_tokens(llm, ("system", "S"), *turns) + GREEDY.max_tokens > 80:
            del turns[:2]
            num_dropped += 1
        answers.append(answer(llm, ("system", "S"), *turns))
        turns.append(("assistant", answers[-1]))
    assert num_dropped > 0
    assert done.out == "".join(f"{text}\n" for text in answers)
    assert done.err.count("has grown beyond 80 tokens: the oldest turn was dropped.") == num_dropped


def test_a_model_without_a_template_is_refused(cli: Cli, tmp_path: Path) -> None:
    save(make_reference("llama-gqa"), tmp_path)
    done = cli("chat", "-m", tmp_path)
    assert done.code == 2
    assert "has no chat template; use infinilm generate" in done.err


def test_the_first_ctrl_c_is_noted_and_the_second_raises() -> None:
    before = signal.getsignal(signal.SIGINT)
    with CtrlC() as ctrl_c:
        was_pressed = [ctrl_c.was_pressed]
        os.kill(os.getpid(), signal.SIGINT)
        was_pressed.append(ctrl_c.was_pressed)
        assert was_pressed == [False, True]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


class Terminal:
    """A process in a terminal of its own."""

    def __init__(self, *args: str) -> None:
        self._own_end, other_end = pty.openpty()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"}
        command = [sys.executable, "-m", "infinilm", *args]
        self.process = subprocess.Popen(
            command, stdin=other_end, stdout=other_end, stderr=other_end, env=environment, start_new_session=True
        )
        os.close(other_end)
        self._seen = ""
        self._decoder = getincrementaldecoder("utf-8")()

    def type(self, text: str) -> None:
        os.write(self._own_end, text.encode())

    def has(self, text: str, *, timeout: float = 0.5) -> bool:
        """Read until `text` has come; False if it does not in time."""
        deadline = time.monotonic() + timeout
        while text not in self._seen:
            ready, _, _ = select.select([self._own_end], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return False
            self._seen += self._decoder.decode(os.read(self._own_end, 4096))
        return True

    def wait_for_length(self, num_characters: int) -> None:
        """Read until at least so many characters have come since the last call of `wait_for`."""
        while len(self._seen) < num_characters:
            ready, _, _ = select.select([self._own_end], [], [], 60.0)
            assert ready, f"nothing more came after {self._seen!r}"
            self._seen += self._decoder.decode(os.read(self._own_end, 4096))

    def wait_for(self, text: str) -> str:
        """Read until `text` has come; returns what came before it since the last call."""
        assert self.has(text, timeout=60.0), f"{text!r} has not come; there is {self._seen!r}"
        before, _, self._seen = self._seen.partition(text)
        return before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._own_end)


@pytest.fixture(scope="module")
def tireless_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers take minutes."""
    directory = tmp_path_factory.mktemp("tireless")
    save(make_reference("llama-gqa", vocab_size=300, max_position_embeddings=32768, eos_token_id=299), directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture
def terminal(tireless_dir: Path) -> Iterator[Terminal]:
    terminal = Terminal("chat", "-m", str(tireless_dir), "-t", "0", "-n", "30000")
    yield terminal
    terminal.close()


def test_ctrl_c_stops_the_answer_and_not_the_chat(terminal: Terminal, tireless_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    terminal.wait_for("›")
    while not terminal.has("To end the chat, type quit or press Ctrl-D."):
        # Python overhears a signal that comes between showing the prompt and waiting for input.
        os.kill(terminal.process.pid, signal.SIGINT)
    terminal.wait_for("›")
    terminal.type("hello\n")
    terminal.wait_for("hello\r\n")
    terminal.wait_for_length(20)
    os.kill(terminal.process.pid, signal.SIGINT)
    shown = terminal.wait_for("Stopped.").replace("\r\n", "\n")

    terminal.wait_for("›")
    terminal.type(f"/save {file}\n")
    terminal.wait_for("Saved 2 messages")
    question, partial = json.loads(file.read_text())["messages"]
    assert (question["content"], partial["role"]) == ("hello", "assistant")
    assert shown.endswith("\n")
    assert shown.split() == visible(partial["content"]).split()  # lines end between words
    with LLM(tireless_dir, max_num_seqs=1) as llm:
        beginning = answer(llm, ("user", "hello")).rstrip("\N{REPLACEMENT CHARACTER}")
    assert len(partial["content"]) >= 20
    assert partial["content"].startswith(beginning)

    terminal.wait_for("›")
    terminal.type("Quit\n")
    assert terminal.process.wait(timeout=20) == 0
