"""Checkpoints quantised for GPUs: read as the values that they stand for, whole, in parts and packed, or refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference_logits
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.entrypoints.convert import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from gguf import GGMLQuantizationType, dequantize
from quantized_files import FORMATS, OWN_FORMATS, change_config, config_of, write_checkpoint
from safetensors.torch import load_file, save_file

from infinilm import InferEngine
from infinilm.distributed import DistConfig
from infinilm.errors import CheckpointError
from infinilm.executor import rank_worker
from infinilm.loading.checkpoint import open_checkpoint

Written = dict[str, tuple[Path, Any]]
"""Checkpoints and their references, by format."""
TOKENS = list(range(3, 40))
NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return {name: write_checkpoint(name, tmp_path_factory.mktemp(name)) for name in FORMATS}


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_decoded_weights(written: Written, name: str) -> None:
    path, reference = written[name]
    expected = reference_logits(reference, TOKENS)
    with InferEngine(path, device_type="cpu", quantization="none") as engine:
        found = engine.forward(input_ids=[TOKENS], return_logits=True).logits
    assert found is not None
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["fp8-blocks", "awq", "gptq-order", "compressed-int4-zeros"])
def test_two_ranks_read_their_shares(written: Written, name: str) -> None:
    path, reference = written[name]
    with InferEngine(path, DistConfig(2), "cpu", quantization="none") as engine:
        found = engine.forward(input_ids=[TOKENS], return_logits=True).logits
    assert found is not None
    torch.testing.assert_close(found[0], reference_logits(reference, TOKENS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_any_part_can_be_read(written: Written, name: str) -> None:
    path, reference = written[name]
    stored = open_checkpoint(path)
    expected = reference.get_parameter(NAME).detach()
    assert stored.shapes().keys() == reference.state_dict().keys()
    assert stored.formats()[NAME] == ("FP8" if "fp8" in name else "INT4")
    assert stored.formats()["model.layers.1.mlp.down_proj.weight"] == "F32"
    torch.testing.assert_close(stored.read(NAME), expected, atol=1e-7, rtol=1e-6)
    part = torch.empty(21, 45)
    stored.read_into(NAME, part, (13, 27))
    torch.testing.assert_close(part, expected[13:34, 27:72], atol=1e-7, rtol=1e-6)
    stored.close()


def test_awq_is_written_as_its_converter_reads_it() -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    tensors, values = FORMATS["awq"].write(weight)
    converter = AutoAWQConverter(bits=4, group_size=32, zero_point=True, version="gemm", ignore=[], targets=["re:.*"])
    converted = converter.process({f"layer.{name}": tensor.contiguous() for name, tensor in tensors.items()})
    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    plain = {name.removeprefix("layer."): tensor for name, tensor in converted.items()}
    plain["weight_scale"] = plain["weight_scale"].float()
    found = PackedQuantizationCompressor.decompress(plain, scheme)["weight"]
    torch.testing.assert_close(found, values)


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("compressed")])
def test_checkpoints_of_the_benchmarks_are_as_the_library_writes_them(name: str) -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    (own, own_values), (tensors, values) = OWN_FORMATS[name].write(weight), FORMATS[name].write(weight)
    assert own.keys() == tensors.keys()
    for end, tensor in tensors.items():
        torch.testing.assert_close(own[end].float(), tensor.float(), atol=0, rtol=0)
    torch.testing.assert_close(own_values, values)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("gptq", "Q4_0"),
        ("gptq-zeros", "Q5_0"),
        ("gptq-v2", "Q5_0"),
        ("awq", "Q5_0"),
        ("compressed-int4", "Q4_0"),
        ("compressed-int4-zeros", "Q5_0"),
        ("compressed-int4-rows", "Q4_0"),
        ("gptq-order", None),
    ],
)
def test_blocks_of_the_native_library_have_the_same_values(written: Written, name: str, format: str | None) -> None:
    path, reference = written[name]
    stored = open_checkpoint(path)
    assert stored.packed_format(NAME, is_native=True) == format
    assert stored.packed_format("model.norm.weight", is_native=True) is None
    if format is not None:
        ((blocks, rows),) = stored.read_packed(NAME, format, (16, 32), (24, 64))
        values = torch.from_numpy(dequantize(blocks, GGMLQuantizationType[format]))
        assert rows.tolist() == list(range(24))
        torch.testing.assert_close(values, reference.get_parameter(NAME).detach()[16:40, 32:96], atol=0, rtol=0)
    stored.close()


def test_scales_that_float16_does_not_hold_are_not_repacked(written: Written, tmp_path: Path) -> None:
    weights, scales = altered(written["compressed-int4"][0], tmp_path), NAME + "_scale"
    stored = weights[scales]
    for factor, format in ((1.0, "Q4_0"), (2.0**-20, None)):
        weights[scales] = stored.bfloat16() * factor
        save_file(weights, tmp_path / "model.safetensors")
        assert open_checkpoint(tmp_path).packed_format(NAME, is_native=True) == format


def with_first(tensor: torch.Tensor, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[0] = value
    return tensor


def altered(path: Path, target: Path) -> dict[str, torch.Tensor]:
    (target / "config.json").write_text((path / "config.json").read_text())
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("awq", ("scales", lambda t: t[:-1]), r"down_proj.scales' has shape \[3, 64\], 3 groups; for 128 .* must be 4"),
        ("awq", ("qzeros", lambda t: t[:, :-1]), r"qzeros' has shape \[4, 7\]; .* groups of 32 it must be \[4, 8\]"),
        ("awq", ("qzeros", None), r"there is no '.*down_proj.qzeros'"),
        ("awq", ("qweight", lambda t: t[:, :-1]), r"qweight' has shape \[128, 7\]; .* must be \[128, 8\]"),
        ("awq", ("qweight", lambda t: t.float()), "qweight' has type F32; it must be I32"),
        ("gptq", ("scales", None), r"down_proj.qweight' \[16, 64\] has no scales: there is no '.*down_proj.scales'"),
        ("gptq-order", ("g_idx", None), r"there is no '.*down_proj.g_idx'"),
        ("gptq-order", ("g_idx", lambda t: t[:-8]), r"g_idx' has shape \[120\]; .* it must be \[128\]"),
        ("gptq-order", ("g_idx", lambda t: t + 1), "g_idx' has groups from 1 to 4, and there are 4, from 0 on"),
        ("fp8-blocks", ("weight_scale_inv", lambda t: t[:1]), r"weight_scale_inv' has shape \[1, 4\]; .* \[2, 4\]"),
        ("fp8-blocks", ("weight_scale_inv", None), r"weight', F8_E4M3 \[64, 128\], has no scales: there is no"),
        ("compressed-fp8-channel", ("weight_scale", lambda t: t[1:]), r"\[63, 1\]; .* must be \[64, 1\] or"),
        ("compressed-int4-zeros", ("weight_zero_point", None), "there is no '.*weight_zero_point'"),
        ("compressed-int4", ("weight_packed", lambda t: t.long()), "weight_packed' has type I64; it must be I32"),
        ("compressed-int4", ("weight_shape", lambda t: t + 1), r"weight_shape' says \[65, 129\], .* shape \[64, 128\]"),
        ("awq", ("scales", lambda t: t[:, :-1]), r"qweight' has shape \[128, 8\]; .* 63 outputs .* must be \[128, 7\]"),
        ("awq", ("scales", lambda t: with_first(t, math.nan)), r"down_proj.scales' of shape \[4, 64\]: 1 of 256 .*nan"),
        (
            "gptq",
            ("scales", lambda t: with_first(t, math.inf)),
            r"1 of 256 scales are NaN or infinite, .* \[0, 0\]: inf",
        ),
        ("compressed-int4-rows", ("weight_scale", torch.zeros_like), "weight_scale' .*: 64 of 64 scales are zero, the"),
        (
            "fp8-blocks",
            ("weight_scale_inv", lambda t: with_first(t, -1)),
            r"1 of 8 scales .*negative, .* \[0, 0\]: -1.0",
        ),
        ("fp8-tensor", ("weight_scale", lambda t: t * 0), r"weight_scale' of shape \[\]: 1 of 1 scales are zero"),
        ("fp8-tensor", ("weight", lambda t: t.bfloat16()), r"1 unexpected:\n  .*down_proj.weight_scale \[\]"),
        ("fp8-tensor", ("weight", lambda t: t.float().flatten().to(t.dtype)), r"F8_E4M3 \[8192\]: it must be a matrix"),
    ],
)
def test_bad_tensors_are_refused_by_name_before_anything_is_loaded(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, name: str, part: tuple[str, Any], message: str
) -> None:
    monkeypatch.setattr(rank_worker, "load_weights", lambda *_args, **_options: pytest.fail("weights are loaded"))
    (end, change), weights = part, altered(written[name][0], tmp_path)
    own = NAME.removesuffix("weight") + end
    stored = weights.pop(own)
    if change is not None:
        weights[own] = change(stored).contiguous()
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        InferEngine(tmp_path, device_type="cpu")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "weights quantised by 'bitsandbytes' can't be read; known are fp8, awq"),
        ({**config_of("awq"), "bits": 3}, "bits=3 can't be read; known: 4"),
        ({**config_of("awq"), "version": "gemv"}, "version='gemv' can't be read; known: 'gemm'"),
        ({**config_of("awq"), "zero_point": False}, "zero_point=False can't be read"),
        ({**config_of("gptq"), "bits": 8}, "bits=8 can't be read"),
        ({**config_of("gptq"), "group_size": 24}, "group_size=24 can't be read; known are multiples of 16"),
        ({**config_of("gptq"), "group_size": 64}, "4 groups; for 128 inputs in groups of 64 there must be 2"),
        ({**config_of("gptq"), "checkpoint_format": "marlin"}, "checkpoint_format='marlin' can't be read"),
        ({**config_of("gptq"), "dynamic": {"+:.*": {"bits": 8}}}, "dynamic=.* can't be read"),
        ({**config_of("fp8-tensor"), "fmt": "e5m2"}, "fmt='e5m2' can't be read"),
        ({**config_of("fp8-tensor"), "activation_scheme": "static_token"}, "activation_scheme='static_token'"),
        ({**config_of("fp8-tensor"), "weight_block_size": [128]}, r"weight_block_size=\[128\] must be two positive"),
        ({"quant_method": "compressed-tensors"}, "config_groups=None must describe groups"),
    ],
)
def test_unknown_schemes_are_refused_before_anything_is_read(
    written: Written, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    save_file(altered(written["gptq"][0], tmp_path), tmp_path / "model.safetensors")
    change_config(tmp_path, quantization_config=config)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"num_bits": 8}, r"config_groups.group_0.weights.num_bits=8 can't be read; known: 4"),
        ({"type": "uint"}, "weights.type='uint' can't be read"),
        ({"strategy": "tensor_group"}, "strategy='tensor_group' can't be read; known: 'channel', 'group'"),
        ({"type": "float", "num_bits": 4}, "num_bits=4 can't be read; known: 8"),
        ({"type": "float", "num_bits": 8}, "format='pack-quantized' can't be read; known: 'float-quantized'"),
    ],
)
def test_unknown_groups_are_refused(written: Written, tmp_path: Path, weights: dict[str, Any], message: str) -> None:
    save_file(altered(written["compressed-int4"][0], tmp_path), tmp_path / "model.safetensors")
    config = config_of("compressed-int4")
    group = config["config_groups"]["group_0"]
    changed = {**config, "config_groups": {"group_0": {**group, "weights": {**group["weights"], **weights}}}}
    change_config(tmp_path, quantization_config=changed)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_two_matrices_of_one_name_are_refused(written: Written, tmp_path: Path) -> None:
    weights = altered(written["gptq"][0], tmp_path) | {NAME: torch.zeros(64, 128)}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj.qweight' and '.*down_proj.weight' are the same matrix"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("version", "zero"), [("gptq_v2", 7), ("gptq", 8)])
def test_the_wrong_version_of_gptq_is_refused_where_it_shows(
    written: Written, tmp_path: Path, version: str, zero: int
) -> None:
    """Symmetric matrices have zeros of 8, which version 1 stores as 7."""
    weights = altered(written["gptq"][0], tmp_path)
    words = int.from_bytes(bytes([zero * 0x11] * 4), "little", signed=True)
    weights |= {name: torch.full_like(zeros, words) for name, zeros in weights.items() if name.endswith("qzeros")}
    save_file(weights, tmp_path / "model.safetensors")
    change_config(tmp_path, quantization_config={**config_of("gptq"), "checkpoint_format": version})
    found = 7 if version == "gptq_v2" else 9
    with pytest.raises(
        CheckpointError, match=rf"qzeros': all zero points are {found}, and with sym=True they must be 8"
    ):
        InferEngine(tmp_path, device_type="cpu")


def test_negative_scales_of_integers_are_read(written: Written, tmp_path: Path) -> None:
    """AutoRound writes them."""
    path, reference = written["compressed-int4"]
    weights = altered(path, tmp_path)
    scales = NAME + "_scale"
    weights[scales] = -weights[scales]
    save_file(weights, tmp_path / "model.safetensors")
    stored = open_checkpoint(tmp_path)
    stored.check_values()
    torch.testing.assert_close(stored.read(NAME), -reference.get_parameter(NAME).detach(), atol=1e-7, rtol=1e-6)
    assert stored.packed_format(NAME, is_native=True) == "Q4_0"
    stored.close()


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_of_0_are_ignored(written: Written, tmp_path: Path, value: float) -> None:
    """Tools for GPTQ give every layer a bias."""
    path, reference = written["gptq"]
    weights = altered(path, tmp_path) | {"model.layers.0.mlp.up_proj.bias": torch.full((128,), value)}
    save_file(weights, tmp_path / "model.safetensors")
    if value:
        with pytest.raises(CheckpointError, match=r"1 unexpected:\n  model.layers.0.mlp.up_proj.bias \[128\]"):
            InferEngine(tmp_path, device_type="cpu")
        return
    with InferEngine(tmp_path, device_type="cpu", quantization="none") as engine:
        found = engine.forward(input_ids=[TOKENS], return_logits=True).logits
    assert found is not None
    torch.testing.assert_close(found[0], reference_logits(reference, TOKENS), atol=1e-4, rtol=0)
