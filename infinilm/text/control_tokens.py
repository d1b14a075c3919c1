"""Keep the control tokens that a chat template writes apart from the same text in messages.

A user who writes `<|im_end|>` in a message must not end the turn. So a template's string literals are marked when it is
compiled: `OPEN` stands before and `CLOSE` behind each control token. Text in messages, tools and variables never holds
these characters (`scrub`), and no operation of a template on such text can add them. After rendering, only a control
token between marks becomes the token's id. The rest is encoded as text.

A template may build a token from parts, as in `'<|' + message.role + '|>'`. A literal that ends with the beginning of a
control token therefore holds `OPEN` before that beginning, and one that begins with the end of a control token holds
`CLOSE` behind that end. Marks that turn out not to enclose a control token are dropped.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import tokenizers
from tokenizers import AddedToken

from infinilm.errors import InvalidValueError
from infinilm.text.native_tokenizer import NativeTokenizer

OPEN, CLOSE = "\ufdd0", "\ufdd1"  # Unicode noncharacters, which no text needs
_REPLACED = {ord(OPEN): "\ufffd", ord(CLOSE): "\ufffd"}

_LOOKS_LIKE_CONTROL = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)


def scrub(value: Any) -> Any:
    """Replace the marks in all strings of JSON-like data by U+FFFD."""
    if isinstance(value, str):
        return value.translate(_REPLACED) if OPEN in value or CLOSE in value else value
    if isinstance(value, dict):
        return {scrub(key): scrub(item) for key, item in value.items()}
    return [scrub(item) for item in value] if isinstance(value, list) else value


def without_marks(marked: str) -> str:
    return marked.replace(OPEN, "").replace(CLOSE, "")


class ControlTokens:
    """A tokenizer's control tokens, and an encoder that recognises them only between marks.

    Control tokens are the special tokens, those with a role such as `eos_token`, and those spelled `<|...|>`: some
    tokenizers do not declare the tokens around turns as special. Other added tokens, such as `<think>`, are text that
    has an id of its own.
    """

    def __init__(self, backend: tokenizers.Tokenizer | NativeTokenizer, named_tokens: Mapping[str, str]) -> None:
        added = backend.get_added_tokens_decoder()
        control = {
            token.content: token_id
            for token_id, token in added.items()
            if token.content
            and (
                token.special or token.content in named_tokens.values() or _LOOKS_LIKE_CONTROL.fullmatch(token.content)
            )
        }
        self._control = control
        longest_first = sorted(control, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if control else None
        self._beginnings = {text[:end] for text in control for end in range(1, len(text))}
        self._endings = {text[start:] for text in control for start in range(1, len(text))}
        self._longest = max(map(len, control), default=0)
        self._encoder: _NativeEncoder | _LibraryEncoder
        if isinstance(backend, NativeTokenizer):
            self._encoder = _NativeEncoder(backend, control)
        else:
            self._encoder = _LibraryEncoder(backend, control)

    def mark(self, literal: str) -> str:
        """Mark the control tokens, complete or partial, in a literal of a template."""
        literal = scrub(literal)
        if self._pattern is None or not literal:
            return literal
        pieces, position = [], 0
        for match in self._pattern.finditer(literal):
            pieces += [literal[position : match.start()], f"{OPEN}{match[0]}{CLOSE}"]
            position = match.end()
        pieces.append(literal[position:])
        pieces[0] = self._mark_ending(pieces[0])
        pieces[-1] = self._mark_beginning(pieces[-1])
        return "".join(pieces)

    def encode(self, marked: str) -> list[int]:
        """Encode a rendered prompt: control tokens between marks become their ids, all else is text."""
        return self._encoder.encode(self._find_tokens(marked), is_whole=False)

    def encode_text(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._encoder.encode([scrub(text)], is_whole=add_special_tokens)

    def _mark_ending(self, text: str) -> str:
        """Put `CLOSE` after the end of a control token that `text` begins with."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if text[:size] in self._endings:
                return f"{text[:size]}{CLOSE}{text[size:]}"
        return text

    def _mark_beginning(self, text: str) -> str:
        """Put `OPEN` before the beginning of a control token that `text` ends with."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-size:] in self._beginnings:
                return f"{text[:-size]}{OPEN}{text[-size:]}"
        return text

    def _find_tokens(self, marked: str) -> list[str | int]:
        """The ids of control tokens between marks, and the text between them without other marks."""
        first, *parts = marked.split(OPEN)
        pieces: list[str | int] = [first.replace(CLOSE, "")]
        for part in parts:
            end = part.find(CLOSE, 0, self._longest + 1)
            token_id = self._control.get(part[: max(end, 0)])
            text = (part if token_id is None else part[end + 1 :]).replace(CLOSE, "")
            if token_id is not None:
                pieces += [token_id, text]
            else:
                pieces[-1] = f"{pieces[-1]}{text}"  # the last piece is always text
        return pieces


def _refuse(token: str) -> NoReturn:
    raise InvalidValueError(
        f"the text holds {token!r}, which this model's tokenizer can only write as a control token; remove it"
    )


class _NativeEncoder:
    """Encodes texts with ids between them. Control tokens within a text are encoded as text."""

    def __init__(self, backend: NativeTokenizer, control: Mapping[str, int]) -> None:
        backend.model.add_tokens([], list(control.values()))
        self._backend = backend
        # BPE may merge text into a control token if the vocabulary holds the token as a word.
        self._forbidden = frozenset(token_id for text, token_id in control.items() if text != backend.unknown_token)

    def encode(self, parts: Sequence[str | int], *, is_whole: bool) -> list[int]:
        ids: list[int] = []
        for part in parts:
            ids += [part] if isinstance(part, int) else self._encode(part)
        return [*self._backend.before, *ids, *self._backend.after] if is_whole else ids

    def _encode(self, text: str) -> list[int]:
        ids = self._backend.encode_part(text, with_control=False)
        if self._forbidden.isdisjoint(ids):
            return ids
        return [
            own for token_id in ids for own in (self._spell(token_id) if token_id in self._forbidden else [token_id])
        ]

    def _spell(self, token_id: int) -> list[int]:
        """Encode a token character by character."""
        token = self._backend.id_to_token(token_id) or ""
        ids: list[int] = self._backend.model.encode(list(token))
        return _refuse(token) if not self._forbidden.isdisjoint(ids) else ids


class _LibraryEncoder:
    """The same with the `tokenizers` library."""

    def __init__(self, backend: tokenizers.Tokenizer, control: Mapping[str, int]) -> None:
        self._encoder, self._ids = _make_encoder(backend, set(control.values()))
        self._post_process = backend.post_process
        unknown = getattr(backend.model, "unk_token", None)
        self._forbidden = frozenset(token_id for text, token_id in control.items() if text != unknown)

    def encode(self, parts: Sequence[str | int], *, is_whole: bool) -> list[int]:
        text = "".join(part if isinstance(part, str) else _numbered(part) for part in parts)
        encoding = self._encoder.encode(text, add_special_tokens=False)
        return self._ids_of(self._post_process(encoding, None, True) if is_whole else encoding)

    def _ids_of(self, encoding: tokenizers.Encoding) -> list[int]:
        ids: list[int] = []
        for token, token_id, is_from_processor in zip(
            encoding.tokens, encoding.ids, encoding.special_tokens_mask, strict=True
        ):
            if is_from_processor:
                ids.append(token_id)
            elif token_id in self._ids:
                ids.append(self._ids[token_id])
            elif token_id in self._forbidden:
                ids += self._spell(token)
            else:
                ids.append(token_id)
        return ids

    def _spell(self, token: str) -> list[int]:
        ids = [part.id for character in token for part in self._encoder.model.tokenize(character)]
        return _refuse(token) if not self._forbidden.isdisjoint(ids) else ids


def _numbered(token_id: int) -> str:
    return f"{OPEN}{token_id}{CLOSE}"


def _make_encoder(backend: tokenizers.Tokenizer, control_ids: set[int]) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
    """A tokenizer that knows control tokens by number, and the original ids of its added tokens."""
    encoder = tokenizers.Tokenizer(backend.model)  # the vocabulary is shared, not copied
    if backend.normalizer is not None:
        encoder.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        encoder.pre_tokenizer = backend.pre_tokenizer
    added = backend.get_added_tokens_decoder()
    # New ids begin at the vocabulary's size. If the vocabulary has holes, some of these are in use and are skipped.
    num_tokens = first_id = encoder.get_vocab_size()
    next_id = first_id
    while next_id < first_id + len(added):
        if encoder.model.id_to_token(next_id) is not None:
            first_id = next_id + 1
        next_id += 1
    fillers = [AddedToken(f"{OPEN}{number}{OPEN}", normalized=False) for number in range(first_id - num_tokens)]
    tokens: dict[int, AddedToken] = {}
    for token_id, token in added.items():
        flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        if token_id in control_ids:
            tokens[token_id] = AddedToken(_numbered(token_id), special=True, **{**flags, "normalized": False})
        else:
            tokens[token_id] = AddedToken(token.content, special=False, **flags)
    encoder.add_tokens([*fillers, *tokens.values()])
    ids = {encoder.token_to_id(token.content): token_id for token_id, token in tokens.items()}
    return encoder, {own: token_id for own, token_id in ids.items() if own is not None}
