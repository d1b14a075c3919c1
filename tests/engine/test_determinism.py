"""A request gets the same bits in every circumstance, with tiny models of every architecture."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from checkpoints import ARCHITECTURES, make_reference, save
from packing import needs_native

from infinilm import LLM, InferEngine, SamplingParams
from infinilm.bench.circumstances import all_circumstances
from infinilm.bench.determinism import (
    Circumstance,
    Finding,
    Session,
    Workload,
    changed,
    check,
    check_hidden_states,
    in_chunks,
)
from infinilm.bench.hidden_states import first_difference
from infinilm.config import Config
from infinilm.distributed import CommunicationGroup, DistConfig, RankInfo
from infinilm.executor.commands import Command
from infinilm.executor.guarantee import known_reasons
from infinilm.executor.local import LocalExecutor
from infinilm.executor.self_check import MixerTrial, _Trial, check_products
from infinilm.kernels.invariant import PIECE
from infinilm.layers.formats import DenseWeight
from infinilm.layers.moe import SparseMLP
from infinilm.models import ModelConfig, auto, create_model
from infinilm.models.random_weights import fill_randomly

pytestmark = needs_native

SIZES = {
    "vocab_size": 1000,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 2,
}
LARGE = {**SIZES, "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336}
SMALL = {**LARGE, "hidden_size": 1024, "intermediate_size": 3072}
TINY_SPARSE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
SPARSE = {**LARGE, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}

QUANTIZED = ("llama-bias", "qwen3", "gemma3", "glm4-moe", "mixtral", "smollm3", "qwen3.5", "deepseek-v2")
HALF = ("llama-gqa", "qwen3", "gemma3", "gpt-oss", "mixtral", "gemma4", "qwen3.5-moe", "deepseek-v3")


def local(engine: LLM) -> LocalExecutor:
    assert isinstance(engine.executor, LocalExecutor)
    return engine.executor


def in_company(session: Session):
    """All together, in chunks, with two steps in flight."""
    engine = session.engine()
    with ExitStack() as stack:
        stack.enter_context(in_chunks(engine, 16))
        stack.enter_context(changed(engine, _max_in_flight=2))
        stack.enter_context(changed(engine.scheduler.blocks, enable_prefix_caching=True))
        return session.run(engine, session.all)


def warm(session: Session):
    """In another order, on what the run before has left in the prefix cache."""
    engine = session.engine()
    with changed(engine.scheduler.blocks, enable_prefix_caching=True):
        return session.run(engine, reversed(session.all))


def find_differences(path: Path, **settings) -> list[Finding]:
    work = Workload.make(160, num_requests=3, max_tokens=3, max_prompt_len=63, num_others=0, num_sharing=0)
    session = Session(Config(model=path, device="cpu", deterministic=True, **settings), work)
    try:
        assert session.engine().stats().guarantee == "yes"
        circumstances = [Circumstance("in company", in_company), Circumstance("warm", warm)]
        return [finding for finding in check(session, circumstances) if not finding.is_equal]
    finally:
        session.close()


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_architectures(kind: str, tmp_path: Path) -> None:
    assert find_differences(save(make_reference(kind), tmp_path)) == []


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized(kind: str, tmp_path: Path) -> None:
    assert find_differences(save(make_reference(kind, intermediate_size=128), tmp_path), quantization="q8") == []


@pytest.mark.parametrize("kind", HALF)
def test_half_precision(kind: str, tmp_path: Path) -> None:
    assert find_differences(save(make_reference(kind), tmp_path), dtype="bfloat16") == []


def test_four_ranks(tmp_path: Path) -> None:
    """The library's sum of four ranks' results has another order for each part of a tensor."""
    path = save(make_reference("llama-mha"), tmp_path)
    assert find_differences(path, tensor_parallel_size=4) == []
    with LLM(path, device="cpu", tensor_parallel_size=4, quantization="q8", max_model_len=64) as llm:
        assert "more than two ranks" in llm.stats().guarantee


def test_every_circumstance(tiny_dir: Path) -> None:
    """Also those of other interfaces, and hidden states."""
    work = Workload.make(300, num_requests=4, max_tokens=18, max_prompt_len=66, num_others=4, num_sharing=4)
    session = Session(Config(model=tiny_dir, device="cpu", deterministic=True), work)
    try:
        found = list(check(session, all_circumstances(session, num_others=4)))
        assert [finding for finding in found if not finding.is_equal or finding.skipped] == []
        assert {"preempted", "AsyncLLM", "InferEngine", "server"} <= {finding.name for finding in found}
        states = check_hidden_states(session)
        assert states.is_equal
        assert states.num_compared
    finally:
        session.close()


def test_a_difference_is_found_with_the_layer_where_it_begins(tiny_dir: Path) -> None:
    work = Workload.make(300, num_requests=2, max_tokens=4, max_prompt_len=40, num_others=0, num_sharing=0)
    session = Session(Config(model=tiny_dir, device="cpu", deterministic=True), work)

    def disturbed(session: Session):
        """A weight of layer 1 is another one while requests are together."""
        engine = session.engine()
        model: Any = local(engine).worker.model
        weight = model.layers[1].channel_mixer.down.matrix.weight
        with torch.inference_mode():
            weight *= 1.01
            try:
                return session.run(engine, session.all)
            finally:
                weight /= 1.01

    try:
        (finding,) = check(session, [Circumstance("disturbed", disturbed)])
    finally:
        session.close()
    assert not finding.is_equal
    assert "begins at layer1_mlp_output, at position 0 of the text" in finding.difference


def test_records_part_at_the_first_position() -> None:
    ours = {0: {"a": 1, "b": 2}, 1: {"a": 3, "b": 4}}
    assert first_difference(ours, {1: {"a": 3, "b": 4}}) is None
    assert str(first_difference(ours, {1: {"a": 3, "b": 5}, 0: {"a": 1, "b": 2}})) == "b, at position 1 of the text"


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("llama-gqa", {}, None),
        ("llama-gqa", {"deterministic": False}, "deterministic=True is not set; attention by torch"),
        ("llama-gqa", {"dtype": "bfloat16"}, "deterministic=True is not set; attention by torch"),
        ("llama-gqa", {"dtype": "bfloat16", "deterministic": True}, None),
        ("llama-gqa", {"quantization": "q8"}, None),
        ("llama-gqa", {"deterministic": True, "attention_backend": "torch"}, "attention by torch"),
        ("deepseek-v2", {}, None),
        ("qwen3.5", {}, None),
        ("qwen3.5-moe", {}, None),
        ("qwen3.5", {"quantization": "q8"}, None),
    ],
)
def test_what_is_promised(kind: str, settings: dict, reason: str | None, tmp_path: Path) -> None:
    path = save(make_reference(kind, intermediate_size=128), tmp_path / "model")
    with LLM(path, device="cpu", **settings) as llm:
        stats = llm.stats()
        llm.generate([[3, 4]], SamplingParams(max_tokens=1), use_tqdm=False)
    if reason is None:
        assert stats.guarantee == "yes"
        assert stats.system_fingerprint.startswith("model:w")
        assert stats.system_fingerprint.endswith(":deterministic")
    else:
        assert stats.guarantee.startswith("no, because ")
        assert reason in stats.guarantee
        assert stats.system_fingerprint.endswith(":unguaranteed")


def test_fingerprints_tell_apart_what_computes_otherwise(tmp_path: Path) -> None:
    path = save(make_reference("llama-gqa", intermediate_size=128), tmp_path / "model")
    ways: list[dict[str, Any]] = [
        {},
        {"deterministic": False},
        {"deterministic": True, "dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8"},
        {"tensor_parallel_size": 2},
        {"quantization": "q8"},
        {"quantization": "q4"},
        {"quantization": "q8", "kv_cache_dtype": "float32"},
        {"quantization": "q8", "activation_bits": 8},
    ]

    def fingerprint(**settings: Any) -> str:
        with LLM(path, device="cpu", **settings) as llm:
            return llm.stats().system_fingerprint

    assert len({fingerprint(**settings) for settings in ways}) == len(ways)
    # These change speed and room, not results.
    assert fingerprint(quantization="q8", max_num_seqs=3, max_model_len=100) == fingerprint(quantization="q8")


@pytest.mark.parametrize(
    ("device", "attention", "promises"),
    [("cpu", "native", True), ("cpu", "torch", False), ("cuda:0", "triton", True), ("cuda:0", "torch", False)],
)
def test_what_attention_is_promised_for(device: str, attention: str, promises: bool) -> None:
    reasons = known_reasons(device, attention, 1, is_native=False, is_ordered=True)
    assert (reasons == []) == promises


def test_products_that_depend_on_the_number_of_rows_are_named() -> None:
    """Without whole tiles of rows MKL's do, and so would any library's whose results this one imitates."""

    class Uneven(DenseWeight):
        def multiply(self, x, bias=None, residual=None, norm=None):
            return super().multiply(x, bias, residual, norm) + len(x)

    good = DenseWeight([24], 16, dtype=torch.float64, device="cpu", is_ordered=True)
    bad = Uneven([40], 16, dtype=torch.float64, device="cpu", is_ordered=True)
    for matrix in (good, bad):
        matrix.weight.data.normal_()
    assert check_products(torch.nn.ModuleList([good])) == []
    assert check_products(torch.nn.ModuleList([good, bad])) == ["products with 16 x 40"]


def test_rows_are_multiplied_in_pieces_where_a_library_has_an_order_for_each_number_of_them() -> None:
    """As MKL on some CPUs of Intel."""

    class Fickle(DenseWeight):
        def _product(self, x, bias, residual):
            return super()._product(x, bias, residual) + len(x)

    matrix = Fickle([40], 16, dtype=torch.float64, device="cpu", is_ordered=True)
    matrix.weight.data.normal_()
    x, residual, bias = (torch.randn(*shape, dtype=torch.float64) for shape in [(37, 16), (37, 40), (40,)])
    expected = torch.nn.functional.linear(x, matrix.weight.t(), bias) + residual + PIECE
    assert check_products(torch.nn.ModuleList([matrix])) == []
    whole = matrix.multiply(x, bias, residual.clone())
    torch.testing.assert_close(whole, expected)
    for count in range(1, 38):
        assert matrix.multiply(x[:count], bias, residual[:count].clone()).equal(whole[:count])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_low_level_engine_tries_the_products_of_all_ranks(num_ranks: int, tiny_dir: Path) -> None:
    tried: list[list[str]] = []
    with InferEngine(tiny_dir, DistConfig(num_ranks), deterministic=True) as engine:
        assert engine.guarantee == "yes"
        assert isinstance(engine._executor, LocalExecutor)
        tried = engine._executor.call_all(Command.CHECK_LAYERS)
    assert tried == [[]] * num_ranks


def test_products_in_pieces_of_the_low_level_engine(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU whose library has an order for each number of rows."""
    product = DenseWeight._product
    monkeypatch.setattr(DenseWeight, "_product", lambda self, x, *rest: product(self, x, *rest) * (1 + len(x) * 2**-7))
    tokens = list(range(3, 40))
    with InferEngine(tiny_dir, dtype="bfloat16", deterministic=True) as engine:
        assert engine.guarantee == "yes"
        whole, start = (engine.forward(input_ids=[ids], return_hidden_states=True) for ids in (tokens, tokens[:5]))
    assert start.hidden_states is not None
    assert whole.hidden_states is not None
    assert start.hidden_states[0].equal(whole.hidden_states[0, :5])


