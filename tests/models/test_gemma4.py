"""What is particular to Gemma 4; its results are compared in test_parity.py and in engine/test_families.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load, make_reference, reference_logits, save
from drive import make_batch
from narrow import dense
from safetensors.torch import load_file, save_file

from infinilm import LLM
from infinilm.attention import TorchAttention
from infinilm.cache.paged import PagedKVCache
from infinilm.cache.specs import AttentionSpec, SharedKV
from infinilm.debug import HookRegistry
from infinilm.engine import InferEngine
from infinilm.errors import CheckpointError, InfinilmError, InvalidValueError
from infinilm.models import ModelConfig
from infinilm.models.gemma4 import Gemma4Config
from infinilm.models.stages import Stage

SETTINGS: dict[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 5,
    "sliding_window": 20,
    "head_dim": 16,
    "num_kv_shared_layers": 2,
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}


EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}


def test_layers_keep_heads_of_their_own_size_or_nothing() -> None:
    config = ModelConfig.from_dict({**SETTINGS, "global_head_dim": 32, "num_global_key_value_heads": 1})
    sliding, full = AttentionSpec(4, 16, 20), AttentionSpec(1, 32, None)
    assert config.cache_specs() == (sliding, full, sliding, SharedKV(2), SharedKV(1))
    assert config.max_head_dim == 32
    layers = {str(layer): {"head_dim": 32, "num_key_value_heads": 1} for layer in (1, 4)}
    assert ModelConfig.from_dict({**SETTINGS, "per_layer_config": layers}) == config
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**EXPERTS, "num_experts": None}, "num_experts=None must be an integer"),
        ({**EXPERTS, "top_k_experts": 9}, "top_k_experts=9"),
        ({**EXPERTS, "hidden_activation": "silu"}, "hidden_activation='silu'"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported"),
        ({"num_kv_shared_layers": 4}, "no layer before the shared ones is of the type of layer 1"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers"),
        ({"global_head_dim": 33}, "global_head_dim=33 must be even"),
        ({"per_layer_config": {"1": {"head_dim": 8}, "4": {"head_dim": 16}}}, "must be the same head sizes"),
        ({"per_layer_config": 3}, "per_layer_config=3 must be"),
        ({"vocab_size": 300, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 160}, "input=160 .*300"),
    ],
)
def test_what_can_not_be_run_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InfinilmError, match=message):
        ModelConfig.from_dict({**SETTINGS, **settings})


@pytest.mark.parametrize(("kind", "settings"), [("gemma4", {}), ("gemma4-shared", {"hidden_size_per_layer_input": 0})])
def test_stages_that_need_others_are_refused(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="pipeline_parallel_size=2: layers of this Gemma 4 read keys"):
        LLM(save(make_reference(kind, **settings), tmp_path), device="cpu", pipeline_parallel_size=2)


def test_stages_of_layers_that_need_no_others_compute_the_whole() -> None:
    reference = make_reference("gemma4-moe")
    whole = load(reference)
    tokens = list(range(40))
    batch = make_batch([tokens], [0], [[0, 1, 2]], block_size=16)
    config = whole.config
    hidden: torch.Tensor | None = None
    for stage in (Stage(0, 2, range(1)), Stage(1, 2, range(1, 3))):
        part = type(whole)(config, stage=stage)
        sources = whole.weight_targets()
        for name, shard in part.weight_targets().items():
            dense(shard).tensor.copy_(dense(sources[name]).tensor)
        cache = PagedKVCache(config.cache_specs(), 3, 16, dtype=torch.float32, device="cpu")
        with torch.inference_mode():
            hidden = part(batch, cache, TorchAttention(), None, hidden)
    assert hidden is not None
    with torch.inference_mode():
        torch.testing.assert_close(part.compute_logits(hidden), reference_logits(reference, tokens), atol=1e-4, rtol=0)


def test_files_may_hold_keys_that_no_layer_uses(tmp_path: Path) -> None:
    file = save(make_reference("gemma4-shared"), tmp_path) / "model.safetensors"
    save_file(load_file(file) | {"model.layers.4.self_attn.k_proj.weight": torch.zeros(4, 4)}, file)
    with LLM(tmp_path, device="cpu", num_kvcache_blocks=16):
        pass
    save_file(load_file(file) | {"model.layers.1.self_attn.v_proj.weight": torch.zeros(4, 4)}, file)
    with pytest.raises(CheckpointError, match="1 unexpected"), LLM(tmp_path, device="cpu", num_kvcache_blocks=16):
        pass


def test_hooks_see_the_projections_that_a_layer_has() -> None:
    reference = make_reference("gemma4-shared")
    config = ModelConfig.from_dict(reference.config.to_dict())
    assert isinstance(config, Gemma4Config)
    registry, seen = HookRegistry(), {}
    registry.register_hook("*", lambda name, x, _layer: seen.update({name: x}))
    tokens = list(range(30))
    with InferEngine(config, device_type="cpu") as engine:
        engine.load_params(
            {name: weight for name, weight in reference.state_dict().items() if name in engine.state_dict_keyname()}
        )
        expected = engine.forward(input_ids=[tokens], return_logits=True).logits
        engine.set_hook_registry(registry)
        watched = engine.forward(input_ids=[tokens], return_logits=True).logits
    assert expected is not None
    assert watched is not None
    torch.testing.assert_close(watched, expected, atol=1e-5, rtol=0)
    assert seen["layer1_attention_k_after_rope"].shape == (30, 1, 32)
    assert "layer1_attention_v_after_proj" not in seen  # its values are its keys
    assert seen["layer4_attention_q_after_rope"].shape == (30, 4, 32)
    assert "layer4_attention_k_after_proj" not in seen
    assert seen["layer4_mlp_gate_proj"].shape == (30, 224)
