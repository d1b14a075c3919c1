"""Which matrices are kept quantised, by the settings and the machine."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_reference, save
from packing import needs_native

from infinilm.distributed.shard import PackedShard
from infinilm.errors import InvalidValueError
from infinilm.kernels import native
from infinilm.layers.formats import DENSE
from infinilm.loading.checkpoint import Checkpoint, open_checkpoint
from infinilm.models import LlamaConfig
from infinilm.models.auto import check_fits, outline_model
from infinilm.models.quantization import choose_formats, note_dense
from infinilm.models.registry import FAMILIES, ModelFamily

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SETTINGS: dict[str, Any] = {"quantization": None, "dtype": "auto", "device": CPU}


@pytest.fixture
def plain(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(save(make_reference("llama-gqa"), tmp_path))


@pytest.fixture
def quantized(smollm2: Path) -> Checkpoint:
    return open_checkpoint(smollm2)


@needs_native
def test_a_gguf_file_stays_as_it_is(quantized: Checkpoint) -> None:
    formats = choose_formats(quantized, "llama", **SETTINGS).by_name
    assert len(formats) == 211
    assert formats["model.embed_tokens.weight"] == "Q8_0"
    assert formats["model.layers.3.mlp.down_proj.weight"] == "Q4_1"
    assert formats == choose_formats(quantized, "llama", **{**SETTINGS, "quantization": "q4"}).by_name


@pytest.mark.parametrize(
    "settings",
    [{"quantization": "none"}, {"dtype": "float32"}, {"dtype": "bfloat16"}],
)
def test_what_makes_it_dense(settings: dict[str, Any], quantized: Checkpoint) -> None:
    assert choose_formats(quantized, "llama", **{**SETTINGS, **settings}) == DENSE


def test_a_gguf_file_stays_as_it_is_on_a_gpu(quantized: Checkpoint) -> None:
    for settings in ({"device": GPU}, {"device": GPU, "dtype": "bfloat16"}):
        formats = choose_formats(quantized, "llama", **{**SETTINGS, **settings})
        assert not formats.is_native
        assert len(formats.by_name) == 210  # all but the embedding
        assert formats.by_name["model.layers.3.mlp.down_proj.weight"] == "Q4_1"


def test_plain_matrices_are_quantised_on_a_gpu(plain: Checkpoint) -> None:
    formats = {"fp8": "FP8 row F32", "int4": "INT4 64 F16", "q8": "Q8_0", "q4": "Q4_1"}
    for quantization, format in formats.items():
        by_name = choose_formats(plain, "llama", **{**SETTINGS, "device": GPU, "quantization": quantization}).by_name
        assert by_name["model.layers.0.self_attn.q_proj.weight"] == format
        assert by_name["lm_head.weight"] == (format if quantization == "fp8" else "Q8_0")
    matrices = {name for name, shape in plain.shapes().items() if len(shape) == 2}
    assert by_name.keys() == matrices - {"model.embed_tokens.weight"}


def test_plain_matrices_stay_plain(plain: Checkpoint) -> None:
    assert choose_formats(plain, "llama", **SETTINGS) == DENSE


@needs_native
def test_plain_matrices_are_quantised_if_asked_for(plain: Checkpoint) -> None:
    formats = choose_formats(plain, "llama", **{**SETTINGS, "quantization": "q4", "dtype": "float32"}).by_name
    assert set(formats) == {name for name, shape in plain.shapes().items() if len(shape) == 2}
    outer = {"model.embed_tokens.weight", "lm_head.weight"}
    assert {name for name, format in formats.items() if format == "Q8_0"} == outer
    assert set(formats.values()) == {"Q8_0", "Q4_1"}
    formats = choose_formats(plain, "llama", **{**SETTINGS, "quantization": "fp8"}).by_name
    assert set(formats.values()) == {"FP8 row F32"}
    assert "lm_head.weight" in formats
    assert "model.embed_tokens.weight" not in formats


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"dtype": "float16", "quantization": "fp8"},
            "quantization='fp8' computes in float32, and dtype='float16'; use dtype='auto'",
        ),
        ({"dtype": "bfloat16"}, "quantization='q8' computes in float32, and dtype='bfloat16'; use dtype='auto'"),
    ],
)
def test_what_can_not_be_quantised(settings: dict[str, Any], message: str, plain: Checkpoint) -> None:
    with pytest.raises(InvalidValueError, match=message):
        choose_formats(plain, "llama", **{**SETTINGS, "quantization": "q8", **settings})


def test_without_the_native_library(plain: Checkpoint, quantized: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: None)
    assert choose_formats(quantized, "llama", **SETTINGS) == DENSE
    with pytest.raises(InvalidValueError, match=r"needs the native library.*install a C\+\+ compiler .*'none'"):
        choose_formats(plain, "llama", **{**SETTINGS, "quantization": "q8"})


def test_a_builder_that_knows_no_formats(
    plain: Checkpoint, quantized: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ModelFamily("OtherForCausalLM", LlamaConfig, lambda config, **options: None)  # type: ignore[arg-type]
    monkeypatch.setitem(FAMILIES, "other", other)
    assert choose_formats(quantized, "other", **SETTINGS) == DENSE
    with pytest.raises(InvalidValueError, match="the builder of model_type='other' has no parameter `formats`"):
        choose_formats(plain, "other", **{**SETTINGS, "quantization": "q8"})


@needs_native
def test_matrices_that_stay_dense_are_named_once(plain: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    """The MLP has 112 numbers, which are no whole blocks of 32; so have the two ranks' 56."""
    config = LlamaConfig.from_dict(plain.config)
    formats = choose_formats(plain, "llama", **{**SETTINGS, "quantization": "q8"})
    for num_ranks in (1, 2):
        targets = check_fits(plain, config, torch.float32, num_ranks, formats).weight_targets()
        dense = {name for name in formats.by_name if not isinstance(targets[name], PackedShard)}
        assert dense == {f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1)}
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            note_dense(targets, formats)
        (record,) = caplog.records
        assert record.message.startswith("2 of 16 quantised matrices are computed dense")
        assert record.message.endswith("model.layers.0.mlp.down_proj.weight, model.layers.1.mlp.down_proj.weight")
    caplog.clear()
    note_dense(outline_model(config, torch.float32).weight_targets(), DENSE)
    assert not caplog.records
