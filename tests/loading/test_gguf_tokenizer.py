"""Tokenizers built from GGUF metadata give the ids transformers gives for the same file."""

import itertools
import json
import random
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import pytest
import tokenizers
from narrow import present
from tokenizers import models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from infinilm.errors import CheckpointError
from infinilm.loading.gguf import GGUFFile
from infinilm.loading.sources import resolve
from infinilm.text.gguf_tokenizer import PRE_TOKENIZERS, GGUFVocabulary, build_library_tokenizer
from infinilm.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

SAMPLES = [
    "",
    "Hello, world!",
    "The quick brown fox doesn't jump; it's we'LL and I'VE.",
    "def f(x: int) -> int:\n\treturn x ** 2  # squared\n\n\nclass A:\n    pass\n",
    '{"key": [1, 2.5e-3, null], "nested": {"a": "b\\n"}}',
    "3.14159 2024-01-02 1,000,000 0x1F 42nd 7",
    "٣١٤ २०२४ ½ ² ① Ⅷ",
    "🙂 👩‍👩‍👧‍👦 🇨🇭 ❤️ 🥨🥨",
    "日本語の文章です。中文也可以，한국어도.",
    "مرحبا بالعالم، كيف حالك؟ שלום",
    "Привет, мир! Ça va? naïve café Straße ǅungla",
    "e\u0301 and é, \u212b",
    " leading", "trailing ", "  two", "\t tabs \t\t", "\n\n  \n x", "a    b      c", "   ", "\r\n\r\n",
    "\u00a0\u3000\u2009x",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|>more <repo_name> and <not_special> <|im_start", "</s><s> hello</s> world <unk>",
    "\x00\x01\x7f\x80", "�", "https://example.org/a?b=c&d=%20#e", "!!!???...---___===", "ﬁ ﬂ ﷺ",
]  # fmt: skip


def random_texts(count: int) -> list[str]:
    """Strings of characters from many scripts, with runs of spaces and special tokens among them."""
    rng = random.Random(0)
    alphabet = [*"".join(SAMPLES), *map(chr, range(0x20, 0x250)), "  ", "   ", "<|im_end|>", "</s>", "hello"]
    return ["".join(rng.choices(alphabet, k=rng.randint(1, 30))) for _ in range(count)]


TEXTS = SAMPLES + random_texts(400)


def write_gguf(path: Path, metadata: Mapping[str, Any], architecture: str = "llama") -> Path:
    """Write a file without tensors, with the least a reader needs to know about the model."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@cache
def byte_level_metadata(pre: str) -> MappingProxyType[str, Any]:
    """A byte-level vocabulary trained on the samples, cut the way `pre` says."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = tokenizers.Tokenizer(models.BPE())
    steps = [pre_tokenizers.Split(tokenizers.Regex(split), "isolated") for split in PRE_TOKENIZERS[pre].splits]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level])
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SAMPLES * 3, trainer)
    model = json_model(backend)
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [CONTROL if token in specials else NORMAL for token in tokens]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "<think>", "[PAD701]"],
        "tokenizer.ggml.token_type": [*types, USER_DEFINED, UNUSED],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return MappingProxyType(metadata)


