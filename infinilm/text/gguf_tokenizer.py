"""Build a `tokenizers.Tokenizer` from the vocabulary in a GGUF file's metadata.

A GGUF file has no tokenizer.json. It lists the tokens with their types, and either merges (byte-level BPE,
`tokenizer.ggml.model = "gpt2"`) or scores (SentencePiece BPE, `"llama"`); Gemma 4's (`"gemma4"`) is SentencePiece with
merges. The file only names how text is split before merging (`tokenizer.ggml.pre`); `PRE_TOKENIZERS` defines these
names.

The ids are those of llama.cpp, which defines the format. This has two consequences. Text is never Unicode-normalised,
even if the model's own tokenizer.json asks for NFC (Qwen). And a SentencePiece vocabulary with a space prefix puts a
space before each part of a text between special tokens, even before a part that begins with a space.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from infinilm.errors import CheckpointError
from infinilm.garbage import gc_paused
from infinilm.kernels import native
from infinilm.text.merges import derive_merges
from infinilm.text.native_tokenizer import NativeTokenizer, TextPipeline

# Values of tokenizer.ggml.token_type that matter here (0 undefined, 1 normal and 5 unused are plain tokens).
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_NUM_TOKEN_TYPES = 7

_NO_TOKEN = 2**32 - 1  # the format's -1

# Deriving merges is quadratic in a token's length; SentencePiece's own tokens have a few dozen characters.
_MAX_PIECE_CHARS = 512

# --- how families split text. The patterns are those of the models' own tokenizers. ---------------------------------

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35_SPLIT = _QWEN2_SPLIT.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
# Words of capitals, then small letters.
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+~"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*~"
)
_PUNCTUATION_AND_SPACES = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN_SPLIT = rf"{_CASED_WORDS.replace('~', '')}|\p{{N}}|{_PUNCTUATION_AND_SPACES}"
_GPT4O_SPLIT = rf"{_CASED_WORDS.replace('~', _CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACES}"
_DEEPSEEK3_SPLIT = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
# Letters that have a case, without those that were added to Unicode late.
_DEEPSEEK_LETTERS = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2D}\x{A790}-\x{A7FA}"
    r"\x{AB30}-\x{AB68}\x{10570}-\x{105BC}\x{16E40}-\x{16E7F}\x{1D400}-\x{1DFFF}]]"
)
_DEEPSEEK_PUNCTUATION = r"[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]"
_CJK = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"
_HAN_AND_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+"


@dataclass(frozen=True)
class PreTokenizer:
    """How a family of byte-level vocabularies splits text before merging."""

    splits: tuple[str, ...]
    """Patterns. Each divides the parts from the patterns before it into matches and the text between them."""
    ignores_merges: bool = False  # a word that is a token is not split, even if merges would
    adds_bos: bool = False  # unless the file specifies it


_GPT2 = PreTokenizer((_GPT2_SPLIT,))
_DIGITS = PreTokenizer((r"\p{N}", _GPT2_SPLIT))
_LLAMA3 = PreTokenizer((_LLAMA3_SPLIT,), ignores_merges=True, adds_bos=True)
_DBRX = PreTokenizer((_LLAMA3_SPLIT,))
_GLM4 = PreTokenizer((_LLAMA3_SPLIT,), ignores_merges=True)
_QWEN2 = PreTokenizer((_QWEN2_SPLIT,))
_GPT4O = PreTokenizer((_GPT4O_SPLIT,))
_DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK3_SPLIT))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **dict.fromkeys(("default", "gpt-2", "mpt", "olmo", "jais", "phi-2", "gigachat", "exaone4", "trillion"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _DBRX),
    **dict.fromkeys(("glm4", "glm5"), _GLM4),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"), _QWEN2),
    "qwen35": PreTokenizer((_QWEN35_SPLIT,)),
    "tekken": PreTokenizer((_TEKKEN_SPLIT,), ignores_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", rf"\s?{_DEEPSEEK_LETTERS}+", rf"\s?{_DEEPSEEK_PUNCTUATION}+", r"\s+$", _CJK, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2_SPLIT, "[0-9]{3}")),
    "seed-coder": PreTokenizer((_QWEN2_SPLIT.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+"),)),
}


@dataclass(frozen=True)
class GGUFVocabulary:
    """The checked `tokenizer.ggml.*` metadata of one file."""

    kind: str  # "gpt2", "llama" or "gemma4"
    pre: str
    tokens: Sequence[str]  # or the native library's `Strings`, as merges
    token_types: npt.NDArray[Any]  # one per token
    scores: Sequence[float] | npt.NDArray[Any] | None  # one per token
    merges: Sequence[str] | None  # "left right", best first
    token_ids: Mapping[str, int]  # of "bos", "eos", "unknown" and "padding", where the file names one
    adds_bos: bool
    adds_eos: bool
    adds_space_prefix: bool

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "GGUFVocabulary | None":
        """Check and collect the tokenizer's metadata; None if the file carries no tokenizer."""
        kind = _value(metadata, "tokenizer.ggml.model", str)
        if kind in (None, "none", "no_vocab"):
            return None
        if kind not in ("gpt2", "llama", "gemma4"):
            raise CheckpointError(
                f"GGUF metadata tokenizer.ggml.model is {kind!r}; supported are 'gpt2' (byte-level BPE), 'llama' "
                f"(SentencePiece) and 'gemma4'"
            )
        pre = _value(metadata, "tokenizer.ggml.pre", str) or "default"
        if kind == "gpt2" and pre not in PRE_TOKENIZERS:
            raise CheckpointError(
                f"GGUF metadata tokenizer.ggml.pre is {pre!r}, which is unknown; known are "
                f"{', '.join(sorted(PRE_TOKENIZERS))}"
            )
        tokens = _list(metadata, "tokens", str)
        if not tokens:
            raise CheckpointError("GGUF metadata tokenizer.ggml.tokens is missing or empty")
        scores = _list(metadata, "scores", (int, float), length=len(tokens))
        if scores is not None and not np.isfinite(scores).all():
            raise CheckpointError("GGUF metadata tokenizer.ggml.scores holds values that are not finite")
        token_types = _list(metadata, "token_type", int, length=len(tokens))
        types = np.ones(len(tokens), np.int64) if token_types is None else np.asarray(token_types)
        if (is_unknown := (types < 0) | (types >= _NUM_TOKEN_TYPES)).any():
            unknown_types = np.unique(types[is_unknown]).tolist()
            raise CheckpointError(f"GGUF metadata tokenizer.ggml.token_type holds unknown types {unknown_types[:5]}")
        is_sentencepiece = kind == "llama"
        adds_space = _value(metadata, "tokenizer.ggml.add_space_prefix", bool)
        token_ids = _token_ids(metadata, len(tokens))
        adds_bos = PRE_TOKENIZERS[pre].adds_bos if kind == "gpt2" else True
        return cls(
            kind=kind,
            pre=pre,
            tokens=tokens,
            token_types=types,
            scores=scores,
            merges=_list(metadata, "merges", str),
            token_ids=token_ids,
            adds_bos=_adds_token(metadata, "bos", token_ids, default=adds_bos),
            adds_eos=_adds_token(metadata, "eos", token_ids, default=False),
            adds_space_prefix=is_sentencepiece if adds_space is None else adds_space,
        )

    def token(self, name: str) -> str | None:
        """The text of the token with this role, such as "bos"; None if the file names none."""
        token_id = self.token_ids.get(name)
        return None if token_id is None else self.tokens[token_id]


