"""A damaged config.json ends in one of our errors, whatever is in it: never in a crash, a hang or a wrong model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinilm.errors import CheckpointError, InfinilmError, InvalidValueError
from infinilm.loading.parts import MAX_EXPERTS
from infinilm.models import LlamaConfig, ModelConfig
from infinilm.models.sparse import SparseConfig

SOUND = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "vocab_size": 100,
    "sliding_window": 16,
    "use_sliding_window": True,
}
KEYS = [
    *SOUND,
    *("model_type", "architectures", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps"),
    *("bos_token_id", "eos_token_id", "tie_word_embeddings", "attention_bias", "layer_types", "max_window_layers"),
    *("dtype", "torch_dtype", "rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"),
    *("partial_rotary_factor", "quantization_config", "something_else"),
]
EXPERT_KEYS = [
    *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "n_shared_experts", "n_group", "topk_group"),
    *("routed_scaling_factor", "first_k_dense_replace", "use_qk_norm", "swiglu_alpha", "swiglu_limit"),
    *KEYS[::3],
]
SPARSE_FAMILIES = ["qwen3_moe", "mixtral", "glm4_moe", "gpt_oss"]
ROPE_KEYS = [
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor"),
    *("high_freq_factor", "short_factor", "long_factor", "attention_factor", "beta_fast", "mscale"),
]
ROPE_TYPES = ["default", "linear", "dynamic", "yarn", "llama3", "longrope", "su", "spiral"]

values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70),
    st.sampled_from([10**12, -(10**12), 10**300]),
    st.floats(),
    st.sampled_from(["silu", "llama", "qwen3", "bfloat16", "x", ""]),
    st.lists(st.one_of(st.floats(), st.integers(), st.sampled_from(["full_attention", "x"])), max_size=9),
    st.dictionaries(st.sampled_from(["x", "quant_method"]), st.integers(), max_size=1),
)
ropes = st.dictionaries(
    st.sampled_from(ROPE_KEYS), st.one_of(values, st.sampled_from(ROPE_TYPES)), max_size=len(ROPE_KEYS)
)
expert_damages = st.dictionaries(st.sampled_from(EXPERT_KEYS), values, min_size=1, max_size=3)
damages = st.dictionaries(st.sampled_from(KEYS), st.one_of(values, ropes), min_size=1, max_size=4)


@settings(max_examples=1500, deadline=None)
@given(model_type=st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]), damage=damages)
def test_damage_is_an_error_of_ours(model_type: str, damage: dict) -> None:
    try:
        config = LlamaConfig.from_dict({"model_type": model_type, **SOUND, **damage})
    except InfinilmError:
        return
    assert LlamaConfig.from_dict(config.to_dict()) == config
    assert config.max_context_len() >= config.max_position_embeddings
    for layer in range(config.num_hidden_layers):
        assert config.window(layer) in (None, config.sliding_window)


@settings(max_examples=300, deadline=None)
@given(model_type=st.sampled_from(SPARSE_FAMILIES), damage=expert_damages)
def test_damage_to_experts_is_an_error_of_ours(model_type: str, damage: dict) -> None:
    try:
        config = ModelConfig.from_dict({"model_type": model_type, **SOUND, **damage})
    except InfinilmError:
        return
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert isinstance(config, SparseConfig)
    assert config.num_experts_per_tok <= config.num_experts <= MAX_EXPERTS


def test_quantised_weights_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="quantised by 'hqq'"):
        LlamaConfig.from_dict({"model_type": "llama", "quantization_config": {"quant_method": "hqq", "bits": 4}})


def test_rope_settings_that_differ_between_layers_are_refused() -> None:
    rope = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(InvalidValueError, match="differ between layers"):
        LlamaConfig.from_dict({"model_type": "llama", "rope_parameters": rope})


def test_the_main_name_wins_where_both_generations_are_written() -> None:
    config = {"model_type": "llama", "dtype": "bfloat16", "torch_dtype": "float32"}
    assert LlamaConfig.from_dict(config).dtype == "bfloat16"
    assert LlamaConfig.from_dict(dict(reversed(config.items()))).dtype == "bfloat16"
