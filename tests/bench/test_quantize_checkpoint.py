"""Checkpoints written again in other formats, to measure accuracy with: names, shapes and values are kept, or near."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from bench.test_random_checkpoint import TINY
from gguf import GGMLQuantizationType, dequantize

from benchmarks.quantize_checkpoint import REST, formats, largest_group, write_checkpoint
from benchmarks.quantize_gguf import TYPES, WRITERS, write_gguf
from benchmarks.random_checkpoint import Q4_K, write
from infinilm.loading.checkpoint import open_checkpoint

NAME = "model.layers.1.mlp.down_proj.weight"
ERRORS = {"Q4": 0.1, "Q5": 0.05, "Q6": 0.03, "Q8": 0.01, "BF": 0.003, "F1": 0.0005}
"""The largest share of a matrix's norm that rounding may cost."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    write(TINY, directory, Q4_K)
    return directory / "model.gguf"


@pytest.mark.parametrize("name", WRITERS)
def test_blocks_are_near_what_they_are_made_of(name: str) -> None:
    values = torch.randn(16, 512, generator=torch.Generator().manual_seed(0))
    _, kind = TYPES[name]
    blocks = WRITERS[name](values.view(-1, kind.block_elements))
    found = torch.from_numpy(dequantize(blocks.view(16, -1).numpy(), GGMLQuantizationType[name]))
    assert (found - values).norm() < ERRORS[name[:2]] * values.norm()


def test_a_gguf_file_in_another_type(source: Path, tmp_path: Path) -> None:
    write_gguf(source, "Q6_K", tmp_path / "new.gguf")
    with closing(open_checkpoint(source)) as old, closing(open_checkpoint(tmp_path / "new.gguf")) as new:
        assert new.shapes() == old.shapes()
        assert new.config == old.config
        assert new.formats()[NAME] == "Q6_K"
        assert new.read("model.embed_tokens.weight").equal(old.read("model.embed_tokens.weight"))
        expected = old.read(NAME)
        assert (new.read(NAME) - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize(("name", "error"), [("fp8-blocks", 0.04), ("gptq-order", 0.2), ("mxfp4", 0.2)])
def test_a_directory_in_another_format(source: Path, tmp_path: Path, name: str, error: float) -> None:
    with closing(open_checkpoint(source)) as old:
        format = formats(largest_group(old))[name]
        write_checkpoint(old, format, tmp_path / "first")
        write_checkpoint(old, format, tmp_path / "second", tmp_path / "first" / REST)
        with closing(open_checkpoint(tmp_path / "second")) as new:
            assert new.shapes().keys() == old.shapes().keys()
            expected = old.read(NAME)
            assert 0 < (new.read(NAME) - expected).norm() < error * expected.norm()
