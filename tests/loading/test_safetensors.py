"""Hugging Face directories, whole, sharded, damaged and dangerous."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from infinilm.errors import CheckpointError
from infinilm.loading.checkpoint import open_checkpoint
from infinilm.loading.safetensors_checkpoint import SafetensorsCheckpoint

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b.weight": torch.arange(6, dtype=torch.bfloat16),
    "c.weight": torch.tensor(2.5, dtype=torch.float16),
    "d.weight": torch.arange(24, dtype=torch.float64).view(2, 3, 4),
}


def write_directory(path: Path, config: Any = None, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} if config is None else config))
    save_file(TENSORS if tensors is None else tensors, path / "model.safetensors")
    return path


def write_shards(path: Path, weight_map: dict[str, str] | None = None) -> Path:
    write_directory(path)
    (path / "model.safetensors").unlink()
    names = list(TENSORS)
    shards = {
        "model-00001-of-00002.safetensors": names[:2],
        "model-00002-of-00002.safetensors": names[2:],
    }
    for file, members in shards.items():
        save_file({name: TENSORS[name] for name in members}, path / file)
    if weight_map is None:
        weight_map = {name: file for file, members in shards.items() for name in members}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def assert_holds_tensors(checkpoint: SafetensorsCheckpoint) -> None:
    assert dict(checkpoint.shapes()) == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    for name, tensor in TENSORS.items():
        read = checkpoint.read(name)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)


@pytest.mark.parametrize("max_shard_size", ["50GB", "40KB"])
def test_a_directory_saved_by_transformers(max_shard_size: str, tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=128
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    num_files = len(list(tmp_path.glob("*.safetensors")))
    assert num_files == 1 if max_shard_size == "50GB" else num_files > 1
    checkpoint = open_checkpoint(tmp_path)
    theirs = model.state_dict()
    assert set(checkpoint.shapes()) == set(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(checkpoint.read(name), tensor)
    assert checkpoint.config["hidden_size"] == 32
    assert checkpoint.generation_config["eos_token_id"] == 2
    assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in theirs.values())
    checkpoint.close()


def test_one_file_every_type(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(write_directory(tmp_path))
    assert_holds_tensors(checkpoint)
    assert checkpoint.generation_config == {}
    assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in TENSORS.values())


def test_shards_with_and_without_their_index(tmp_path: Path) -> None:
    write_shards(tmp_path)
    assert_holds_tensors(SafetensorsCheckpoint(tmp_path))
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_holds_tensors(SafetensorsCheckpoint(tmp_path))


def test_a_second_format_beside_the_model_is_left_alone(tmp_path: Path) -> None:
    write_directory(tmp_path)
    save_file({"tok_embeddings.weight": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    assert_holds_tensors(SafetensorsCheckpoint(tmp_path))


def test_reading_in_many_slices_and_threads(tmp_path: Path) -> None:
    """Slices are at most 2 MiB for small models; the file is mapped anew for each here."""
    big = torch.arange(3 * 2**20, dtype=torch.float32).view(3072, 1024)
    checkpoint = SafetensorsCheckpoint(write_directory(tmp_path, tensors={"big": big, "small": big[0].clone()}))
    targets = [torch.zeros(3072, 1024, dtype=torch.float64) for _ in range(3)]
    threads = [threading.Thread(target=checkpoint.read_into, args=("big", target)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(target, big.double()) for target in targets)
    assert torch.equal(checkpoint.read("small"), big[0])


def test_reading_what_is_not_there_or_not_a_float(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2, 2), "mask": torch.ones(3, dtype=torch.bool), "fp8": torch.zeros(3)}
    tensors["fp8"] = tensors["fp8"].to(torch.float8_e4m3fn)
    checkpoint = SafetensorsCheckpoint(write_directory(tmp_path, tensors=tensors))
    with pytest.raises(CheckpointError, match="no tensor 'b'"):
        checkpoint.read("b")
    with pytest.raises(CheckpointError, match=r"'a' has shape \[2, 2\], not \[4\]"):
        checkpoint.read_into("a", torch.zeros(4))
    with pytest.raises(CheckpointError, match="'mask' has type BOOL; supported are F64, F32, F16, BF16"):
        checkpoint.read("mask")
    with pytest.raises(CheckpointError, match="'fp8' has type F8_E4M3"):
        checkpoint.read_into("fp8", torch.zeros(3))


def error_of(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return str(caught.value)


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    assert "no such file or directory" in error_of(tmp_path / "absent")
    assert "there is no config.json" in error_of(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    assert "neither a GGUF file nor a directory" in error_of(tmp_path / "notes.txt")
    (tmp_path / "fake.gguf").write_text("hello")
    assert "not a GGUF file" in error_of(tmp_path / "fake.gguf")
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert "give the directory" in error_of(tmp_path / "model.safetensors")
    for name in ("model.bin", "model.pt", "model.pth", "model.ckpt"):
        (tmp_path / name).write_bytes(b"")
        assert "pickled weights are refused" in error_of(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('["a"]', "must hold a JSON object, it holds a list"),
        ('{"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}', "code from a model directory is never run"),
        ('{"auto_map": {"AutoConfig": "configuration.Config"}}', "code from a model directory is never run"),
        ('{"auto_map": "modeling.Model"}', "code from a model directory is never run"),
        ('{"quantization_config": {"quant_method": "quip"}}', "quantised by 'quip' can't be read; known are fp8, awq"),
        ('{"quantization_config": {"quant_method": "gptq"}}', "quantization_config.bits=None can't be read; known: 4"),
    ],
)
def test_a_config_that_cannot_be_used(content: str, message: str, tmp_path: Path) -> None:
    write_directory(tmp_path)
    (tmp_path / "config.json").write_text(content)
    assert message in error_of(tmp_path)
    assert str(tmp_path / "config.json") in error_of(tmp_path)


def test_code_of_a_tokenizer_alone_is_no_obstacle(tmp_path: Path) -> None:
    config = {"auto_map": {"AutoTokenizer": ["tokenization.Tokenizer", None]}}
    assert_holds_tensors(SafetensorsCheckpoint(write_directory(tmp_path, config)))


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "phi3"])
def test_code_that_no_one_needs_is_no_obstacle(model_type: str, tmp_path: Path) -> None:
    config = {"model_type": model_type, "auto_map": {"AutoModelForCausalLM": "modeling.Model"}}
    assert_holds_tensors(SafetensorsCheckpoint(write_directory(tmp_path, config)))


def test_a_generation_config_that_is_not_json(tmp_path: Path) -> None:
    write_directory(tmp_path)
    (tmp_path / "generation_config.json").write_text("{,}")
    assert "generation_config.json: not valid JSON" in error_of(tmp_path)


def test_a_directory_without_usable_weights(tmp_path: Path) -> None:
    write_directory(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "there are no weights" in error_of(tmp_path)
    for name in ("pytorch_model.bin", "consolidated.00.pth"):
        (tmp_path / name).write_bytes(b"\x80\x04N.")
    message = error_of(tmp_path)
    assert "has only consolidated.00.pth, pytorch_model.bin; pickled weights are refused" in message
    assert "convert them to safetensors" in message


@pytest.mark.parametrize("num_bytes", [0, 4, 8, 60, -1])
def test_a_truncated_file(num_bytes: int, tmp_path: Path) -> None:
    file = write_directory(tmp_path) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:num_bytes])
    assert f"{file}: not a valid safetensors file, it is truncated or damaged" in error_of(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,9999999]}}',
        b'{"a":{"dtype":"F32","shape":[9223372036854775807,8],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F31","shape":[2],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}',
    ],
)
def test_a_header_that_lies(header: bytes, tmp_path: Path) -> None:
    file = write_directory(tmp_path) / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    assert f"{file}: not a valid safetensors file" in error_of(tmp_path)
    file.write_bytes((2**63).to_bytes(8, "little") + header + b"\0" * 8)
    assert f"{file}: not a valid safetensors file" in error_of(tmp_path)


def test_missing_shards_are_all_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    message = error_of(tmp_path)
    assert "2 of the 2 files" in message
    assert "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors" in message


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/model.safetensors", "..\\m.safetensors", "x.bin", 3])
def test_an_index_cannot_leave_the_directory(shard: Any, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    write_shards(tmp_path / "model", {"a.weight": shard})
    message = error_of(tmp_path / "model")
    assert "'a.weight' must be a .safetensors file in the same directory" in message
    assert repr(shard) in message


@pytest.mark.parametrize("index", ['{"weight_map": {}}', '{"weight_map": ["a"]}', "{}"])
def test_an_index_without_a_map(index: str, tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "weight_map must map tensor names to files" in error_of(tmp_path)


def test_an_index_that_disagrees_with_its_shards(tmp_path: Path) -> None:
    second = "model-00002-of-00002.safetensors"
    write_shards(tmp_path, {"a.weight": second, "c.weight": second, "x.weight": second})
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    message = error_of(tmp_path)
    assert f"2 tensors are not in the files it names: a.weight ({second}), x.weight ({second})" in message


def test_the_same_tensor_in_two_shards(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({"a.weight": TENSORS["a.weight"]}, tmp_path / "model-00003.safetensors")
    assert "'a.weight' is also in model-00001-of-00002.safetensors" in error_of(tmp_path)
