"""`InferEngine` and `LlamaForCausalLM` with quantised weights: what `LLM` computes, and what can be done with them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checkpoints import make_reference, save
from gguf_files import write_gguf
from narrow import dense, native_worker_of, present, worker_of
from packing import needs_native

from infinilm import LLM, InferEngine, SamplingParams
from infinilm.cache import StaticKVCacheConfig
from infinilm.debug import HookRegistry
from infinilm.distributed import DistConfig
from infinilm.errors import EngineError, InvalidValueError
from infinilm.models import AutoLlamaModel, CausalLM, LlamaForCausalLM
from infinilm.models.cpu import ThreadUsers

pytestmark = needs_native

PROMPTS = [list(range(first, first + 40)) for first in (2, 50, 100)]
NUM_NEW = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, prompt_logprobs=0)
MATRIX, NORM = "model.layers.1.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight"
PACKED = ThreadUsers(torch=False, native=True)


@pytest.fixture(scope="module", params=["gguf", "q8"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A checkpoint whose matrices are quantised: in the file, or while it is read."""
    reference = make_reference("llama-gqa", intermediate_size=128, vocab_size=161, eos_token_id=None)
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "gguf":
        return {"path": write_gguf(reference, directory / "tiny.gguf", "llama", "Q8_0")}
    return {"path": save(reference, directory), "quantization": "q8"}


def make_engine(model: dict[str, Any], **settings: Any) -> InferEngine:
    own = {key: value for key, value in model.items() if key != "path"}
    return InferEngine(model["path"], device_type="cpu", **{**own, **settings})


@pytest.fixture(scope="module")
def engine(model: dict[str, Any]) -> Iterator[InferEngine]:
    with make_engine(model, cache_config=StaticKVCacheConfig(3, 64)) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(model: dict[str, Any]) -> LlamaForCausalLM:
    own = {key: value for key, value in model.items() if key != "path"}
    return AutoLlamaModel.from_pretrained(model["path"], device="cpu", **own)


def logits_of(engine: InferEngine, rows: list[list[int]]) -> torch.Tensor:
    logits = engine(input_ids=rows, return_logits=True).logits
    assert logits is not None
    return logits


def test_all_interfaces_compute_the_same(model: dict[str, Any], engine: InferEngine, alone: LlamaForCausalLM) -> None:
    with LLM(model["path"], quantization=model.get("quantization"), device="cpu", num_kvcache_blocks=32) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert present(native_worker_of(llm.executor).cache).dtype == "float16"
        found = worker_of(engine._executor)
        assert (found.thread_users, found.backend.name) == (PACKED, "native")
        assert present(found.cache).dtype == torch.float16
    tokens = [list(output.token_ids) for output in outputs]
    for host in (engine, alone):
        assert host.generate(PROMPTS, NUM_NEW, temperature=0).token_ids == tokens
        assert host.generate(PROMPTS[0], NUM_NEW, temperature=0).token_ids == tokens[:1]
    together = logits_of(engine, PROMPTS)
    assert together.equal(torch.cat([logits_of(engine, [row]) for row in PROMPTS]))
    assert together.equal(alone(PROMPTS).logits)
    for row, logits, output in zip(PROMPTS, together, outputs, strict=True):
        scores = logits.log_softmax(-1)[torch.arange(len(row) - 1), torch.tensor(row[1:])]
        theirs = torch.tensor([present(entry).logprob for entry in present(output.prompt_logprobs)[1:]])
        torch.testing.assert_close(scores, theirs, atol=1e-5, rtol=0)


def test_without_a_cache_as_with_one(model: dict[str, Any], engine: InferEngine) -> None:
    with make_engine(model) as other:
        assert logits_of(other, PROMPTS).equal(logits_of(engine, PROMPTS))


@pytest.mark.parametrize("model", ["gguf"], indirect=True, scope="module")
def test_ranks_share_quantised_weights(model: dict[str, Any], engine: InferEngine) -> None:
    with make_engine(model, distributed_config=DistConfig(2)) as shared:
        assert worker_of(shared._executor).thread_users == PACKED
        torch.testing.assert_close(logits_of(shared, PROMPTS), logits_of(engine, PROMPTS), atol=0.1, rtol=0)
        pieces = [weights[MATRIX] for weights in shared.state_dict()]
        assert torch.cat(pieces).equal(engine.state_dict()[0][MATRIX])
        shared.load_param(MATRIX, torch.zeros(128, 64))
        assert not any(weights[MATRIX].any() for weights in shared.state_dict())
        shared.load_param(NORM, torch.zeros(64))


