"""InfiniLM's names for models on their own, held against transformers: forward passes, growing caches, loading."""

import logging
from pathlib import Path

import pytest
import torch
from checkpoints import ARCHITECTURES, make_reference, save
from narrow import dense

from infinilm.cache.dynamic import BLOCK_SIZE, DynamicCache
from infinilm.errors import CheckpointError, EngineError, InfinilmError, InvalidValueError, PromptTooLongError
from infinilm.lib import _infinilm
from infinilm.models import AutoConfig, AutoLlamaModel, LlamaConfig, LlamaForCausalLM
from infinilm.models.llama import LlamaOutput

NUM_TOKENS = 100


def random_rows(batch_size: int, length: int = NUM_TOKENS) -> torch.Tensor:
    return torch.randint(0, 160, (batch_size, length), generator=torch.Generator().manual_seed(batch_size))


@torch.inference_mode()
def reference_logits(reference, rows: torch.Tensor, **options) -> torch.Tensor:
    return reference(rows, **options).logits.float()


@pytest.fixture(scope="module")
def reference():
    return make_reference("llama-gqa")


@pytest.fixture(scope="module")
def model(reference, tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    return AutoLlamaModel.from_pretrained(save(reference, tmp_path_factory.mktemp("llama")))


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_logits_in_one_go(kind: str, batch_size: int, tmp_path: Path) -> None:
    reference = make_reference(kind)
    rows = random_rows(batch_size)
    output = LlamaForCausalLM.from_pretrained(save(reference, tmp_path))(rows)
    assert output.logits.dtype == torch.float32
    assert output.past_key_values.get_seq_length() == NUM_TOKENS
    assert output.past_key_values.batch_size == batch_size
    torch.testing.assert_close(output.logits, reference_logits(reference, rows), atol=1e-4, rtol=0)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", ["llama-gqa", "mistral", "qwen3"])
def test_logits_in_pieces_while_the_cache_grows(kind: str, batch_size: int, tmp_path: Path) -> None:
    reference = make_reference(kind)
    model = LlamaForCausalLM.from_pretrained(save(reference, tmp_path))
    rows = random_rows(batch_size)
    cache, pieces, capacities = DynamicCache(), [], []
    for piece in rows.split([5, 1, 1, 20, 1, 1, 30, *[1] * 41], dim=1):
        output = model(piece, past_key_values=cache)
        assert output.past_key_values is cache
        pieces.append(output.logits)
        capacities.append(cache._pool.num_blocks[0] * BLOCK_SIZE // batch_size)
    assert sorted(set(capacities)) == [16, 32, 64, 128], "it must have been copied for this to mean much"
    torch.testing.assert_close(torch.cat(pieces, dim=1), reference_logits(reference, rows), atol=1e-4, rtol=0)


def test_a_cache_made_in_any_mode_can_be_used_in_any_other(model) -> None:
    rows = random_rows(1, 40)
    expected = model(rows).logits
    with torch.inference_mode():
        cache = model(rows[:, :30]).past_key_values
    later = model(rows[:, 30:], past_key_values=cache).logits
    torch.testing.assert_close(later, expected[:, 30:], atol=1e-4, rtol=0)
    later[0, 0, 0] = 1.0  # what is given out may be edited


@pytest.mark.parametrize("kind", ["llama-bias", "gemma3"])
def test_weights_may_be_changed_in_place_between_calls(kind: str, tmp_path: Path) -> None:
    reference = make_reference(kind)
    model = LlamaForCausalLM.from_pretrained(save(reference, tmp_path))
    rows = random_rows(1, 9)
    before = model(rows).logits
    for name, parameter in reference.named_parameters():
        parameter.data.mul_(0.9)
        own = dense(model.model.weight_targets()[name]).tensor
        own.data.copy_(parameter.data)
    after = model(rows).logits
    assert (after - before).abs().max() > 1e-2
    torch.testing.assert_close(after, reference_logits(reference, rows), atol=1e-4, rtol=0)


def test_reset_and_mismatches_of_caches(model) -> None:
    cache = DynamicCache()
    assert (cache.get_seq_length(), cache.batch_size) == (0, 0)
    first = model(random_rows(2, 20), past_key_values=cache).logits
    assert (cache.get_seq_length(), cache.batch_size) == (20, 2)
    with pytest.raises(InvalidValueError, match=r"holds 2 rows .* brings 3 rows .* reset this one"):
        model(random_rows(3, 4), past_key_values=cache)
    other = LlamaForCausalLM(LlamaConfig.from_dict({**model.config.to_dict(), "num_hidden_layers": 3}))
    with pytest.raises(InvalidValueError, match=r"num_layers=2.*num_layers=3.*new DynamicCache"):
        other(random_rows(2, 4), past_key_values=cache)
    assert (cache.get_seq_length(), cache.batch_size) == (20, 2)
    cache.reset()
    assert (cache.get_seq_length(), cache.batch_size) == (0, 0)
    model(random_rows(3, 4), past_key_values=cache)
    cache.reset()
    torch.testing.assert_close(model(random_rows(2, 20), past_key_values=cache).logits, first, atol=0, rtol=0)


def test_a_pass_that_fails_leaves_the_cache_as_it_was(model) -> None:
    rows = random_rows(1, 60)
    expected = model(rows).logits[:, 30:]
    cache = model(rows[:, :30]).past_key_values
    norm = model.model.norm
    handle = norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(rows[:, 30:], past_key_values=cache)
    with pytest.raises(ZeroDivisionError):
        model(rows, past_key_values=(fresh := DynamicCache()))
    handle.remove()
    assert cache.get_seq_length() == 30
    torch.testing.assert_close(model(rows[:, 30:], past_key_values=cache).logits, expected, atol=1e-4, rtol=0)
    assert fresh.batch_size == 0
    model(random_rows(2, 3), past_key_values=fresh)  # it is still anybody's
    assert (fresh.get_seq_length(), fresh.batch_size) == (3, 2)


@pytest.mark.parametrize("keep", [0, 1, 7, 500, torch.tensor([3, 0, 12])])
def test_logits_to_keep(model, reference, keep: int | torch.Tensor) -> None:
    rows = random_rows(2, 13)
    expected = reference_logits(reference, rows, logits_to_keep=keep)
    torch.testing.assert_close(model(rows, logits_to_keep=keep).logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(2, 9), (1, 9), (9,)])
def test_position_ids(model, reference, shape: tuple[int, ...]) -> None:
    rows = random_rows(2, 9)
    positions = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(3))
    expected = reference_logits(reference, rows, position_ids=positions.view(-1, 9).expand(2, 9))
    for given in (positions, positions.numpy(), positions.tolist()):
        torch.testing.assert_close(model(rows, position_ids=given).logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": [[1, 160]]}, r"input_ids\[0, 1\]=160 is out of range; use 0 to 159"),
        ({"position_ids": [[0, 256]]}, r"position_ids\[0, 1\]=256 is out of range; use 0 to 255"),
        ({"position_ids": [0, 1, 2]}, r"position_ids has shape \[1, 3\], but input_ids \[1, 2\]"),
        ({"past_key_values": ()}, "past_key_values must be infinilm's DynamicCache, not tuple"),
        ({"logits_to_keep": -1}, "logits_to_keep=-1 is out of range; use 0 or more"),
        ({"logits_to_keep": torch.tensor([2])}, r"logits_to_keep\[0, 0\]=2 is out of range; use 0 to 1"),
        ({"logits_to_keep": torch.tensor([[0], [1]])}, r"logits_to_keep has shape \[2, 1\]; use \[n\]"),
        ({"input_ids": [[1] * 257]}, "the text would have 257 tokens.*takes 256"),
    ],
)
def test_bad_input_to_forward(model, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InfinilmError, match=message):
        model(**{"input_ids": [[1, 2]], **arguments})


