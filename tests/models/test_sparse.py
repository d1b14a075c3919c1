"""Mixtures of experts: settings, hooks, loading, pipeline stages. Results are in test_parity.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_reference, save
from narrow import present

from infinilm import InferEngine
from infinilm.debug import HookRegistry
from infinilm.errors import CheckpointError, InvalidValueError
from infinilm.models import ModelConfig, create_model
from infinilm.models.stages import divide_layers

TOKENS = [(7 * i * i + 3 * i + 11) % 160 for i in range(20)]


@pytest.fixture(scope="module")
def reference() -> Any:
    return make_reference("qwen3-moe")


@pytest.fixture(scope="module")
def checkpoint(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference, tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[InferEngine]:
    with InferEngine(checkpoint, device_type="cpu") as engine:
        yield engine


def logits_of(engine: InferEngine) -> torch.Tensor:
    return present(engine.forward(input_ids=[TOKENS], return_logits=True).logits)


def run_with(engine: InferEngine, **hooks: Any) -> torch.Tensor:
    registry = HookRegistry()
    for name, callback in hooks.items():
        registry.register_hook(name, callback)
    engine.set_hook_registry(registry)
    try:
        return logits_of(engine)
    finally:
        engine.set_hook_registry(None)


def test_hooks_see_the_router(engine: InferEngine, reference: Any) -> None:
    seen: dict[str, torch.Tensor] = {}
    run_with(engine, **{"layer*_router_logits": lambda name, tensor, _: seen.update({name: tensor})})
    run_with(engine, **{"layer*_expert_ids": lambda name, tensor, _: seen.update({name: tensor})})
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS]), output_router_logits=True).router_logits
    for layer in range(2):
        torch.testing.assert_close(seen[f"layer{layer}_router_logits"], expected[layer], atol=1e-4, rtol=0)
        assert seen[f"layer{layer}_expert_ids"].equal(expected[layer].topk(3).indices.int())


@pytest.mark.parametrize(
    ("kind", "points"),
    [
        ("gemma4-moe", ("layer2_router_logits", "layer2_expert_ids", "layer2_mlp_gate_proj", "layer2_output")),
        ("qwen3.5-moe", ("layer2_router_logits", "layer2_expert_ids", "layer2_state", "layer2_mlp_output")),
        ("qwen3-next", ("layer0_mlp_gate_proj", "layer1_expert_ids", "layer2_state", "layer2_mlp_output")),
    ],
)
def test_watching_hybrids_changes_nothing(kind: str, points: tuple[str, ...], tmp_path: Path) -> None:
    seen: dict[str, torch.Tensor] = {}
    with InferEngine(save(make_reference(kind), tmp_path), device_type="cpu") as engine:
        watched = run_with(engine, **{"*": lambda name, tensor, _: seen.update({name: tensor})})
        torch.testing.assert_close(watched, logits_of(engine), atol=1e-5, rtol=0)
        changed = run_with(engine, layer2_expert_ids=lambda _name, ids, _layer: torch.arange(3).int().expand_as(ids))
        assert (changed - watched).abs().max() > 1e-2
    assert set(points) <= set(seen)


def test_hooks_choose_other_experts(engine: InferEngine) -> None:
    """The router's logits give ids and weights; ids alone leave the weights."""
    plain = logits_of(engine)
    favoured = torch.zeros(len(TOKENS), 8)
    favoured[:, [1, 4, 7]] = torch.tensor([30.0, 30.0, 30.0])
    by_logits = run_with(engine, layer1_router_logits=lambda *_: favoured)
    chosen = torch.tensor([[4, 7, 1]]).expand(len(TOKENS), 3)
    by_both = run_with(
        engine, layer1_router_logits=lambda *_: torch.zeros(len(TOKENS), 8), layer1_expert_ids=lambda *_: chosen
    )
    assert (by_logits - plain).abs().max() > 0.1
    torch.testing.assert_close(by_both, by_logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("bad", [[0, 1, 8], [-1, 0, 1], [2, 2, 1]])
def test_a_hook_can_only_choose_different_experts(engine: InferEngine, bad: list[int]) -> None:
    ids = torch.tensor([bad] * len(TOKENS))
    with pytest.raises(InvalidValueError, match=r"hook of layer0_expert_ids returned .* must be 3 different experts"):
        run_with(engine, layer0_expert_ids=lambda *_: ids)
    assert logits_of(engine).isfinite().all()


def settings_of(kind: str, **changes: Any) -> dict[str, Any]:
    return {**make_reference(kind).config.to_dict(), **changes}


def test_the_number_of_experts_has_two_names() -> None:
    settings = settings_of("qwen3-moe")
    number = settings.pop("num_local_experts", None) or settings.pop("num_experts")
    for name in ("num_experts", "num_local_experts"):
        config = ModelConfig.from_dict({**settings, name: number})
        assert getattr(config, "num_experts") == 8  # noqa: B009 - which ModelConfig has not
        assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen3-moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is out of range; use 1 to 8"),
        ("qwen3-moe", {"mlp_only_layers": 1}, "mlp_only_layers=1 must be a list"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ("qwen3-moe", {"moe_intermediate_size": 0}, "moe_intermediate_size=0"),
        ("qwen3-moe", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("mixtral", {"num_local_experts": 0}, "num_experts=0"),
    ],
)
def test_bad_settings_are_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidValueError, CheckpointError), match=message):
        ModelConfig.from_dict(settings_of(kind, **changes))


def test_stages_count_the_bytes_of_experts() -> None:
    """The last of four layers is sparse, and each of its experts is as large as the MLP of the others."""
    own = {"num_hidden_layers": 4, "mlp_only_layers": [0, 1, 2], "intermediate_size": 64, "vocab_size": 16}
    weights = create_model(ModelConfig.from_dict(settings_of("qwen3-moe", **own)), device="meta").weight_targets()
    stages = divide_layers(weights, 4, 2, is_tied=True)
    assert [list(stage.layers) for stage in stages] == [[0, 1, 2], [3]]


def test_a_missing_expert_is_named(checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"1 missing:\n  model.layers.1.mlp.experts.5.up_proj.weight \[64, 64\]"):
        InferEngine(tmp_path, device_type="cpu")
