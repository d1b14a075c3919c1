"""The messages of a chat: kept, shortened, saved and loaded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infinilm.errors import InvalidValueError

Message = dict[str, str]
ROLES = ("system", "user", "assistant")


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
