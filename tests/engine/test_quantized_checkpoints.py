"""Engines with checkpoints quantised for GPUs: in the native library's formats on a CPU, and packed as on a GPU."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference_logits
from narrow import present, worker_of
from packing import needs_native, pack_as_on_gpus
from quantized_files import write_checkpoint
from safetensors.torch import load_file, save_file

from benchmarks.quantize_checkpoint import pack
from infinilm import LLM, InferEngine, SamplingParams
from infinilm.cli.info import collect_facts
from infinilm.debug import HookRegistry
from infinilm.distributed import DistConfig
from infinilm.distributed.shard import PackedShard
from infinilm.errors import EngineError
from infinilm.layers.formats import TiledWeight
from infinilm.loading.checkpoint import open_checkpoint
from infinilm.models import auto
from infinilm.models.quantization import choose_formats

TOKENS = list(range(3, 40))
GPU = torch.device("cuda", 0)
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
SMALL: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 32}
Written = dict[str, tuple[Path, Any]]
NAMES = ("fp8-blocks", "compressed-fp8-channel", "awq", "gptq", "gptq-order", "compressed-int4-zeros")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return {name: write_checkpoint(name, tmp_path_factory.mktemp(name)) for name in NAMES}


@pytest.fixture
def packs_as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pack_as_on_gpus(monkeypatch)


def logits(path: Path, tp_size: int = 1, **settings: Any) -> torch.Tensor:
    with InferEngine(path, DistConfig(tp_size), "cpu", **settings) as engine:
        return present(engine.forward(input_ids=[TOKENS], return_logits=True).logits)[0]


@needs_native
@pytest.mark.parametrize(("name", "format"), [("gptq", "Q4_0"), ("awq", "Q5_0"), ("compressed-int4-zeros", "Q5_0")])
def test_a_cpu_repacks_what_it_can_keep_exactly(
    written: Written, name: str, format: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Activations are rounded to 16 bits, and the cache is float16, hence the tolerance."""
    path, reference = written[name]
    with caplog.at_level(logging.INFO), LLM(path, **SMALL) as llm:
        targets = worker_of(llm.executor).model.weight_targets()
        kept = {own for own, shard in targets.items() if isinstance(shard, PackedShard)}
        [output] = llm.generate([TOKENS], GREEDY, use_tqdm=False)
    assert len(kept) == 13  # of 14: one is dense in the file
    assert f"13 matrices stored as INT4 are kept as {format}, which has exactly the same values" in caplog.text
    shard = targets["model.layers.0.self_attn.q_proj.weight"]
    assert isinstance(shard, PackedShard)
    assert shard.matrix.format == format
    expected = (
        reference_logits(reference, TOKENS).log_softmax(-1)[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    )
    found = torch.tensor([entry.logprob for entry in present(output.prompt_logprobs) if entry is not None])
    assert (found - expected).abs().max() < 4e-3


def test_a_cpu_computes_the_rest_dense_and_says_so(written: Written, caplog: pytest.LogCaptureFixture) -> None:
    path, reference = written["gptq-order"]
    with caplog.at_level(logging.WARNING):
        found = logits(path)
    torch.testing.assert_close(found, reference_logits(reference, TOKENS), atol=1e-4, rtol=0)
    assert "13 matrices stored as INT4 are computed dense: the native library has no form of them" in caplog.text
    assert "quantization='q8' keeps them as Q8_0" in caplog.text


@needs_native
def test_a_cpu_rounds_8_bit_floats_if_asked_for(written: Written) -> None:
    path, reference = written["fp8-blocks"]
    difference = (logits(path, quantization="q8") - reference_logits(reference, TOKENS)).abs().max()
    assert 1e-3 < difference < 0.2  # the embedding and the head are rounded, too
    with InferEngine(path, device_type="cpu", quantization="q8") as engine:
        shards = worker_of(engine._executor).model.weight_targets().values()
    assert {shard.matrix.format for shard in shards if isinstance(shard, PackedShard)} == {"Q8_0"}


@pytest.mark.usefixtures("packs_as_on_gpus")
@pytest.mark.parametrize("name", NAMES)
def test_packed_matrices_have_the_same_logits(written: Written, name: str) -> None:
    path, reference = written[name]
    torch.testing.assert_close(logits(path), reference_logits(reference, TOKENS), atol=1e-4, rtol=0)


@pytest.mark.usefixtures("packs_as_on_gpus")
@pytest.mark.parametrize("name", ["fp8-blocks", "awq"])
def test_ranks_and_stages_have_shards_of_packed_matrices(written: Written, name: str) -> None:
    path, reference = written[name]
    expected = reference_logits(reference, TOKENS)
    torch.testing.assert_close(logits(path, 2), expected, atol=1e-4, rtol=0)
    settings: dict[str, Any] = {**SMALL, "pipeline_parallel_size": 2}
    with LLM(path, **settings) as llm:
        [output] = llm.generate([TOKENS], GREEDY, use_tqdm=False)
    own = expected.log_softmax(-1)[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    found = torch.tensor([entry.logprob for entry in present(output.prompt_logprobs) if entry is not None])
    torch.testing.assert_close(found, own, atol=1e-4, rtol=0)


def packed_names(model: Any) -> set[str]:
    return {name for name, shard in model.weight_targets().items() if isinstance(shard, PackedShard)}


@pytest.mark.usefixtures("packs_as_on_gpus")
def test_inputs_in_another_order_stay_packed(written: Written) -> None:
    """A rank that has some of the inputs has some of each group, and computes such matrices dense."""
    path, reference = written["gptq-order"]
    expected = reference_logits(reference, TOKENS)
    with InferEngine(path, device_type="cpu") as engine:
        (weights,) = engine.state_dict()
        for own, weight in weights.items():
            torch.testing.assert_close(weight, reference.get_parameter(own).detach(), atol=1e-7, rtol=1e-6)
        with pytest.raises(EngineError, match=r"INT4 32 F16 zeros order=\w+\), which can't be made of other numbers"):
            engine.load_param("model.layers.0.self_attn.q_proj.weight", torch.zeros(64, 64))
        assert len(packed_names(worker_of(engine._executor).model)) == 13
    with InferEngine(path, DistConfig(2), "cpu") as engine:
        names = packed_names(worker_of(engine._executor).model)
        assert {name.split(".")[-2] for name in names} == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
        found = present(engine.forward(input_ids=[TOKENS], return_logits=True).logits)[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.usefixtures("packs_as_on_gpus")
def test_matrices_multiplied_as_one_may_have_different_orders(tmp_path: Path) -> None:
    """Then they are dense, and right."""
    path, reference = write_checkpoint("gptq-order", tmp_path)
    file = path / "model.safetensors"
    weights, name = load_file(file), "model.layers.0.self_attn.k_proj"
    places = torch.randperm(64)
    codes = (weights[f"{name}.qweight"][:, None] >> torch.arange(0, 32, 4)[:, None]) & 15  # [in / 8, 8, out]
    weights[f"{name}.qweight"] = pack(codes.flatten(0, 1)[places], 0)
    weights[f"{name}.g_idx"] = weights[f"{name}.g_idx"][places]
    save_file(weights, file)
    with torch.no_grad():
        weight = reference.get_parameter(f"{name}.weight")
        weight.copy_(weight[:, places])
    torch.testing.assert_close(logits(path), reference_logits(reference, TOKENS), atol=1e-4, rtol=0)
    with InferEngine(path, device_type="cpu") as engine:
        names = packed_names(worker_of(engine._executor).model)
    assert len(names) == 10
    assert f"{name}.weight" not in names


@pytest.mark.usefixtures("packs_as_on_gpus")
def test_hooks_see_the_type_that_is_computed_in(written: Written) -> None:
    seen: dict[str, torch.Tensor] = {}
    registry = HookRegistry()

    def note(name: str, tensor: torch.Tensor, _layer: int) -> None:
        seen[name] = tensor

    registry.register_hook("layer0_*", note)
    with InferEngine(written["fp8-blocks"][0], device_type="cpu") as engine:
        engine.set_hook_registry(registry)
        engine.forward(input_ids=[TOKENS])
    assert seen
    assert {tensor.dtype for tensor in seen.values()} == {torch.float32}


@pytest.mark.usefixtures("packs_as_on_gpus")
def test_packed_weights_are_decoded_and_quantised(written: Written) -> None:
    path, reference = written["awq"]
    name = "model.layers.0.self_attn.q_proj.weight"
    with InferEngine(path, device_type="cpu") as engine:
        (weights,) = engine.state_dict()
        for own, weight in weights.items():
            torch.testing.assert_close(weight, reference.get_parameter(own).detach(), atol=1e-7, rtol=1e-6)
        refused = r"q_proj.weight is quantised \(INT4 32 F16 zeros\), which can't be made of other numbers; .*='none'"
        with pytest.raises(EngineError, match=refused):
            engine.load_param(name, torch.zeros(64, 64))
    with InferEngine(written["compressed-fp8-channel"][0], device_type="cpu") as engine:
        weight = torch.randn(64, 64)
        engine.load_param(name, weight)
        torch.testing.assert_close(engine.state_dict()[0][name], weight, atol=1e-3, rtol=0.07)
    with InferEngine(path, device_type="cpu", quantization="none") as engine:
        (weights,) = engine.state_dict()
        torch.testing.assert_close(weights[name], reference.get_parameter(name).detach(), atol=1e-7, rtol=1e-6)
        engine.load_param(name, torch.zeros(64, 64))
        assert not engine.state_dict()[0][name].any()


@pytest.mark.usefixtures("packs_as_on_gpus")
@pytest.mark.parametrize(
    ("name", "architecture"),
    [("compressed-fp8-channel", "qwen3-moe"), ("gptq-order", "qwen3-moe"), ("awq", "phi3"), ("gptq-order", "phi3")],
)
def test_experts_and_fused_projections(tmp_path: Path, name: str, architecture: str) -> None:
    """A rank has a share of each expert, and reads a part of a fused matrix."""
    path, reference = write_checkpoint(name, tmp_path, architecture)
    torch.testing.assert_close(logits(path, 2), reference_logits(reference, TOKENS), atol=1e-4, rtol=0)


def test_formats_on_a_gpu(written: Written) -> None:
    expected = {"fp8-blocks": "FP8 32 F32", "compressed-fp8-channel": "FP8 row F32", "gptq": "INT4 32 F16 zeros"}
    settings: dict[str, Any] = {"quantization": None, "dtype": "auto", "device": GPU}
    for name, format in expected.items():
        checkpoint = open_checkpoint(written[name][0])
        formats = choose_formats(checkpoint, "llama", **settings)
        assert set(formats.by_name.values()) == {format}
        outline = auto.outline_model(auto.AutoConfig.from_pretrained(written[name][0]), torch.bfloat16, formats=formats)
        kinds = [type(module).__name__ for module in outline.modules()]  # type: ignore[attr-defined]
        assert kinds.count(TiledWeight.__name__) == 7  # and one of eight is dense in the file
        dense = auto.outline_model(auto.AutoConfig.from_pretrained(written[name][0]), torch.bfloat16)
        assert outline.num_bytes() < (0.85 if "fp8" in name else 0.7) * dense.num_bytes()
        checkpoint.close()


@needs_native
def test_info_knows_the_formats(written: Written) -> None:
    facts = collect_facts(written["fp8-blocks"][0])
    assert facts["runs"]
    assert list(facts["stored_as"]) == ["FP8", "F32"]
    facts = collect_facts(written["gptq"][0])
    assert facts["stored_as"]["INT4"] == 2 * 64 * (64 + 64 + 32 + 32) + 5 * 64 * 128
    assert facts["memory"]["quantised"]["weight_bytes"] < facts["memory"]["bfloat16"]["weight_bytes"]