def json_model(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    model: dict[str, Any] = json.loads(backend.to_str())["model"]
    return model


@cache
def sentencepiece_metadata() -> MappingProxyType[str, Any]:
    """A SentencePiece-like vocabulary: bytes, characters, and pieces scored by rank, several ways to each."""
    pieces = [*"▁abcdeghilnorstuw.,!<>/_日本"]
    pieces += ["▁hello", "▁world", "▁the", "▁is", "ello", "lo", "ll", "he", "el", "hel", "▁t", "▁th", "in", "ing"]
    pieces += ["▁ing", "tion", "st", "▁st", "er", "▁he", "▁hell", "llo", "▁▁", "▁▁▁▁", "▁w", "or", "▁wor", "ld", "日本"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<tool>"]
    scores = [0.0] * 259 + [-float(rank // 2) for rank in range(len(pieces))] + [0.0]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces) + [USER_DEFINED]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return MappingProxyType(metadata)


def build(metadata: Mapping[str, Any]) -> Tokenizer:
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def smollm2_path() -> Path:
    return Path(resolve(None))


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return build(GGUFFile(smollm2_path).metadata)


@pytest.fixture(scope="module")
def smollm2_reference(smollm2_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)


def test_smollm2_equals_transformers(smollm2: Tokenizer, smollm2_reference: Any) -> None:
    """On all texts but those where transformers overlooks that digits are cut off first ("smollm")."""
    texts = [text for text in TEXTS if not has_digit_after_spaces(text)]
    assert len(texts) > 300
    for text in texts:
        ids = smollm2.encode(text)
        assert ids == smollm2_reference(text).input_ids, text
        assert smollm2.decode(ids) == smollm2_reference.decode(ids, skip_special_tokens=True), text


def has_digit_after_spaces(text: str) -> bool:
    """Whether spaces run up to a number: two ASCII spaces, or one before a numeral that is not a digit."""
    return any(
        after.isnumeric() and before.isspace() and (not after.isascii() or text[index - 1 : index].isspace())
        for index, (before, after) in enumerate(itertools.pairwise(text))
    )


def test_smollm2_equals_its_published_pipeline(smollm2: Tokenizer, smollm2_reference: Any) -> None:
    """The model's own tokenizer.json cuts off single digits, then splits as GPT-2 does."""
    reference = tokenizers.Tokenizer.from_str(smollm2_reference.backend_tokenizer.to_str())
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS:
        assert smollm2.encode(text) == reference.encode(text).ids, text
    assert [smollm2.content(i) for i in smollm2.encode("  12")] == ["ĠĠ", "1", "2"]


def test_smollm2_special_tokens(smollm2: Tokenizer) -> None:
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (smollm2.bos_token_id, smollm2.eos_token_id) == (1, 2)
    assert smollm2.special_ids == set(range(17))
    assert smollm2.vocab_size == 49152
    assert smollm2.encode("<|im_start|>user") == [1, smollm2.encode("user")[0]]
    assert smollm2.decode([1, 2]) == ""
    assert smollm2.decode([1, 2], skip_special_tokens=False) == "<|im_start|><|im_end|>"


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_byte_level_kinds_equal_transformers(pre: str, tmp_path: Path) -> None:
    metadata = byte_level_metadata(pre)
    path = write_gguf(tmp_path / "model.gguf", metadata, architecture="qwen2" if pre == "qwen2" else "llama")
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    tokenizer = build(GGUFFile(path).metadata)
    for text in [*TEXTS, "a<think>b </think>", "[PAD701]"]:
        assert tokenizer.encode(text, add_special_tokens=False) == reference(text).input_ids, text


def test_pre_tokenizers_differ_where_they_should() -> None:
    def words(pre: str, text: str) -> list[str]:
        backend = build_library_tokenizer(present(GGUFVocabulary.from_metadata(byte_level_metadata(pre))))
        return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]

    assert words("gpt-2", "a 1234\n\n") == ["a", "Ġ1234", "ĊĊ"]
    assert words("smollm", "a 1234\n\n") == ["a", "Ġ", "1", "2", "3", "4", "ĊĊ"]
    assert words("llama-bpe", "a 1234\n\n") == ["a", "Ġ", "123", "4", "ĊĊ"]
    assert words("qwen2", "a 1234\n\n") == ["a", "Ġ", "1", "2", "3", "4", "ĊĊ"]
    assert words("tekken", "getHTTPResponse 12") == ["get", "HTTPResponse", "Ġ", "1", "2"]
    assert words("gpt-4o", "We'Ve getHTTP 1234 a/\n/") == ["We'Ve", "Ġget", "HTTP", "Ġ", "123", "4", "Ġa", "/Ċ/"]
    assert words("tekken", "We'Ve") == ["We", "'Ve"]
    assert words("glm4", "We'Ve 1234") == ["We", "'Ve", "Ġ", "123", "4"]
    assert words("deepseek-v3", "a 1234.b (x) x\n") == ["a", "Ġ", "123", "4", ".b", "Ġ(", "x", ")", "Ġx", "Ċ"]
    assert words("deepseek-v3", "ab\u65e5\u672c") == ["ab", *words("gpt-2", "\u65e5\u672c")]
    assert words("deepseek-llm", "a 12 .b\n\n") == ["a", "Ġ", "12", "Ġ.", "b", "Ċ", "Ċ"]
    assert words("falcon", "a.b 12345") == ["a", ".", "b", "Ġ", "123", "45"]


def test_qwen2_text_is_not_normalised() -> None:
    """llama.cpp does not, nor does transformers for GGUF files."""
    tokenizer = build(byte_level_metadata("qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("e") + tokenizer.encode("\u0301")
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "e\u0301"


def test_llama3_words_in_the_vocabulary_are_taken_whole() -> None:
    """Merges alone could never reach the word; the published tokenizer of Llama 3 takes it all the same."""
    metadata = dict(byte_level_metadata("llama-bpe"))
    tokens = [*metadata["tokenizer.ggml.tokens"], "xylophone"]
    metadata = metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [NORMAL] * len(tokens)}
    assert build(metadata).encode("xylophone", add_special_tokens=False) == [len(tokens) - 1]
    assert len(build(metadata | {"tokenizer.ggml.pre": "gpt-2"}).encode("xylophone")) > 1


@pytest.mark.parametrize("pre", {kind: name for name, kind in PRE_TOKENIZERS.items()}.values())
def test_byte_level_text_survives(pre: str) -> None:
    tokenizer = build(byte_level_metadata(pre) | {"tokenizer.ggml.add_bos_token": False})
    for text in SAMPLES:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def llama_cpp_ids(metadata: Mapping[str, Any], text: str) -> list[int]:
    """What llama.cpp does with a SentencePiece vocabulary: a space before each part of a text between special tokens,
    then the best-scored pair of neighbours is merged for as long as there is one, bytes for what remains."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    whole = [token for token, kind in zip(tokens, types, strict=True) if kind in (UNKNOWN, CONTROL, USER_DEFINED)]
    ids = {token: index for index, token in enumerate(tokens)}
    result: list[int] = []
    for part in filter(None, re.split(f"({'|'.join(map(re.escape, whole))})", text)):
        if part in whole:
            result.append(ids[part])
            continue
        symbols = list("▁" + part.replace(" ", "▁"))
        while True:
            pairs = [(index, left + right) for index, (left, right) in enumerate(itertools.pairwise(symbols))]
            merges = [(metadata["tokenizer.ggml.scores"][ids[pair]], -index) for index, pair in pairs if pair in ids]
            if not merges:
                break
            index = -max(merges)[1]
            symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]
        for symbol in symbols:
            result += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return result


def sentencepiece_texts() -> list[str]:
    rng = random.Random(1)
    words = ["hello", "world", "the", "is", "ing", "tion", " ", "  ", "</s>", "<tool>", "日本", "€", "\n", "st", "ll"]
    return TEXTS + ["".join(rng.choices(words, k=rng.randint(1, 9))) for _ in range(300)]


def test_sentencepiece_equals_llama_cpp() -> None:
    scores = [-float(rank) for rank in range(len(sentencepiece_metadata()["tokenizer.ggml.tokens"]))]
    metadata = {**sentencepiece_metadata(), "tokenizer.ggml.scores": scores}
    tokenizer = build(metadata)
    for text in sentencepiece_texts():
        assert tokenizer.encode(text, add_special_tokens=False) == llama_cpp_ids(metadata, text), text


@pytest.mark.parametrize("has_merges", [False, True])
def test_sentencepiece_equals_transformers(has_merges: bool, tmp_path: Path) -> None:
    """Part by part: transformers puts no space before a part that has one, nor before any but the first."""
    metadata = dict(sentencepiece_metadata())
    if has_merges:
        merges = ["▁ t", "h e", "▁t he", "l l", "he ll", "hell o", "l o"]
        tokens = [*metadata["tokenizer.ggml.tokens"], "▁the", "hell", "hello", "▁t"]
        metadata = metadata | {
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0] * len(tokens),
            "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], 1, 1, 1, 1],
            "tokenizer.ggml.merges": merges,
        }
    path = write_gguf(tmp_path / "model.gguf", metadata)
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    tokenizer = build(GGUFFile(path).metadata)
    for text in sentencepiece_texts():
        for part in re.split("<unk>|</?s>|<tool>", text):
            if not part.startswith((" ", "▁")):
                ids = tokenizer.encode(part, add_special_tokens=False)
                assert ids == reference(part, add_special_tokens=False).input_ids, part
                assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True) == part, part


def test_sentencepiece_keeps_a_space_at_the_beginning() -> None:
    tokenizer = build(sentencepiece_metadata())
    for text in (" the", "  the", " ", "</s> the"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)).endswith(text.removeprefix("</s>"))
    assert [tokenizer.content(i) for i in tokenizer.encode("a</s>the")] == ["<s>", "▁", "a", "</s>", "▁the"]


def test_sentencepiece_pieces_of_equal_score_equal_transformers(tmp_path: Path) -> None:
    rng = random.Random(2)
    pieces = list(dict.fromkeys("".join(rng.choices("abc▁", k=rng.randint(2, 5))) for _ in range(150)))
    tokens = ["<unk>", *"abc▁", *pieces]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(rng.randint(1, 3)) for _ in tokens],
        "tokenizer.ggml.token_type": [UNKNOWN] + [NORMAL] * (len(tokens) - 1),
        "tokenizer.ggml.unknown_token_id": 0,
    }
    path = write_gguf(tmp_path / "model.gguf", metadata)
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    tokenizer = build(metadata)
    for _ in range(500):
        text = rng.choice("abc") + "".join(rng.choices("abc ", k=rng.randint(1, 20)))
        assert tokenizer.encode(text) == reference(text, add_special_tokens=False).input_ids, text


def test_sentencepiece_merges_follow_the_scores() -> None:
    """By hand: where "lo" scores better than "ll", nothing can make "hello" any more."""
    pieces = {"▁": -9.0, "h": -9.0, "e": -9.0, "l": -9.0, "o": -9.0}
    pieces |= {"he": -1.0, "ll": -3.0, "hell": -4.0, "hello": -5.0, "▁hello": -6.0}

    def split(text: str, lo_score: float) -> list[str | None]:
        scores = {"<unk>": 0.0, **pieces, "lo": lo_score}
        metadata = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": list(scores),
            "tokenizer.ggml.scores": list(scores.values()),
            "tokenizer.ggml.token_type": [UNKNOWN] + [NORMAL] * (len(scores) - 1),
        }
        tokenizer = build(metadata)
        return [tokenizer.content(i) for i in tokenizer.encode(text)]

    assert split("hello", lo_score=-2.0) == ["▁", "he", "l", "lo"]
    assert split("hello", lo_score=-7.0) == ["▁hello"]
    assert split("hexy", lo_score=-7.0) == ["▁", "he", "<unk>"]


def test_bytes_stand_for_unknown_characters() -> None:
    tokenizer = build(sentencepiece_metadata())
    ids = tokenizer.encode("€", add_special_tokens=False)
    assert [tokenizer.content(i) for i in ids] == ["▁", "<0xE2>", "<0x82>", "<0xAC>"]
    assert [tokenizer.is_byte_token(i) for i in ids] == [False, True, True, True]
    assert [tokenizer.token(i) for i in ids] == [" ", "\\xe2", "\\x82", "\\xac"]
    assert tokenizer.decode(ids) == "€"


def test_space_prefix_is_added_only_if_the_file_says_so() -> None:
    metadata = sentencepiece_metadata()
    without = build(metadata | {"tokenizer.ggml.add_space_prefix": False})
    assert [without.content(i) for i in without.encode("the")] == ["<s>", "t", "he"]
    assert without.decode(without.encode(" the")) == " the"
    assert [build(metadata).content(i) for i in build(metadata).encode("the")] == ["<s>", "▁the"]


@pytest.mark.parametrize(
    ("kind", "flags", "expected"),
    [
        ("llama", {}, [1, "x"]),
        ("llama", {"add_bos_token": False}, ["x"]),
        ("llama", {"add_eos_token": True}, [1, "x", 2]),
        ("gpt-2", {}, ["x"]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [1, "x", 2]),
        ("llama-bpe", {}, [1, "x"]),
        ("tekken", {"add_bos_token": False}, ["x"]),
    ],
)
def test_bos_and_eos_are_put_around_text(kind: str, flags: dict[str, bool], expected: list[Any]) -> None:
    metadata = sentencepiece_metadata() if kind == "llama" else byte_level_metadata(kind)
    tokenizer = build(metadata | {f"tokenizer.ggml.{name}": value for name, value in flags.items()})
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [i for x in expected for i in (plain if x == "x" else [x])]


def test_bos_may_be_spelled_with_any_characters() -> None:
    """The library's templates give a meaning to colons, spaces and dollars."""
    metadata = dict(byte_level_metadata("gpt-2"))
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[1], tokens[2] = "<a:0 $A b>", "$B"
    metadata = metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.add_bos_token": True}
    assert build(metadata).encode("") == [1]


def test_a_role_may_have_no_token() -> None:
    tokenizer = build(byte_level_metadata("llama-bpe") | {"tokenizer.ggml.bos_token_id": 2**32 - 1})
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == (None, None)
    assert tokenizer.encode("") == []


def test_named_chat_templates() -> None:
    tokenizer = build(
        sentencepiece_metadata()
        | {
            "tokenizer.chat_template": "default {{ bos_token }}",
            "tokenizer.chat_templates": ["tool_use"],
            "tokenizer.chat_template.tool_use": "tools {{ eos_token }}",
        }
    )
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.chat_template == "default {{ bos_token }}"
    assert tokenizer.apply_chat_template(messages) == "default <s>"
    assert tokenizer.apply_chat_template(messages, tools=[]) == "tools </s>"


@pytest.mark.parametrize("metadata", [{}, {"tokenizer.ggml.model": "none"}, {"general.architecture": "llama"}])
def test_files_without_a_tokenizer_have_none(metadata: dict[str, Any]) -> None:
    assert Tokenizer.from_gguf(metadata) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'; supported are 'gpt2'"),
        ({"model": 5}, "tokenizer.ggml.model has type int; expected str"),
        ({"pre": "klingon"}, "'klingon'.*known are chatglm-bpe, .*smollm"),
        ({"tokens": None}, "tokens is missing or empty"),
        ({"tokens": []}, "tokens is missing or empty"),
        ({"tokens": "abc"}, "tokens must be a list of str"),
        ({"tokens": ["a", 5]}, "tokens must be a list of str"),
        ({"token_type": [1, 1]}, "token_type has 2 items for 3 tokens"),
        ({"token_type": [99] * 3}, r"unknown types \[99\]"),
        ({"scores": [0.0]}, "scores has 1 items for 3 tokens"),
        ({"scores": [float("nan")] * 3}, "not finite"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["ab"]}, r"merges\[0\] is 'ab'"),
        ({"merges": ["a qqqq"]}, "does not form a tokenizer"),
        ({"bos_token_id": 3}, "bos_token_id is 3, but the vocabulary has 3 tokens"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eos_token_id": True}, "eos_token_id has type bool; expected int"),
        ({"add_bos_token": 1}, "add_bos_token has type int; expected bool"),
        ({"add_eos_token": True, "eos_token_id": None}, "add_eos_token but has no .*eos_token_id"),
    ],
)
def test_bad_metadata_is_refused(changes: dict[str, Any], message: str) -> None:
    good = {"model": "gpt2", "tokens": ["a", "b", "ab"], "merges": ["a b"], "eos_token_id": 0}
    assert Tokenizer.from_gguf({f"tokenizer.ggml.{k}": v for k, v in good.items()}) is not None
    metadata = {f"tokenizer.ggml.{k}": v for k, v in (good | changes).items()}
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_gguf(metadata)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "neither tokenizer.ggml.scores nor tokenizer.ggml.merges"),
        ({"tokens": ["x" * 100_000], "scores": [0.0], "token_type": None}, "100000 characters"),
    ],
)
def test_bad_sentencepiece_metadata_is_refused(changes: dict[str, Any], message: str) -> None:
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "b"]}
    metadata |= {f"tokenizer.ggml.{k}": v for k, v in changes.items()}
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_gguf(metadata)


