"""Reasoning before an answer: closes it when its token budget is used up, and starts the grammar after it."""

from collections.abc import Sequence
from dataclasses import dataclass

from infinilm.structured.matcher import Mask, token_mask
from infinilm.structured_output import Grammar, Reasoning, TokenMatcher
from infinilm.text.reasoning import ReasoningTracker
from infinilm.text.tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class ReasoningGrammar:
    """The grammar for the answers of one request: reasoning, then text that `structure` allows. See `Grammar`."""

    reasoning: Reasoning
    structure: Grammar | None
    tokenizer: Tokenizer
    vocab_size: int

    def matcher(self, output_ids: Sequence[int], stop_ids: Sequence[int], min_tokens: int) -> "ReasoningMatcher":
        matcher = ReasoningMatcher(self, stop_ids, min_tokens)
        for token_id in output_ids:
            if matcher.is_undecided:
                matcher.fill(token_mask((), self.vocab_size))
            matcher.advance(token_id)
        return matcher

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


class ReasoningMatcher:
    """Follows one answer. See `infinilm.structured_output.TokenMatcher`.

    Before the reasoning, either its opening or the answer may come; the answer is the header and then the structured
    part. If the structure also allows the opening's tokens, both are followed until they differ.
    """

    def __init__(self, grammar: ReasoningGrammar, stop_ids: Sequence[int], min_tokens: int) -> None:
        reasoning = grammar.reasoning
        self._grammar = grammar
        self._stop_ids = tuple(stop_ids)
        self._min_tokens = min_tokens
        self._tracker = ReasoningTracker(
            grammar.tokenizer.token_bytes, reasoning.opening, reasoning.closing, repeats=reasoning.repeats
        )
        self._opening_ids = grammar.encode(reasoning.opening) if reasoning.opening else []
        self._header_ids = grammar.encode(reasoning.header) if reasoning.header else []
        self._num_tokens = 0
        self._forced_ids: list[int] = []
        """Tokens that close the reasoning, the next one last."""
        self._before_answer: list[int] = []
        """The answer's tokens since the reasoning, or since the beginning."""
        self._matcher: TokenMatcher | None = None
        """The matcher of the structured part, once the header is complete. None after tokens that it does not allow."""
        self._matcher_allows_opening = True
        """Whether the structured part may begin with the opening's next token; known since the last `fill`."""
        self._start_answer()
        self._limit()

    @property
    def is_undecided(self) -> bool:
        """Whether both the opening and the structured part may come next."""
        return self._matcher is not None and self._next_opening_id() is not None

    def _limit(self) -> None:
        """Close reasoning that has used up its tokens."""
        reasoning, has_structure = self._grammar.reasoning, self._grammar.structure is not None
        limit = reasoning.max_tokens
        if limit is None or self._forced_ids or self._tracker.state != "within" or self._tracker.num_tokens < limit:
            return
        behind = "" if has_structure else (reasoning.forced_closing or "").partition(reasoning.closing)[2]
        self._forced_ids = self._grammar.encode(self._tracker.closing_left + behind)[::-1]

    def _start_answer(self) -> None:
        self._before_answer = []
        if not self._header_ids:
            self._start_structure()

    def _start_structure(self) -> None:
        if self._grammar.structure is not None:
            left = max(0, self._min_tokens - self._num_tokens)
            self._matcher = self._grammar.structure.matcher((), self._stop_ids, left)

    def advance(self, token_id: int) -> None:
        self._num_tokens += 1
        if self._forced_ids:
            self._forced_ids.pop()
        was_within = self._tracker.state == "within"
        self._tracker.advance(token_id)
        is_within = self._tracker.state == "within"
        if was_within and not is_within:
            self._start_answer()
        elif not was_within and is_within:
            self._matcher = None
        elif not is_within:
            self._advance_answer(token_id)
        self._limit()

    def _advance_answer(self, token_id: int) -> None:
        if self._matcher is None:
            self._before_answer.append(token_id)
            if self._before_answer == self._header_ids:
                self._start_structure()
            return
        if self._next_opening_id() == token_id and not self._matcher_allows_opening:
            self._matcher = None
        else:
            self._matcher.advance(token_id)
        self._before_answer.append(token_id)

    def _next_opening_id(self) -> int | None:
        """The token with which the opening would continue, if it can still come."""
        seen, opening = self._before_answer, self._opening_ids
        can_come = self._tracker.state == "before" and len(seen) < len(opening) and opening[: len(seen)] == seen
        return opening[len(seen)] if can_come else None

    def fill(self, mask: Mask) -> None:
        if self._forced_ids:
            mask[:] = 0
            _set(mask, self._forced_ids[-1])
        elif self._tracker.state == "within" or self._grammar.structure is None:
            mask[:] = -1
            if self._grammar.structure is not None or self._num_tokens < self._min_tokens:
                for token_id in self._stop_ids:
                    _clear(mask, token_id)
        else:
            self._fill_answer(mask)

    def _fill_answer(self, mask: Mask) -> None:
        """Allow the tokens that continue the opening, the header or the structured part."""
        if self._matcher is not None:
            self._matcher.fill(mask)
        else:
            mask[:] = 0
            seen = self._before_answer
            if self._header_ids[: len(seen)] == seen and len(seen) < len(self._header_ids):
                _set(mask, self._header_ids[len(seen)])
        if (opening_id := self._next_opening_id()) is not None:
            self._matcher_allows_opening = bool(mask[opening_id // 32] >> opening_id % 32 & 1)
            _set(mask, opening_id)


def _set(mask: Mask, token_id: int) -> None:
    mask.view("<u4")[token_id // 32] |= 1 << token_id % 32


def _clear(mask: Mask, token_id: int) -> None:
    if token_id // 32 < len(mask):
        mask.view("<u4")[token_id // 32] &= ~(1 << token_id % 32) & 0xFFFFFFFF
