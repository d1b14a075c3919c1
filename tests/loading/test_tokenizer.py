"""Tokenizers of Hugging Face directories give the ids transformers gives."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from infinilm.errors import CheckpointError, InvalidTypeError, InvalidValueError
from infinilm.text.tokenizer import Tokenizer

TEXTS = [
    "",
    "Hello, world! It's 12345 o'clock.",
    " leading", "  two spaces", "trailing  ", "\n\tx\n\n", "a</s>b", "</s> hello", "<s>hi</s>", "hello</s>world <pad>",
    "<|im_start|>user\nHi<|im_end|>\n", "<think> x </think>", "<extra>[IMG] x", "€ 日本語 🙂 e\u0301 ﬁ",
    "def f(x):\n    return x  # comment",
]  # fmt: skip
MESSAGES = [{"role": "user", "content": "Hi"}]


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    return backend


def sentencepiece_like() -> tokenizers.Tokenizer:
    """As converters wrote Llama 2's: a space before each part of a text, by way of a normaliser."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁helowrd"]
    merges = [("h", "e"), ("l", "l"), ("▁", "he"), ("ll", "o"), ("▁he", "llo"), ("▁", "w"), ("▁", "▁")]
    vocab = {token: index for index, token in enumerate([*tokens, *(left + right for left, right in merges)])}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    return backend


def word_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def write_directory(path: Path, backend: tokenizers.Tokenizer, model_type: str = "llama", **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    write_json(path / "tokenizer_config.json", config)
    write_json(path / "config.json", {"model_type": model_type})
    return path


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def load(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_directory(path)
    assert tokenizer is not None
    return tokenizer


def check_equal_to_transformers(path: Path) -> Tokenizer:
    tokenizer = load(path)
    reference = AutoTokenizer.from_pretrained(path)
    for text in TEXTS:
        for add_special_tokens in (True, False):
            ids = tokenizer.encode(text, add_special_tokens)
            assert ids == reference(text, add_special_tokens=add_special_tokens).input_ids, text
            for skip in (True, False):
                expected = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert tokenizer.decode(ids, skip_special_tokens=skip) == expected, text
    assert (tokenizer.bos_token, tokenizer.eos_token) == (reference.bos_token, reference.eos_token)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (reference.bos_token_id, reference.eos_token_id)
    assert tokenizer.vocab_size == len(reference)
    return tokenizer


def test_a_saved_directory_equals_transformers(tmp_path: Path) -> None:
    """Whatever transformers writes today, with its chat templates in files of their own."""
    reference = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<extra>"],
        chat_template={"default": "D{{ bos_token }}{{ pad_token }}", "tool_use": "T{{ eos_token }}"},
    )
    reference.save_pretrained(tmp_path)
    write_json(tmp_path / "config.json", {"model_type": "llama"})
    assert (tmp_path / "chat_template.jinja").is_file()
    tokenizer = check_equal_to_transformers(tmp_path)
    assert tokenizer.chat_template == "D{{ bos_token }}{{ pad_token }}"
    assert tokenizer.apply_chat_template(MESSAGES) == "D<s><pad>"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[]) == "T</s>"


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like, word_level])
@pytest.mark.parametrize("post_processor", [False, True])
def test_bos_comes_from_the_tokenizer_not_its_config(
    make: Callable[[], tokenizers.Tokenizer], post_processor: bool, tmp_path: Path
) -> None:
    backend = make()
    if post_processor:
        backend.add_special_tokens(["<s>", "</s>"])
        ids = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
        backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    path = write_directory(
        tmp_path, backend, bos_token="<s>", eos_token={"__type": "AddedToken", "content": "</s>"}, add_bos_token=True
    )
    check_equal_to_transformers(path)


