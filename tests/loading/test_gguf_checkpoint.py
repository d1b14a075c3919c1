"""GGUF files seen as Hugging Face checkpoints."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from infinilm.errors import CheckpointError
from infinilm.loading import gguf_checkpoint
from infinilm.loading.checkpoint import open_checkpoint
from infinilm.loading.gguf import GGML_TYPES, GGUFFile
from infinilm.loading.gguf_checkpoint import GGUFCheckpoint
from infinilm.models.config import ModelConfig
from infinilm.models.gemma import Gemma3Config

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, LAYERS = 64, 96, 4, 2, 16, 48, 2
Weights = dict[str, np.ndarray]


def tiny_weights(*, has_bias: bool = False, has_head: bool = True, has_qk_norm: bool = False) -> Weights:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCABULARY, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    if has_head:
        shapes["output.weight"] = (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        shapes |= {f"blk.{layer}.attn_{part}.weight": (size, HIDDEN) for part, size in rows.items()}
        if has_bias:
            shapes |= {f"blk.{layer}.attn_{part}.bias": (size,) for part, size in rows.items()}
        if has_qk_norm:
            shapes |= {f"blk.{layer}.attn_{part}_norm.weight": (HEAD_DIM,) for part in "qk"}
        shapes |= {
            f"blk.{layer}.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, FFN),
        }
    return {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    weights: Weights,
    architecture: str = "llama",
    *,
    kind: str = "F32",
    change: Callable[[GGUFWriter], None] = lambda writer: None,
    without: str | None = None,
) -> Path:
    """Write a tiny model; `change` adds or overrides metadata, `without` leaves one key out."""
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    change(writer)
    if without:
        del writer.kv_data[0][without]
    for name, values in weights.items():
        if kind == "F32" or values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            quantised = quantize(values, GGMLQuantizationType[kind])
            writer.add_tensor(name, quantised, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def override(key: str, value: float) -> Callable[[GGUFWriter], None]:
    return lambda writer: setattr(writer.kv_data[0][key], "value", value)


def add_what_transformers_needs(writer: GGUFWriter) -> None:
    writer.add_name("tiny")
    writer.add_rope_dimension_count(HEAD_DIM)


def put_pairs_side_by_side(rows: np.ndarray) -> np.ndarray:
    """The order in which GGUF's llama keeps the rows of q and k, from Hugging Face's."""
    heads = rows.reshape(-1, HEAD_DIM, *rows.shape[1:])
    order = [half * HEAD_DIM // 2 + pair for pair in range(HEAD_DIM // 2) for half in (0, 1)]
    return heads[:, order].reshape(rows.shape)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_llama_tensors_and_config_equal_transformers(kind: str, tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "tiny.gguf",
        tiny_weights(),
        kind=kind,
        change=add_what_transformers_needs,
    )
    checkpoint = open_checkpoint(path)
    their_config = load_gguf_checkpoint(path)["config"]
    for key in set(their_config) - {"_model_name_or_path"}:
        assert checkpoint.config[key] == their_config[key]
    model = LlamaForCausalLM(LlamaConfig(**checkpoint.config))
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    assert checkpoint.shapes() == {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    assert set(checkpoint.shapes()) == set(model.state_dict())
    for name, tensor in theirs.items():
        assert torch.equal(checkpoint.read(name).float(), torch.as_tensor(tensor).float()), name
    checkpoint.close()


def test_rows_of_q_and_k_and_their_biases_are_put_back_in_order(tmp_path: Path) -> None:
    original = tiny_weights(has_bias=True)
    stored = {
        name: put_pairs_side_by_side(values) if ".attn_q." in name or ".attn_k." in name else values
        for name, values in original.items()
    }
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "llama.gguf", stored))
    for part in "qkv":
        for suffix in ("weight", "bias"):
            read = checkpoint.read(f"model.layers.1.self_attn.{part}_proj.{suffix}")
            assert np.array_equal(read.numpy(), original[f"blk.1.attn_{part}.{suffix}"])
    assert (checkpoint.config["qkv_bias"], checkpoint.config["attention_bias"]) == (True, False)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_keeps_the_order_of_rows(architecture: str, tmp_path: Path) -> None:
    weights = tiny_weights(has_bias=architecture == "qwen2", has_qk_norm=architecture == "qwen3", has_head=False)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "qwen.gguf", weights, architecture))
    read = checkpoint.read("model.layers.0.self_attn.q_proj.weight")
    assert np.array_equal(read.numpy(), weights["blk.0.attn_q.weight"])
    if architecture == "qwen3":
        read = checkpoint.read("model.layers.1.self_attn.k_norm.weight")
        assert np.array_equal(read.numpy(), weights["blk.1.attn_k_norm.weight"])
    assert checkpoint.config["model_type"] == architecture
    assert checkpoint.config["architectures"] == [f"{architecture.capitalize()}ForCausalLM"]
    assert checkpoint.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in checkpoint.shapes()


def test_gemma3_tensors_and_config_equal_transformers(tmp_path: Path) -> None:
    weights = tiny_weights(has_head=False, has_qk_norm=True)
    rng = np.random.default_rng(1)
    for layer in range(LAYERS):
        for name in ("post_attention_norm", "post_ffw_norm"):
            weights[f"blk.{layer}.{name}.weight"] = rng.normal(1, 0.1, HIDDEN).astype(np.float32)

    def change(writer: GGUFWriter) -> None:
        writer.add_name("tiny")
        writer.add_sliding_window(24)
        writer.add_key_length(HEAD_DIM)
        writer.add_value_length(HEAD_DIM)

    path = write_gguf(tmp_path / "tiny.gguf", weights, "gemma3", change=change)
    checkpoint = open_checkpoint(path)
    config = ModelConfig.from_dict(checkpoint.config)
    assert isinstance(config, Gemma3Config)
    assert (config.sliding_window, config.query_pre_attn_scalar) == (24, HEAD_DIM)
    assert config.rope_parameters["full_attention"]["rope_theta"] == 5000.0
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10000.0
    model = Gemma3ForCausalLM(Gemma3TextConfig(**load_gguf_checkpoint(path)["config"]))
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    assert checkpoint.shapes() == {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    for name, tensor in theirs.items():
        torch.testing.assert_close(checkpoint.read(name).float(), torch.as_tensor(tensor).float(), atol=1e-7, rtol=0)
    checkpoint.close()


def test_config_from_metadata(tmp_path: Path) -> None:
    def more(writer: GGUFWriter) -> None:
        writer.add_eot_token_id(5)
        writer.add_eom_token_id(2)
        writer.add_pad_token_id(0)

    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "tiny.gguf", tiny_weights(), kind="BF16", change=more))
    config = dict(checkpoint.config)
    assert math.isclose(config.pop("rms_norm_eps"), 1e-5, rel_tol=1e-6)
    assert config == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "vocab_size": VOCABULARY,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "sliding_window": None,
        "attention_bias": False,
        "qkv_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": [2, 5],
        "pad_token_id": 0,
    }
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": 0}
    assert checkpoint.num_bytes == sum(
        values.nbytes // (1 if values.ndim == 1 else 2) for values in tiny_weights().values()
    )


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("Q8_0", "bfloat16")])
def test_the_type_that_a_gpu_computes_in(kind: str, dtype: str, tmp_path: Path) -> None:
    """Its kernels multiply quantised matrices with 16-bit numbers, and not with float32."""
    path = write_gguf(tmp_path / "tiny.gguf", tiny_weights(), kind=kind)
    assert GGUFCheckpoint(path).config["torch_dtype"] == dtype


def test_a_sliding_window_makes_it_a_mistral(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_weights(), change=lambda writer: writer.add_sliding_window(32))
    config = GGUFCheckpoint(path).config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 32)
    assert config["architectures"] == ["MistralForCausalLM"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slice_elements", [1, 300, 2**18])
def test_reading_into_a_view_in_slices(
    dtype: torch.dtype, slice_elements: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target may be a part of a fused weight, of another type, and slices may end anywhere."""
    monkeypatch.setattr(gguf_checkpoint, "_SLICE_ELEMENTS", slice_elements)
    weights = tiny_weights(has_bias=True)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "tiny.gguf", weights, kind="Q8_0"))
    for part, name in (("q_proj", "attn_q"), ("v_proj", "attn_v")):
        raw = quantize(weights[f"blk.0.{name}.weight"], GGMLQuantizationType.Q8_0)
        values = dequantize(raw, GGMLQuantizationType.Q8_0)
        if part == "q_proj":
            values = values.reshape(HEADS, HEAD_DIM // 2, 2, HIDDEN).swapaxes(1, 2).reshape(values.shape)
        fused = torch.full((len(values) + 2, HIDDEN), 9.0, dtype=dtype)
        checkpoint.read_into(f"model.layers.0.self_attn.{part}.weight", fused[1:-1])
        assert torch.equal(fused[1:-1], torch.from_numpy(values).to(dtype))
        assert (fused[[0, -1]] == 9).all()


def write_scaling(**values: Any) -> Callable[[GGUFWriter], None]:
    def change(writer: GGUFWriter) -> None:
        for key, value in values.items():
            add: Callable[[str, Any], None] = writer.add_string if isinstance(value, str) else writer.add_float32
            if isinstance(value, int):
                add = writer.add_uint32
            add(f"llama.rope.scaling.{key}", value)

    return change


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"type": "none"}, None),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        (
            {
                "type": "yarn",
                "factor": 4.0,
                "yarn_beta_fast": 16.0,
                "yarn_beta_slow": 2.0,
                "attn_factor": 0.5,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "attention_factor": 0.5 * (1 + 0.1 * math.log(4.0)),
            },
        ),
    ],
)
def test_rope_scaling_from_metadata(written: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_weights(), change=write_scaling(**written))
    assert GGUFCheckpoint(path).config["rope_scaling"] == expected


