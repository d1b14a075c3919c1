"""Compiles a request's `structured` to a grammar that the sampler can follow."""

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from threading import Lock
from typing import TYPE_CHECKING, Any

from infinilm.errors import InvalidValueError
from infinilm.sampling_params import SamplingParams
from infinilm.structured.grammar_sandbox import Cancellation, Trials, TrialTimeoutError
from infinilm.structured.matcher import CompiledGrammar, Mask, readable, token_mask
from infinilm.structured.reasoning import ReasoningGrammar
from infinilm.structured.trial_process import TRIAL_S, Verdict, parser_limits
from infinilm.structured.vocabulary import Vocabulary
from infinilm.structured_output import Grammar, StructuredOutput
from infinilm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

CACHE_SIZE = 32  # compiled grammars; a hostile one may hold some 20 MB
JSON_WHITESPACE = r"( |\r?\n[ \t]{0,32})"  # between the parts of a JSON text: enough to indent it, and bounded
_IGNORED_ATTRIBUTE = re.compile(r"^[ \t]*[?!]?[A-Za-z_][\w-]*[ \t]*\[[^\]\n]*\b(temperature|stop)[ \t]*=", re.MULTILINE)


def grammar_text(structured: StructuredOutput, drops_first_space: bool) -> str:
    """The grammar as JSON; it begins with a space if the tokenizer drops the first one."""
    grammar = _grammar(structured)
    if not drops_first_space:
        return json.dumps({"grammars": [grammar]})
    return json.dumps({"grammars": [{"lark_grammar": 'start: " " @answer'}, {"name": "answer", **grammar}]})


def _grammar(structured: StructuredOutput) -> dict[str, Any]:
    if structured.json_object:
        return _json_grammar({"type": "object"})
    if structured.json_schema is not None:
        assert isinstance(structured.json_schema, str)
        schema = json.loads(structured.json_schema)
        return _json_grammar({} if schema is True else schema)
    if structured.regex is not None:
        return _regex_grammar(structured.regex)
    if structured.choice is not None:
        return _regex_grammar("|".join(map(_escaped, dict.fromkeys(structured.choice))))
    assert structured.grammar is not None
    if found := _IGNORED_ATTRIBUTE.search(structured.grammar):
        raise InvalidValueError(
            f"grammar uses the attribute {found[1]!r}, which has no effect here; for a temperature use the request's "
            "own, for a stop use 'suffix' or 'lazy'"
        )
    return {"lark_grammar": structured.grammar}


def _json_grammar(schema: dict[str, Any]) -> dict[str, Any]:
    return {"json_schema": {**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}}


def _regex_grammar(regex: str) -> dict[str, Any]:
    from llguidance import LLMatcher

    grammar: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(regex))["grammars"][0]
    return {"lark_grammar": grammar["lark_grammar"]}


def _escaped(text: str) -> str:
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}" for char in text)


@dataclass(frozen=True, slots=True)
class _Tools:
    vocabulary: Vocabulary
    real_tokens: Mask
    lltokenizer: "LLTokenizer"
    trials: Trials


class GrammarCompiler:
    """Compiles grammars for one tokenizer and caches them. Thread-safe.

    Compiling takes milliseconds for most schemas and up to two seconds before a grammar is refused, mostly without the
    GIL. A caller that must not block calls `compile` in a thread; the next call finds the result.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        """`vocab_size` is the number of logits, which may exceed the number of tokens."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._tools: _Tools | None = None
        self._lock = Lock()
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()  # in order of last use

    def grammar_of(self, params: SamplingParams, stop_ids: Sequence[int]) -> Grammar | None:
        """The grammar for one request's answers, which `stop_ids` end; None if all tokens are allowed everywhere."""
        grammar, reasoning = self._structure_of(params, stop_ids), params.reasoning
        if reasoning is None or (grammar is None and reasoning.max_tokens is None):
            return grammar
        if self._tokenizer is None:
            raise InvalidValueError("reasoning needs text, and the checkpoint has no tokenizer")
        return ReasoningGrammar(reasoning, grammar, self._tokenizer, self._vocab_size)

    def _structure_of(self, params: SamplingParams, stop_ids: Sequence[int]) -> CompiledGrammar | None:
        if params.structured is None:
            return None
        if not any(token_id < self._vocab_size for token_id in stop_ids):
            raise InvalidValueError(
                "structured needs a token that ends the answer, and the checkpoint names none; give stop_token_ids"
            )
        return self.compile(params.structured)

    def compile(
        self, structured: StructuredOutput, limit_s: float | None = None, cancellation: Cancellation | None = None
    ) -> CompiledGrammar:
        """Compile a request's structure, or refuse it with the reason.

        With `limit_s`, raises `TrialTimeoutError` when compiling takes longer, even if more time might suffice.
        `cancellation` ends it from another thread, with a `TrialCancelledError`.
        """
        tools = self._ready_tools()
        from llguidance import LLMatcher  # installed, because `_ready_tools` succeeded

        field = structured.kind
        text = grammar_text(structured, tools.vocabulary.drops_first_space)
        key = sha256(text.encode()).digest()
        with self._lock:
            if (start := self._compiled.get(key)) is not None:
                self._compiled.move_to_end(key)
        if start is None:
            if not structured.json_object:  # not user input, so not tried
                try:
                    verdict = tools.trials.try_out(text, limit_s or TRIAL_S, cancellation)
                except TrialTimeoutError as error:
                    if limit_s is not None:
                        raise
                    verdict = Verdict(str(error))
                _refuse_if(verdict.error, field)
                text = verdict.grammar
            start = LLMatcher(tools.lltokenizer, text, log_level=0, limits=parser_limits())
            _refuse_if(start.get_error(), field)
            with self._lock:
                self._compiled[key] = start
                while len(self._compiled) > CACHE_SIZE:
                    self._compiled.popitem(last=False)
        return CompiledGrammar(start, tools.vocabulary, tools.real_tokens, field, partial(self._remove, key))

    def prepare(self) -> None:
        """Do the one-time work of compiling now, if possible, so that the next grammar does not wait for it."""
        with suppress(InvalidValueError):  # reported to the next request that needs a grammar
            self._ready_tools().trials.prepare()

    def close(self) -> None:
        with self._lock:
            tools, self._tools = self._tools, None
        if tools is not None:
            tools.trials.close()

    def _ready_tools(self) -> _Tools:
        with self._lock:
            if self._tools is None:
                self._tools = self._make_tools()
            return self._tools

    def _make_tools(self) -> _Tools:
        if self._tokenizer is None:
            raise InvalidValueError("structured needs text, and the checkpoint has no tokenizer")
        try:
            import llguidance  # noqa: F401
        except ImportError as error:
            raise InvalidValueError(
                "structured output needs llguidance, which is not installed; pip install 'infinilm[structured]'"
            ) from error
        vocabulary = Vocabulary.of(self._tokenizer, self._vocab_size)
        real_ids = [token_id for token_id, token in enumerate(vocabulary.tokens) if token]
        real_tokens = token_mask(real_ids, self._vocab_size)
        return _Tools(vocabulary, real_tokens, vocabulary.lltokenizer(self._tokenizer), Trials(vocabulary))

    def _remove(self, key: bytes) -> None:
        """Drop a grammar that failed in use: the state that its users share may be damaged."""
        with self._lock:
            self._compiled.pop(key, None)


def _refuse_if(reason: str, field: str) -> None:
    if reason:
        raise InvalidValueError(f"structured: this {field} is refused: {readable(reason)}")
