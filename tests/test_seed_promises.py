"""What the seed documents promise, used as their readers would. Each test names its document and section."""

import logging
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoints import SIZES, make_reference, save
from halved_cache import HalvedCacheConfig
from narrow import dense, present, worker_of
from torch import Tensor

from infinilm import LLM, InferEngine, SamplingParams
from infinilm.attention import TorchAttention
from infinilm.cache import (
    Cache,
    CacheConfig,
    DynamicCache,
    PagedKVCache,
    PagedKVCacheConfig,
    StaticKVCache,
    StaticKVCacheConfig,
)
from infinilm.cache.specs import AttentionSpec
from infinilm.debug import HookRegistry
from infinilm.distributed import DistConfig
from infinilm.engine import Sequence
from infinilm.errors import EngineError, InvalidTypeError, InvalidValueError
from infinilm.generation import infini_to_numpy
from infinilm.lib import _infinilm
from infinilm.models import CausalLM, InfinilmModelFactory, LlamaConfig, LlamaForCausalLM
from infinilm.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaModel

CONFIG = LlamaConfig(**SIZES, initializer_range=0.2)
ROWS = torch.randint(0, 160, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def reference():
    return make_reference("llama-gqa")


@pytest.fixture(scope="module")
def checkpoint(reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference, tmp_path_factory.mktemp("llama"))


# --- 000: engine bindings -------------------------------------------------------------------------------


def test_000_2_dist_config_takes_a_list_of_devices() -> None:
    config = DistConfig([0, 2, 4, 6])
    assert config == DistConfig(tp_device_ids=[0, 2, 4, 6]) == DistConfig((0, 2, 4, 6))
    assert (config.tp_size, repr(config)) == (4, "DistConfig(tp_device_ids=[0, 2, 4, 6])")
    with pytest.raises(InvalidValueError, match="names a device twice"):
        DistConfig([0, 0])
    with pytest.raises(InvalidValueError, match="both given"):
        DistConfig([0], [1])


def test_000_2_tp_device_ids_are_assigned_and_refuse_other_changes() -> None:
    config = DistConfig(2)
    ids = config.tp_device_ids
    for change in (lambda: ids.append(2), lambda: ids.__setitem__(0, 1), ids.clear, ids.sort):
        with pytest.raises(InvalidTypeError, match="assign a new one"):
            change()
    assert config.tp_device_ids == [0, 1]
    config.tp_device_ids = [*ids, 2]
    assert config == pickle.loads(pickle.dumps(config)) == DistConfig(3)


def test_000_2_input_becomes_the_models_input(reference) -> None:
    model = CausalLM(LlamaConfig.from_dict(reference.config.to_dict()))
    for name, shard in model.weight_targets().items():
        dense(shard).tensor.copy_(reference.state_dict()[name])
    cache = PagedKVCache(model.config.cache_specs(), 8, 16, dtype=torch.float32, device="cpu")
    given = [
        InferEngine.Input(input_ids=ROWS[:, :19], block_tables=[[7, 3], [1, 4]]),
        InferEngine.Input(input_ids=ROWS[:, 19:], block_tables=[[7, 3], [1, 4]], cache_lengths=[19, 19]),
    ]
    expected = reference(ROWS).logits
    with torch.inference_mode():
        for each, wanted in zip(given, (expected[:, :19], expected[:, 19:]), strict=True):
            batch = each.to_model_input()
            logits = model.compute_logits(model(batch.to_device(torch.device("cpu")), cache, TorchAttention()))
            torch.testing.assert_close(logits, wanted.flatten(0, 1), atol=1e-4, rtol=0)
    alone = InferEngine.Input(input_ids=[[1, 2, 3], [4, 5, 0]], input_lengths=[3, 2]).to_model_input()
    assert (alone.input_ids.tolist(), alone.block_tables.tolist()) == ([1, 2, 3, 4, 5], [[0], [1]])
    with pytest.raises(InvalidValueError, match="give block_tables"):
        InferEngine.Input(input_ids=[[1]], cache_lengths=[4]).to_model_input()


def test_000_5_cache_configurations_are_copied_by_unique_copy(checkpoint: Path) -> None:
    class Labelled(StaticKVCacheConfig):
        """Has something that can be changed."""

        labels: list[str]

        def __init__(self, labels: list[str]) -> None:
            super().__init__(2, 32)
            object.__setattr__(self, "labels", labels)

        def unique_copy(self) -> "Labelled":
            return Labelled([*self.labels, "copied"])

    plain = PagedKVCacheConfig(8)
    assert plain.unique_copy() == plain
    assert plain.unique_copy() is not plain
    with InferEngine(checkpoint, device_type="cpu") as engine:
        engine.reset_cache(plain)
        assert engine.get_cache_config() == plain
        assert engine.get_cache_config() is not engine.get_cache_config()
        given = Labelled(["mine"])
        engine.reset_cache(given)
        given.labels.append("changed")
        copied = engine.get_cache_config()
        assert isinstance(copied, Labelled)
        assert copied.labels == ["mine", "copied", "copied"]


def test_000_5_a_default_cache_config_is_abstract() -> None:
    with pytest.raises(NotImplementedError, match="CacheConfig is abstract"):
        CacheConfig()


# --- 001: bindings as a whole ---------------------------------------------------------------------------


def test_001_4_llama_config_takes_all_of_hugging_faces_keys(reference) -> None:
    theirs = transformers.LlamaConfig(**SIZES, attention_dropout=0.1, initializer_range=0.05, use_cache=True)
    config = LlamaConfig(**theirs.to_dict())
    assert (config.hidden_size, config.initializer_range) == (64, 0.05)
    model = LlamaForCausalLM(config, device="cpu", dtype="float32")
    weight = dense(model.model.weight_targets()["model.layers.0.mlp.up_proj.weight"]).tensor
    assert weight.std().item() == pytest.approx(0.05, rel=0.05)
    for name, value in {"use_cache": False, "output_attentions": True, "return_dict": False}.items():
        with pytest.raises(InvalidValueError, match=f"{name}={value} is not supported; use {not value}"):
            LlamaConfig(**{name: value})
    with pytest.raises(InvalidTypeError, match="has no setting use_cash"):
        LlamaConfig(use_cash=True)


def test_001_4_llama_config_reads_back_what_it_was_given() -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    config = LlamaConfig(num_layers=3, torch_dtype=torch.float16, rope_theta=5e5, rope_scaling=scaling)
    assert (config.num_layers, config.torch_dtype, config.rope_theta) == (3, "float16", 5e5)
    assert config.rope_scaling == scaling
    again = LlamaConfig(
        num_layers=config.num_layers,
        torch_dtype=config.torch_dtype,
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
    )
    assert again == config
    assert LlamaConfig().rope_scaling is None


@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id", "pad_token_id"])
def test_001_4_token_ids_are_checked_at_once(name: str) -> None:
    with pytest.raises((InvalidTypeError, InvalidValueError), match=f"{name}='x'"):
        LlamaConfig(**{name: "x"})
    with pytest.raises((InvalidTypeError, InvalidValueError), match=f"{name}=-1"):
        LlamaConfig(**{name: [1, -1]})


def test_001_4_3_threads_that_share_an_llm_get_what_they_get_alone(tiny_dir: Path) -> None:
    num_tokens = 100  # so many that quick threads do not end before others begin

    def params(seed: int) -> SamplingParams:
        return SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=seed)

    def generate(llm: LLM, name: int) -> list[list[int]]:
        prompts = [[name + 3] * (5 + name), [7, name + 3]]
        return [output.token_ids for output in llm.generate(prompts, params(name), use_tqdm=False)]

    def stream(llm: LLM, name: int) -> str:
        return "".join(llm.stream([name + 3, 5], params(name)))

    def by_hand(llm: LLM, name: int) -> list[int]:
        found: list[list[int]] = []
        request = llm.add_request([9, name + 3], params(name), on_token=lambda output: found.append(output.token_ids))
        while not found or len(found[-1]) < num_tokens:
            llm.step_deltas()  # which may compute the requests of others only
        assert not llm.abort(request)
        return found[-1]

    tasks = [(call, name) for name in range(2) for call in (generate, stream, by_hand)]
    with LLM(tiny_dir, num_kvcache_blocks=64) as llm:
        alone = [call(llm, name) for call, name in tasks]
        num_alone = llm.stats().num_steps
        with ThreadPoolExecutor(len(tasks)) as threads:
            start = Barrier(len(tasks))
            together = list(threads.map(lambda task: (start.wait(), task[0](llm, task[1]))[1], tasks))
        assert together == alone
        assert llm.stats().num_steps < 2 * num_alone, "a step computes requests of several threads"
        assert (llm.is_finished(), llm.stats().num_free_blocks) == (True, 64)


