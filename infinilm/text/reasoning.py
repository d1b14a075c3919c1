"""How models mark the reasoning before an answer, which markers a chat template uses, and where reasoning ends."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from infinilm.checks import check_choice
from infinilm.text.tokenizer import Tokenizer

NO_REASONING = "none"
_NUM_TAIL_TOKENS = 32


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers of reasoning."""

    name: str
    opening: str
    closing: str
    sign: str
    """The text in a template that identifies the format."""
    answer_header: str = ""
    """Text between the closing marker and the answer, which is not part of the answer."""
    repeats: bool = False
    """Whether there may be more reasoning after the closing marker."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that must reach the parser, even if they hold special tokens."""
        return self.opening, self.closing, self.answer_header


def _pair(name: str, opening: str, closing: str) -> ReasoningFormat:
    return ReasoningFormat(name, opening, closing, sign=closing)


HARMONY = ReasoningFormat(
    "harmony",
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant",
    sign="<|channel|>analysis<|message|>",
    answer_header="<|channel|>final<|message|>",
    repeats=True,
)
"""GPT-OSS: messages in channels."""

FORMATS: Mapping[str, ReasoningFormat] = {
    each.name: each
    for each in (
        HARMONY,
        _pair("seed", "<seed:think>", "</seed:think>"),
        _pair("minimax", "<mm:think>", "</mm:think>"),
        _pair("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
        _pair("mistral", "[THINK]", "[/THINK]"),
        _pair("apriel", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
        ReasoningFormat("gemma", "<|channel>thought", "<channel|>", sign="<|channel>thought"),
        _pair("think", "<think>", "</think>"),
    )
}
"""The formats in the order in which their signs are looked for in a template."""


def detect_reasoning(chat_template: str | None, override: str | None = None) -> ReasoningFormat | None:
    """The format for a model with this chat template, or the one that `override` names; None: there is none."""
    if override is not None:
        check_choice("reasoning_parser", override, (*FORMATS, NO_REASONING))
        return FORMATS.get(override)
    return next((each for each in FORMATS.values() if each.sign in (chat_template or "")), None)


PromptEnd = Literal["open", "closed", "neither"]


def end_of_prompt(tokenizer: Tokenizer, prompt_ids: Sequence[int], reasoning: ReasoningFormat) -> PromptEnd:
    """Whether the prompt has opened the answer's reasoning, or closed it, so that the answer has no reasoning."""
    tail = tokenizer.decode(prompt_ids[-_NUM_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
    if tail.endswith(reasoning.opening):
        return "open"
    return "closed" if tail.endswith(reasoning.closing) else "neither"


class ReasoningTracker:
    """Follows an answer token by token through its reasoning."""

    def __init__(self, token_bytes: Callable[[int], bytes], opening: str, closing: str, *, repeats: bool) -> None:
        """Reasoning begins with `opening`, or at once if that is empty, and ends with `closing`."""
        self._token_bytes = token_bytes
        self._opening = opening.encode()
        self._closing = closing.encode()
        self._repeats = repeats
        self._text = b""
        """The last bytes, which may be part of a marker."""
        self._pending: list[int] = []
        """The lengths of the last tokens, if these are part of a closing marker, should its rest follow."""
        self._num_passed = 0
        self._num_matched = 0
        """How many bytes of the closing marker the text ends with."""
        self.state: Literal["before", "within", "behind"] = "before" if opening else "within"

    @property
    def num_tokens(self) -> int:
        """Tokens of reasoning so far, without markers."""
        return self._num_passed + len(self._pending)

    @property
    def closing_left(self) -> str:
        """The rest of the closing marker, which would complete it."""
        rest = self._closing[self._num_matched :]
        try:
            return rest.decode()
        except UnicodeDecodeError:  # a token ends within a character
            return self._closing.decode()

    def advance(self, token_id: int) -> None:
        if self.state == "behind":
            return
        new = self._token_bytes(token_id)
        self._text += new
        if self.state == "before":
            text = self._text.lstrip()
            if text.startswith(self._opening):
                self.state, self._text = "within", b""
            elif not self._opening.startswith(text):
                self.state = "behind"
        elif self._closing in self._text:
            self.state = "before" if self._repeats and self._opening else "behind"
            self._text, self._num_matched = b"", 0
            self._pending.clear()
        else:
            self._text = self._text[-len(self._closing) :]
            self._pending.append(len(new))
            self._num_matched = max(n for n in range(len(self._text) + 1) if self._text.endswith(self._closing[:n]))
            while self._pending and sum(self._pending) > self._num_matched:
                del self._pending[0]
                self._num_passed += 1
