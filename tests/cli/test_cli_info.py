"""`infinilm info` and `infinilm pull`."""

import json
from pathlib import Path

import pytest
from checkpoints import make_reference, save
from cli.cli_driver import Cli
from gguf_files import write_gguf

from infinilm.loading.sources import ALIASES


def test_facts_of_the_embedded_model(cli: Cli, smollm2: Path) -> None:
    facts = json.loads(cli("info", "--json").out)
    expected = {
        "path": str(smollm2),
        "num_bytes": 98_362_432,
        "license": "Apache-2.0",
        "architecture": "llama",
        "num_parameters": 134_515_008,
        "num_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "sliding_window": None,
        "vocab_size": 49152,
        "tied_head": True,
        "max_context_len": 8192,
    }
    assert {name: facts[name] for name in expected} == expected
    assert sum(facts["stored_as"].values()) == 134_515_008
    assert next(iter(facts["stored_as"])) == "Q4_1"
    assert facts["tokenizer"] == {"kind": "byte-level BPE", "vocab_size": 49152, "has_chat_template": True}
    assert facts["memory"]["float32"]["weight_bytes"] == 4 * 134_515_008
    assert facts["memory"]["bfloat16"]["kv_bytes_per_token"] == 2 * 30 * 3 * 64 * 2


def test_what_fits_fills_the_free_memory(cli: Cli, tiny_dir: Path) -> None:
    memory = json.loads(cli("info", tiny_dir, "--json").out)["memory"]
    needs = memory["float32"]
    assert needs["kv_bytes_of_max_context"] == 256 * 2 * 2 * 2 * 16 * 4
    taken = needs["weight_bytes"] + needs["workspace_bytes"]
    taken += needs["num_tokens_that_fit"] * needs["kv_bytes_per_token"]
    assert 0 <= 0.9 * memory["free_bytes"] - taken <= needs["kv_bytes_per_token"]


def test_what_each_rank_holds(cli: Cli, tiny_dir: Path) -> None:
    whole = json.loads(cli("info", tiny_dir, "--json").out)
    assert whole["ranks"] == []
    stages = json.loads(cli("info", tiny_dir, "--json", "-p", "2", "--tp", "2").out)["ranks"]
    assert [stage["layers"] for stage in stages] == [[0, 0], [1, 1]]
    # Ranks share matrices, and each has the norms and the table of angles.
    total = 2 * sum(stage["weight_bytes"]["float32"] for stage in stages)
    assert 0 < total - whole["memory"]["float32"]["weight_bytes"] < 0.02 * total
    assert (
        sum(stage["kv_bytes_per_token"]["float32"] for stage in stages) * 2
        == (whole["memory"]["float32"]["kv_bytes_per_token"])
    )
    shown = cli("info", tiny_dir, "-p", "2").out
    assert "layers 0 to 0" in " ".join(shown.split())
    refused = cli("info", tiny_dir, "-p", "3")
    assert refused.code != 0
    assert "more than the model's 2 layers" in refused.err


def test_a_model_larger_than_memory_is_told_so(cli: Cli, tiny_dir: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_dir / "config.json").read_text())
    config |= {"intermediate_size": 10**9}  # workspace grows with it; weights are not looked at
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(tiny_dir / "model.safetensors")
    done = cli("info", tmp_path)
    (line,) = [line for line in done.out.splitlines() if line.startswith("fits here")]
    assert line.split()[-2:] == ["no", "no"]


@pytest.mark.parametrize(
    ("kind", "settings", "shown"),
    [
        ("mistral", {}, ["mistral", "window of 24 tokens", "default, theta 10000", "none"]),
        ("gemma3-plain", {}, ["gemma3_text", "runs          yes", "window of 20 tokens", "default, theta 1e+06"]),
        (
            "llama-tied",
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
            ["head tied to embedding", "linear, ", "factor 4", "theta 500000", "1,024 tokens"],
        ),
    ],
)
def test_facts_are_readable(cli: Cli, tmp_path: Path, kind: str, settings: dict[str, object], shown: list[str]) -> None:
    model = make_reference(kind, **settings)
    done = cli("info", save(model, tmp_path))
    assert done.code == 0
    for text in [*shown, "F32", "fits here", "float32", "bfloat16", "2 of width 64, MLP 112"]:
        assert text in done.out


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        ({"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]}, "model_type='mamba2'"),
        ({"quantization_config": {"quant_method": "hqq", "bits": 4}}, "weights quantised by 'hqq' can't be read"),
        ({"num_hidden_layers": 3}, "9 missing:"),
        ({"auto_map": {"AutoModelForCausalLM": "own.Model"}}, "code from a model directory is never run"),
    ],
)
def test_why_a_model_does_not_run(
    cli: Cli, tiny_dir: Path, tmp_path: Path, edit: dict[str, object], reason: str
) -> None:
    config = json.loads((tiny_dir / "config.json").read_text()) | edit
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(tiny_dir / "model.safetensors")
    done = cli("info", tmp_path, "--json")
    facts = json.loads(done.out)
    assert (done.code, facts["runs"]) == (1, False)
    assert reason in facts["why_not"]
    assert str(config["model_type"]) in facts["architecture"]
    assert facts["num_parameters"] > 0
    shown = cli("info", tmp_path)
    assert shown.code == 1
    assert "runs          no: " in shown.out


def test_an_unknown_gguf_architecture_does_not_run(cli: Cli, tmp_path: Path) -> None:
    file = write_gguf(make_reference("llama-gqa"), tmp_path / "model.gguf", "gpt2")
    facts = json.loads(cli("info", file, "--json").out)
    assert facts["architecture"] == "gpt2"
    assert facts["why_not"].startswith("architecture 'gpt2' is not supported; supported are llama")


def test_a_damaged_model_is_an_error(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF\x03\x00\x00\x00\xff")
    done = cli("info", file)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {file}: ")


def test_pull_tells_where_the_model_is(cli: Cli, smollm2: Path) -> None:
    done = cli("pull", "smollm2-135m")
    facts = dict(line.split(None, 1) for line in done.out.splitlines())
    assert facts["path"].strip() == str(smollm2)
    assert facts["size"].strip() == "98.4 MB"
    assert facts["licence"].strip() == "Apache-2.0"


def test_pull_lists_the_aliases(cli: Cli) -> None:
    listed = cli("pull", "--list").out
    for alias, source in ALIASES.items():
        assert alias in listed
        assert source.license in listed


def test_experts_are_counted(cli: Cli, tmp_path: Path) -> None:
    path = save(make_reference("qwen3-moe-mixed"), tmp_path)
    assert json.loads(cli("info", path, "--json").out)["experts"] == {
        "count": 8,
        "per_token": 3,
        "size": 64,
        "layers": 2,
    }
    assert "8 experts of 64, 3 per token, in 2 layers" in " ".join(cli("info", path).out.split())
    path = save(make_reference("gemma4-moe"), tmp_path)
    assert "8 experts of 64, 3 per token, in 3 layers" in " ".join(cli("info", path).out.split())