def test_001_4_3_threads_that_share_an_infer_engine_get_what_they_get_alone(checkpoint: Path) -> None:
    def generate(engine: InferEngine, name: int) -> list[list[int]]:
        return engine.generate(ROWS[:, name:], 4, seed=name, stop_on_eos=False).token_ids

    def forward(engine: InferEngine, name: int) -> list[int]:
        return engine.forward(input_ids=ROWS[:, name:], random_val=0.3).output_ids.tolist()

    tasks = [(call, name) for name in range(2) for call in (generate, forward)]
    with InferEngine(checkpoint, device_type="cpu", cache_config=StaticKVCacheConfig(2, 64)) as engine:
        alone = [call(engine, name) for call, name in tasks]
        with ThreadPoolExecutor(len(tasks)) as threads:
            assert list(threads.map(lambda task: task[0](engine, task[1]), tasks)) == alone


def test_001_4_3_calls_from_within_a_call_are_refused_with_the_cause(tiny_dir: Path, checkpoint: Path) -> None:
    with InferEngine(checkpoint, device_type="cpu") as engine:
        with pytest.raises(EngineError, match=r"forward: .* which this one comes from.*not from a hook or streamer"):
            engine.generate([1, 2], 4, streamer=lambda _: engine.forward(input_ids=[[1]]))
        registry = HookRegistry()
        registry.register_hook("final_norm", lambda *_: engine.reset_cache())
        engine.set_hook_registry(registry)
        with pytest.raises(EngineError, match=r"reset_cache: .* not from a hook"):
            engine.forward(input_ids=[[1]])
    with LLM(tiny_dir, num_kvcache_blocks=16) as llm:
        llm.add_request([1, 2], on_token=lambda _: llm.generate([3, 4], use_tqdm=False))  # type: ignore[arg-type]
        output = llm.step()[0]
        assert output.error == (
            "on_token failed: EngineError: the engine is in the middle of a step; don't call it from a hook or from "
            "on_token"
        )