@pytest.mark.parametrize("legacy", [None, True, False])
@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_llama_directories_equal_transformers(
    model_type: str, tokenizer_class: str, legacy: bool | None, tmp_path: Path
) -> None:
    config: dict[str, Any] = {
        "tokenizer_class": tokenizer_class,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    config |= {} if legacy is None else {"legacy": legacy}
    check_equal_to_transformers(write_directory(tmp_path, sentencepiece_like(), model_type, **config))


def test_a_llama_class_with_a_byte_level_vocabulary_equals_transformers(tmp_path: Path) -> None:
    config = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    check_equal_to_transformers(write_directory(tmp_path, byte_level(), **config))


def test_tokens_only_the_config_knows_equal_transformers(tmp_path: Path) -> None:
    size = byte_level().get_vocab_size()
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    path = write_directory(
        tmp_path,
        byte_level(),
        bos_token="<s>",
        eos_token="</s>",
        added_tokens_decoder={
            str(size + 1): {"content": "<think>", "special": False, **flags},
            str(size): {"content": "<extra>", "special": True, **flags, "rstrip": True},
            "3": {"content": "<|im_end|>", "special": False, **flags},
        },
    )
    tokenizer = check_equal_to_transformers(path)
    assert tokenizer.encode("<think><extra>") == [size + 1, size]
    assert size in tokenizer.special_ids
    assert size + 1 not in tokenizer.special_ids


def test_special_tokens_map_equals_transformers(tmp_path: Path) -> None:
    path = write_directory(tmp_path, byte_level(), bos_token="<|im_start|>")
    special_tokens = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False},
        "additional_special_tokens": ["[IMG]"],
    }
    write_json(path / "special_tokens_map.json", special_tokens)
    tokenizer = check_equal_to_transformers(path)
    assert tokenizer.bos_token == "<s>"
    assert tokenizer.backend.token_to_id("[IMG]") in tokenizer.special_ids


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=100, pad_token="<s>")
    tokenizer = check_equal_to_transformers(write_directory(tmp_path, backend))
    assert 3 < len(tokenizer.encode(TEXTS[1])) < 100


def test_chat_templates_are_found_wherever_they_are_written(tmp_path: Path) -> None:
    def template(**config: Any) -> str | None:
        return load(write_directory(tmp_path, word_level(), **config)).chat_template

    assert template() is None
    assert template(chat_template="plain") == "plain"
    listed = [{"name": "default", "template": "listed"}, {"name": "rag", "template": "other"}]
    assert template(chat_template=listed) == "listed"
    write_json(tmp_path / "chat_template.json", {"chat_template": "own json"})
    assert template() == "own json"
    assert template(chat_template="plain") == "plain"
    (tmp_path / "chat_template.jinja").write_text("own file", encoding="utf-8")
    assert template(chat_template="plain") == "own file"


def test_a_model_without_chat_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"no default chat template \(it has none\)"):
        load(write_directory(tmp_path, word_level())).apply_chat_template(MESSAGES)
    path = write_directory(tmp_path, word_level(), chat_template=[{"name": "rag", "template": "x"}])
    with pytest.raises(InvalidValueError, match=r"it has \['rag'\]"):
        load(path).apply_chat_template(MESSAGES)


def test_a_broken_chat_template_does_not_keep_the_tokenizer_from_loading(tmp_path: Path) -> None:
    tokenizer = load(write_directory(tmp_path, word_level(), chat_template="{% if %}"))
    assert tokenizer.encode("hello world") == [1, 2]
    with pytest.raises(CheckpointError, match="does not compile"):
        tokenizer.apply_chat_template(MESSAGES)


def test_code_in_the_directory_is_never_run(tmp_path: Path) -> None:
    path = write_directory(
        tmp_path,
        word_level(),
        tokenizer_class="EvilTokenizer",
        auto_map={"AutoTokenizer": ["tokenization_evil.EvilTokenizer", None]},
    )
    marker = tmp_path / "was_run"
    (path / "tokenization_evil.py").write_text(f"open({str(marker)!r}, 'w')\n", encoding="utf-8")
    assert load(path).encode("hello") == [1]
    assert not marker.exists()


