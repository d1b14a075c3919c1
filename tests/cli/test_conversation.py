"""What is kept of a chat, and how messages are read."""

import json
from pathlib import Path

import pytest

from infinilm.cli.chat import Conversation, read_message
from infinilm.errors import InvalidValueError


def talk(*texts: str, system: str | None = None) -> Conversation:
    conversation = Conversation(system)
    for index, text in enumerate(texts):
        conversation.say("assistant" if index % 2 else "user", text)
    return conversation


def contents(conversation: Conversation) -> list[str]:
    return [message["content"] for message in conversation.messages]


@pytest.mark.parametrize(
    ("num_allowed", "num_dropped", "left"),
    [
        (6, 0, ["S", "q1", "a1", "q2", "a2", "q3"]),
        (5, 1, ["S", "q2", "a2", "q3"]),
        (4, 1, ["S", "q2", "a2", "q3"]),
        (2, 2, ["S", "q3"]),
        (1, 2, ["S", "q3"]),
    ],
)
def test_shortening_drops_the_oldest_turns_and_keeps_the_system_message(
    num_allowed: int, num_dropped: int, left: list[str]
) -> None:
    conversation = talk("q1", "a1", "q2", "a2", "q3", system="S")
    assert conversation.shorten(lambda messages: len(messages) <= num_allowed) == num_dropped
    assert contents(conversation) == left


def test_shortening_drops_an_answer_without_its_question() -> None:
    conversation = Conversation()
    for role, text in (("assistant", "hello"), ("user", "q1"), ("assistant", "a1"), ("user", "q2")):
        conversation.say(role, text)
    assert conversation.shorten(lambda messages: len(messages) <= 3) == 1
    assert contents(conversation) == ["q1", "a1", "q2"]


def test_saved_conversations_come_back(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    conversation = talk("ça va?", "oui 🙂", system="Parle français.")
    conversation.save(file)
    assert Conversation.load(file).messages == conversation.messages
    file.write_text(json.dumps(conversation.messages))
    assert Conversation.load(file).messages == conversation.messages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ('"hello"', "holds no conversation"),
        ('{"turns": []}', "holds no conversation"),
        ('["hello"]', "message 0 of .* must be an object"),
        ('[{"role": "user"}]', "message 0 of .* must be an object"),
        ('[{"role": "user", "content": "x", "name": "y"}]', "message 0 of .* must be an object"),
        ('[{"role": "user", "content": 1}]', "message 0 of .* must have a role"),
        ('[{"role": "god", "content": "x"}]', "message 0 of .* must have a role"),
        ('[{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]', "message 1 of .* only be the first"),
    ],
)
def test_files_that_hold_no_conversation(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "chat.json"
    file.write_text(text)
    with pytest.raises(InvalidValueError, match=message):
        Conversation.load(file)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="can't be read: No such file"):
        Conversation.load(tmp_path / "none.json")
    with pytest.raises(InvalidValueError, match="can't be written: Is a directory"):
        talk("x").save(tmp_path)


@pytest.mark.parametrize(
    ("lines", "message", "num_left"),
    [
        (["hello", "next"], "hello", 1),
        (["one\\", "two\\", "three", "next"], "one\ntwo\nthree", 1),
        (['"""one', "", "  two", '"""', "next"], "one\n\n  two", 1),
        (['"""', "one", 'two"""', "next"], "one\ntwo", 1),
        (["", "next"], "", 1),
        ([" /not a command"], " /not a command", 0),
    ],
)
def test_messages_of_several_lines(lines: list[str], message: str, num_left: int) -> None:
    left = iter(lines)
    assert read_message(lambda prompt: next(left), is_interactive=False) == message
    assert len(list(left)) == num_left