@pytest.mark.parametrize("kind", ["qwen3.5", "deepseek-v3", "gemma3"])
@pytest.mark.parametrize(("attention", "is_alike"), [("native", True), ("torch", False)])
def test_texts_are_computed_whole_and_in_parts(kind: str, attention: str, is_alike: bool, tmp_path: Path) -> None:
    """The start's check of token mixers, where a GPU has other kernels for a single token than for a prompt."""
    path = save(make_reference(kind), tmp_path / "model")
    with LLM(path, device="cpu", deterministic=True, attention_backend=attention, max_model_len=128) as llm:
        worker = local(llm).worker
        assert worker._passes(MixerTrial(kind, 70)) == is_alike
        assert not worker._passes(MixerTrial(kind, 8))  # which is too short to tell
    with InferEngine(path, deterministic=True) as engine:  # without a cache
        assert cast(LocalExecutor, engine._executor).worker._passes(MixerTrial(kind, 70))


def test_experts_are_tried_on_each_rank_alone() -> None:
    config = ModelConfig.from_dict({**TINY_SPARSE, "model_type": "mixtral"})
    group = CommunicationGroup(RankInfo(0, 2))  # nobody joins it
    model = create_model(config, dtype=torch.float32, device=torch.device("cpu"), group=group)
    fill_randomly(model.weight_targets(), 0.02, 0)
    experts = [module for module in cast(torch.nn.Module, model).modules() if isinstance(module, SparseMLP)]
    assert len(experts) == 2
    assert all(_Trial.of_experts(module, 16).counts == (1, 3, 5) for module in experts)
    assert _Trial.of_experts(experts[0], 16).multiply(torch.randn(3, config.hidden_size)).shape == (
        3,
        config.hidden_size,
    )


