"""Junk at every way in: an error of the package that names it, an engine that goes on, and neighbours unharmed."""

import copy
import json
import pickle
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from narrow import present
from tiny_tokenizer import build_tokenizer

from infinilm import LLM, Config, InferEngine, RequestOutput, SamplingParams
from infinilm.cache import PagedKVCacheConfig, StaticKVCacheConfig
from infinilm.debug import HookRegistry
from infinilm.errors import InfinilmError, InvalidTypeError, InvalidValueError
from infinilm.structured_output import StructuredOutput

SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
NESTED = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])])


@pytest.fixture
def neighbour(llm: LLM) -> Iterator[None]:
    """A request in the middle of its answer, which ends as it does alone."""
    [alone] = llm.generate("hello", SHORT, use_tqdm=False)
    request_id = llm.add_request("hello", SHORT)
    llm.step()
    yield
    outputs = []
    while not llm.is_finished():
        outputs += [output for output in llm.step() if output.request_id == request_id]
    assert outputs[-1].finished
    assert (outputs[-1].error, outputs[-1].token_ids) == (None, alone.token_ids)


class Odd:
    """Something that no parameter can be."""

    def __repr__(self) -> str:
        return "<odd>"


JUNK: list[Any] = [
    None, True, 7, -1, 2**70, 1.5, float("nan"), float("inf"), "", "\ud800", b"", b"abc", bytearray(b"a"), [], {},
    set(), {1: 2}, {"a": 1}, [None], [[None]], [[[1]]], [b"abc"], [True], ["\ud800"], [1.5], [-1], [2**70], ["a", 1],
    [[1], "\ud800"], object(), Odd(), Odd, len, iter([1]), range(0), count(), torch.tensor([]), torch.tensor([1.5]),
    torch.tensor(5),
    torch.tensor([True]), torch.zeros(2, 2, 2, dtype=torch.int64), torch.tensor([999]), NESTED,
    torch.tensor([1, 2]).to_sparse(), torch.empty(3, dtype=torch.int64, device="meta"), np.array(3), np.array([1.5]),
    np.array([None]), np.array([2**63], dtype=np.uint64), np.zeros((2, 2, 2), dtype=int), memoryview(b"abc"),
]  # fmt: skip


