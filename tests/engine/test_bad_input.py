"""Every bad input gets an error of its own that names it, and the same engine answers the next request."""

import json
import pickle
import shutil
from pathlib import Path

import pytest

from infinilm import LLM, Config, SamplingParams
from infinilm.distributed import DistConfig
from infinilm.errors import CheckpointError, InfinilmError, InvalidTypeError, InvalidValueError, PromptTooLongError

NAN, INF = float("nan"), float("inf")

BAD_PARAMS = [
    ({"temperature": NAN}, "temperature=nan"),
    ({"temperature": INF}, "temperature=inf"),
    ({"temperature": -0.1}, "temperature=-0.1"),
    ({"temperature": "hot"}, "temperature='hot' must be a number"),
    ({"top_k": -2}, "top_k=-2"),
    ({"top_k": 1.5}, "top_k=1.5 must be an integer"),
    ({"top_p": 0.0}, r"top_p=0.0 .* \(0, 1\]"),
    ({"top_p": 1.5}, "top_p=1.5"),
    ({"min_p": NAN}, "min_p=nan"),
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"max_tokens": True}, "max_tokens=True must be an integer"),
    ({"min_tokens": 65}, "min_tokens=65 .* 0 to 64"),
    ({"n": 0}, "n=0"),
    ({"n": 10**6}, "n=1000000"),
    ({"seed": 2**64}, "seed="),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
    ({"repetition_penalty": 1e-30}, r"repetition_penalty=1e-30 .* \[0.01, 100\]"),
    ({"presence_penalty": INF}, "presence_penalty=inf"),
    ({"frequency_penalty": NAN}, "frequency_penalty=nan"),
    ({"logit_bias": {1: NAN}}, r"logit_bias\[1\]=nan"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias key=-1"),
    ({"logit_bias": [1]}, "logit_bias=.* must map"),
    ({"logprobs": -1}, "logprobs=-1"),
    ({"prompt_logprobs": 10**6}, "prompt_logprobs=1000000"),
    ({"stop": [""]}, "stop holds a text of 0 characters"),
    ({"stop": ["x"] * 1000}, "stop has 1000 texts"),
    ({"stop": [3]}, "stop holds 3"),
    ({"stop_token_ids": [-1]}, "stop_token_ids=-1"),
    ({"stop_token_ids": 5}, "stop_token_ids=5 must be a list"),
    ({"ignore_eos": 1}, "ignore_eos=1 must be True or False"),
    ({"logits_processors": [3]}, "not callable"),
    ({"temprature": 1.0}, "unknown sampling parameter 'temprature'"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_PARAMS, ids=[str(s)[:40] for s, _ in BAD_PARAMS])
def test_sampling_params(settings: dict, message: str) -> None:
    with pytest.raises(InfinilmError, match=message) as caught:
        SamplingParams.from_kwargs(**settings)
    assert isinstance(caught.value, (ValueError, TypeError))


BAD_SETTINGS = [
    ({"max_model_length": 5}, "unknown setting 'max_model_length'"),
    ({"max_num_seqs": 0}, "max_num_seqs=0"),
    ({"max_num_batched_tokens": -1}, "max_num_batched_tokens=-1"),
    ({"max_model_len": 1}, "max_model_len=1"),
    ({"kvcache_block_size": 8}, "kvcache_block_size=8"),
    ({"kvcache_block_size": 24}, "kvcache_block_size=24 must be a multiple of 16"),
    ({"num_kvcache_blocks": 0}, "num_kvcache_blocks=0"),
    ({"num_kvcache_blocks": 10**12}, "num_kvcache_blocks=1000000000000 needs"),
    ({"gpu_memory_utilization": 0}, "gpu_memory_utilization=0"),
    ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization=1.1"),
    ({"gpu_memory_utilization": 1e-9}, "no memory is left"),
    ({"device": "tpu"}, "device='tpu' is unknown; use one of auto, cpu, cuda"),
    ({"dtype": "int8"}, "dtype='int8'"),
    ({"attention_backend": "flash"}, "attention_backend='flash'"),
    ({"enable_prefix_caching": "yes"}, "enable_prefix_caching='yes'"),
    ({"deterministic": 1}, "deterministic=1"),
    ({"tensor_parallel_size": 3}, "num_attention_heads=4 and num_key_value_heads=2 .* use a .* size of 1, 2, 4"),
    ({"tensor_parallel_size": 2, "distributed": DistConfig(4)}, "disagree"),
    ({"distributed": 2}, "distributed=2 must be a DistConfig"),
    ({"seed": "x"}, "seed='x'"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS, ids=[str(s)[:40] for s, _ in BAD_SETTINGS])
def test_settings(tiny_dir: Path, settings: dict, message: str) -> None:
    with pytest.raises(InfinilmError, match=message) as caught:
        LLM(tiny_dir, **settings)
    assert isinstance(caught.value, (ValueError, TypeError))


def test_presets_and_configs() -> None:
    with pytest.raises(InvalidValueError, match="preset='fast' is unknown; use one of cpu"):
        Config.preset("fast")
    with pytest.raises(InvalidTypeError, match="unknown setting 'colour'"):
        Config.preset("cpu", colour=3)
    with pytest.raises(AttributeError):
        Config().seed = 3  # type: ignore[misc]


BAD_PROMPTS = [
    ("", InvalidValueError, "the prompt is empty"),
    ([[]], InvalidValueError, "the prompt is empty"),
    ([300], InvalidValueError, "token id 300 at position 0 .* use 0 to 299"),
    ([5, -1], InvalidValueError, "token id -1 at position 1"),
    ([5, 2**32 + 5], InvalidValueError, "token id 4294967301 at position 1"),
    ([[5, 1.5]], InvalidTypeError, "integers"),
    ([[5, True]], InvalidTypeError, "integers, not True"),
    (7, InvalidTypeError, "prompts=7"),
    (["to", 7], InvalidTypeError, "a prompt of type int"),
    (b"to", InvalidTypeError, "prompts=b'to'"),
    (["to", None], InvalidTypeError, "NoneType"),
    ([5] * 256, PromptTooLongError, "the prompt has 256 tokens; with max_model_len=256"),
    ("\ud800", InfinilmError, "surrogate"),
]


@pytest.mark.parametrize(("prompt", "kind", "message"), BAD_PROMPTS, ids=[repr(p)[:30] for p, _, _ in BAD_PROMPTS])
def test_prompts_are_refused_and_the_engine_goes_on(llm, prompt, kind, message) -> None:
    with pytest.raises(kind, match=message):
        llm.generate(prompt, use_tqdm=False)
    assert llm.is_finished()
    assert len(llm.generate("to", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0].token_ids) == 2


def test_one_bad_prompt_of_many_queues_none(llm) -> None:
    with pytest.raises(InvalidValueError, match="token id 999"):
        llm.generate(["to", [999]], use_tqdm=False)
    assert llm.is_finished()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop_token_ids": [300]}, "stop_token_ids names token id 300"),
        ({"logit_bias": {300: 1.0}}, "logit_bias names token id 300"),
    ],
)
def test_token_ids_of_parameters_must_be_in_the_vocabulary(llm, settings, message) -> None:
    with pytest.raises(InvalidValueError, match=message):
        llm.add_request("to", SamplingParams(**settings))
    assert llm.is_finished()