@pytest.mark.parametrize(
    ("sizes", "capability", "settings", "is_ordered"),
    [
        (LARGE, (9, 0), {}, True),
        (LARGE, (9, 0), {"deterministic": False}, False),
        (LARGE, (9, 0), {"kv_cache_dtype": "fp8"}, False),
        (LARGE, (9, 0), {"dtype": "float32"}, False),
        (LARGE, (9, 0), {"attention_backend": "torch"}, False),
        (LARGE, (8, 0), {}, False),
        (SPARSE, (9, 0), {}, False),
        (SMALL, (9, 0), {}, False),
        (SMALL, (9, 0), {"deterministic": True}, True),
    ],
)
def test_what_a_gpu_does_unasked(
    sizes: dict[str, Any],
    capability: tuple[int, int],
    settings: dict[str, Any],
    is_ordered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large dense models are computed in order, where that costs little, unless it is forbidden."""
    monkeypatch.setattr(auto, "has_kernels", lambda device: True)
    monkeypatch.setattr(auto, "has_bfloat16", lambda device: True)
    monkeypatch.setattr(auto, "check_fp8_cache", lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = ModelConfig.from_dict(sizes)
    choices = auto.make_choices(config, None, torch.device("cuda", 0), **{"dtype": "bfloat16", **settings})
    assert choices.formats.is_ordered == is_ordered
