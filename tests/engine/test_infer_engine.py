"""`InferEngine` as its callers meet it: building it, weights, inputs and outputs, generating, closing."""

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import save
from engine.infer_cases import VOCAB_SIZE, assert_greedy, assert_near, expected_logits, reference_of, text
from narrow import present

from infinilm import DeviceType
from infinilm.cache import CacheConfig, PagedKVCacheConfig, StaticKVCacheConfig
from infinilm.distributed import DistConfig
from infinilm.engine import InferEngine
from infinilm.errors import CheckpointError, EngineError, InvalidTypeError, InvalidValueError, PromptTooLongError
from infinilm.models import LlamaConfig

KIND = "mha"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference_of(KIND), tmp_path_factory.mktemp(KIND))


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[InferEngine]:
    with InferEngine(path, cache_config=StaticKVCacheConfig(3, 64)) as engine:
        yield engine


def small_config(**settings: Any) -> LlamaConfig:
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_attention_heads": 4}
    return LlamaConfig(**{**sizes, **settings})


# --- building ---


@pytest.mark.parametrize("device_type", [None, "cpu", torch.device("cpu"), torch.device("cpu:0"), DeviceType.CPU])
def test_every_way_to_name_a_device(device_type: Any) -> None:
    with InferEngine(small_config(), device_type=device_type) as engine:
        assert present(engine(input_ids=[1, 2], return_logits=True).logits).device.type == "cpu"


NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device_type": "tpu"}, InvalidValueError, "device_type='tpu' is unknown; use one of auto, cpu, cuda"),
        ({"device_type": torch.device("meta")}, InvalidValueError, "device_type='meta' is not supported; use one of"),
        ({"device_type": 1}, InvalidTypeError, "device_type=1 must be a string"),
        *(
            pytest.param({"device_type": cuda}, InvalidValueError, "device_type='cuda.*: torch finds no", marks=NO_CUDA)
            for cuda in ("cuda", torch.device("cuda"), torch.device("cuda:1"), DeviceType.CUDA)
        ),
        ({"config": None}, InvalidTypeError, "config=None must be a ModelConfig or the path"),
        ({"config": "/nowhere/at/all"}, CheckpointError, "/nowhere/at/all"),
        ({"distributed_config": 2}, InvalidTypeError, "distributed_config=2 must be a DistConfig"),
        ({"cache_config": "paged"}, InvalidTypeError, "cache_config='paged' must be a CacheConfig"),
        ({"config": small_config(num_key_value_heads=3)}, InvalidValueError, "=4 must be a multiple of .*heads=3"),
        ({"config": small_config(hidden_act="relu")}, InvalidValueError, "hidden_act='relu'"),
        ({"distributed_config": DistConfig(3)}, InvalidValueError, "num_attention_heads=4 .* 3 ranks; use .* 1, 2, 4$"),
        (
            {"distributed_config": DistConfig(4), "config": small_config(intermediate_size=34)},
            InvalidValueError,
            "intermediate_size=34 can't be shared out evenly over 4 ranks",
        ),
    ],
    ids=str,
)
def test_what_can_not_work_is_refused_before_any_process_is_started(
    arguments: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python/here")  # a process could not be started
    with pytest.raises(error, match=message):
        InferEngine(**{"config": small_config(), "distributed_config": DistConfig(2), **arguments})


def test_a_checkpoint_that_does_not_divide_is_refused_before_any_process_is_started(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python/here")
    with pytest.raises(InvalidValueError, match=r"num_attention_heads=12 .* over 5 ranks; use .* 1, 2, 3, 4, 6, 12$"):
        InferEngine(path, DistConfig(5))


def test_a_cache_that_is_too_large_ends_the_engine(path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"num_blocks=1000000000000.* are free"):
        InferEngine(path, cache_config=PagedKVCacheConfig(10**12))


@pytest.mark.parametrize("dtype", [None, "float32", "float16", "bfloat16"])
def test_a_configuration_alone(dtype: str | None) -> None:
    """Random weights, the same each time; in the type that the configuration says."""
    states = []
    for _ in range(2):
        with InferEngine(small_config(dtype=dtype), cache_config=StaticKVCacheConfig()) as engine:
            states.append(engine.state_dict()[0])
            output = engine(input_ids=[[1, 2, 3]], return_logits=True, return_hidden_states=True)
            assert present(output.hidden_states).dtype == getattr(torch, dtype or "float32")
            assert present(output.logits).dtype == torch.float32
            assert present(output.logits).isfinite().all()
            assert len(engine.generate([1, 2], 4, stop_on_eos=False).token_ids[0]) == 4
    assert states[0].keys() == states[1].keys()
    assert all(weight.equal(states[1][name]) for name, weight in states[0].items())
    assert states[0]["model.norm.weight"].equal(torch.ones(16, dtype=getattr(torch, dtype or "float32")))
    assert 0.015 < states[0]["model.layers.0.mlp.up_proj.weight"].float().std() < 0.025


def test_configurations_are_copied_in_and_out() -> None:
    given = DistConfig(tp_device_ids=[3])
    with InferEngine(small_config(), given, "cpu") as engine:
        given.tp_device_ids = [5]
        got = engine.get_dist_config()
        got.tp_device_ids = [6]
        assert engine.get_dist_config() == DistConfig(tp_device_ids=[3])
        assert repr(engine) == "<InferEngine: DistConfig(tp_device_ids=[3])>"
        assert engine.get_cache_config() is None


CALLS: dict[str, Callable[[InferEngine], object]] = {
    "forward": lambda engine: engine.forward(input_ids=[1]),
    "call": lambda engine: engine(input_ids=[1]),
    "generate": lambda engine: engine.generate([1], 2),
    "reset_cache": lambda engine: engine.reset_cache(),
    "state_dict": lambda engine: engine.state_dict(),
    "load_param": lambda engine: engine.load_param("model.norm.weight", torch.ones(16)),
    "load_params": lambda engine: engine.load_params({}, strict=False),
}


def test_a_closed_engine_says_so() -> None:
    with InferEngine(small_config(), cache_config=PagedKVCacheConfig(2)) as engine:
        engine(input_ids=[1])
    engine.close()
    engine.close()
    for call in CALLS.values():
        with pytest.raises(EngineError, match="the engine was closed; make a new one"):
            call(engine)
    assert repr(engine) == "<InferEngine: DistConfig(tp_device_ids=[0])>"


def test_generate_keeps_its_signature_and_text() -> None:
    assert list(inspect.signature(InferEngine.generate).parameters)[:4] == [
        *("self", "input_ids", "max_new_tokens", "tokenizer")
    ]
    assert "input_ids" in (InferEngine.generate.__doc__ or "")


# --- inputs and outputs ---


def test_fields_as_keywords_are_an_input(engine: InferEngine) -> None:
    fields: dict[str, Any] = {
        "input_ids": [text(20), text(21)[1:]],
        "position_ids": range(20),
        "past_kv_lengths": [0, 0],
        "random_val": [0.3, 0.9],
        "temperature": 0.7,
        "return_logits": True,
        "return_hidden_states": True,
    }
    outputs = [engine.forward(engine.Input(**fields)), engine(engine.Input(**fields)), engine(**fields)]
    outputs.append(engine.forward(InferEngine.Input(**{**fields, "input_ids": np.array(fields["input_ids"])})))
    outputs.append(engine.forward(**{**fields, "input_ids": torch.tensor(fields["input_ids"], dtype=torch.int32)}))
    for output in outputs:
        assert isinstance(output, InferEngine.Output)
        assert output.output_ids.equal(outputs[0].output_ids)
        assert present(output.logits).equal(present(outputs[0].logits))
        assert present(output.hidden_states).equal(present(outputs[0].hidden_states))
    for wrong in ({"given": 1}, {"input_idx": [1]}):
        with pytest.raises(InvalidTypeError, match=f"unknown keyword '{next(iter(wrong))}'"):
            engine(**wrong)
    listed: Any = [[1]]
    for call in (lambda: engine(listed), lambda: engine(engine.Input(input_ids=[1]), temperature=0)):
        with pytest.raises(InvalidTypeError, match=r"takes one InferEngine\.Input, or its fields as keywords"):
            call()


def test_outputs_are_ordinary_tensors_in_the_shape_of_the_input(engine: InferEngine) -> None:
    reference = reference_of(KIND)
    output = engine(input_ids=[text(9), text(10)[1:]], return_logits=True, return_hidden_states=True)
    with torch.inference_mode():
        states = reference.model(torch.tensor([text(9), text(10)[1:]])).last_hidden_state
    assert_near(output.hidden_states, states)
    assert output.output_ids.dtype == torch.int64
    assert (present(output.logits).shape, present(output.hidden_states).shape) == ((2, 9, VOCAB_SIZE), (2, 9, 96))
    for tensor in (output.output_ids, present(output.logits), present(output.hidden_states)):
        array = tensor.numpy()
        assert array.ctypes.data == tensor.data_ptr()
        array[0] = 3
        assert (tensor[0] == 3).all()
        tensor.add_(1)  # which tensors made in inference mode do not take
        assert (array[0] == 4).all()
    plain = engine(input_ids=[1])
    assert plain.logits is plain.hidden_states is None


def test_the_callers_mode_does_not_matter(path: Path) -> None:
    def check(engine: InferEngine) -> None:
        engine.reset_cache(PagedKVCacheConfig(4))
        assert_near(engine(input_ids=text(40), return_logits=True).logits, expected_logits(KIND, text(40)))

    with torch.inference_mode():
        made_inside = InferEngine(path)
        check(made_inside)
    with made_inside, InferEngine(path) as made_outside:
        check(made_inside)
        check(made_outside)
        with torch.inference_mode():
            check(made_outside)
        check(made_outside)


def test_an_array_may_be_changed_between_calls(engine: InferEngine) -> None:
    ids = np.array([text(5)])
    given = engine.Input(input_ids=ids, return_logits=True)
    first = present(engine(given).logits)
    ids[0] = text(6)[1:]
    assert_near(present(engine(given).logits)[0], expected_logits(KIND, text(6)[1:]))
    assert_near(first[0], expected_logits(KIND, text(5)))


def test_the_draw_is_the_seeds_rule(engine: InferEngine) -> None:
    """The first token whose share of the sum, likeliest first, reaches `random_val`."""
    rows = [text(12), text(13)[1:], text(14)[2:]]
    last = torch.stack([expected_logits(KIND, row)[-1] for row in rows]).double()
    for temperature, top_k, top_p, random_val in [(1.0, 0, 1.0, 0.5), (0.7, 10, 0.8, 0.95), (2.0, 50, 0.5, 0.3)]:
        values, order = last.sort(descending=True)
        sums = ((values - values[:, :1]) / temperature).exp().cumsum(-1)
        limits = torch.minimum(sums[:, (top_k or VOCAB_SIZE) - 1], top_p * sums[:, -1])
        expected = order.gather(1, (sums < random_val * limits[:, None]).sum(-1, keepdim=True)).squeeze(1)
        drawn = engine(input_ids=rows, temperature=temperature, top_k=top_k, top_p=top_p, random_val=random_val)
        assert drawn.output_ids.tolist() == expected.tolist()
    greedy = engine(input_ids=rows, temperature=[0, 1, 1], top_k=[0, 1, 0], random_val=[0.9, 0.9, 0])
    assert greedy.output_ids.tolist() == last.argmax(-1).tolist()


BAD_INPUTS = [
    ({"input_ids": [VOCAB_SIZE]}, "input_ids holds 161"),
    ({"input_ids": [[1]] * 4}, "4 requests, but the cache has max_batch_size=3"),
    ({"input_ids": [1], "cache_lengths": [64]}, "max_cache_len = 64"),
    ({"input_ids": [1], "block_tables": [[0]]}, "block_tables was given, but the rows of this cache"),
    ({"input_ids": [1], "temperature": -1.0}, "temperature=-1.0 of request 0"),
    ({"input_ids": [[1], [2]], "random_val": [0.1, 1.0]}, "random_val=1.0 of request 1"),
    ({"input_ids": [[1], [2]], "top_k": [1, 2, 3]}, r"top_k has shape \[3\] for 2 requests"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_INPUTS, ids=str)
def test_bad_inputs_are_refused_and_leave_the_cache_alone(
    engine: InferEngine, fields: dict[str, Any], message: str
) -> None:
    engine(input_ids=[text(20)[:19]])
    with pytest.raises(InvalidValueError, match=message):
        engine(**fields)
    output = engine(input_ids=[text(20)[19:]], cache_lengths=[19], return_logits=True)
    assert_near(present(output.logits)[0], expected_logits(KIND, text(20))[19:])


# --- generating ---


@pytest.mark.parametrize("config", [StaticKVCacheConfig(2, 30), PagedKVCacheConfig(4)], ids=["static", "paged"])
def test_generating_up_to_the_last_place(path: Path, config: CacheConfig) -> None:
    """The last token is drawn, not computed: it needs no place."""
    with InferEngine(path, cache_config=config) as engine:
        room = 30 if isinstance(config, StaticKVCacheConfig) else 32
        prompts = [text(20), text(21)[1:]]
        answers = engine.generate(prompts, room - 19, temperature=0).token_ids
        for prompt, answer in zip(prompts, answers, strict=True):
            assert len(answer) == room - 19
            assert_greedy(KIND, prompt, answer)
        with pytest.raises(PromptTooLongError, match=rf"make {room + 2} tokens.* take {room} for each of 2 rows"):
            engine.generate(prompts, room - 18)
        with pytest.raises(InvalidValueError, match=r"max_batch_size=2|5 requests without block_tables"):
            engine.generate([[1]] * 5, 2)


def test_generating_without_a_cache_goes_as_far_as_the_model(path: Path) -> None:
    with InferEngine(path) as engine:
        assert len(engine.generate(text(250), 7, temperature=0).token_ids[0]) == 7
        with pytest.raises(PromptTooLongError, match=r"make 258 tokens.* take 256"):
            engine.generate(text(250), 8)


def test_draws_depend_on_the_seed_alone(engine: InferEngine) -> None:
    prompts = [text(7)] * 3
    first, again, other = (engine.generate(prompts, 12, seed=seed).token_ids for seed in (5, 5, 6))
    assert first == again
    assert first != other
    assert first[0] != first[1] != first[2]
    assert engine.generate(prompts[:1], 12, seed=5).token_ids == first[:1]  # whatever the company
    engine.reset_cache(PagedKVCacheConfig(12))
    assert engine.generate(prompts, 12, seed=5).token_ids == first
    engine.reset_cache(StaticKVCacheConfig(3, 64))


def test_a_streamer_that_fails_or_calls_leaves_the_engine_working(engine: InferEngine) -> None:
    def fail(tokens: list[int]) -> None:
        raise KeyError(tokens[0])

    def call(tokens: list[int]) -> None:
        engine(input_ids=[tokens])

    with pytest.raises(KeyError):
        engine.generate(text(7), 5, streamer=fail)
    with pytest.raises(EngineError, match="forward: the engine is in the middle of another call"):
        engine.generate(text(7), 5, streamer=call)
    assert_greedy(KIND, text(7), engine.generate(text(7), 5, temperature=0).token_ids[0])
