"""Text to token ids and back, from a Hugging Face directory or a GGUF file."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from infinilm.errors import CheckpointError, InfinilmError, InvalidTypeError, InvalidValueError
from infinilm.text.control_tokens import ControlTokens, without_marks
from infinilm.text.gguf_tokenizer import GGUFVocabulary, build_tokenizer
from infinilm.text.hf_tokenizer import decoder_types, read_directory
from infinilm.text.native_tokenizer import NativeTokenizer

if TYPE_CHECKING:
    from infinilm.text.chat_template import ChatTemplate


class Tokenizer:
    """A tokenizer with its special tokens and chat templates. Thread-safe.

    Texts are encoded one at a time, which never starts the library's thread pool: a pool would not survive a fork, and
    the library warns about that.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer | NativeTokenizer,
        *,
        named_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """Wrap `backend`. `named_tokens` are special tokens by role, such as `{"eos_token": "</s>"}`; `chat_templates`
        are Jinja sources by name, "default" being the usual one.
        """
        if isinstance(backend, tokenizers.Tokenizer):
            backend.no_truncation()
            backend.no_padding()
        self.backend = backend
        self.named_tokens = dict(named_tokens or {})
        # Ids that `decode` skips by default.
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        decoders = decoder_types(backend)
        # Whether a text is simply the UTF-8 decoding of its tokens' bytes.
        self.is_byte_level = decoders == ["ByteLevel"]
        # Whether a token may end within a character.
        self.can_split_characters = "ByteLevel" in decoders
        self._byte_token_ids = _byte_token_ids(backend) if "ByteFallback" in decoders else frozenset()
        self.bytes_by_id: Mapping[int, bytes] = _Found(self._find_bytes)
        """The results of `token_bytes` by id, for callers that need many."""
        self._chat_templates = dict(chat_templates or {})
        self._compiled_templates: dict[tuple[str, bool], ChatTemplate] = {}

    @classmethod
    def from_directory(cls, path: Path) -> "Tokenizer | None":
        """Read the tokenizer of a Hugging Face directory; None if it has none. Code in it is never run."""
        found = read_directory(path)
        return None if found is None else cls(found[0], named_tokens=found[1], chat_templates=found[2])

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer | None":
        """Build the tokenizer that a GGUF file's metadata describes; None if it describes none."""
        vocabulary = GGUFVocabulary.from_metadata(metadata)
        if vocabulary is None:
            return None
        roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        templates = {"default": metadata.get("tokenizer.chat_template")}
        for name in metadata.get("tokenizer.chat_templates") or ():
            templates[name] = metadata.get(f"tokenizer.chat_template.{name}")
        for name, source in templates.items():
            if source is not None and not isinstance(source, str):
                raise CheckpointError(f"GGUF metadata: the chat template {name!r} is not a string")
        return cls(
            build_tokenizer(vocabulary),
            named_tokens={name: text for name, role in roles.items() if (text := vocabulary.token(role))},
            chat_templates={name: source for name, source in templates.items() if source is not None},
        )

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id; models may have more rows than that."""
        if isinstance(self.backend, NativeTokenizer):
            return self.backend.get_vocab_size()
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def max_token_chars(self) -> int:
        """The characters of the longest token."""
        if isinstance(self.backend, NativeTokenizer):
            return int(self.backend.tokens.longest)
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)

    @property
    def bos_token(self) -> str | None:
        return self.named_tokens.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self.backend.token_to_id(self.bos_token) if self.bos_token else None

    @property
    def eos_token(self) -> str | None:
        return self.named_tokens.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self.backend.token_to_id(self.eos_token) if self.eos_token else None

    @cached_property
    def control_tokens(self) -> ControlTokens:
        return ControlTokens(self.backend, self.named_tokens)

    def encode(self, text: str, add_special_tokens: bool = True, *, parse_special_tokens: bool = True) -> list[int]:
        """The ids of `text`.

        `add_special_tokens`: add the tokens that the tokenizer puts around texts, such as the bos token.
        `parse_special_tokens`: special tokens written out in the text become their ids; otherwise they are text.
        """
        with _converting_errors(text):
            if parse_special_tokens:
                return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
            return self.control_tokens.encode_text(text, add_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        parse_special_tokens: bool = False,
        check_text: Callable[[str], None] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """The ids of a conversation, rendered with the chat template (see `apply_chat_template`).

        Control tokens that the template writes become their ids. In messages, tools and other arguments they are text,
        so that a message cannot forge a turn, unless `parse_special_tokens`. `check_text` is called with the rendered
        prompt before it is encoded, and may raise.
        """
        marked = self._render(messages, is_marked=not parse_special_tokens, **kwargs)
        text = marked if parse_special_tokens else without_marks(marked)
        if check_text is not None:
            check_text(text)
        if parse_special_tokens:
            return self.encode(text, add_special_tokens=False)
        with _converting_errors(text):
            return self.control_tokens.encode(marked)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids without a token are skipped."""
        try:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except OverflowError:
            bad = next(token_id for token_id in ids if not 0 <= token_id < 2**32)
            raise InvalidValueError(f"ids holds {bad}; token ids are between 0 and 2**32 - 1") from None
        except TypeError as error:
            raise InvalidTypeError(f"ids must be a sequence of integers: {error}") from None

    def content(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it (`Ġhello`, `▁hello`); None for an id without a token."""
        try:
            return self.backend.id_to_token(token_id)
        except OverflowError:
            raise InvalidValueError(f"token_id is {token_id}; ids are between 0 and 2**32 - 1") from None

    def token(self, token_id: int) -> str:
        r"""Return the text one token adds to a text, special or not; parts of characters show as `\xe2`."""
        return self.token_bytes(token_id).decode("utf-8", errors="backslashreplace")

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that one token adds to a text; none for an id without a token."""
        return self.bytes_by_id[token_id]

    def is_byte_token(self, token_id: int) -> bool:
        """Whether the token is one byte (`<0xE2>`), whose text depends on the byte tokens around it."""
        return token_id in self._byte_token_ids

    def special_tokens_in(self, texts: Sequence[str]) -> dict[str, int]:
        """The special tokens that are part of one of `texts`, with their ids."""
        found = {self.content(token_id): token_id for token_id in self.special_ids}
        return {token: token_id for token, token_id in found.items() if token and any(token in text for text in texts)}

    @property
    def chat_template(self) -> str | None:
        return self._chat_templates.get("default")

    @property
    def tool_template(self) -> str | None:
        return self._chat_templates.get("tool_use", self.chat_template)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Render a conversation into a prompt (see `ChatTemplate.render`); `kwargs` are template variables.

        The text does not distinguish control tokens that the template wrote from those in messages; `encode_chat` does.
        Templates write the bos token themselves, so encode the result with `add_special_tokens=False`.
        """
        return self._render(messages, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        is_marked: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        name = "tool_use" if tools is not None and "tool_use" in self._chat_templates else "default"
        if name not in self._chat_templates:
            raise InvalidValueError(
                f"this model has no default chat template (it has {sorted(self._chat_templates) or 'none'}); "
                f"write the prompt yourself"
            )
        mark = self.control_tokens.mark if is_marked else None
        template = self._compiled_templates.get((name, is_marked))
        if template is None:
            from infinilm.text.chat_template import ChatTemplate  # late, because it imports jinja2

            template = ChatTemplate(self._chat_templates[name], mark=mark)
            self._compiled_templates[name, is_marked] = template
        named = self.named_tokens
        special_tokens = named if mark is None else {role: mark(text) for role, text in named.items()}
        return template.render(messages, tools=tools, special_tokens=special_tokens, **kwargs)

    def _find_bytes(self, token_id: int) -> bytes:
        content = self.content(token_id)
        if content is None:
            return b""
        if self.can_split_characters:
            return _byte_level_bytes(content)
        if self.is_byte_token(token_id):
            return bytes.fromhex(content[3:5])
        # A text's first token may lose its space, so the token is decoded after another one.
        context, context_text = self._context
        return self.decode([*context, token_id], skip_special_tokens=False)[len(context_text) :].encode()

    @cached_property
    def _context(self) -> tuple[list[int], str]:
        """The first ordinary token, in a list, and its text."""
        for token_id in range(self.backend.get_vocab_size()):
            if self.content(token_id) and token_id not in self.special_ids and not self.is_byte_token(token_id):
                return [token_id], self.decode([token_id], skip_special_tokens=False)
        return [], ""


class _Found(dict[int, bytes]):
    """Caches the results of a function, by id."""

    def __init__(self, find: Callable[[int], bytes]) -> None:
        self._find = find

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._find(token_id)
        return found


@contextmanager
def _converting_errors(text: str) -> Iterator[None]:
    """Convert the library's errors in the block, which encodes `text`, to those of this package."""
    try:
        yield
    except InfinilmError:
        raise
    except TypeError:
        if not isinstance(text, str):
            raise InvalidTypeError(f"text must be a string, not {type(text).__name__}") from None
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidValueError(
                f"text has a lone surrogate {text[error.start]!a} at character {error.start}, which UTF-8 cannot "
                f"express; decode the input with errors='replace'"
            ) from None
        raise
    except Exception as error:  # the library raises bare Exceptions, here for vocabularies with holes
        raise CheckpointError(f"the checkpoint's tokenizer cannot encode this text: {error}") from error


def _byte_token_ids(backend: tokenizers.Tokenizer | NativeTokenizer) -> frozenset[int]:
    digits = itertools.product("0123456789abcdefABCDEF", repeat=2)
    ids = (backend.token_to_id(f"<0x{high}{low}>") for high, low in digits)
    return frozenset(token_id for token_id in ids if token_id is not None)


def _bytes_of_characters() -> Mapping[str, int]:
    """The byte that each character of byte-level vocabularies stands for.

    Printable Latin-1 characters stand for their own code, the characters from 256 on for the other bytes.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _bytes_of_characters()


def _byte_level_bytes(content: str) -> bytes:
    """A token's bytes, as the library's ByteLevel decoder computes them: added tokens may be plain text."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in content])
    except KeyError:
        return content.encode()
