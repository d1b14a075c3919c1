"""Tokenizers of llama.cpp's own vocabulary files give its golden ids, or are refused by name."""

from pathlib import Path

import pytest
from llama_cpp_data import llama_cpp_models

from infinilm.errors import CheckpointError
from infinilm.loading.gguf import GGUFFile
from infinilm.text.tokenizer import Tokenizer

LOADED = [
    *("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "mpt"),
    *("phi-3", "qwen2", "qwen35", "refact", "starcoder"),
]
WITHOUT_GOLDENS = ["aquila", "baichuan", "gpt-neox"]
REFUSED = {
    "bert-bge": "tokenizer.ggml.model is 'bert'",
    "nomic-bert-moe": "tokenizer.ggml.model is 't5'",
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return llama_cpp_models()


def load(folder: Path, name: str) -> Tokenizer:
    file = GGUFFile(folder / f"ggml-vocab-{name}.gguf")
    tokenizer = Tokenizer.from_gguf(file.metadata)
    file.close()
    assert tokenizer is not None
    return tokenizer


def test_every_vocabulary_is_accounted_for(folder: Path) -> None:
    names = {path.stem.removeprefix("ggml-vocab-") for path in folder.glob("*.gguf")}
    assert names == {*LOADED, *WITHOUT_GOLDENS, *REFUSED}


@pytest.mark.parametrize("name", LOADED)
def test_ids_equal_the_goldens(name: str, folder: Path) -> None:
    tokenizer = load(folder, name)
    file = folder / f"ggml-vocab-{name}.gguf.inp"
    texts = file.read_bytes().decode().removesuffix("\n__ggml_vocab_test__\n").split("\n__ggml_vocab_test__\n")
    lines = (folder / f"ggml-vocab-{name}.gguf.out").read_text().splitlines()
    goldens = [[int(token_id) for token_id in line.split()] for line in lines]
    assert len(goldens) >= 46
    for text, golden in zip(texts, goldens, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == golden, text
        assert tokenizer.decode(golden) == text


@pytest.mark.parametrize("name", WITHOUT_GOLDENS)
def test_other_vocabularies_keep_the_text(name: str, folder: Path) -> None:
    tokenizer = load(folder, name)
    for text in ("Hello, world!", " 日本 €\n", "  x = 12345"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_vocabularies_are_refused_by_name(name: str, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=REFUSED[name]):
        load(folder, name)
