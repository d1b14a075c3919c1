"""Reads answers of GPT-OSS, which are messages in channels.

    <|channel|>analysis<|message|>…<|end|>                                  reasoning
    <|start|>assistant<|channel|>commentary<|message|>…<|end|>              content
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…                          content

The prompt ends with the first `<|start|>assistant`. The rules of `AnswerParser` hold. Text outside of messages is
content. A message to an unknown function is content too, with its header. A header that is cut short is dropped.
"""

import re
from collections.abc import Collection, Generator
from typing import Any

from infinilm.server.answer_parser import AnswerParser
from infinilm.server.tool_formats import ToolFormat
from infinilm.text.reasoning import HARMONY

_BEGINNINGS = ("<|start|>", "<|channel|>", "assistant", " to=", "to=")
_ENDS = ("<|end|>", "<|start|>", "<|call|>", "<|return|>")
_MAX_HEADER_CHARS = 256
_FUNCTION = re.compile(r"(?:^|[\s=])functions\.([^\s<]+)")


class HarmonyParser(AnswerParser):
    _has_reasoned = False

    def _read_all(self) -> Generator[None, None, None]:
        source = self._source
        while not self.is_done and (yield from self._has_more()):
            header = None
            if beginning := (yield from self._accept_any(*_BEGINNINGS)):
                rest = yield from self._read_until("<|message|>", _MAX_HEADER_CHARS)
                header = None if rest is None else beginning + rest
                if rest is None and source.is_finished:
                    return
            function = _FUNCTION.search(header) if header is not None else None
            if function is not None and (yield from self._read_message_to(function[1])):
                continue
            if header is None or function is not None:
                source.rewind()
                yield from self._read_character()
                yield from self._pass_on_until(_ENDS, self._add_content, is_stripped=False)
            elif "analysis" in header:
                yield from self._skip_space()
                if self._has_reasoned:
                    self._add_reasoning("\n")
                self._has_reasoned = True
                yield from self._pass_on_until(_ENDS, self._add_reasoning, is_stripped=True)
            else:
                yield from self._pass_on_until(_ENDS, self._add_content, is_stripped=False)

    def _read_message_to(self, name: str) -> Generator[None, None, bool]:
        yield from self._skip_space()
        if not self._is_known(name) or not (yield from self._is_next("{")):
            return False
        self._start_call(name)
        yield from self._read_value(self._add_arguments)
        if self._is_single:
            self.is_done = True
        else:
            yield from self._pass_on_until(_ENDS, lambda _: None, is_stripped=False)
        return True

    def _add_content(self, text: str) -> None:
        self._content.append(text)


def make_parser(tool_format: ToolFormat | None = None, names: Collection[str] = (), **settings: Any) -> AnswerParser:
    """The parser for answers with this format of reasoning; `settings` are those of `AnswerParser`."""
    kind = HarmonyParser if settings.get("reasoning") is HARMONY else AnswerParser
    return kind(tool_format, names, **settings)
