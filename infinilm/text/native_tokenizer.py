"""Replaces a `tokenizers.Tokenizer` for the vocabulary of a GGUF file, as far as `Tokenizer` uses one.

The native library finds added tokens in a text and merges words into tokens: it reads a vocabulary of 262,144 tokens in
a twentieth of the time and memory. Between these steps, parts of the `tokenizers` library normalise texts and cut them
into words. All ids are equal to those of a `tokenizers.Tokenizer`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers

_NUM_IDS = 2**32


class TextPipeline(NamedTuple):
    """How text becomes words, and tokens become text. Parts that are None are skipped: then a text is one word."""

    normalizer: normalizers.Normalizer | None
    pre_tokenizer: pre_tokenizers.PreTokenizer | None
    decoder: decoders.Decoder


class Encoded(NamedTuple):
    """A text's tokens."""

    ids: list[int]


@dataclass(frozen=True)
class NativeTokenizer:
    """Methods that `tokenizers.Tokenizer` also has do the same."""

    model: Any
    """The library's `BPE`."""
    tokens: Any
    """The library's `Strings`: the tokens by id."""
    pipeline: TextPipeline
    added_tokens: Mapping[int, AddedToken]
    unknown_token: str | None
    before: Sequence[int]
    """Tokens that `encode` puts before a text."""
    after: Sequence[int]

    @property
    def decoder(self) -> decoders.Decoder:
        return self.pipeline.decoder

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoded:
        return Encoded(self.encode_part(text, with_control=True, is_whole=add_special_tokens))

    def encode_part(self, text: str, *, with_control: bool, is_whole: bool = False) -> list[int]:
        """Encode a text. Added tokens in it become their ids, control tokens only with `with_control`."""
        ids = [*self.before] if is_whole else []
        for part in self.model.split(text, with_control):
            ids += [part] if isinstance(part, int) else self.encode_words(part)
        return [*ids, *self.after] if is_whole else ids

    def encode_words(self, text: str) -> list[int]:
        """Encode a text without looking for added tokens in it."""
        normalizer, pre_tokenizer, _ = self.pipeline
        if normalizer is not None:
            text = normalizer.normalize_str(text)
        words = [text] if pre_tokenizer is None else [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]
        ids: list[int] = self.model.encode(words)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        added, tokens = self.added_tokens, []
        for token_id in ids:
            content = self.id_to_token(token_id)
            if content is None or (skip_special_tokens and token_id in added and added[token_id].special):
                continue
            tokens.append(content)
        return self.decoder.decode(tokens)

    def id_to_token(self, token_id: int) -> str | None:
        if not 0 <= token_id < _NUM_IDS:
            raise OverflowError(f"{token_id} is no token id")
        content: str | None = self.model.content(token_id)
        return content

    def token_to_id(self, token: str) -> int | None:
        token_id: int | None = self.model.find(token)
        return token_id

    def get_added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        return self.added_tokens

    def get_vocab_size(self) -> int:
        return len(self.tokens)
