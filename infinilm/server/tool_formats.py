"""The formats in which models write tool calls, and which of them a chat template uses."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from infinilm.checks import check_choice


@dataclass(frozen=True)
class ToolFormat:
    """A way to write calls: `{"name": …, "arguments": {…}}` objects between markers."""

    name: str
    opening: str
    """The marker in front of calls."""
    closing: str
    """The marker behind them; empty if there is none."""
    layout: tuple[str, str, str]
    """The text before the first call, between two, and after the last, including markers."""
    arguments_key: str = "arguments"
    may_be_bare: bool = False
    """Whether an answer may begin with a call, without the opening marker."""
    is_parallel: bool = True
    """Whether one answer may hold several calls."""
    is_parsed: bool = True
    """Whether calls are looked for at all."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that must reach the parser, even if they are special tokens."""
        return tuple(marker for marker in (self.opening, self.closing) if marker)

    def write_call(self, name: str, arguments: str) -> str:
        """Write one call without markers; `arguments` is JSON."""
        return f'{{"name": {json.dumps(name)}, "{self.arguments_key}": {arguments}}}'

    def write_answer(self, calls: Sequence[str]) -> str:
        """Write calls (see `write_call`) with markers, as an example for the model."""
        before, between, after = self.layout
        return before + between.join(calls) + after


_TAGS_PER_CALL = ("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")

HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", _TAGS_PER_CALL)
"""Hermes, Qwen and many others: one pair of tags for each call."""

SMOLLM = ToolFormat("smollm", "<tool_call>", "</tool_call>", ("<tool_call>[", ", ", "]</tool_call>"))
"""SmolLM2: a list of calls within one pair of tags."""

LLAMA = ToolFormat("llama", "<|python_tag|>", "", ("", "\n", ""), "parameters", may_be_bare=True, is_parallel=False)
"""Llama 3.1 to 3.3: the answer is the call. Their templates refuse conversations with two calls in one answer."""

MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", ("[TOOL_CALLS][", ", ", "]"))
"""Mistral up to Nemo and Small 3.1: a marker and a list."""

PLAIN = ToolFormat("plain", "<tool_call>", "</tool_call>", _TAGS_PER_CALL, is_parsed=False)
"""Calls stay in the text, for clients that parse it themselves."""

FORMATS = {tool_format.name: tool_format for tool_format in (HERMES, SMOLLM, LLAMA, MISTRAL, PLAIN)}

# What gives a format away in a template's text, the surest sign first. Other ways to write calls share some markers:
# `<tool_call><function=…>`, `<tool_call>{name}<arg_key>…`, `[TOOL_CALLS]name[ARGS]…` must not be taken for these.
_SIGNS = (
    (re.compile(r"\[TOOL_CALLS\] ?\["), MISTRAL),
    (re.compile(r'"name": function name, "parameters":'), LLAMA),
    (re.compile(r"<tool_call>(?:\\n|\s)*\["), SMOLLM),
    (re.compile(r'<tool_call>(?!</tool_call>)(?s:.*)arguments\\?"'), HERMES),
)
# SmolLM2's template has no word about tools; its model card says how the model was taught to call them.
_SMOLLM_NAME = "named SmolLM, trained by Hugging Face"

_TEMPLATE_CODE = re.compile(r"\{[{%](?s:.*?)[%}]\}")
_TEMPLATE_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_TOOLS_VARIABLE = re.compile(r"(?<![\w.])tools\b(?!\s*=[^=])")


def detect_format(chat_template: str | None, override: str | None = None) -> ToolFormat:
    """Return the format for a model with this chat template, or the one that `override` names.

    If the template shows no known format, it is Hermes: `prepare_messages` then describes it to the model.
    """
    if override is not None:
        check_choice("tool_call_parser", override, tuple(FORMATS))
        return FORMATS[override]
    template = chat_template or ""
    for sign, tool_format in _SIGNS:
        if sign.search(template):
            return tool_format
    return SMOLLM if _SMOLLM_NAME in template else HERMES


def supports_tools(chat_template: str | None, tool_format: ToolFormat) -> bool:
    """Whether the template itself tells the model about `tools`, and in this format.

    A template that reads `tools` but asks for calls in an unknown format does not count: they could not be parsed.
    """
    template = chat_template or ""
    code = " ".join(_TEMPLATE_CODE.findall(template))
    if not _TOOLS_VARIABLE.search(_TEMPLATE_STRING.sub("''", code)):
        return False
    signs = [sign for sign, found in _SIGNS if found.markers == tool_format.markers]
    return not tool_format.is_parsed or any(sign.search(template) for sign in signs)
