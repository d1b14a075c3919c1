"""What the tests of batch jobs share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def batch_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose context has room for the description of tools."""
    from checkpoints import make_reference, save
    from tiny_tokenizer import save_tokenizer

    directory = tmp_path_factory.mktemp("batch") / "tiny-model"
    sizes = {"vocab_size": 300, "eos_token_id": 1, "bos_token_id": 0, "max_position_embeddings": 4096}
    save(make_reference("llama-gqa", **sizes), directory)
    save_tokenizer(directory)
    return directory
