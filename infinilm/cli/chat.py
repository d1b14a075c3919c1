"""`infinilm chat`: a conversation in the terminal, or line by line through a pipe."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from infinilm.cli.answering import AnswerSplitter, open_engine, stream_answer
from infinilm.cli.display import (
    AnswerWriter,
    ReasoningWriter,
    console,
    format_count,
    format_rate,
    format_seconds,
    make_facts,
    note,
)
from infinilm.cli.options import takes_config, takes_sampling
from infinilm.config import Config
from infinilm.errors import EngineError, InfinilmError, InvalidValueError
from infinilm.outputs import RequestOutput
from infinilm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from infinilm import LLM

Number = TypeVar("Number", int, float)
Message = dict[str, str]
ROLES = ("system", "user", "assistant")

LEAVING_WORDS = ("quit", "exit")
FENCE = '"""'
# Ctrl-C waits for a step's end. With small steps it acts soon, even during a long prefill.
MAX_STEP_TOKENS = 512


@takes_sampling(max_tokens=1024, without=("n", "logprobs"))
@takes_config(without=("max_num_seqs", "max_num_batched_tokens"))
def chat(
    *,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.", show_default=False)] = None,
    config: Config,
    sampling: dict[str, Any],
) -> None:
    """Talk with a model.

    /help lists the commands of the chat. Ctrl-C stops an answer; quit, exit or Ctrl-D ends the chat. A line that ends
    with a backslash continues on the next; lines between two \"\"\" are one message. Through a pipe, each line is a
    message.
    """
    settings = config.replace(max_num_seqs=1, max_num_batched_tokens=MAX_STEP_TOKENS)
    with open_engine(settings) as engine:
        if engine.tokenizer is None or engine.tokenizer.chat_template is None:
            raise InvalidValueError(f"{engine.config.model} has no chat template; use infinilm generate")
        params = replace(engine.default_sampling_params, **sampling)
        Chat(engine, params, Conversation(system)).run()


