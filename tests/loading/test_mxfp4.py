"""Experts in MXFP4: decoded as transformers' reference values, whole, in parts, and refused if they do not fit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from checkpoints import make_reference, reference_logits, save
from packing import needs_native, pack_as_on_gpus
from safetensors.torch import load_file, save_file
from torch import Tensor

from infinilm import InferEngine
from infinilm.distributed import DistConfig
from infinilm.errors import CheckpointError
from infinilm.layers.formats.experts import UnpackedExperts
from infinilm.loading.checkpoint import open_checkpoint
from infinilm.loading.gguf import GGMLType
from infinilm.loading.mxfp4 import decode, repack
from infinilm.loading.quantize import dequantize

LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
TOKENS = list(range(3, 40))


def encode(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks, scales and what they stand for, of `[experts, in, out]`."""
    groups = values.transpose(1, 2).unflatten(2, (-1, 32))  # [experts, out, in / 32, 32]
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    scaled = groups / exponents.exp2()[..., None]
    nearest = (scaled.abs()[..., None] - LEVELS).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8)
    blocks = codes[..., ::2] | (codes[..., 1::2] << 4)
    decoded = LEVELS[nearest] * scaled.sign() * exponents.exp2()[..., None]
    return blocks, (exponents + 127).to(torch.uint8), decoded.flatten(2).transpose(1, 2)


@pytest.fixture(scope="module")
def reference() -> Any:
    return make_reference("gpt-oss")


@pytest.fixture(scope="module")
def checkpoint(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference's experts are rounded, too."""
    path = save(reference, tmp_path_factory.mktemp("mxfp4"))
    weights = load_file(path / "model.safetensors")
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales, decoded = encode(weights.pop(name))
        weights |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales}
        with torch.no_grad():
            reference.get_parameter(name).copy_(decoded)
    save_file(weights, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("tp_size", [1, 2])
def test_logits_are_those_of_the_decoded_weights(checkpoint: Path, reference: Any, tp_size: int) -> None:
    with InferEngine(checkpoint, DistConfig(tp_size), "cpu", dtype="float32") as engine:
        found = engine.forward(input_ids=[TOKENS], return_logits=True).logits
    assert found is not None
    torch.testing.assert_close(found[0], reference_logits(reference, TOKENS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_experts_stay_packed_on_a_gpu(
    checkpoint: Path, reference: Any, tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed: list[UnpackedExperts] = []
    mix = UnpackedExperts.mix

    def counted(experts: UnpackedExperts, *args: Any, **options: Any) -> Tensor:
        mixed.append(experts)
        return mix(experts, *args, **options)

    monkeypatch.setattr(UnpackedExperts, "mix", counted)
    pack_as_on_gpus(monkeypatch)
    with InferEngine(checkpoint, DistConfig(tp_size), "cpu", dtype="float32") as engine:
        mixed.clear()  # those that were tried at the start
        found = engine.forward(input_ids=[TOKENS], return_logits=True).logits
    assert len(mixed) == 3  # one for each layer
    assert found is not None
    torch.testing.assert_close(found[0], reference_logits(reference, TOKENS), atol=1e-4, rtol=0)


def test_any_part_can_be_read(checkpoint: Path, reference: Any) -> None:
    stored = open_checkpoint(checkpoint)
    source, name = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.3.up_proj.weight"
    expected = reference.get_parameter(source).detach()[3, :, 1::2].t()  # lines of gate and up alternate
    assert stored.shapes()[name] == tuple(expected.shape)
    assert stored.formats()[name] == "MXFP4"
    assert not {source, f"{source}_blocks", f"{source}_scales"} & stored.shapes().keys()
    assert stored.read(name).equal(expected)
    part = torch.empty(6, 40)
    stored.read_into(name, part, (50, 17))
    assert part.equal(expected[50:56, 17:57])
    stored.close()


def repacked(codes: npt.NDArray[np.uint8], exponents: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    blocks = repack(codes, exponents, "x")
    return dequantize(blocks, GGMLType("Q5_0", 32, 22), (len(codes), codes.shape[1] * 32))


def test_the_native_librarys_form_has_the_same_values(checkpoint: Path) -> None:
    codes = np.random.default_rng(0).integers(0, 16, (40, 3, 32), dtype=np.uint8)
    exponents = np.arange(104, 144, dtype=np.uint8)[:, None].repeat(3, axis=1)  # all that a float16 can scale by
    assert np.array_equal(repacked(codes, exponents), decode(codes, exponents))
    assert not repacked(np.zeros_like(codes), np.full_like(exponents, 254)).any()
    tiny = np.full_like(exponents, 102)
    assert np.abs(repacked(codes, tiny) - decode(codes, tiny)).max() <= 2**-25
    with pytest.raises(CheckpointError, match=r"x: has numbers of 131072 or more, .* use quantization='none'"):
        repack(codes, np.full_like(exponents, 144), "x")


@needs_native
def test_experts_stay_packed_on_a_cpu(checkpoint: Path, reference: Any) -> None:
    """Their values are exact, and other matrices are dense. Activations are rounded to 16 bits, keys and values too."""
    with InferEngine(checkpoint, device_type="cpu") as engine:
        (state,) = engine.state_dict()
        found = engine.forward(input_ids=[TOKENS], return_logits=True).logits
    expected = reference.get_parameter("model.layers.0.mlp.experts.down_proj").detach()[2].t()
    assert state["model.layers.0.mlp.experts.2.down_proj.weight"].equal(expected)
    assert found is not None
    assert (found[0] - reference_logits(reference, TOKENS)).abs().mean() < 5e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.int(), r"down_proj_blocks' of shape .* it must be U8 .* the types are I32, U8"),
        (lambda t: t.fill_(255), r"down_proj_scales' of expert 0 has 255, which stands for no number"),
    ],
)
def test_scales_that_are_none_are_refused(checkpoint: Path, tmp_path: Path, change: Any, message: str) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    weights[name] = change(weights[name])
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(CheckpointError, match=message):
        InferEngine(tmp_path, device_type="cpu")


def test_blocks_without_scales_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"down_proj_blocks' of shape \[5, 64, 2, 16\], with scales of None"):
        open_checkpoint(tmp_path)