def test_the_factors_of_llama_3_give_its_frequencies(tmp_path: Path) -> None:
    """The tensor, read as longrope, must give the frequencies of transformers' llama3 scaling."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    def frequencies(scaling: dict[str, Any]) -> tuple[torch.Tensor, float]:
        parameters = scaling | {"rope_theta": 5000.0}
        config = LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=128, rope_parameters=parameters)
        return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu", seq_len=200)

    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    wanted, _ = frequencies(llama3 | {"original_max_position_embeddings": 64})
    plain = 5000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    factors = (plain / wanted).numpy()
    assert factors.min() < 1.01
    assert factors.max() > 7.9

    path = write_gguf(tmp_path / "llama3.gguf", tiny_weights() | {"rope_freqs.weight": factors})
    checkpoint = GGUFCheckpoint(path)
    found, attention_factor = frequencies(checkpoint.config["rope_scaling"])
    assert torch.allclose(found, wanted, rtol=1e-6)
    assert attention_factor == 1.0
    assert "rope_freqs.weight" not in checkpoint.shapes()


def test_a_tensor_of_another_structure_keeps_its_name_for_the_strict_loader(tmp_path: Path) -> None:
    extra = {
        "blk.0.attn_gate.weight": np.zeros((4, 4), np.float32),
        "v.blk.0.weight": np.zeros(4, np.float32),
    }
    names = GGUFCheckpoint(write_gguf(tmp_path / "tiny.gguf", tiny_weights() | extra)).shapes()
    assert set(extra) < set(names)


WITHOUT_Q = {name: values for name, values in tiny_weights().items() if name != "blk.0.attn_q.weight"}
ONE_LAYER = {name: values for name, values in tiny_weights().items() if not name.startswith("blk.1.")}
BAD_FACTORS = tiny_weights() | {"rope_freqs.weight": np.full(HEAD_DIM // 2, np.nan, np.float32)}
TWO_HEADS = tiny_weights() | {"lm_head.weight": np.zeros((VOCABULARY, HIDDEN), np.float32)}
FEW_FACTORS = tiny_weights() | {"rope_freqs.weight": np.ones(3, np.float32)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"architecture": "gpt2"},
            "architecture 'gpt2' is not supported; supported are llama, mistral, qwen2, qwen3, gemma2, gemma3,",
        ),
        ({"without": "general.architecture"}, "architecture None is not supported"),
        (
            {"without": "llama.embedding_length"},
            "llama.embedding_length must be a positive integer, it is missing",
        ),
        (
            {"change": override("llama.block_count", 0)},
            "llama.block_count must be a positive integer, it is 0",
        ),
        (
            {"change": override("llama.block_count", 2**32 - 1)},
            "block_count is 4294967295, but there are tensors of 2",
        ),
        ({"weights": ONE_LAYER}, "block_count is 2, but there are tensors of 1 layers"),
        ({"weights": WITHOUT_Q}, "tensor 'blk.0.attn_q.weight' is missing"),
        (
            {"change": override("llama.attention.head_count", 2)},
            r"'blk.0.attn_k.weight' .* ask for \[64, 64\]",
        ),
        ({"change": override("llama.feed_forward_length", 97)}, r"has shape \[96, 64\].* ask for \[97, 64\]"),
        ({"change": override("llama.embedding_length", 128)}, r"'token_embd.weight' has shape \[48, 64\]"),
        (
            {"change": override("llama.rope.freq_base", math.nan)},
            "freq_base must be a positive number, it is nan",
        ),
        (
            {"change": lambda w: w.add_rope_dimension_count(8)},
            "rope.dimension_count is 8, and the head dimension 16",
        ),
        (
            {"change": lambda w: w.add_expert_count(8)},
            "llama.expert_used_count must be a positive integer, it is missing",
        ),
        ({"change": lambda w: w.add_uint16("split.count", 3)}, "one of 3 parts of a split model"),
        ({"change": override("tokenizer.ggml.eos_token_id", 48)}, "eos_token_id is 48, which is no token"),
        ({"change": write_scaling(type="longrope")}, "rope scaling 'longrope' is not supported in GGUF"),
        (
            {"change": write_scaling(type="linear")},
            "rope.scaling.factor must be a positive number, it is missing",
        ),
        ({"change": write_scaling(type="linear", factor=2.0, alpha=1.0)}, r"not supported: \['alpha'\]"),
        ({"weights": TWO_HEADS}, "'output.weight' and 'lm_head.weight' are both 'lm_head.weight'"),
        ({"weights": BAD_FACTORS}, "factors that are not positive numbers"),
        ({"weights": FEW_FACTORS}, r"must be F32 of shape \[8\], it is F32 of shape \[3\]"),
    ],
)
def test_what_cannot_be_run_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "bad.gguf", **({"weights": tiny_weights()} | options))
    with pytest.raises(CheckpointError, match=message) as caught:
        GGUFCheckpoint(path)
    assert str(path) in str(caught.value)


def test_no_damage_does_more_than_raise_checkpoint_error(tmp_path: Path) -> None:
    """Headers that still parse may hold any value of any type; whatever opens can be read."""
    path = write_gguf(tmp_path / "tiny.gguf", tiny_weights(), change=write_scaling(type="yarn", factor=2.0))
    content = path.read_bytes()
    header_bytes = min(tensor.offset for tensor in GGUFFile(path).tensors.values())
    rng = random.Random(1)
    num_refused = 0
    for _ in range(800):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 2, 3))):
            damaged[rng.randrange(header_bytes)] = rng.choice((0, 1, 2, 3, 4, 6, 8, 9, 255))
        path.write_bytes(damaged)
        try:
            checkpoint = GGUFCheckpoint(path)
            for name in checkpoint.shapes():
                checkpoint.read(name)
            checkpoint.close()
        except CheckpointError:
            num_refused += 1
    assert 100 < num_refused < 800


def test_no_damage_makes_blocks_that_do_not_fit(tmp_path: Path) -> None:
    """Whatever opens gives whole rows of blocks, each with a place of its own: kernels believe it."""
    path = write_gguf(tmp_path / "tiny.gguf", tiny_weights(), kind="Q8_0")
    content = path.read_bytes()
    file = GGUFFile(path)
    header_bytes = min(tensor.offset for tensor in file.tensors.values())
    file.close()
    first_tensor = content.index(b"token_embd.weight")
    block_sizes = {each.name: (each.block_elements, each.block_bytes) for each in GGML_TYPES.values()}
    rng = random.Random(2)
    num_read = 0
    for _ in range(600):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 2))):  # types, shapes and offsets of tensors, for the most part
            damaged[rng.randrange(first_tensor, header_bytes)] = rng.choice((0, 1, 2, 3, 6, 7, 8, 12, 14, 32, 64, 255))
        path.write_bytes(damaged)
        try:
            checkpoint = GGUFCheckpoint(path)
            for name, shape in checkpoint.shapes().items():
                format = checkpoint.formats()[name]
                columns, num_bytes = block_sizes[format]
                if len(shape) != 2 or columns == 1:
                    continue
                rows = list(checkpoint.read_packed(name, format, (0, 0), shape))
                assert all(blocks.shape == (len(at), shape[1] // columns * num_bytes) for blocks, at in rows)
                assert sorted(np.concatenate([at for _, at in rows]).tolist()) == list(range(shape[0]))
                num_read += 1
            checkpoint.close()
        except CheckpointError:
            continue
    assert num_read > 1000


def test_reading_what_is_not_there(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "tiny.gguf", tiny_weights()))
    with pytest.raises(CheckpointError, match=r"there is no tensor 'model.layers.7.mlp.up_proj.weight'"):
        checkpoint.read("model.layers.7.mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' has shape \[64\], not \[63\]"):
        checkpoint.read_into("model.norm.weight", torch.zeros(63))
