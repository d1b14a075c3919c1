"""Devices other than CPUs and NVIDIA GPUs: what is missing is named, and what a torch plug-in brings is used."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import make_reference, save

import infinilm
from infinilm import LLM, DeviceType, InferEngine
from infinilm.attention import select_backend
from infinilm.distributed import CommunicationGroup, DistConfig, RankInfo
from infinilm.errors import EngineError, InvalidValueError
from infinilm.executor.loader import select_devices
from infinilm.executor.memory import free_memory_bytes
from infinilm.kernels.support import has_kernels
from infinilm.models import LlamaConfig, LlamaForCausalLM, ModelConfig
from infinilm.models.auto import choose_dtype
from infinilm.platforms import PLATFORMS, collectives_of, is_nvidia, sampling_device

CONFIG = LlamaConfig(vocab_size=20, hidden_size=16, intermediate_size=32, num_layers=1, num_attention_heads=4)
MISSING = {
    "rocm": r"this torch \(.*\) is not built for ROCm; .*: pip install torch --index-url .*whl/rocm",
    "xpu": "torch finds no XPU device here; .*: pip install torch --index-url .*whl/xpu",
    "mps": "torch finds no MPS device here; .*: pip install torch",
    "npu": "the package torch_npu is not installed; .*: pip install torch-npu",
    "musa": "the package torch_musa is not installed; .*: pip install torch_musa",
    "mlu": "the package torch_mlu is not installed; .*: pip install torch_mlu",
}


def is_there(name: str) -> bool:
    """Whether a test about missing devices would be wrong here."""
    return {
        "rocm": torch.version.hip is not None,
        "xpu": torch.xpu.is_available(),
        "mps": torch.mps.is_available(),
    }.get(name, False)


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_device_is_refused_with_its_remedy(name: str) -> None:
    if is_there(name):
        pytest.skip(f"this machine has {name} devices")
    with pytest.raises(InvalidValueError, match=f"device='{name}': {MISSING[name]}.*Or use 'cpu'"):
        LLM("/no/model/here", device=name)  # which is not even looked for
    with pytest.raises(InvalidValueError, match=f"device_type='{name}': {MISSING[name]}"):
        InferEngine(CONFIG, device_type=name)
    with pytest.raises(InvalidValueError, match=f"device='{name}': {MISSING[name]}"):
        LlamaForCausalLM(CONFIG, device=name)


def test_every_name_is_covered() -> None:
    assert {*MISSING, "cpu", "cuda"} == set(PLATFORMS) == set(DeviceType)


@pytest.mark.parametrize("name", ["tpu", "cpu:0", "meta", "hpu", "", "GPU"])
def test_names_that_are_no_devices(name: str) -> None:
    with pytest.raises(
        InvalidValueError, match=f"device='{name}' is (unknown|not supported); use one of auto, cpu, cuda"
    ):
        infinilm.Config(device=name)


def test_a_plug_in_that_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_mlu.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidValueError, match=r"torch_mlu can't be imported \(No module named 'no_such_library'\)"):
        select_devices("mlu", DistConfig())


def fake_module(**changes: Any) -> SimpleNamespace:
    """What `torch.cuda` or a plug-in's `torch.npu` has."""
    functions = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (7 << 30, 8 << 30),
        "is_bf16_supported": lambda: False,
    }
    return SimpleNamespace(**{**functions, **changes})


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float16), ("gemma3_text", torch.bfloat16)])
def test_gemma_is_not_computed_in_float16_unasked(family: str, dtype: torch.dtype) -> None:
    """Its hidden states are larger than that can hold."""
    config = ModelConfig.from_dict({"model_type": family, "torch_dtype": "float16"})
    assert choose_dtype("auto", config, torch.device("cuda")) == dtype
    assert choose_dtype("float16", config, torch.device("cuda")) == torch.float16


def test_any_plug_in_of_torch_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """`maia` stands for a device type that torch knows of and we don't."""
    monkeypatch.setattr(torch, "maia", fake_module(), raising=False)
    infinilm.Config(device="maia")
    (device,) = select_devices("maia", DistConfig(tp_device_ids=[1]))
    assert device == torch.device("maia", 1)
    assert free_memory_bytes(device) == 7 << 30
    assert (is_nvidia(device), has_kernels(device), sampling_device(device)) == (False, False, torch.device("cpu"))
    assert select_backend("auto", device).name == "torch"
    assert choose_dtype("auto", CONFIG, device) == torch.float16  # it has no bfloat16
    with pytest.raises(InvalidValueError, match="dtype='bfloat16': maia:1 has no bfloat16; use float16"):
        choose_dtype("bfloat16", CONFIG, device)
    with pytest.raises(InvalidValueError, match=r"tp_device_ids=\[0, 1\] asks for 2 ranks.*no collectives.*one rank"):
        select_devices("maia", DistConfig(2))
    with pytest.raises(InvalidValueError, match=r"names \[2\], but there are 2 MAIA devices, numbered from 0"):
        select_devices("maia", DistConfig(tp_device_ids=[2]))