def test_a_chat_template_that_is_no_text_is_refused() -> None:
    with pytest.raises(CheckpointError, match="chat template 'default' is not a string"):
        Tokenizer.from_gguf(sentencepiece_metadata() | {"tokenizer.chat_template": 5})


@pytest.mark.parametrize(
    "metadata",
    [
        *(byte_level_metadata(pre) for pre in ("gpt-2", "llama-bpe")),
        sentencepiece_metadata(),
        # Unknown characters, with and without tokens of some bytes; tokens of equal text; control tokens that text
        # could merge into; a merge of an unknown token.
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [
                "<unk>",
                "a",
                "b",
                "ab",
                "<0xC3>",
                "ab",
                "abab",
                "b<unk>",
                "▁",
                "<e>",
                "<",
                "e",
                ">",
            ],
            "tokenizer.ggml.scores": [0.0, -1.0, -1.0, -2.0, 0.0, -3.0, -3.0, -1.0, -1.0, 0.0, -1.0, -1.0, -1.0],
            "tokenizer.ggml.token_type": [2, 1, 1, 1, 6, 1, 4, 1, 1, 3, 1, 1, 1],
            "tokenizer.ggml.eos_token_id": 9,
            "tokenizer.ggml.add_eos_token": True,
        },
    ],
)
def test_the_native_tokenizer_equals_the_library(metadata: Mapping[str, Any]) -> None:
    vocabulary = present(GGUFVocabulary.from_metadata(metadata))
    ours, theirs = (
        build(metadata),
        Tokenizer(build_library_tokenizer(vocabulary), named_tokens=build(metadata).named_tokens),
    )
    rng = random.Random(3)
    mixed = [
        "".join(rng.choices(["a", "b", "ab", "é", "Ã", "日", "<e>", "e", " ", "<unk>", ">"], k=12)) for _ in range(200)
    ]
    for text in TEXTS + mixed:
        for settings in ({}, {"add_special_tokens": False}, {"parse_special_tokens": False}):
            ids = ours.encode(text, **settings)
            assert ids == theirs.encode(text, **settings), text
            assert ours.decode(ids) == theirs.decode(ids)
            assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)
    every = range(len(vocabulary.tokens) + 1)
    assert [ours.content(token_id) for token_id in every] == [theirs.content(token_id) for token_id in every]
    assert ours.special_ids == theirs.special_ids
    assert (ours.vocab_size, ours.max_token_chars) == (theirs.vocab_size, theirs.max_token_chars)
