"""The slash commands of a chat."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from infinilm.cli.conversation import Conversation
from infinilm.cli.display import console, format_count, format_rate, format_seconds, make_facts, note
from infinilm.errors import InvalidValueError

if TYPE_CHECKING:
    from infinilm.cli.chat import Chat

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """A command. `act` takes the chat and, if `usage` shows one, the argument."""

    usage: str
    help: str
    act: Callable[..., None]

    def run(self, chat: "Chat", argument: str) -> None:
        if " " in self.usage:
            self.act(chat, argument)
        elif argument:
            raise InvalidValueError(f"{self.usage} takes nothing after it, there is {argument!r}")
        else:
            self.act(chat)


def find_command(name: str) -> ChatCommand:
    if name not in COMMANDS:
        raise InvalidValueError(f"there is no command /{name}; /help lists them (a space before / makes it a message)")
    return COMMANDS[name]


def _help(_chat: "Chat") -> None:
    unique = dict.fromkeys(COMMANDS.values())
    console(err=True).print(make_facts({command.usage: command.help for command in unique}))


def _reset(chat: "Chat") -> None:
    chat.conversation.turns.clear()
    note("The conversation starts anew." + (" The system message stays." if chat.conversation.system else ""))


def _system(chat: "Chat", argument: str) -> None:
    if argument:
        chat.conversation.system = None if argument == "-" else argument
    note(f"System message: {chat.conversation.system or 'none of yours'}")


def _history(chat: "Chat") -> None:
    messages = chat.conversation.messages
    for message in messages:
        note(f"{message['role']}: {message['content']}")
    if not messages:
        note("Nothing was said yet.")


def _save(chat: "Chat", argument: str) -> None:
    file = _file(argument, "/save")
    chat.conversation.save(file)
    note(f"Saved {len(chat.conversation.messages)} messages to {file}.")


def _load(chat: "Chat", argument: str) -> None:
    file = _file(argument, "/load")
    chat.conversation = Conversation.load(file)
    note(f"Loaded {len(chat.conversation.messages)} messages from {file}.")


def _file(argument: str, command: str) -> Path:
    if not argument:
        raise InvalidValueError(f"{command} needs the name of a file")
    return Path(argument).expanduser()


def _temperature(chat: "Chat", argument: str) -> None:
    if argument:
        chat.sampling = replace(chat.sampling, temperature=_number(float, argument, "/temperature 0.7"))
    note(f"Temperature: {chat.sampling.temperature:g}")


def _max_tokens(chat: "Chat", argument: str) -> None:
    if argument:
        chat.sampling = replace(chat.sampling, max_tokens=_number(int, argument, "/max-tokens 256"))
    note(f"Tokens per answer: at most {chat.sampling.max_tokens}")


def _number(kind: Callable[[str], Number], argument: str, usage: str) -> Number:
    try:
        return kind(argument)
    except ValueError:
        raise InvalidValueError(f"{argument!r} is not a number; use {usage}") from None


def _model(chat: "Chat") -> None:
    from infinilm.executor.memory import format_bytes

    engine, config, memory = chat.engine, chat.engine.model_config, chat.engine.memory
    facts = {
        "model": str(engine.config.model),
        "architecture": f"{config.model_type}, {config.num_hidden_layers} layers of {config.hidden_size}",
        "context": f"{engine.max_model_len} tokens",
        "memory": f"weights {format_bytes(memory.weight_bytes)}, KV cache {format_bytes(memory.kv_bytes)}",
    }
    console(err=True).print(make_facts(facts))


def _stats(chat: "Chat") -> None:
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


def _exit(chat: "Chat") -> None:
    chat.is_over = True


_EXIT = ChatCommand("/exit", "End the chat; so does Ctrl-D.", _exit)
COMMANDS = {
    "help": ChatCommand("/help", "List the commands.", _help),
    "reset": ChatCommand("/reset", "Forget what was said.", _reset),
    "system": ChatCommand("/system [TEXT]", "Show or set the system message; - removes it.", _system),
    "history": ChatCommand("/history", "Show what was said.", _history),
    "save": ChatCommand("/save FILE", "Write the conversation as JSON.", _save),
    "load": ChatCommand("/load FILE", "Go on with a saved conversation.", _load),
    "temperature": ChatCommand("/temperature [X]", "Show or set the temperature; 0 is greedy.", _temperature),
    "max-tokens": ChatCommand("/max-tokens [N]", "Show or set the longest answer.", _max_tokens),
    "model": ChatCommand("/model", "Show the model and its memory.", _model),
    "stats": ChatCommand("/stats", "Show lengths and times.", _stats),
    "exit": _EXIT,
    "quit": _EXIT,
}