def test_rocm_runs_without_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("rocm", "cuda", "auto"):
        (device,) = select_devices(name, DistConfig())
        assert device == torch.device("cuda", 0)
    assert (is_nvidia(device), has_kernels(device), collectives_of(device.type)) == (False, False, "nccl")
    assert sampling_device(device) == torch.device("cpu")
    assert select_backend("auto", device).name == "torch"
    with pytest.raises(InvalidValueError, match="written for NVIDIA GPUs, and this torch is built for ROCm"):
        select_backend("triton", device)


@pytest.mark.parametrize("extended_api", [False, True])
def test_collectives_of_a_plug_in(extended_api: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    group = CommunicationGroup(RankInfo(1, 2, torch.device("cpu")), torch.distributed.HashStore())  # type: ignore[attr-defined]
    group.info = SimpleNamespace(device=SimpleNamespace(type="musa"))  # type: ignore[assignment]
    with pytest.raises(EngineError, match=r"torch.distributed has no backend 'mccl'.*use one rank"):
        group.join(0)
    made: list[Any] = []
    plugin = SimpleNamespace(creator_fn=lambda *args: made.append(args), extended_api=extended_api)
    monkeypatch.setitem(torch.distributed.Backend._plugins, "MCCL", plugin)
    group.join(1)
    (arguments,) = made
    rank_and_size = (arguments[0].group_rank, arguments[0].group_size) if extended_api else arguments[1:3]
    assert rank_and_size == (1, 2)


# --- a whole engine on a plug-in's device -----------------------------------------------------------------

RUN = """
import json, sys
from infinilm import LLM, InferEngine, SamplingParams
from infinilm.cache import StaticKVCacheConfig
from infinilm.debug import HookRegistry
from infinilm.models import AutoLlamaModel

path, rows = sys.argv[1], [[1, 2, 3, 4, 5], [9, 8, 7], list(range(40))]
settings = [
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=1, logprobs=2),
    SamplingParams(temperature=1, seed=3, top_k=20, presence_penalty=0.5, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=1, seed=4, top_p=0.9, max_tokens=8, ignore_eos=True),
]
found = {}
for device, size in (("cpu", 1), ("npu", 1), ("npu", 2)):
    with LLM(path, device=device, num_kvcache_blocks=32, tensor_parallel_size=size) as llm:
        outputs = llm.generate(rows, settings, use_tqdm=False)
        info = llm.executor.info
        engine = {
            "device": info.device, "attention": info.attention, "free": llm.memory.free_bytes,
            "tokens": [list(output.token_ids) for output in outputs],
            "scores": [entry.logprob for entry in outputs[0].prompt_logprobs[1:]],
        }
    found[f"{device}{size}"] = engine
for device in ("cpu", "npu"):
    seen = []
    registry = HookRegistry()
    registry.register_hook("layer1_output", lambda name, tensor, layer: seen.append(str(tensor.device)))
    with InferEngine(path, device_type=device, cache_config=StaticKVCacheConfig(2, 64)) as engine:
        low = {"tokens": engine.generate(rows[:1], 8, temperature=0).token_ids}
        engine.set_hook_registry(registry)
        output = engine(input_ids=rows[:1], return_logits=True, return_hidden_states=True)
        low |= {"logits": output.logits.tolist(), "hidden": str(output.hidden_states.device), "seen": seen}
        low["weights"] = str(engine.state_dict()[0]["model.norm.weight"].device)
    low["alone"] = AutoLlamaModel.from_pretrained(path, device=device).generate(rows[:1], 8, temperature=0).token_ids
    found[f"low {device}"] = low
print(json.dumps(found))
"""


@pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch takes no plug-ins written in Python",
)
def test_a_model_computes_the_same_on_a_plug_ins_device(tmp_path: Path) -> None:
    """tests/plugins/torch_npu.py is the plug-in. A process of its own has it, because torch can't forget one."""
    path = save(make_reference("llama-gqa"), tmp_path)
    plugins = Path(__file__).parents[1] / "plugins"
    paths = [str(plugins), str(Path(infinilm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", RUN, path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("npu1", "npu2"):
        engine = found[name]
        assert (engine["device"], engine["attention"], engine["free"]) == ("npu:0", "torch", 3 << 30)
        assert engine["tokens"] == found["cpu1"]["tokens"]
        assert engine["scores"] == pytest.approx(found["cpu1"]["scores"], abs=1e-4)
    ours, theirs = found["low npu"], found["low cpu"]
    assert ours["tokens"] == ours["alone"] == theirs["tokens"] == found["cpu1"]["tokens"][:1]
    assert (ours["hidden"], ours["seen"], ours["weights"]) == ("npu:0", ["npu:0"], "cpu")
    torch.testing.assert_close(torch.tensor(ours["logits"]), torch.tensor(theirs["logits"]), atol=1e-4, rtol=0)
