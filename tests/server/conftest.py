"""What the tests of the service share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_driver import Server, serving


@pytest.fixture(scope="session")
def long_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that can write for a while: 8,192 tokens of context."""
    from checkpoints import make_reference, save
    from tiny_tokenizer import save_tokenizer

    directory = tmp_path_factory.mktemp("served") / "tiny-model"
    save(
        make_reference("llama-gqa", vocab_size=300, eos_token_id=1, bos_token_id=0, max_position_embeddings=8192),
        directory,
    )
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def server(long_dir: Path) -> Iterator[Server]:
    """A server with the usual settings."""
    with serving(long_dir, "--num-kvcache-blocks", "2048") as running:
        yield running
