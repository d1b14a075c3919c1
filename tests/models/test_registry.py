"""Adding an architecture from outside."""

import json
import logging
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any

import pytest
import torch
from checkpoints import make_reference, reference_logits
from drive import Driver
from narrow import dense

from infinilm.distributed.group import SINGLE
from infinilm.errors import CheckpointError, InvalidTypeError, InvalidValueError
from infinilm.models import CausalLM, LlamaConfig, ModelConfig, create_model, register_model
from infinilm.models.registry import FAMILIES, describe_registration, register_described


@pytest.fixture
def llama_clone() -> Iterator[str]:
    """A new name for Llama with normalised heads, which is what Qwen3 is."""
    register_model("clone", "CloneForCausalLM", defaults={"qk_norm": True, "head_dim": 32})
    yield "clone"
    del FAMILIES["clone"]


def test_a_registered_architecture_is_read_and_run(llama_clone: str) -> None:
    reference = make_reference("qwen3")
    settings = reference.config.to_dict()
    settings |= {"model_type": llama_clone, "architectures": ["CloneForCausalLM"]}
    del settings["head_dim"]
    config = LlamaConfig.from_dict(settings)
    assert LlamaConfig.from_dict(config.to_dict()) == config
    model = create_model(config, dtype=torch.float32, device="cpu")
    assert isinstance(model, CausalLM)
    for name, shard in model.weight_targets().items():
        dense(shard).tensor.copy_(reference.state_dict()[name])
    tokens = list(range(40))
    torch.testing.assert_close(Driver(model).run(tokens), reference_logits(reference, tokens), atol=1e-4, rtol=0)


def test_a_builder_of_its_own_is_called(llama_clone: str) -> None:
    FAMILIES.pop(llama_clone)
    calls = []

    def build(config: ModelConfig, **options: Any) -> Any:
        calls.append((config, options))

    register_model(llama_clone, "CloneForCausalLM", builder=build)
    config = LlamaConfig(model_type=llama_clone)
    create_model(config, max_len=7, dtype=torch.bfloat16, device="meta")
    assert calls == [(config, {"max_len": 7, "dtype": torch.bfloat16, "device": "meta", "group": SINGLE})]


def test_a_builder_that_knows_no_stages_is_refused_more_than_one(llama_clone: str) -> None:
    def build(config: ModelConfig, *, max_len: int, dtype: torch.dtype, device: torch.device, group: Any) -> CausalLM:
        return CausalLM(config, max_len=max_len, dtype=dtype, device=device, group=group)

    def build_all(config: ModelConfig, **options: Any) -> CausalLM:
        return CausalLM(config, **options | {"stage": None})

    config = LlamaConfig(model_type=llama_clone, num_hidden_layers=2, hidden_size=64)
    create_model(config, dtype=torch.float32, device="meta", num_stages=2)
    for builder in (build, build_all):
        FAMILIES.pop(llama_clone)
        register_model(llama_clone, "CloneForCausalLM", builder=builder)
        create_model(config, dtype=torch.float32, device="meta")
        with pytest.raises(InvalidValueError, match=r"pipeline_parallel_size=2: the builder of model_type='clone'"):
            create_model(config, dtype=torch.float32, device="meta", num_stages=2)


@dataclass(frozen=True)
class SparseConfig(LlamaConfig):
    """A family's own settings."""

    model_type: str = "sparse"
    num_experts: int = 8
    limit: float | None = 7.0
    dense_layers: list[int] = field(default_factory=list)


class SparseLM(CausalLM):
    """A model that reads them."""

    def __init__(self, config: SparseConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.num_experts = config.num_experts


@pytest.fixture
def sparse() -> Iterator[dict[str, Any]]:
    """The config.json of a registered family with settings of its own."""
    register_model("sparse", "SparseForCausalLM", config=SparseConfig, builder=SparseLM, defaults={"num_experts": 6})
    yield {"model_type": "sparse", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    FAMILIES.pop("sparse", None)


def test_a_familys_own_keys_reach_its_builder(sparse: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="infinilm"):
        config = LlamaConfig.from_dict({**sparse, "num_experts": 4, "limit": None, "dense_layers": [3], "other": 1})
        assert isinstance(config, SparseConfig)
        assert (config.num_experts, config.limit, config.dense_layers, config.head_dim) == (4, None, [3], 16)
        assert ModelConfig.from_dict(config.to_dict()) == config
    assert caplog.messages == ["SparseConfig does not know these keys of config.json: other"]
    model = create_model(config, dtype=torch.float32, device="meta")
    assert isinstance(model, SparseLM)
    assert model.num_experts == 4
    plain = ModelConfig.from_dict(sparse)
    assert isinstance(plain, SparseConfig)
    assert (plain.num_experts, plain.limit, plain.dense_layers) == (6, 7.0, [])
    with pytest.raises(FrozenInstanceError):
        plain.num_experts = 3  # type: ignore[misc]
    with pytest.raises(InvalidTypeError, match="SparseConfig has no setting num_expert; it has"):
        SparseConfig(num_expert=3)  # type: ignore[call-arg]


def test_a_familys_own_keys_go_to_other_processes(sparse: dict[str, Any]) -> None:
    config = ModelConfig.from_dict({**sparse, "num_experts": 4})
    sent = json.loads(json.dumps([describe_registration("sparse"), config.to_dict()]))
    family = FAMILIES.pop("sparse")
    for _ in range(2):  # importing a module may have registered it already
        register_described(sent[0])
    assert FAMILIES["sparse"] == family
    assert ModelConfig.from_dict(sent[1]) == config


def test_a_familys_settings_need_its_class(sparse: dict[str, Any]) -> None:
    message = r"model_type='sparse' has settings that LlamaConfig lacks: .*num_experts; use SparseConfig"
    with pytest.raises(InvalidValueError, match=message):
        LlamaConfig(model_type="sparse").validate()


def test_what_is_no_configuration_class_is_refused() -> None:
    class Undecorated(LlamaConfig):
        num_experts: int = 8

    class Base(ModelConfig):
        pass

    for config, message in [
        (dict, "must be a subclass of ModelConfig"),
        (Undecorated, r"num_experts would be no settings; decorate it with @dataclass\(frozen=True\)"),
        (Base, r"Base is no LlamaConfig.*give a builder"),
    ]:
        with pytest.raises(InvalidTypeError, match=message):
            register_model("refused", "RefusedForCausalLM", config=config)
    assert "refused" not in FAMILIES
    register_model("local", "LocalForCausalLM", config=Base, builder=SparseLM)
    try:
        with pytest.raises(
            InvalidValueError, match=r"the configuration class of model_type='local'.*can't be imported"
        ):
            describe_registration("local")
    finally:
        del FAMILIES["local"]


def test_a_name_is_taken_once(llama_clone: str) -> None:
    with pytest.raises(InvalidValueError, match="model_type='clone' is registered already"):
        register_model(llama_clone, "OtherForCausalLM")


def test_an_unknown_architecture_is_refused_with_what_there_is() -> None:
    with pytest.raises(InvalidValueError, match="model_type='clone' is unknown; use one of llama, mistral"):
        create_model(LlamaConfig(model_type="clone"), dtype=torch.float32, device="meta")
    with pytest.raises(CheckpointError, match=r"'clone'.*supported are llama \(LlamaForCausalLM\), mistral"):
        LlamaConfig.from_dict({"model_type": "clone"})
    with pytest.raises(CheckpointError, match="LlamaForSequenceClassification"):
        LlamaConfig.from_dict({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]})