def build_tokenizer(vocabulary: GGUFVocabulary) -> "Tokenizer | NativeTokenizer":
    """Use the native library if there is one. If it refuses the vocabulary, the other way does so with the reason."""
    library: Any = native.load()
    if library is not None:
        try:
            return _build_native(vocabulary, library)
        except ValueError:
            pass  # the other way names the reason
    return build_library_tokenizer(vocabulary)


def _build_native(vocabulary: GGUFVocabulary, library: Any) -> NativeTokenizer:
    def strings(texts: Any) -> Any:
        return library.Strings.of(list(texts)) if isinstance(texts, list | tuple) else texts

    tokens, unknown = strings(vocabulary.tokens), _unknown_token(vocabulary)
    is_byte_level = vocabulary.kind == "gpt2"
    settings: dict[str, Any] = {"merges": None, "scores": None, "can_result": None}
    if vocabulary.merges is not None:
        settings["merges"] = strings(vocabulary.merges)
    elif is_byte_level or vocabulary.scores is None or tokens.longest > _MAX_PIECE_CHARS:
        raise ValueError("there are no merges")
    else:
        settings["scores"] = np.ascontiguousarray(vocabulary.scores, np.float64)
        settings["can_result"] = _can_result(vocabulary).astype(np.uint8)
    model = library.BPE(
        tokens,
        **settings,
        ignores_merges=is_byte_level and PRE_TOKENIZERS[vocabulary.pre].ignores_merges,
        has_byte_fallback=not is_byte_level,
        unknown=None if is_byte_level or unknown is None else unknown,
    )
    special, user_defined = _special_tokens(vocabulary)
    added: dict[int, AddedToken] = {}
    for token in (*special, *user_defined):
        if token.content:
            added.setdefault(model.find(token.content), token)
    model.add_tokens(list(added), [])
    before, after = ([vocabulary.token_ids[name]] if adds else [] for name, adds in _adds(vocabulary).items())
    unknown_text = None if is_byte_level or unknown is None else vocabulary.tokens[unknown]
    return NativeTokenizer(model, tokens, _make_pipeline(vocabulary), added, unknown_text, before, after)


