"""Follows answers through a compiled grammar."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import thread_time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from infinilm.errors import InvalidValueError
from infinilm.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = npt.NDArray[np.int32]  # one bit per token: token t is bit t % 32 of item t // 32

ALLOWANCE_S = 0.5  # CPU time that a request's grammar may take, beyond …
ALLOWANCE_PER_TOKEN_S = 0.005  # … this for each token. Most take a hundredth of it.
MAX_CHARGE_S = 0.2  # at most for one token: if the machine was paused, the clock counts the pause once

_MAX_REASON_CHARS = 500
_EXCERPT = re.compile(r"\s*(\^+|\d+ \|.*)")  # lines that quote the grammar, and marks below them


@dataclass(slots=True, eq=False)
class CompiledGrammar:
    """A grammar for the answers of one request; the compiled form is shared with other requests."""

    start: "LLMatcher"  # before its first token
    vocabulary: Vocabulary
    real_tokens: Mask  # all tokens but the empty ones
    field: str  # the kind of structure
    on_failure: Callable[[], None]  # called when an answer can't continue
    left_s: float = ALLOWANCE_S

    def matcher(self, output_ids: Sequence[int], stop_ids: Sequence[int], min_tokens: int) -> "GrammarMatcher":
        matcher = GrammarMatcher(self, stop_ids, min_tokens)
        matcher.replay(output_ids)
        return matcher

    def spend(self, seconds: float) -> None:
        self.left_s = min(self.left_s + ALLOWANCE_PER_TOKEN_S, ALLOWANCE_S) - min(seconds, MAX_CHARGE_S)
        if self.left_s < 0:
            raise self.error(f"following it takes too long ({seconds * 1000:.0f} ms for the last token)")

    def error(self, reason: str) -> InvalidValueError:
        self.on_failure()
        return InvalidValueError(f"structured: the answer can't continue with this {self.field}: {readable(reason)}")


class GrammarMatcher:
    """Follows one answer. See `infinilm.structured_output.TokenMatcher`.

    Stop ids are not part of the grammar: they are allowed where the answer is complete, and nowhere else. Special stop
    ids may also end the grammar itself, since they add no text.
    """

    def __init__(self, grammar: CompiledGrammar, stop_ids: Sequence[int], min_tokens: int) -> None:
        self._grammar = grammar
        self._matcher = grammar.start.deep_copy()
        self._vocab_size = vocab_size = len(grammar.vocabulary.tokens)
        self._stop_ids = frozenset(token_id for token_id in stop_ids if token_id < vocab_size)
        self._special_stop_ids = [token_id for token_id in stop_ids if token_id in grammar.vocabulary.special_ids]
        self._stop_tokens = token_mask(self._stop_ids, vocab_size)
        self._ordinary_tokens = grammar.real_tokens & ~self._stop_tokens
        self._min_tokens = min_tokens
        self._allowed = np.zeros(_num_items(vocab_size + 1), dtype=np.int32)  # llguidance has its own end of texts
        self._num_tokens = 0
        self._has_ended = False
        self._spent_s = 0.0

    def replay(self, output_ids: Iterable[int]) -> None:
        for token_id in output_ids:
            self.advance(token_id)
        self._spent_s = 0.0  # counted when the tokens were first drawn

    def advance(self, token_id: int) -> None:
        self._num_tokens += 1
        if token_id in self._stop_ids:
            self._has_ended = True
        if self._has_ended:
            return
        start_s = thread_time()
        self._matcher.consume_token(token_id)  # an error stays in the matcher's state
        self._spent_s += thread_time() - start_s

    def fill(self, mask: Mask) -> None:
        if self._has_ended:  # the token is discarded, but one has to be drawn
            mask[:] = self._stop_tokens
            return
        start_s = thread_time()
        self._fill_by_grammar(mask)
        spent_s, self._spent_s = self._spent_s + thread_time() - start_s, 0.0
        self._grammar.spend(spent_s)

    def _fill_by_grammar(self, mask: Mask) -> None:
        matcher, allowed = self._matcher, self._allowed
        if matcher.is_stopped():
            allowed[:] = 0
        else:
            matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        if matcher.is_error():
            raise self._grammar.error(matcher.get_error())
        np.bitwise_and(allowed[: len(mask)], self._ordinary_tokens, out=mask)
        can_go_on = bool(mask.any())
        if can_go_on and self._num_tokens < self._min_tokens:
            return
        if matcher.is_accepting():
            mask |= self._stop_tokens
        elif completing := [token_id for token_id in self._special_stop_ids if self._completes(token_id)]:
            mask |= token_mask(completing, self._vocab_size)
        elif not can_go_on:
            raise self._grammar.error("it is not complete, and no token is left but one of stop_token_ids")

    def _completes(self, stop_id: int) -> bool:
        """Whether the grammar requires this token, and nothing after it."""
        if not self._allowed[stop_id // 32] >> stop_id % 32 & 1:
            return False
        after = self._matcher.deep_copy()
        return after.consume_token(stop_id) and after.is_accepting()


def token_mask(token_ids: Iterable[int], vocab_size: int) -> Mask:
    is_in = np.zeros(_num_items(vocab_size) * 32, dtype=np.bool_)
    is_in[list(token_ids)] = True
    return np.packbits(is_in, bitorder="little").view("<i4").astype(np.int32, copy=False)


def readable(reason: str) -> str:
    """llguidance's message about a grammar, without the parts for its own developers."""
    lines = reason.partition("\n<")[0].splitlines()
    reason = " ".join(line.strip() for line in lines if not _EXCERPT.fullmatch(line))
    if reason.startswith("NoExtension"):
        return "no token that the model has fits here"
    reason = reason.replace("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "Use anyOf")
    return reason if len(reason) <= _MAX_REASON_CHARS else reason[:_MAX_REASON_CHARS] + " …"


def _num_items(vocab_size: int) -> int:
    return -(-vocab_size // 32)