# --- 002: the Python package ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_002_2_parts_of_llama_compute_by_themselves(kind: str) -> None:
    reference = make_reference(kind)
    config = LlamaConfig.from_dict(reference.config.to_dict())
    assert isinstance(config, LlamaConfig)
    body, layer = reference.model, reference.model.layers[1]
    hidden = torch.randn(2, 30, 64)
    positions = torch.arange(30)[None]
    with torch.inference_mode():
        angles = body.rotary_emb(hidden, positions)
        causal = torch.full((30, 30), float("-inf")).triu(1)[None, None]
        if window := config.window(1):
            causal = causal + torch.full((30, 30), float("-inf")).tril(-window)
        theirs = {
            LlamaMLP: layer.mlp(hidden),
            LlamaAttention: layer.self_attn(hidden, position_embeddings=angles, attention_mask=causal)[0],
            LlamaDecoderLayer: layer(hidden, position_embeddings=angles, attention_mask=causal),
        }
    modules = {LlamaMLP: layer.mlp, LlamaAttention: layer.self_attn, LlamaDecoderLayer: layer}
    before = hidden.clone()
    for part, module in modules.items():
        ours = part(config, device="cpu") if part is LlamaMLP else part(config, 1, device="cpu")
        ours.load_params(module.state_dict())
        torch.testing.assert_close(ours(hidden), theirs[part], atol=1e-4, rtol=0)
        if part is not LlamaMLP:
            cache = DynamicCache()
            pieces = [ours(piece, past_key_values=cache) for piece in hidden.split([7, 1, 22], dim=1)]
            torch.testing.assert_close(torch.cat(pieces, dim=1), theirs[part], atol=1e-4, rtol=0)
            assert (cache.get_seq_length(1), cache.get_seq_length(0)) == (30, 0)
    assert torch.equal(hidden, before)