@gc_paused()  # a vocabulary is a million small objects
def build_library_tokenizer(vocabulary: GGUFVocabulary) -> Tokenizer:
    try:
        tokenizer = Tokenizer(_make_model(vocabulary))
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exceptions, e.g. for merges of unknown tokens
        raise CheckpointError(f"GGUF metadata does not form a tokenizer: {error}") from error
    normalizer, pre_tokenizer, decoder = _make_pipeline(vocabulary)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    special, user_defined = _special_tokens(vocabulary)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(user_defined)
    tokenizer.post_processor = _bos_eos_processor(vocabulary)
    return tokenizer


def use_sentencepiece_pipeline(tokenizer: Tokenizer, prepend_scheme: str) -> None:
    """Make `tokenizer` treat spaces as SentencePiece does.

    `prepend_scheme` adds a space before the whole text ("first"), before each part between special tokens ("always") or
    "never".
    """
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=prepend_scheme, split=False)
    tokenizer.decoder = _sentencepiece_decoder(has_space_prefix=prepend_scheme != "never")


def _sentencepiece_decoder(*, has_space_prefix: bool) -> decoders.Decoder:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_space_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    return decoders.Sequence(steps)


def _make_model(vocabulary: GGUFVocabulary) -> models.BPE:
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    if vocabulary.kind == "gpt2":
        if vocabulary.merges is None:
            raise CheckpointError("GGUF metadata tokenizer.ggml.merges is missing; a 'gpt2' tokenizer needs it")
        ignores_merges = PRE_TOKENIZERS[vocabulary.pre].ignores_merges
        return models.BPE(vocab=ids, merges=_split_merges(vocabulary.merges), ignore_merges=ignores_merges)
    merges = _derive_merges(vocabulary) if vocabulary.merges is None else _split_merges(vocabulary.merges)
    unknown = _unknown_token(vocabulary)
    unknown_text = None if unknown is None else vocabulary.tokens[unknown]
    return models.BPE(vocab=ids, merges=merges, unk_token=unknown_text, fuse_unk=True, byte_fallback=True)


def _make_pipeline(vocabulary: GGUFVocabulary) -> TextPipeline:
    if vocabulary.kind == "gpt2":
        splits = PRE_TOKENIZERS[vocabulary.pre].splits
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splits
        ]
        # The format's add_space_prefix is for SentencePiece only.
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return TextPipeline(None, pre_tokenizers.Sequence(steps), decoders.ByteLevel())
    prefix = [normalizers.Prepend("▁")] if vocabulary.adds_space_prefix else []
    # Unlike the library's Metaspace, these keep a space that the text begins with.
    normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    return TextPipeline(normalizer, None, _sentencepiece_decoder(has_space_prefix=vocabulary.adds_space_prefix))


def _unknown_token(vocabulary: GGUFVocabulary) -> int | None:
    """The id of the token that stands for text without a token."""
    unknown = vocabulary.token_ids.get("unknown")
    if unknown is None and (places := np.flatnonzero(np.asarray(vocabulary.token_types) == _UNKNOWN)).size:
        return int(places[0])
    return unknown


