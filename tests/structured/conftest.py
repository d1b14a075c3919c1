"""Tokenizers to draw answers with."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from structured.structured_helpers import Source

from infinilm.loading.checkpoint import open_checkpoint
from infinilm.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Iterator[Source]:
    """A real vocabulary of 49,152 tokens."""
    checkpoint = open_checkpoint(smollm2)
    tokenizer = checkpoint.tokenizer()
    checkpoint.close()
    assert tokenizer is not None
    source = Source.of(tokenizer)
    yield source
    source.compiler.close()


@pytest.fixture(scope="module")
def tiny(tiny_dir: Path) -> Iterator[Source]:
    """300 tokens, most of them one byte, for a model with some more logits."""
    tokenizer = Tokenizer.from_directory(tiny_dir)
    assert tokenizer is not None
    source = Source.of(tokenizer, vocab_size=331)
    yield source
    source.compiler.close()
