"""Adding an architecture from outside."""

from collections.abc import Iterator

import pytest
import torch
from checkpoints import make_reference, reference_logits
from drive import Driver

from infinilm.distributed.group import SINGLE
from infinilm.errors import CheckpointError, InvalidValueError
from infinilm.models import CausalLM, LlamaConfig, create_model, register_model
from infinilm.models.registry import FAMILIES


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
        shard.tensor.copy_(reference.state_dict()[name])
    tokens = list(range(40))
    torch.testing.assert_close(Driver(model).run(tokens), reference_logits(reference, tokens), atol=1e-4, rtol=0)


def test_a_builder_of_its_own_is_called(llama_clone: str) -> None:
    FAMILIES.pop(llama_clone)
    calls = []
    register_model(llama_clone, "CloneForCausalLM", builder=lambda config, **options: calls.append((config, options)))
    config = LlamaConfig(model_type=llama_clone)
    create_model(config, max_len=7, dtype=torch.bfloat16, device="meta")
    assert calls == [(config, {"max_len": 7, "dtype": torch.bfloat16, "device": "meta", "group": SINGLE})]


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