def test_a_prompt_larger_than_the_cache_is_refused(tiny_dir) -> None:
    with LLM(tiny_dir, num_kvcache_blocks=2) as llm:
        assert llm.max_model_len == 32
        with pytest.raises(PromptTooLongError, match="num_kvcache_blocks"):
            llm.add_request([5] * 32)
        assert llm.generate([5] * 31, SamplingParams(max_tokens=5), use_tqdm=False)[0].finished


def test_text_needs_a_tokenizer(tiny_dir, tmp_path) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(tiny_dir / name, tmp_path / name)
    with LLM(tmp_path, num_kvcache_blocks=8) as llm:
        with pytest.raises(InvalidValueError, match="no tokenizer"):
            llm.generate("to", use_tqdm=False)
        with pytest.raises(InvalidValueError, match="no chat template"):
            llm.chat([{"role": "user", "content": "to"}])
        with pytest.raises(InvalidValueError, match="stop needs text"):
            llm.generate([5], SamplingParams(stop="x"), use_tqdm=False)
        [output] = llm.generate([5], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert len(output.token_ids) == 3
        assert output.text == ""


# --- checkpoints ------------------------------------------------------------------------------------------


@pytest.fixture
def broken_dir(tiny_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint to break."""
    return shutil.copytree(tiny_dir, tmp_path / "model")


def edit_config(directory: Path, **changes: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


def test_missing_directory(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        LLM(tmp_path / "nowhere")


def test_unknown_name() -> None:
    with pytest.raises(CheckpointError, match="smollm2-135m"):
        LLM("no-such-model")


def test_directory_without_weights(broken_dir) -> None:
    (broken_dir / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        LLM(broken_dir)


def test_pickled_weights_are_not_even_opened(broken_dir) -> None:
    class Trap:
        def __reduce__(self):
            return (Path.touch, (broken_dir / "sprung",))

    (broken_dir / "model.safetensors").unlink()
    (broken_dir / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError, match="pickle"):
        LLM(broken_dir)
    assert not (broken_dir / "sprung").exists()


def test_code_in_the_model_directory_is_never_run(broken_dir) -> None:
    (broken_dir / "evil.py").write_text(f"import pathlib; pathlib.Path({str(broken_dir)!r}, 'sprung').touch()")
    edit_config(broken_dir, auto_map={"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"})
    with pytest.raises(CheckpointError, match="auto_map"):
        LLM(broken_dir)
    assert not (broken_dir / "sprung").exists()


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_safetensors(broken_dir, keep) -> None:
    file = broken_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        LLM(broken_dir)


def test_lying_safetensors_header(broken_dir) -> None:
    file = broken_dir / "model.safetensors"
    file.write_bytes((2**62).to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        LLM(broken_dir)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "relu"}, "relu"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"num_hidden_layers": 3}, "missing"),
        ({"num_hidden_layers": 1}, "unexpected"),
        ({"intermediate_size": 128}, "misshapen"),
        ({"hidden_size": 2**40}, "misshapen"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers=1099511627776"),
        ({"vocab_size": -5}, "vocab_size"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_configs_that_do_not_fit(broken_dir, changes, message) -> None:
    edit_config(broken_dir, **changes)
    with pytest.raises(InfinilmError, match=message):
        LLM(broken_dir)


def test_a_config_that_claims_an_absurd_length_takes_no_absurd_memory(broken_dir) -> None:
    edit_config(broken_dir, max_position_embeddings=2**50)
    with LLM(broken_dir, gpu_memory_utilization=0.01) as llm:
        assert llm.max_model_len < 2**30
        assert len(llm.generate("to", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0].token_ids) == 2


def test_broken_config(broken_dir) -> None:
    (broken_dir / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        LLM(broken_dir)


@pytest.mark.parametrize("keep", [0, 3, 20, 5000, 50_000_000])
def test_truncated_gguf(smollm2, tmp_path, keep) -> None:
    file = tmp_path / "cut.gguf"
    with smollm2.open("rb") as whole:
        file.write_bytes(whole.read(keep))
    with pytest.raises(CheckpointError, match=r"cut\.gguf"):
        LLM(file)


def test_corrupt_gguf(tmp_path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (2**63).to_bytes(8, "little") * 2)
    with pytest.raises(CheckpointError, match=r"bad\.gguf"):
        LLM(file)