def test_002_2_llama_model_is_the_body_of_llama_for_causal_lm(reference, checkpoint: Path) -> None:
    whole = LlamaForCausalLM.from_pretrained(checkpoint, device="cpu")
    assert isinstance(whole.config, LlamaConfig)
    body = LlamaModel(whole.config, device="cpu")
    body.load_params(reference.model.state_dict())
    first = body(ROWS[:, :12])
    second = body(ROWS[:, 12:], past_key_values=first.past_key_values)
    hidden = torch.cat([first.last_hidden_state, second.last_hidden_state], dim=1)
    logits = whole.model.compute_logits(hidden.flatten(0, 1)).view(2, 20, -1)
    torch.testing.assert_close(logits, whole(ROWS).logits, atol=1e-4, rtol=0)
    incomplete = dict(reference.model.state_dict())
    incomplete.pop("norm.weight")
    with pytest.raises(InvalidValueError, match=r"params\['norm.weight'\] has shape None, but the part's is \[64\]"):
        body.load_params(incomplete)
    with pytest.raises(InvalidValueError, match=r"hidden_states is torch\.float64 on cpu.*convert it"):
        LlamaMLP(CONFIG, device="cpu")(torch.zeros(3, 64).double())


def test_002_3_layers_built_one_by_one_share_a_dynamic_cache(reference) -> None:
    config = LlamaConfig.from_dict(reference.config.to_dict())
    assert isinstance(config, LlamaConfig)
    layers = [LlamaDecoderLayer(config, index, device="cpu") for index in range(2)]
    for ours, theirs in zip(layers, reference.model.layers, strict=True):
        ours.load_params(theirs.state_dict())
    cache, logits = DynamicCache(), []
    with torch.inference_mode():
        for piece in ROWS.split([11, 1, 8], dim=1):
            hidden = reference.model.embed_tokens(piece)
            for layer in layers:
                hidden = layer(hidden, past_key_values=cache)
            logits.append(reference.lm_head(reference.model.norm(hidden)))
        torch.testing.assert_close(torch.cat(logits, dim=1), reference(ROWS).logits, atol=1e-4, rtol=0)
    assert (len(cache), cache.get_seq_length(), cache.batch_size) == (2, 20, 2)