def test_a_text_longer_than_the_model_is_refused_piece_by_piece(model) -> None:
    cache = model(random_rows(1, 250)).past_key_values
    with pytest.raises(PromptTooLongError, match="257 tokens"):
        model(random_rows(1, 7), past_key_values=cache)
    model(random_rows(1, 6), past_key_values=cache)
    assert cache.get_seq_length() == 256


def test_random_weights_follow_the_seed() -> None:
    config = LlamaConfig.from_dict(make_reference("qwen2").config.to_dict())
    model = LlamaForCausalLM(config, dtype="float32", device="cpu")
    rows = random_rows(1, 8)
    assert torch.equal(model(rows).logits, LlamaForCausalLM(config, dtype=torch.float32)(rows).logits)
    assert not torch.equal(model(rows).logits, LlamaForCausalLM(config, seed=1)(rows).logits)
    weights = {name: dense(weight).tensor for name, weight in model.model.weight_targets().items()}
    assert weights["model.layers.0.mlp.up_proj.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert bool((weights["model.layers.1.input_layernorm.weight"] == 1).all())
    assert bool((weights["model.layers.1.self_attn.q_proj.bias"] == 0).all())


def test_dtype_and_device_are_what_was_asked_for(model, reference, tmp_path: Path) -> None:
    assert (model.dtype, model.device) == (torch.float32, torch.device("cpu"))
    half = LlamaForCausalLM.from_pretrained(save(reference, tmp_path), dtype="bfloat16", device="cpu")
    assert half.dtype == torch.bfloat16
    rows = random_rows(1, 30)
    output: LlamaOutput = half(rows)
    assert output.logits.dtype == torch.float32
    assert 0 < (output.logits - reference_logits(reference, rows)).abs().mean() < 3e-2
    with pytest.raises(EngineError, match=r"built on cpu in torch.bfloat16 and stays so"):
        half.float()
    with pytest.raises(InvalidValueError, match="dtype='int8' is unknown; use one of float32"):
        LlamaForCausalLM(model.config, dtype="int8")
    for device, message in [("tpu", "is unknown"), ("meta", "is not supported"), ("cuda:99", "CUDA device")]:
        with pytest.raises(InvalidValueError, match=f"device='{device}'.*{message}"):
            LlamaForCausalLM(model.config, device=device)
    with pytest.raises(TypeError, match="config must be a ModelConfig, not dict"):
        LlamaForCausalLM({})  # type: ignore[arg-type]


def test_auto_config_reads_directories_files_and_aliases(model, smollm2: Path, tmp_path: Path) -> None:
    path = save(make_reference("mistral"), tmp_path)
    config = AutoConfig.from_pretrained(str(path))
    assert (config.model_type, config.sliding_window) == ("mistral", 24)
    embedded = AutoConfig.from_pretrained(smollm2)
    assert embedded == AutoConfig.from_pretrained("smollm2-135m") == AutoConfig.from_pretrained()
    assert (embedded.num_hidden_layers, embedded.hidden_size) == (30, 576)
    with pytest.raises(CheckpointError, match="'nowhere' is not known"):
        AutoConfig.from_pretrained("nowhere")
    for auto in (AutoConfig, AutoLlamaModel):
        with pytest.raises(NotImplementedError, match="from_pretrained"):
            auto()


def test_loading_is_logged_with_device_dtype_and_time(tiny_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "infinilm"):
        model = AutoLlamaModel.from_pretrained(tiny_dir, device="cpu", dtype="float32")
    assert any("llama on cpu in float32, loaded in" in message for message in caplog.messages)
    assert model.tokenizer is not None
    assert model.tokenizer.decode(model.tokenizer.encode("hello")) == "hello"


def test_weights_that_do_not_fit_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    path = save(make_reference("llama-gqa"), tmp_path)
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 9999'))
    with pytest.raises(CheckpointError, match="num_hidden_layers=9999, but there are only"):
        AutoLlamaModel.from_pretrained(path)
    (path / "config.json").write_text(config.replace('"intermediate_size": 112', '"intermediate_size": 1000000000'))
    with pytest.raises(CheckpointError, match="misshapen"):
        AutoLlamaModel.from_pretrained(path)


@pytest.mark.parametrize(
    "name",
    [
        *("CacheConfig", "DistConfig", "HookRegistry", "InferEngine"),
        *("LlamaConfig", "PagedKVCacheConfig", "StaticKVCacheConfig"),
    ],
)
def test_the_extension_modules_names(name: str) -> None:
    assert getattr(_infinilm, name).__name__ == name
    assert name in dir(_infinilm)


def test_the_extension_module_has_no_other_names() -> None:
    assert _infinilm.LlamaConfig is LlamaConfig
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'; it has CacheConfig"):
        _ = _infinilm.Nothing
