"""Checkpoints whose tensors are parts of the stored ones."""

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import make_reference, save
from safetensors.torch import load_file, save_file

from infinilm.errors import CheckpointError
from infinilm.loading.checkpoint import Checkpoint, open_checkpoint
from infinilm.loading.parts import Part, find_parts
from infinilm.loading.quantize import quantize

Q, K = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, torch.Tensor]:
    reference = make_reference("phi3")
    fused = reference.state_dict()["model.layers.1.self_attn.qkv_proj.weight"]
    return open_checkpoint(save(reference, tmp_path_factory.mktemp("phi3"))), fused


def test_fused_matrices_are_read_in_parts(phi3: tuple[Checkpoint, torch.Tensor]) -> None:
    checkpoint, fused = phi3
    assert not any("qkv_proj" in name or "gate_up" in name for name in checkpoint.shapes())
    assert (checkpoint.shapes()[Q], checkpoint.shapes()[K]) == ((64, 64), (32, 64))
    assert checkpoint.formats()[K] == "F32"
    assert checkpoint.read(K).equal(fused[64:96])
    part = torch.empty(5, 7)
    checkpoint.read_into(K, part, (3, 11))
    assert part.equal(fused[67:72, 11:18])
    blocks = np.concatenate([blocks for blocks, _ in checkpoint.read_packed(K, "Q8_0", (8, 0), (8, 64))])
    scales = torch.from_numpy(blocks.reshape(8, 2, 34)[..., :2].copy()).view(torch.float16)
    expected = fused[72:80].view(8, 2, 32).abs().amax(-1, keepdim=True) / 127
    torch.testing.assert_close(scales.float(), expected, atol=1e-5, rtol=1e-2)


def test_what_lies_outside_of_a_part_is_refused(phi3: tuple[Checkpoint, torch.Tensor]) -> None:
    checkpoint, _ = phi3
    with pytest.raises(CheckpointError, match=r"begins at \[30, 0\] does not lie inside .*k_proj"):
        checkpoint.read_into(K, torch.empty(5, 64), (30, 0))
    with pytest.raises(CheckpointError, match=r"there is no tensor 'model\.layers\.1\.self_attn\.qkv_proj\.weight'"):
        checkpoint.read("model.layers.1.self_attn.qkv_proj.weight")


def test_only_families_with_fused_matrices_are_divided(tmp_path: Path) -> None:
    shapes = {"a.self_attn.qkv_proj.weight": (12, 4), "a.self_attn.o_proj.weight": (4, 8)}
    assert find_parts(shapes, {"model_type": "llama"}).keys() == shapes.keys()
    assert find_parts(shapes, {"model_type": "phi3"})["a.self_attn.v_proj.weight"] == Part(
        "a.self_attn.qkv_proj.weight", (10,), (2, 4)
    )


@pytest.mark.parametrize(
    "shapes",
    [
        {"a.self_attn.qkv_proj.weight": (12, 4)},
        {"a.self_attn.qkv_proj.weight": (11, 4), "a.self_attn.o_proj.weight": (4, 8)},
        {"a.self_attn.qkv_proj.weight": (6, 4), "a.self_attn.o_proj.weight": (4, 8)},
        {"a.mlp.gate_up_proj.weight": (7, 4)},
        {"a.mlp.experts.gate_up_proj": (3, 7, 4)},
        {"a.mlp.experts.gate_up_proj": (10**12, 0, 4)},
    ],
)
def test_what_can_not_be_divided_is_refused(shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(CheckpointError, match=r"can't be divided into"):
        find_parts(shapes, {"model_type": "phi3"})


def test_experts_are_read_one_by_one_however_they_are_stored(tmp_path: Path) -> None:
    reference = make_reference("qwen3.5-moe-bias")
    stacked = save(reference, tmp_path / "stacked")
    apart = save(reference, tmp_path / "apart")
    checkpoint = open_checkpoint(stacked)
    names = [name for name in checkpoint.shapes() if ".mlp.experts." in name]
    assert len(names) == 2 * 5 * 3
    gate_up = reference.state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    up = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert checkpoint.read(up).equal(gate_up[3, 64:])
    part = torch.empty(5, 7)
    checkpoint.read_into(up, part, (3, 11))
    assert part.equal(gate_up[3, 67:72, 11:18])
    [(blocks, rows)] = checkpoint.read_packed(up, "Q8_0", (32, 0), (32, 64))
    assert np.array_equal(blocks, quantize(gate_up[3, 96:].numpy(), "Q8_0"))
    assert rows.tolist() == list(range(32))
    weights = {name: checkpoint.read(name) for name in names}
    file = apart / "model.safetensors"
    others = {name: weight for name, weight in load_file(file).items() if ".mlp.experts." not in name}
    save_file(others | weights, file)
    again = open_checkpoint(apart)
    assert again.shapes() == checkpoint.shapes()
    assert again.read(up).equal(weights[up])
