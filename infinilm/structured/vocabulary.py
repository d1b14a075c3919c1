"""A model's tokens as bytes, and llguidance's tokenizer for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from infinilm.text.tokenizer import Tokenizer

Encode = Callable[[str], list[int]]

_MARK_OF_SPECIALS = 0xFF  # llguidance puts this byte, which UTF-8 never has, before special tokens


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes that each token id adds to a text."""

    tokens: Sequence[bytes]  # by token id, one per logit; empty for ids without a token
    special_ids: frozenset[int]  # tokens that add no text, although `tokens` holds their names
    drops_first_space: bool  # whether decoding drops a text's first space, as SentencePiece does

    @classmethod
    def of(cls, tokenizer: "Tokenizer", vocab_size: int) -> "Vocabulary":
        """Spell tokens as the detokenizer does, so that the grammar sees the text that the user gets."""
        special_ids = frozenset(token_id for token_id in tokenizer.special_ids if token_id < vocab_size)
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        for token_id, token in enumerate(tokens):
            if token_id not in special_ids and token[:1] == bytes([_MARK_OF_SPECIALS]):
                tokens[token_id] = b""
        return cls(tokens, special_ids, _drops_first_space(tokenizer, tokens, special_ids))

    def lltokenizer(self, tokenizer: "Tokenizer | None" = None) -> "LLTokenizer":
        """Build llguidance's tokenizer.

        Text that a grammar forces is encoded by `tokenizer`, or if that is None by the longest tokens. There is one
        token more than the model has, which ends texts and is never drawn: a request's own stop ids end an answer.
        """
        from llguidance import LLTokenizer

        source = _TokenSource([*self.tokens, b""], sorted(self.special_ids))
        lltokenizer = LLTokenizer(cast(Any, source))
        greedy = lltokenizer.greedy_tokenize
        source.encode = greedy if tokenizer is None else Speller(tokenizer, self, greedy)
        return lltokenizer


class _TokenSource:
    """The interface that llguidance expects of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = len(tokens) - 1
        self.encode: Encode

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)


class Speller:
    """Encodes parts of a text as the model's tokenizer would in the middle of one, byte for byte."""

    def __init__(self, tokenizer: "Tokenizer", vocabulary: Vocabulary, fallback: Encode) -> None:
        self._encode = tokenizer.encode
        self._vocabulary = vocabulary
        self._fallback = fallback
        # After a line break no tokenizer adds the space that many put before a text's first word.
        self._anchors = [(anchor, self._encode(anchor, add_special_tokens=False)) for anchor in ("", "\n")]

    def __call__(self, text: str) -> list[int]:
        for anchor, anchor_ids in self._anchors:
            ids = self._encode(anchor + text, add_special_tokens=False)
            rest = ids[len(anchor_ids) :]
            if ids[: len(anchor_ids)] == anchor_ids and self._spells(rest, text):
                return rest
        return self._fallback(text)

    def _spells(self, ids: Sequence[int], text: str) -> bool:
        tokens = self._vocabulary.tokens
        if any(token_id >= len(tokens) or token_id in self._vocabulary.special_ids for token_id in ids):
            return False
        return b"".join([tokens[token_id] for token_id in ids]) == text.encode()


def _drops_first_space(tokenizer: "Tokenizer", tokens: Sequence[bytes], special_ids: frozenset[int]) -> bool:
    for token_id, token in enumerate(tokens):
        if token.startswith(b" ") and token.strip() and token_id not in special_ids:
            return not tokenizer.decode([token_id]).startswith(" ")
    return False
