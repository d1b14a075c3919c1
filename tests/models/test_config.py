"""Model configurations: both generations of config.json, defaults, and what is refused."""

import json
import logging

import pytest
import transformers

from infinilm.errors import CheckpointError, InfinilmError, InvalidTypeError, InvalidValueError
from infinilm.models import LlamaConfig, MistralConfig, ModelConfig, Qwen2Config, Qwen3Config

FAMILIES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_defaults_are_hugging_faces(family: type[LlamaConfig]) -> None:
    ours, theirs = family(), getattr(transformers, family.__name__)()
    names = [
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
        *("bos_token_id", "eos_token_id", "attention_bias", "mlp_bias"),
    ]
    for name in names:
        if name not in ours.ignored_settings:
            assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.head_dim == 128
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    read = ModelConfig.from_dict({"model_type": ours.model_type})
    assert type(read) is family
    for name in {*family.setting_names()} - {"layer_types"}:
        assert getattr(read, name) == getattr(ours, name), name
    assert [read.window(layer) for layer in range(32)] == [ours.window(layer) for layer in range(32)]


def test_llamas_other_settings() -> None:
    assert LlamaConfig().kv_dim() == 4096
    assert LlamaConfig(num_layers=5).num_hidden_layers == 5


def test_any_class_reads_a_config_as_its_familys() -> None:
    for reader in (ModelConfig, LlamaConfig, MistralConfig):
        config = reader.from_dict({"model_type": "qwen3"})
        assert type(config) is Qwen3Config
        assert isinstance(config, LlamaConfig)
    assert type(ModelConfig.from_dict({"architectures": ["MistralForCausalLM"]})) is MistralConfig


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_a_family_does_not_know_are_reported(family: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = getattr(transformers, FAMILIES[family].__name__)().to_dict()
    with caplog.at_level(logging.INFO, logger="infinilm"):
        config = ModelConfig.from_dict({**settings, "pretraining_tp": 1, "torch_dtype": "float32", "some_scale": None})
        assert ModelConfig.from_dict(config.to_dict()) == config
        assert not caplog.records
        assert ModelConfig.from_dict({**settings, "num_experts": 8, "attn_logit_softcapping": 50.0}) is not None
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    name = FAMILIES[family].__name__
    assert record.getMessage() == f"{name} does not know these keys of config.json: attn_logit_softcapping, num_experts"


def test_a_flag_that_the_family_ignores_is_reported_if_set(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="infinilm"):
        off = ModelConfig.from_dict({"model_type": "mistral", "mlp_bias": False})
        assert not caplog.records
        on = ModelConfig.from_dict({"model_type": "mistral", "mlp_bias": True})
    for config in (off, on):
        assert isinstance(config, LlamaConfig)
        assert not config.mlp_bias
    assert caplog.messages == ["MistralConfig does not know these keys of config.json: mlp_bias"]


def test_both_generations_of_rope_settings_are_read() -> None:
    scaling = {"type": "linear", "factor": 2.0}
    old = LlamaConfig.from_dict({"model_type": "llama", "rope_theta": 5e5, "rope_scaling": scaling})
    new = LlamaConfig.from_dict(
        {"model_type": "llama", "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    )
    assert old.rope_parameters == new.rope_parameters
    assert old.max_context_len() == 2 * old.max_position_embeddings
    assert LlamaConfig.from_dict(new.to_dict()) == new


def test_windows_follow_the_architecture() -> None:
    mistral = LlamaConfig.from_dict({"model_type": "mistral", "sliding_window": 64, "num_hidden_layers": 2})
    assert [mistral.window(layer) for layer in range(2)] == [64, 64]
    qwen = {"model_type": "qwen2", "sliding_window": 64, "num_hidden_layers": 3, "max_window_layers": 1}
    assert LlamaConfig.from_dict(qwen).window(2) is None, "use_sliding_window is off by default"
    windows = LlamaConfig.from_dict({**qwen, "use_sliding_window": True})
    assert [windows.window(layer) for layer in range(3)] == [None, 64, 64]


def test_a_directory_is_read(tmp_path) -> None:
    transformers.Qwen3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2).save_pretrained(tmp_path)
    config = LlamaConfig.from_pretrained(tmp_path)
    assert isinstance(config, LlamaConfig)
    assert (config.model_type, config.qk_norm, config.hidden_size) == ("qwen3", True, 64)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(CheckpointError, match="mamba"):
        LlamaConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"hidden_sise": 3}, InvalidTypeError, "hidden_sise"),
        ({"num_layers": 2, "num_hidden_layers": 2}, InvalidTypeError, "the same setting"),
        ({"hidden_size": 0}, InvalidValueError, "hidden_size=0"),
        (
            {"intermediate_size": 2**62},
            InvalidValueError,
            "intermediate_size=4611686018427387904 must be 1099511627776 at most",
        ),
        ({"num_attention_heads": 5, "num_key_value_heads": 2}, InvalidValueError, "num_attention_heads=5"),
        ({"hidden_size": 30, "num_attention_heads": 4, "num_key_value_heads": 4}, InvalidValueError, "hidden_size=30"),
        ({"hidden_act": "relu"}, InvalidValueError, "relu"),
        ({"dtype": "int8"}, InvalidValueError, "int8"),
        ({"rope_scaling": {"rope_type": "spiral"}}, InvalidValueError, "spiral"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, InvalidValueError, "factor"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, InfinilmError, "factor"),
        ({"eos_token_id": "end"}, InfinilmError, "eos_token_id"),
        ({"model_type": "mistral", "attention_bias": True}, InvalidValueError, "attention_bias=True"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_settings_are_refused_by_name(settings: dict, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        LlamaConfig(**settings).validate()