def test_hooks_see_activations(engine: InferEngine) -> None:
    """They are float32, and the layers run one by one."""
    seen: dict[str, torch.Tensor] = {}
    registry = HookRegistry()

    def note(name: str, tensor: torch.Tensor, _layer: int) -> None:
        seen.setdefault(name, tensor)

    registry.register_hook("layer1_*", note)
    without = logits_of(engine, PROMPTS[:1])
    engine.set_hook_registry(registry)
    try:
        torch.testing.assert_close(logits_of(engine, PROMPTS[:1]), without, atol=0.05, rtol=0)
        assert seen["layer1_mlp_intermediate"].shape == (40, 128)
        assert {tensor.dtype for tensor in seen.values()} == {torch.float32}
        registry.clear()
        registry.register_hook("layer1_mlp_output", lambda _name, tensor, _layer: torch.zeros_like(tensor))
        assert (logits_of(engine, PROMPTS[:1]) - without).abs().max() > 0.1
    finally:
        engine.set_hook_registry(None)
    assert logits_of(engine, PROMPTS[:1]).equal(without)


def test_hooks_of_modules_are_called(alone: LlamaForCausalLM) -> None:
    without = alone(PROMPTS).logits
    shapes: list[tuple[int, ...]] = []
    assert isinstance(alone.model, CausalLM)
    handle = alone.model.layers[1].register_forward_hook(lambda _module, _given, out: shapes.append(tuple(out.shape)))
    hooked = alone(PROMPTS).logits
    handle.remove()
    assert shapes == [(120, 64)]
    torch.testing.assert_close(hooked, without, atol=0.05, rtol=0)
    assert alone(PROMPTS).logits.equal(without)


def test_what_is_quantised_is_decoded_and_quantised(engine: InferEngine, alone: LlamaForCausalLM) -> None:
    before = logits_of(engine, PROMPTS)
    assert {MATRIX, NORM} <= set(engine.state_dict_keyname())
    refused = r"is quantised \(Q8_0\) and can't be read or replaced; load the model with quantization='none'"
    for call in (alone.state_dict, lambda: alone.load_state_dict({})):
        with pytest.raises(EngineError, match=refused):
            call()
    (weights,) = engine.state_dict()
    engine.load_param(MATRIX, torch.zeros(128, 64))
    assert not engine.state_dict()[0][MATRIX].any()
    assert not logits_of(engine, PROMPTS).equal(before)
    engine.load_param(MATRIX, weights[MATRIX])
    torch.testing.assert_close(engine.state_dict()[0][MATRIX], weights[MATRIX], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(logits_of(engine, PROMPTS), before, atol=0.02, rtol=0)
    before = logits_of(engine, PROMPTS)
    norm = 1 + 0.2 * torch.arange(64.0)
    engine.load_param(NORM, norm)
    changed = logits_of(engine, PROMPTS)
    assert not changed.equal(before)
    engine.load_params({NORM: norm.numpy()}, strict=False)
    assert logits_of(engine, PROMPTS).equal(changed)


@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"dtype": torch.bfloat16}, {"quantization": "none"}])
def test_dense_if_asked_for(settings: dict[str, Any], model: dict[str, Any]) -> None:
    path = model["path"]
    dtype = torch.bfloat16 if torch.bfloat16 in settings.values() else torch.float32
    with InferEngine(path, device_type="cpu", **settings) as engine:
        assert engine.state_dict()[0][MATRIX].dtype == dtype
    alone = AutoLlamaModel.from_pretrained(path, device="cpu", **settings)
    assert dense(alone.model.weight_targets()[MATRIX]).tensor.dtype == alone.dtype == dtype


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "q5"}, "quantization='q5' is unknown; use one of none, fp8, int4, q8, q4"),
        ({"quantization": "q8", "dtype": "bfloat16"}, "quantization='q8' computes in float32, and dtype='bfloat16'"),
        ({"dtype": "int8"}, "dtype='int8' is unknown; use one of float32"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str, model: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match=message):
        InferEngine(model["path"], device_type="cpu", **settings)
    with pytest.raises(InvalidValueError, match=message):
        AutoLlamaModel.from_pretrained(model["path"], device="cpu", **settings)


def test_a_configuration_alone_is_not_quantised(alone: LlamaForCausalLM) -> None:
    for make in (InferEngine, LlamaForCausalLM):
        with pytest.raises(
            InvalidValueError, match=r"quantization='q4': .* give the path of a checkpoint, or .*'none'"
        ):
            make(alone.config, quantization="q4")
    with InferEngine(alone.config, device_type="cpu", dtype="float16", quantization="none") as engine:
        assert engine.state_dict()[0][MATRIX].dtype == torch.float16