class Conversation:
    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        opening = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*opening, *self.turns]

    def say(self, role: str, content: str) -> None:
        self.turns.append({"role": role, "content": content})

    def shorten(self, fits: Callable[[list[Message]], bool]) -> int:
        """Drop the oldest questions with their answers until the rest fits; returns how many were dropped.

        The system message and the last question always stay.
        """
        num_dropped = 0
        while not fits(self.messages):
            next_turn = next((i for i, turn in enumerate(self.turns) if i and turn["role"] == "user"), None)
            if next_turn is None:
                break
            del self.turns[:next_turn]
            num_dropped += 1
        return num_dropped

    def save(self, file: Path) -> None:
        try:
            text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=2)
            file.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidValueError(f"{file} can't be written: {error.strerror or error}") from error

    @classmethod
    def load(cls, file: Path) -> "Conversation":
        """Read what `save` wrote, or a plain list of messages."""
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidValueError(f"{file} can't be read: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise InvalidValueError(f"{file} is not valid JSON: {error}") from error
        messages = content.get("messages") if isinstance(content, dict) else content
        if not isinstance(messages, list):
            raise InvalidValueError(f"{file} holds no conversation; it must be a list of messages under 'messages'")
        conversation = cls()
        for index, message in enumerate(messages):
            conversation._add(message, index, f"message {index} of {file}")
        return conversation

    def _add(self, message: Any, index: int, label: str) -> None:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise InvalidValueError(f"{label} must be an object with 'role' and 'content', it is {message!r:.80}")
        role, text = message["role"], message["content"]
        if role not in ROLES or not isinstance(text, str):
            raise InvalidValueError(f"{label} must have a role ({', '.join(ROLES)}) and a text, it is {message!r:.80}")
        if role != "system":
            self.say(role, text)
        elif index == 0:
            self.system = text
        else:
            raise InvalidValueError(f"{label}: a system message can only be the first")


class Chat:
    def __init__(self, engine: "LLM", sampling: SamplingParams, conversation: Conversation) -> None:
        self.engine = engine
        self.sampling = sampling
        self.conversation = conversation
        self.last_output: RequestOutput | None = None
        self.is_over = False

    def run(self) -> None:
        is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        if is_interactive:
            import readline  # noqa: F401 (its import gives `input` editing and history)

            note("Write a message and press Enter. /help lists commands, Ctrl-C stops an answer, quit ends the chat.\n")
        while not self.is_over:
            try:
                message = read_message(input, is_interactive=is_interactive)
            except EOFError:
                if is_interactive:
                    note("")  # the shell's prompt belongs on a line of its own
                break
            except UnicodeDecodeError as error:
                raise InvalidValueError(f"stdin is not UTF-8 text: {error.reason}") from error
            except KeyboardInterrupt:
                if not is_interactive:
                    raise
                note("\nTo end the chat, type quit or press Ctrl-D.")
                continue
            if not message.strip():
                continue
            if is_interactive and message.strip().lower() in LEAVING_WORDS:
                break
            try:
                self.handle(message)
            except InfinilmError as error:
                note(f"error: {error}")

    def handle(self, message: str) -> None:
        if message.startswith("/"):
            name, _, argument = message[1:].partition(" ")
            if name not in COMMANDS:
                raise InvalidValueError(
                    f"there is no command /{name}; /help lists them (a space before / makes it a message)"
                )
            COMMANDS[name].run(self, argument.strip())
        else:
            self.answer(message)

    def answer(self, message: str) -> None:
        """Answer a message. A message that gets no answer is removed from the conversation."""
        self.conversation.say("user", message)
        output: RequestOutput | None = None
        content = ""
        try:
            prompt = self._make_prompt()
            assert self.engine.tokenizer is not None
            splitter = AnswerSplitter(self.engine.tokenizer, prompt, self.sampling)
            with ReasoningWriter() as thoughts:
                writer = AnswerWriter()
                for output in stream_answer(self.engine, prompt, self.sampling):
                    reasoning, text = splitter.split(output)
                    thoughts.write(reasoning)
                    if text:
                        thoughts.end()
                        content += text
                        writer.write(text)
            writer.end()
        finally:
            if content:
                self.conversation.say("assistant", content)
            else:
                self.conversation.turns.pop()
        self.last_output = output
        if output is not None:
            self._report_end(output)

    def _make_prompt(self) -> list[int]:
        """The conversation's token ids, after dropping the oldest turns that leave no space for an answer."""
        limit = self.engine.max_model_len
        reserve = min(self.sampling.max_tokens, limit // 4)

        def fits(messages: list[Message]) -> bool:
            return len(self.engine.chat_prompt(messages)) + reserve <= limit

        if num_dropped := self.conversation.shorten(fits):
            turns = "turn was" if num_dropped == 1 else f"{num_dropped} turns were"
            note(f"The conversation has grown beyond {limit} tokens: the oldest {turns} dropped.")
        return self.engine.chat_prompt(self.conversation.messages)

    def _report_end(self, output: RequestOutput) -> None:
        if output.error:
            raise EngineError(output.error)
        if output.finish_reason == "abort":
            note("Stopped.")
        elif output.finish_reason == "length":
            if len(output.token_ids) >= self.sampling.max_tokens:
                note(f"Cut off after {self.sampling.max_tokens} tokens; /max-tokens changes that.")
            else:
                note(f"Cut off: the conversation has reached {self.engine.max_model_len} tokens.")


def read_message(read_line: Callable[[str], str], *, is_interactive: bool) -> str:
    """Read one message: a line, lines joined by trailing backslashes, or everything between two fences."""
    first, more = ("\001\033[1;36m\002›\001\033[0m\002 ", "  ") if is_interactive else ("", "")
    line = read_line(first)
    if line.strip().startswith(FENCE):
        lines = [line.strip().removeprefix(FENCE)]
        while not lines[-1].rstrip().endswith(FENCE):
            lines.append(read_line(more))
        return "\n".join(lines).rstrip().removesuffix(FENCE).strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read_line(more))
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """A command. `act` takes the chat and, if `usage` shows one, the argument."""

    usage: str
    help: str
    act: Callable[..., None]

    def run(self, chat: Chat, argument: str) -> None:
        if " " in self.usage:
            self.act(chat, argument)
        elif argument:
            raise InvalidValueError(f"{self.usage} takes no argument, there is {argument!r}")
        else:
            self.act(chat)


def _help(_chat: Chat) -> None:
    unique = dict.fromkeys(COMMANDS.values())
    console(err=True).print(make_facts({command.usage: command.help for command in unique}))


def _reset(chat: Chat) -> None:
    chat.conversation.turns.clear()
    note("The conversation is empty again." + (" The system message stays." if chat.conversation.system else ""))


def _system(chat: Chat, argument: str) -> None:
    if argument:
        chat.conversation.system = None if argument == "-" else argument
    note(f"System message: {chat.conversation.system or 'none of yours'}")


def _history(chat: Chat) -> None:
    messages = chat.conversation.messages
    for message in messages:
        note(f"{message['role']}: {message['content']}")
    if not messages:
        note("Nothing was said yet.")


def _save(chat: Chat, argument: str) -> None:
    file = _file(argument, "/save")
    chat.conversation.save(file)
    note(f"Saved {len(chat.conversation.messages)} messages to {file}.")


def _load(chat: Chat, argument: str) -> None:
    file = _file(argument, "/load")
    chat.conversation = Conversation.load(file)
    note(f"Loaded {len(chat.conversation.messages)} messages from {file}.")


def _file(argument: str, command: str) -> Path:
    if not argument:
        raise InvalidValueError(f"{command} needs the name of a file")
    return Path(argument).expanduser()


def _temperature(chat: Chat, argument: str) -> None:
    if argument:
        chat.sampling = replace(chat.sampling, temperature=_number(float, argument, "/temperature 0.7"))
    note(f"Temperature: {chat.sampling.temperature:g}")


def _max_tokens(chat: Chat, argument: str) -> None:
    if argument:
        chat.sampling = replace(chat.sampling, max_tokens=_number(int, argument, "/max-tokens 256"))
    note(f"Tokens per answer: at most {chat.sampling.max_tokens}")


def _number(kind: Callable[[str], Number], argument: str, usage: str) -> Number:
    try:
        return kind(argument)
    except ValueError:
        raise InvalidValueError(f"{argument!r} is not a number; use {usage}") from None


def _model(chat: Chat) -> None:
    from infinilm.executor.memory import format_bytes

    engine, config, memory = chat.engine, chat.engine.model_config, chat.engine.memory
    facts = {
        "model": str(engine.config.model),
        "architecture": f"{config.model_type}, {config.num_hidden_layers} layers of {config.hidden_size}",
        "context": f"{engine.max_model_len} tokens",
        "memory": f"weights {format_bytes(memory.weight_bytes)}, KV cache {format_bytes(memory.kv_bytes)}",
    }
    console(err=True).print(make_facts(facts))


def _stats(chat: Chat) -> None:
    stats = chat.engine.stats()
    num_now = len(chat.engine.chat_prompt(chat.conversation.messages)) if chat.conversation.turns else 0
    facts = {
        "conversation": f"{num_now} of {chat.engine.max_model_len} tokens",
        "answers": f"{stats.num_finished}, of {format_count(stats.num_decode_tokens)} tokens",
        "prompts": f"{format_count(stats.num_prefill_tokens)} tokens computed, "
        f"{format_count(stats.num_cached_tokens)} found in the cache",
    }
    if chat.last_output is not None:
        metrics = chat.last_output.metrics
        facts["last answer"] = (
            f"{len(chat.last_output.token_ids)} tokens · TTFT {format_seconds(metrics.ttft)} · "
            f"ITL {format_seconds(metrics.itl)} · {format_rate(metrics.tokens_per_second)} tokens/s"
        )
    console(err=True).print(make_facts(facts))


def _exit(chat: Chat) -> None:
    chat.is_over = True


_EXIT = ChatCommand("/exit", "End the chat; so do quit, exit and Ctrl-D.", _exit)
COMMANDS = {
    "help": ChatCommand("/help", "List the commands.", _help),
    "reset": ChatCommand("/reset", "Forget what was said.", _reset),
    "system": ChatCommand("/system [TEXT]", "Show or set the system message; - removes it.", _system),
    "history": ChatCommand("/history", "Show what was said.", _history),
    "save": ChatCommand("/save FILE", "Write the conversation as JSON.", _save),
    "load": ChatCommand("/load FILE", "Continue a saved conversation.", _load),
    "temperature": ChatCommand("/temperature [X]", "Show or set the temperature; 0 is greedy.", _temperature),
    "max-tokens": ChatCommand("/max-tokens [N]", "Show or set the longest answer.", _max_tokens),
    "model": ChatCommand("/model", "Show the model and its memory.", _model),
    "stats": ChatCommand("/stats", "Show lengths and times.", _stats),
    "exit": _EXIT,
    "quit": _EXIT,
}