def _derive_merges(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    """All pairs of tokens that form another token: SentencePiece merges the pair whose result scores highest."""
    if vocabulary.scores is None:
        raise CheckpointError(
            "GGUF metadata has neither tokenizer.ggml.scores nor tokenizer.ggml.merges; a 'llama' tokenizer "
            "needs one of them"
        )
    tokens = list(vocabulary.tokens)
    results = _can_result(vocabulary)
    # If a token occurs more than once, the last one counts.
    ids = {token: index for index, token in enumerate(tokens)}
    results &= np.fromiter(map(ids.__getitem__, tokens), np.int64, len(results)) == np.arange(len(results))
    lengths = np.fromiter(map(len, tokens), np.int64, len(results))
    if (too_long := results & (lengths > _MAX_PIECE_CHARS)).any():
        index = int(too_long.argmax())
        raise CheckpointError(
            f"GGUF metadata tokenizer.ggml.tokens[{index}] has {lengths[index]} characters; at most "
            f"{_MAX_PIECE_CHARS} make sense for a 'llama' tokenizer"
        )
    return derive_merges(tokens, lengths, vocabulary.scores, np.flatnonzero(results))


def _can_result(vocabulary: GGUFVocabulary) -> npt.NDArray[np.bool_]:
    """Which tokens can be the result of a merge."""
    return ~np.isin(vocabulary.token_types, (_UNKNOWN, _CONTROL, _BYTE))


def _split_merges(merges: Sequence[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for index, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if not left or not right:
            raise CheckpointError(
                f"GGUF metadata tokenizer.ggml.merges[{index}] is {merge!r}; expected two tokens and a space"
            )
        pairs.append((left, right))
    return pairs


def _special_tokens(vocabulary: GGUFVocabulary) -> tuple[list[AddedToken], list[AddedToken]]:
    """Control tokens, which decoding can skip, and user-defined tokens."""
    types = np.asarray(vocabulary.token_types)
    is_special = types == _CONTROL
    is_special[list(vocabulary.token_ids.values())] = True

    def added(which: npt.NDArray[np.bool_], *, special: bool) -> list[AddedToken]:
        indices = np.flatnonzero(which).tolist()
        return [AddedToken(vocabulary.tokens[index], normalized=False, special=special) for index in indices]

    return added(is_special, special=True), added((types == _USER_DEFINED) & ~is_special, special=False)


def _adds(vocabulary: GGUFVocabulary) -> dict[str, bool]:
    return {"bos": vocabulary.adds_bos, "eos": vocabulary.adds_eos}


def _bos_eos_processor(vocabulary: GGUFVocabulary) -> processors.TemplateProcessing:
    # Roles replace the tokens' texts, which may contain template syntax.
    bos, eos = ([name] if adds else [] for name, adds in _adds(vocabulary).items())
    return processors.TemplateProcessing(
        single=[*bos, "$A", *eos],
        special_tokens=[
            {"id": name, "ids": [vocabulary.token_ids[name]], "tokens": [vocabulary.token(name)]} for name in bos + eos
        ],
    )


def _token_ids(metadata: Mapping[str, Any], num_tokens: int) -> dict[str, int]:
    token_ids = {}
    for name in ("bos", "eos", "unknown", "padding"):
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = _value(metadata, key, int)
        if token_id is None or token_id == _NO_TOKEN:
            continue
        if not 0 <= token_id < num_tokens:
            raise CheckpointError(f"GGUF metadata {key} is {token_id}, but the vocabulary has {num_tokens} tokens")
        token_ids[name] = token_id
    return token_ids


def _adds_token(metadata: Mapping[str, Any], name: str, token_ids: Mapping[str, int], default: bool) -> bool:
    """Whether `encode` adds the bos or eos token."""
    adds = _value(metadata, f"tokenizer.ggml.add_{name}_token", bool)
    if adds and name not in token_ids:
        raise CheckpointError(
            f"GGUF metadata sets tokenizer.ggml.add_{name}_token but has no tokenizer.ggml.{name}_token_id"
        )
    return name in token_ids and (default if adds is None else adds)


def _value(metadata: Mapping[str, Any], key: str, kind: type) -> Any:
    """A scalar of the metadata, or None if it is absent."""
    value = metadata.get(key)
    if value is not None and type(value) is not kind:
        raise CheckpointError(f"GGUF metadata {key} has type {type(value).__name__}; expected {kind.__name__}")
    return value


def _list(metadata: Mapping[str, Any], name: str, kind: type | tuple[type, ...], length: int | None = None) -> Any:
    """A list or an array of the metadata with items of `kind`, or None if it is absent."""
    key = f"tokenizer.ggml.{name}"
    values = metadata.get(key)
    if values is None:
        return None
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not _has_items(values, kinds):
        raise CheckpointError(f"GGUF metadata {key} must be a list of {' or '.join(kind.__name__ for kind in kinds)}")
    if length is not None and len(values) != length:
        raise CheckpointError(f"GGUF metadata {key} has {len(values)} items for {length} tokens")
    return values


def _has_items(values: Any, kinds: Sequence[type]) -> bool:
    if isinstance(values, np.ndarray):
        return {"i": int, "u": int, "f": float}.get(values.dtype.kind) in kinds
    if type(values).__name__ == "Strings":
        return str in kinds
    return isinstance(values, list) and {type(value) for value in values} <= set(kinds)
