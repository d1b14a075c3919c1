"""Fixtures that several rooms' tests share."""

import os
import random
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # a core for each worker, before anybody imports torch
    os.environ.setdefault("OMP_NUM_THREADS", "1")

HAS_TORCH = find_spec("torch") is not None
"""`test_without_torch.py` runs some of the tests where there is none."""
if HAS_TORCH:
    import interpreter  # noqa: F401 # before any kernel, whichever tests are run

    from infinilm.models.cpu import avoid_false_amx

    avoid_false_amx()  # transformers' bfloat16 would die of it too

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing in the tests may wait for a network it does not need
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


# Under nohup, and in the background of a script, these are ignored, and so they would be in every process that a test
# starts. Handlers are not inherited.
for _number, _handler in ((signal.SIGHUP, lambda *_: None), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

SLOW_ROOMS = ("cluster", "examples", "fuzz", "engine", "server", "structured", "cli")
"""Their files go first: one that begins last would keep one worker busy when the others are done."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {room: place for place, room in enumerate(SLOW_ROOMS)}
    items.sort(key=lambda item: rank.get(item.path.parent.name, len(rank)))


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """A test that fails, fails again."""
    import numpy as np

    random.seed(0)
    np.random.seed(0)
    if HAS_TORCH:
        import torch

        torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama checkpoint with a byte-level tokenizer and a chat template."""
    from checkpoints import make_reference, save
    from tiny_tokenizer import save_tokenizer

    directory = tmp_path_factory.mktemp("tiny")
    save(make_reference("llama-gqa", vocab_size=300, eos_token_id=1, bos_token_id=0), directory)
    save_tokenizer(directory)
    return directory


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
def smollm2() -> Path:
    """The embedded model, fetched once."""
    from infinilm.loading.sources import resolve

    return resolve(None)


@pytest.fixture(scope="module")
def llm(tiny_dir: Path) -> Iterator["object"]:
    """An engine on the tiny checkpoint; whatever a test does to it, the next test finds it working and empty."""
    from infinilm import LLM

    with LLM(tiny_dir, num_kvcache_blocks=64) as engine:
        yield engine