def test_an_empty_directory_has_no_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.from_directory(tmp_path) is None


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "vocab.json"])
def test_unconverted_tokenizers_are_refused_with_the_remedy(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=rf"{name} but no tokenizer.json; convert it .*save_pretrained"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b'{"version": "1.0"', "tokenizer.json is not a valid tokenizer"),
        ("tokenizer.json", b'{"model": {"type": "Magic"}}', "tokenizer.json is not a valid tokenizer"),
        ("tokenizer.json", b"\xff\xfe\x00", "tokenizer.json is not a valid tokenizer"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json: not valid JSON"),
        ("tokenizer_config.json", b"[1]", "tokenizer_config.json: must hold a JSON object, it holds a list"),
        ("tokenizer_config.json", b'"\xff"', "tokenizer_config.json: not valid JSON"),
        ("tokenizer_config.json", b"[" * 100_000, "tokenizer_config.json: not valid JSON"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {}}}', "bad added_tokens_decoder"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": [1]}', "bad added_tokens_decoder"),
        ("tokenizer_config.json", b'{"extra_special_tokens": 5}', "bad extra_special_tokens"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "chat_template must be a string"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "x"}]}', "chat_template must be a string"),
        ("special_tokens_map.json", b"nope", "special_tokens_map.json: not valid JSON"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
    ],
)
def test_damaged_files_are_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = write_directory(tmp_path, word_level())
    (path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_directory(path)


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        Tokenizer.from_directory(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (5, InvalidTypeError, "text must be a string, not int"),
        (None, InvalidTypeError, "not NoneType"),
        (b"abc", InvalidTypeError, "not bytes"),
        (["abc"], InvalidTypeError, "not list"),
        ("ab\ud83dcd", InvalidValueError, r"lone surrogate '\\ud83d' at character 2"),
    ],
)
def test_texts_that_cannot_be_encoded(text: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Tokenizer(byte_level()).encode(text)


def test_a_vocabulary_without_its_unknown_token_is_named_as_the_cause() -> None:
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"hello": 0}, unk_token="[UNK]")))
    assert tokenizer.encode("hello") == [0]
    with pytest.raises(CheckpointError, match=r"cannot encode this text: .*\[UNK\]"):
        tokenizer.encode("world")


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([1, -1], InvalidValueError, "ids holds -1"),
        ([2**32], InvalidValueError, "ids holds 4294967296"),
        (["a"], InvalidTypeError, "sequence of integers"),
        (5, InvalidTypeError, "sequence of integers"),
    ],
)
def test_ids_that_cannot_be_decoded(ids: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Tokenizer(byte_level()).decode(ids)


def test_ids_without_a_token_have_no_text() -> None:
    tokenizer = Tokenizer(byte_level())
    assert tokenizer.decode([tokenizer.vocab_size, tokenizer.encode("a")[0], 10**6]) == "a"
    assert (tokenizer.token(10**6), tokenizer.content(10**6)) == ("", None)
    with pytest.raises(InvalidValueError, match="token_id is -1"):
        tokenizer.token(-1)


def test_single_tokens_show_the_text_they_add() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode("Hello ÿ</s>")
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "Hello ÿ</s>"
    assert [tokenizer.token(i) for i in ids] == ["Hello", " ", "\\xc3", "\\xbf", "</s>"]

    tokenizer = Tokenizer(sentencepiece_like())
    ids = tokenizer.encode("hello world€\n")
    expected = ["<s>", " hello", " w", "o", "r", "l", "d", "\\xe2", "\\x82", "\\xac", "\n"]
    assert [tokenizer.token(i) for i in ids] == expected

    tokenizer = Tokenizer(word_level())
    assert [tokenizer.token(i) for i in tokenizer.encode("hello world")] == [" hello", " world"]


def test_byte_tokens_are_those_the_decoder_treats_so() -> None:
    tokenizer = Tokenizer(sentencepiece_like())
    assert [i for i in range(tokenizer.vocab_size) if tokenizer.is_byte_token(i)] == list(range(3, 259))
    backend = sentencepiece_like()
    backend.decoder = decoders.Metaspace()
    assert not Tokenizer(backend).is_byte_token(3)
    assert Tokenizer(backend).token(3) == "<0x00>"


def test_ids_may_have_gaps() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 7}, unk_token="[UNK]"))
    assert Tokenizer(backend).vocab_size == 8


def test_encoding_is_thread_safe() -> None:
    tokenizer = Tokenizer(byte_level())
    expected = [tokenizer.encode(text) for text in TEXTS]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(tokenizer.encode, TEXTS * 50))
    assert results == expected * 50


def test_no_warning_after_a_fork(tmp_path: Path) -> None:
    """The library warns when a process forks after its thread pool has started."""
    path = write_directory(tmp_path, byte_level(), bos_token="<s>")
    program = (
        "import os, sys, pathlib\n"
        "from infinilm.text.tokenizer import Tokenizer\n"
        "tokenizer = Tokenizer.from_directory(pathlib.Path(sys.argv[1]))\n"
        "ids = tokenizer.encode('hello ' * 1000)\n"
        "tokenizer.decode(ids)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(0 if tokenizer.encode('hello ' * 1000) == ids else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        check=False,
        cwd=root,
        env=environment | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_template_is_compiled_once(tmp_path: Path) -> None:
    path = write_directory(tmp_path, word_level(), chat_template="{{ messages[0].content }}")
    tokenizer = load(path)
    shutil.rmtree(path)
    assert [tokenizer.apply_chat_template(MESSAGES) for _ in range(2)] == ["Hi", "Hi"]
    assert len(tokenizer._compiled_templates) == 1