def refused(call: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a call is refused, which only an error of the package for bad input may do."""
    try:
        call(*args, **kwargs)
    except (InvalidValueError, InvalidTypeError):
        return True
    return False


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize("junk", JUNK, ids=[f"{type(junk).__name__}{i}" for i, junk in enumerate(JUNK)])
def test_junk_is_refused_or_served(llm: LLM, junk: Any) -> None:
    good = SamplingParams(max_tokens=1)
    refused(llm.generate, junk, good, use_tqdm=False)
    refused(llm.generate, [junk], good, use_tqdm=False)
    refused(llm.generate, ["to", junk], good, use_tqdm=False)
    refused(llm.generate, "to", junk, use_tqdm=False)
    refused(llm.generate, ["to"], [junk], use_tqdm=False)
    refused(llm.chat, junk, good, use_tqdm=False)
    refused(llm.chat, [junk], good, use_tqdm=False)
    refused(llm.chat, [[junk]], good, use_tqdm=False)
    refused(llm.chat, [{"role": "user", "content": junk}], good, use_tqdm=False)
    refused(llm.chat, [{"role": junk, "content": "a"}], good, use_tqdm=False)
    refused(llm.chat_prompt, junk)
    refused(lambda: list(llm.stream(junk, good)))
    refused(lambda: list(llm.stream("to", junk)))
    refused(llm.add_request, junk, good)
    refused(llm.add_request, "to", junk)
    refused(llm.add_request, "to", good, request_id=junk)
    refused(llm.add_request, "to", good, cache_salt=junk)
    refused(llm.add_request, "to", good, on_token=junk)
    refused(llm.abort, junk)
    refused(llm.set_hook_registry, junk)
    llm.set_hook_registry(None)


PARAMETERS = [
    "temperature", "top_k", "top_p", "min_p", "max_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids",
    "seed", "n", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs",
    "prompt_logprobs", "logits_processors", "structured",
]  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_junk_in_sampling_params(name: str) -> None:
    for junk in JUNK:
        refused(SamplingParams, **{name: junk})
        refused(SamplingParams, **{name: [junk]})
        try:
            hash(junk)
        except TypeError:
            continue
        refused(SamplingParams, **{name: {junk: 1.0}})
        refused(SamplingParams, **{name: {1: junk}})


def test_junk_in_settings() -> None:
    for name in Config.__dataclass_fields__:
        for junk in JUNK:
            refused(Config, **{name: junk})
    for junk in JUNK:
        refused(StaticKVCacheConfig, junk, junk)
        refused(PagedKVCacheConfig, junk)
        refused(PagedKVCacheConfig, block_size=junk, dtype=junk)
        refused(StructuredOutput, json_schema=junk)
        refused(StructuredOutput, regex=junk)
        refused(StructuredOutput, choice=junk)


def test_junk_in_an_infer_engine(tiny_dir: Path) -> None:
    with InferEngine(str(tiny_dir), device_type="cpu", cache_config=StaticKVCacheConfig(2, 32)) as engine:
        expected = engine(input_ids=[[5, 6]], temperature=0.0).output_ids.tolist()
        fields = [
            "input_ids", "position_ids", "cache_lengths", "input_lengths", "input_offsets", "block_tables",
            "slot_mapping", "temperature", "top_k", "top_p", "random_val", "return_logits", "return_hidden_states",
        ]  # fmt: skip
        for junk in [*JUNK, [[2**63]], [[2**64]], [torch.tensor([5.0], requires_grad=True)], [[5], [5, 6]]]:
            for name in fields:
                refused(lambda name=name, junk=junk: engine(**{"input_ids": [[5, 6]], name: junk}))
            refused(engine.forward, junk)
            refused(engine.generate, junk, 2)
            refused(engine.generate, [[5, 6]], junk)
            refused(engine.set_hook_registry, junk)
            engine.set_hook_registry(None)
            assert engine(input_ids=[[5, 6]], temperature=0.0).output_ids.tolist() == expected


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[2**63]], "input_ids holds 9223372036854775808"),
        (np.array([[2**63]], dtype=np.uint64), "input_ids holds 9223372036854775808"),
        (torch.tensor([[2**63]], dtype=torch.uint64), "input_ids holds 9223372036854775808"),
        ([[2**64]], "input_ids=.* holds object; give integers"),
        (NESTED, "input_ids is a tensor of torch.int64 .*nested"),
    ],
    ids=str,
)
def test_numbers_too_large_are_named(ids: Any, message: str) -> None:
    with pytest.raises(InfinilmError, match=message):
        InferEngine.Input(input_ids=ids)


MESSAGES = [
    (lambda llm: llm.generate([b"abc"]), "prompt=b'abc' must be a string, a list of token ids"),
    (lambda llm: llm.generate([[5, True]]), "token ids must be integers, not True"),
    (lambda llm: llm.generate(count()), r"prompts=count\(0\) must be"),
    (lambda llm: llm.generate({"prompt": "a"}), "prompts=.* must be a string"),
    (lambda llm: llm.chat(None), "messages=None must be a list of messages"),
    (lambda llm: llm.chat("hello"), "messages='hello' must be a list of messages"),
    (lambda llm: llm.chat({"role": "user", "content": "a"}), "messages=.* must be a list of messages"),
    (lambda llm: llm.chat([["hello"]]), r"message"),
    (lambda llm: llm.add_request("a", request_id=3), "request_id=3 must be a string"),
    (lambda llm: llm.add_request("a", request_id="\ud800"), "request_id has a lone surrogate"),
    (lambda llm: llm.add_request("a", cache_salt=3), "cache_salt=3 must be a string"),
    (lambda llm: llm.add_request("a", cache_salt="x\ud800"), "cache_salt has a lone surrogate .* at character 1"),
    (lambda llm: llm.add_request("a", on_token=3), "on_token=3 must be a function"),
    (lambda llm: llm.add_request("a", {}), r"sampling_params=\{\} must be SamplingParams"),
    (lambda llm: llm.abort([]), r"request_id=\[\] must be a string"),
    (lambda _: SamplingParams(stop="a\udfff"), "stop has a lone surrogate"),
    (lambda _: SamplingParams(stop_token_ids=b"ab"), "stop_token_ids=b'ab' must be a list"),
    (
        lambda llm: llm.generate("a", SamplingParams(stop_token_ids=range(300), min_tokens=2)),
        "stop_token_ids covers the whole vocabulary, so that min_tokens=2 leaves no token",
    ),
    (
        lambda llm: llm.generate("a", SamplingParams(stop_token_ids=[0, *range(2, 300)], min_tokens=2)),
        "stop_token_ids covers the whole vocabulary",
    ),
]


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize(("call", "message"), MESSAGES, ids=[message[:40] for _, message in MESSAGES])
def test_messages_name_what_is_wrong(llm: LLM, call: Any, message: str) -> None:
    with pytest.raises(InfinilmError, match=message):
        call(llm)


def test_stop_ids_that_leave_one_token_are_served(llm: LLM) -> None:
    params = SamplingParams(stop_token_ids=range(2, 300), min_tokens=2, max_tokens=4, temperature=0)
    [output] = llm.generate("a", params, use_tqdm=False)
    assert output.error is None
    assert output.token_ids[:2] == [0, 0]


# --- what is taken ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompts",
    [
        torch.tensor([72, 9]),
        torch.tensor([[72, 9]], dtype=torch.int32),
        [torch.tensor([72, 9])],
        [torch.tensor(72), torch.tensor(9)],
        np.array([72, 9]),
        np.array([[72, 9]], dtype=np.uint8),
        [np.array([72, 9])],
        [np.int64(72), np.int16(9)],
        (72, 9),
        [(72, 9)],
        [range(72, 73), [72, 9]],
    ],
    ids=repr,
)
def test_arrays_and_tensors_are_prompts(llm: LLM, prompts: Any) -> None:
    output = llm.generate(prompts, SHORT, use_tqdm=False)[-1]
    assert output.prompt_token_ids == [72, 9]
    assert [type(token_id) for token_id in output.prompt_token_ids] == [int, int]
    assert output.token_ids == llm.generate([72, 9], SHORT, use_tqdm=False)[0].token_ids


def test_an_array_of_texts_is_a_list_of_prompts(llm: LLM) -> None:
    outputs = llm.generate(np.array(["to", "he"]), SHORT, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["to", "he"]


def test_numbers_of_numpy_and_torch_are_settings() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_k=np.int64(3),  # type: ignore[arg-type]
        top_p=torch.tensor(0.5),  # type: ignore[arg-type]
        max_tokens=np.array(9),  # type: ignore[arg-type]
        seed=np.uint64(2**64 - 1),  # type: ignore[arg-type]
        ignore_eos=np.bool_(True),  # type: ignore[arg-type]
        stop_token_ids=np.array([3, 4]),  # type: ignore[arg-type]
        logit_bias={np.int32(3): np.float64(0.5)},  # type: ignore[dict-item]
        logprobs=np.int8(2),  # type: ignore[arg-type]
    )
    assert params == SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        max_tokens=9,
        seed=2**64 - 1,
        ignore_eos=True,
        stop_token_ids=[3, 4],
        logit_bias={3: 0.5},
        logprobs=2,
    )
    assert {type(value) for value in (params.top_k, params.max_tokens, params.seed, *params.stop_token_ids)} == {int}
    assert [(type(key), type(value)) for key, value in present(params.logit_bias).items()] == [(int, float)]
    numbers = {"max_num_seqs": np.int64(4), "gpu_memory_utilization": np.float64(0.5), "enforce_eager": np.bool_(False)}
    config = Config(**numbers)  # type: ignore[arg-type]
    assert config == Config(max_num_seqs=4, gpu_memory_utilization=0.5, enforce_eager=False)
    assert type(config.max_num_seqs) is int
    assert PagedKVCacheConfig(np.int64(3), np.int64(32)) == PagedKVCacheConfig(3, 32)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="temperature=nan"):
        SamplingParams(temperature=np.float32("nan"))  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match=r"max_tokens=1\.5 must be an integer"):
        SamplingParams(max_tokens=np.float64(1.5))  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="max_tokens=True must be an integer"):
        SamplingParams(max_tokens=np.bool_(True))  # type: ignore[arg-type]


@pytest.mark.usefixtures("neighbour")
def test_a_logit_bias_changed_later_changes_nothing(llm: LLM) -> None:
    bias = {5: 100.0}
    params = SamplingParams(logit_bias=bias, max_tokens=3, temperature=0)
    bias[10**6] = 1.0
    request_id = llm.add_request("to", params)
    bias.clear()
    for change in (lambda b: b.update({1: 2}), lambda b: b.clear(), lambda b: b.__setitem__(10**6, 1.0)):
        with pytest.raises(InvalidTypeError, match="can't be changed"):
            change(params.logit_bias)
    outputs: list[RequestOutput] = []
    while not outputs or not outputs[-1].finished:
        outputs += [output for output in llm.step() if output.request_id == request_id]
    assert outputs[-1].token_ids == [5, 5, 5]
    for copied in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params)):
        assert copied == params


# --- hooks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["layer99_output", "layer2_*", "layer99_q_proj"])
def test_a_hook_that_no_layer_has_is_refused(llm: LLM, name: str) -> None:
    registry = HookRegistry()
    registry.register_hook(name, lambda *_: None)
    with pytest.raises(InvalidValueError, match=r"matches nothing in this model, .* 0 to 1; .*\{0 to 1\}"):
        llm.set_hook_registry(registry)
    registry.clear()
    llm.set_hook_registry(registry)
    try:
        with pytest.raises(InvalidValueError, match="matches nothing in this model"):
            registry.register_hook(name, lambda *_: None)
        assert not registry.has_hooks()
        registry.register_hook("layer1_output", lambda *_: None)
        assert llm.generate("to", SHORT, use_tqdm=False)[0].error is None
    finally:
        llm.set_hook_registry(None)
    registry.register_hook(name, lambda *_: None)  # for a larger model: it is attached to none now


# --- a tokenizer that does not fit the model -------------------------------------------------------------


@pytest.fixture(scope="module", params=[4, -40], ids=["larger", "smaller"])
def misfit(request: pytest.FixtureRequest, tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A tokenizer with a few tokens more or less than the model's 300."""
    directory = shutil.copytree(tiny_dir, tmp_path_factory.mktemp("misfit") / "model")
    tokenizer = build_tokenizer()
    if request.param > 0:
        tokenizer.add_special_tokens([f"<more{i}>" for i in range(request.param)])
        tokenizer.add_tokens(["<plain>"])
        config = json.loads((directory / "tokenizer_config.json").read_text())
        (directory / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<more1>"}))
        for name in ("config.json", "generation_config.json"):
            settings = json.loads((directory / name).read_text())
            (directory / name).write_text(json.dumps(settings | {"eos_token_id": None}))
    else:
        state = json.loads(tokenizer.to_str())
        vocab = {token: i for token, i in state["model"]["vocab"].items() if i < 300 + request.param}
        state["model"]["vocab"] = vocab
        state["model"]["merges"] = [pair for pair in state["model"]["merges"] if "".join(pair) in vocab]
        tokenizer = type(tokenizer).from_str(json.dumps(state))
    tokenizer.save(str(directory / "tokenizer.json"))
    with LLM(directory, num_kvcache_blocks=64) as engine:
        yield engine


@pytest.mark.parametrize("misfit", [4], indirect=True, ids=["larger"])
def test_text_outside_the_vocabulary_harms_nobody(misfit: LLM) -> None:
    [alone] = misfit.generate("hello", SHORT, use_tqdm=False)
    request_id = misfit.add_request("hello", SHORT)
    message = "is 30[0-4], but the model has only 300 tokens"
    for text in ("a<more0>", "<plain>", "b<more3>c"):
        with pytest.raises(InvalidValueError, match=message):
            misfit.generate(text, SHORT, use_tqdm=False)
        with pytest.raises(InvalidValueError, match=message):
            misfit.add_request(text, SHORT)
        with pytest.raises(InvalidValueError, match=message):
            misfit.stream(text, SHORT)
        with pytest.raises(InvalidValueError, match=message):
            misfit.chat([{"role": "user", "content": text}], SHORT, use_tqdm=False, parse_special_tokens=True)
    assert misfit.eos_token_ids == ()
    outputs = []
    while not misfit.is_finished():
        outputs += misfit.step()
    assert [output.request_id for output in outputs] == [request_id] * len(outputs)
    assert (outputs[-1].token_ids, outputs[-1].error) == (alone.token_ids, None)


@pytest.mark.parametrize("structured", [{"choice": ["to be", "not"]}, {"regex": "[a-z]{3}"}, {"json_object": True}])
def test_grammars_with_a_tokenizer_that_does_not_fit(misfit: LLM, structured: dict) -> None:
    params = SamplingParams(structured=StructuredOutput(**structured), stop_token_ids=[1], max_tokens=30, seed=3)
    for output in misfit.generate(["a"] * 3, params, use_tqdm=False):
        assert output.error is None
        assert all(token_id < min(300, present(misfit.tokenizer).vocab_size) for token_id in output.token_ids)
        if "json_object" not in structured:
            assert output.finish_reason == "stop"


def test_answers_of_ids_without_a_token_have_no_text(misfit: LLM) -> None:
    bias = SamplingParams(logit_bias={299: 100.0}, max_tokens=3, temperature=0, logprobs=3, ignore_eos=True)
    [output] = misfit.generate("a", bias, use_tqdm=False)
    assert output.token_ids == [299, 299, 299]
    assert output.error is None