def test_002_3_dynamic_cache_is_updated_and_read_layer_by_layer(reference, checkpoint: Path) -> None:
    theirs = reference(ROWS[:, :15], use_cache=True).past_key_values
    cache = DynamicCache()
    assert (len(cache), cache.get_seq_length()) == (0, 0)
    with pytest.raises(IndexError, match="layer_idx=0: the cache has 0 layers"):
        _ = cache[0]
    for layer, (keys, values) in enumerate((each.keys, each.values) for each in theirs.layers):
        for part in (slice(0, 9), slice(9, 15)):
            seen = cache.update(keys[:, :, part], values[:, :, part], layer)
        assert torch.equal(seen[0], keys)
        assert torch.equal(cache[layer][1], values)
    assert (len(cache), cache.get_seq_length(1), len(list(cache))) == (2, 15, 2)
    model = LlamaForCausalLM.from_pretrained(checkpoint, device="cpu")
    later = model(ROWS[:, 15:], past_key_values=cache).logits
    torch.testing.assert_close(later, reference(ROWS).logits[:, 15:], atol=1e-4, rtol=0)
    full = model(ROWS).past_key_values
    for ours, expected in zip(cache, full, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    cache.update(keys[:, :, :1], values[:, :, :1], 0)
    with pytest.raises(InvalidValueError, match=r"layers of the cache hold \[21, 20\] tokens"):
        model(ROWS, past_key_values=cache)
    with pytest.raises(InvalidValueError, match="do not fit layer 1"):
        cache.update(keys[:, :1], values[:, :1], 1)
    with pytest.raises(InvalidValueError, match=r"must both be \[batch, kv_heads, new, head_dim\]"):
        cache.update(keys, values[0], 1)


def test_002_3_infini_to_numpy_takes_the_three_float_types() -> None:
    for dtype, found in {"float32": "float32", "float16": "float16", "bfloat16": "float32"}.items():
        array = infini_to_numpy(torch.tensor([0.5, -3.0, 2.0**-30]).to(getattr(torch, dtype)))
        assert array.dtype == np.dtype(found)
        assert array[:2].tolist() == [0.5, -3.0]
    with pytest.raises(ValueError, match=r"torch\.complex64 is not supported; use float32, float16, bfloat16"):
        infini_to_numpy(torch.zeros(2, dtype=torch.complex64))


def test_002_3_the_extension_module_has_llama_for_causal_lm() -> None:
    model = _infinilm.LlamaForCausalLM(CONFIG, device="cpu")
    assert len(model.generate([1, 2, 3], 4, temperature=0, stop_on_eos=False).token_ids[0]) == 4


# --- 003: the core --------------------------------------------------------------------------------------


def run_in_pieces(engine: InferEngine) -> Tensor:
    """Logits of the second of two passes, which attends to the first's keys and values."""
    engine.forward(input_ids=ROWS[:, :13])
    return present(engine.forward(input_ids=ROWS[:, 13:], cache_lengths=[13, 13], return_logits=True).logits)


def test_003_5_2_a_cache_strategy_is_a_subclass_with_its_own_update(checkpoint: Path) -> None:
    """On several ranks: see tests/engine/test_infer_engine_tp.py."""
    with InferEngine(checkpoint, device_type="cpu") as engine:
        engine.reset_cache(PagedKVCacheConfig(8))
        plain = run_in_pieces(engine)
        engine.reset_cache(HalvedCacheConfig(8, factor=1.0))
        assert torch.equal(run_in_pieces(engine), plain), "it does what the built-in one does"
        engine.reset_cache(HalvedCacheConfig(8))
        halved = run_in_pieces(engine)
        assert engine.get_cache_config() == HalvedCacheConfig(8, factor=0.5)
        registry = HookRegistry()
        registry.register_hook("layer*_v_proj", lambda name, tensor, layer: tensor * 0.5)
        engine.set_hook_registry(registry)
        engine.reset_cache(StaticKVCacheConfig(2, 32))
        torch.testing.assert_close(run_in_pieces(engine), halved, atol=1e-5, rtol=0)
    assert (halved - plain).abs().max() > 0.1


def test_003_5_2_strategies_that_are_wrong_are_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Empty(Cache):
        """Has no update."""

    class Wrong(Cache):
        def update(self, layer_idx: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> Tensor:
            return key

    @dataclass(frozen=True)
    class AnyConfig(PagedKVCacheConfig):
        kind: Any = None

        def cache_class(self) -> Any:
            return self.kind

    with InferEngine(checkpoint, device_type="cpu") as engine:
        engine.reset_cache(AnyConfig(4, kind=Empty))
        with pytest.raises(NotImplementedError, match="Empty must define update"):
            engine.forward(input_ids=[[1, 2]])
        engine.reset_cache(AnyConfig(4, kind=Wrong))
        with pytest.raises(InvalidValueError, match=r"Wrong.update returned \[2, 2, 16\].*\[4, 16, 2, 2, 16\]"):
            engine.forward(input_ids=[[1, 2]])
        monkeypatch.setattr(CausalLM, "updates_cache", False)
        with pytest.raises(InvalidValueError, match=r"do not call Wrong\.update"):
            engine.reset_cache(AnyConfig(4, kind=Wrong))
        with pytest.raises(InvalidTypeError, match=r"cache_class\(\) returned 3"):
            engine.reset_cache(AnyConfig(4, kind=3))
        engine.reset_cache(PagedKVCacheConfig(4))
        assert len(engine.forward(input_ids=[[1, 2]]).output_ids) == 1


def test_003_3_2_3_static_and_paged_caches_have_the_seeds_layouts() -> None:
    specs = [AttentionSpec(2, 8)] * 3
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    paged = PagedKVCache(specs, 5, 16, **options)
    static = StaticKVCache(specs, 6, 16, max_batch_size=2, **options)
    assert [(len(cache), cache[0][0].shape) for cache in (paged, static)] == [(3, (5, 2, 16, 8)), (3, (2, 2, 48, 8))]
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    slots = torch.tensor([2, -1, 48 + 17])  # row 0 token 2, nowhere, row 1 token 17
    static.update(1, key, value, slots)
    keys, values = static[1]
    assert torch.equal(keys[0, :, 2], key[0])
    assert torch.equal(values[1, :, 17], value[2])
    assert static[0][0].count_nonzero() == 0
    assert keys.count_nonzero() == 2 * 2 * 8
    assert torch.equal(paged.update(2, key, value, slots), paged.layers[2])
    assert torch.equal(paged[2][0][4, :, 1], key[2])
    with InferEngine(CONFIG, device_type="cpu", cache_config=StaticKVCacheConfig(2, 40)) as engine:
        cache = worker_of(engine._executor).cache
        assert type(cache) is StaticKVCache
        assert cache[0][0].shape == (2, 2, 48, 16)


def test_003_2_1_the_factory_makes_what_a_configuration_describes(reference) -> None:
    config = LlamaConfig.from_dict(reference.config.to_dict())
    model = InfinilmModelFactory.createModel(config)
    for name, shard in model.weight_targets().items():
        dense(shard).tensor.copy_(reference.state_dict()[name])
    cache = PagedKVCache(config.cache_specs(), 4, 16, dtype=torch.float32, device="cpu")
    batch = InferEngine.Input(input_ids=ROWS).to_model_input().to_device(torch.device("cpu"))
    with torch.inference_mode():
        logits = model.compute_logits(model(batch, cache, TorchAttention()))
        torch.testing.assert_close(logits.view(2, 20, -1), reference(ROWS).logits, atol=1e-4, rtol=0)
    with pytest.raises(InvalidValueError, match="model_type='llama' is registered already"):
        InfinilmModelFactory.register("llama", "LlamaForCausalLM")


# --- 004: mindnlp.inference -----------------------------------------------------------------------------


def test_004_public_entrypoints_max_model_len_is_capped(tiny_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "infinilm"), LLM(tiny_dir, max_model_len=9000, num_kvcache_blocks=32) as llm:
        assert llm.max_model_len == 256
        output = llm.generate([[5] * 250], SamplingParams(max_tokens=50, ignore_eos=True))[0]
    assert (len(output.token_ids), output.finish_reason) == (6, "length")
    assert caplog.messages == ["max_model_len=9000 is more than the checkpoint's 256 positions; 256 is used"]


def test_004_engine_architecture_sequences_have_prompt_and_completion() -> None:
    seq = Sequence(0, [1, 2, 3], SamplingParams())
    seq.token_ids += [7, 8]
    assert (seq.prompt_token_ids, seq.completion_token_ids) == ([1, 2, 3], [7, 8])


def test_004_engine_architecture_layers_have_the_seeds_modules() -> None:
    from infinilm.layers import activation, attention, rotary_embedding, sampler
    from infinilm.sampling_params import RowStart

    gate, up = torch.randn(2, 3, 8).unbind(0)
    torch.testing.assert_close(activation.SiluAndMul()(torch.cat([gate, up], 1)), torch.nn.functional.silu(gate) * up)
    draw = sampler.Sampler(10, torch.device("cpu"), 1)
    draw.start_row(RowStart(0, SamplingParams(temperature=0), 0, (), [1, 2, 3]))
    assert draw.sample(torch.eye(10)[4:5], [0], [3]).token_ids.tolist() == [4]
    rotary = rotary_embedding.RotaryEmbedding(
        8,
        {"rope_type": "default", "rope_theta": 1e4},
        max_len=4,
        max_position_embeddings=4,
        dtype=torch.float32,
        device="cpu",
    )
    x, out = torch.randn(1, 1, 8), torch.empty(1, 1, 8)
    rotary_embedding.apply_rotary(x, *rotary(torch.tensor([0])), out=out)
    assert torch.equal(out, x), "position 0 turns nothing"
    assert (
        attention.Attention(
            0, 16, num_heads=2, num_kv_heads=1, head_dim=8, rotary=rotary, dtype=torch.float32, device="cpu"
        ).num_heads
        == 2
    )
