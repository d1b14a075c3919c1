"""The documents are true: their code runs and prints what they say, their tables are complete, their links lead on.

The Python blocks of a document make one script. A block that begins with a file name in a comment is that file.
"""

import math
import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from narrow import present
from safetensors.torch import load_file
from torch import Tensor

import infinilm
from infinilm.debug import ALIASES, EXPERT_POINTS, POINTS, STATE_POINTS
from infinilm.errors import InvalidValueError
from infinilm.lowlevel.infer_input import TENSOR_FIELDS
from infinilm.models import LlamaConfig, register_model
from infinilm.models.registry import _BUILT_IN, FAMILIES

ROOT = Path(__file__).parents[1]


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def run_python(script: str, directory: Path) -> str:
    """What a script in that directory prints."""
    (directory / "main.py").write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "main.py"],
        check=False,
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # busy cores make threads wait for each other
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_blocks(document: str, directory: Path) -> tuple[str, list[str]]:
    """What a document's code prints, and the lines that it says will be among them, in order."""
    script, expected = "", []
    for block in re.findall(r"^```python\n(.*?)^```$", read(document), re.MULTILINE | re.DOTALL):
        if file := re.match(r"# (\w+\.py)\n", block):
            (directory / file[1]).write_text(block, encoding="utf-8")
            continue
        script += f"{block}print()\n"  # a block may leave its line open
        for comment in re.findall(r"^ *print\(.*\)  # (.*)$|# prints: (.*)$", block, re.MULTILINE):
            expected.append("".join(comment))
    assert script, f"{document} has no Python blocks"
    return run_python(script, directory), expected


def check_printed(output: str, expected: list[str]) -> None:
    lines = iter(output.splitlines())
    missing = [line for line in expected if line not in lines]  # `in` moves on: the order counts
    assert not missing, f"not printed, or not in this order: {missing}\nprinted:\n{output}"


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[str]]:
    """The directory in which docs/extending.md has run, with its module and its checkpoint."""
    directory = tmp_path_factory.mktemp("extending")
    return directory, *run_blocks("docs/extending.md", directory)


def test_extending_prints_what_it_says(extended: tuple[Path, str, list[str]]) -> None:
    _, output, expected = extended
    assert len(expected) == 7
    check_printed(output, expected)


def test_low_level_prints_what_it_says(tmp_path: Path) -> None:
    output, expected = run_blocks("docs/low-level.md", tmp_path)
    assert len(expected) == 15
    check_printed(output, expected)


def test_batch_prints_what_it_says(tmp_path: Path) -> None:
    output, expected = run_blocks("docs/batch.md", tmp_path)
    assert expected == ["1 0"]
    check_printed(output, expected)


def test_chat_formats_prints_what_it_says(tmp_path: Path) -> None:
    output, expected = run_blocks("docs/chat_formats.md", tmp_path)
    assert expected == ["1"]
    check_printed(output, expected)


def test_the_readme_prints_what_it_says(tmp_path: Path) -> None:
    output, expected = run_blocks("README.md", tmp_path)
    assert len(expected) == 2
    check_printed(output, expected)
    assert output.startswith(" Paris.\n")  # generate
    assert "sky" in output  # chat
    assert " four\n four,\n four, five\n" in output  # step by step


class PlainLlama:
    """The parts of a Llama, computed the plain way for one text."""

    def __init__(self, tokens: Tensor, weights: dict[str, Tensor], config: LlamaConfig) -> None:
        self.tokens, self.weights, self.config = tokens, weights, config

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def mlp(self, h: Tensor, prefix: str) -> Tensor:
        inner = F.silu(self.linear(h, f"{prefix}.gate_proj")) * self.linear(h, f"{prefix}.up_proj")
        return self.linear(inner, f"{prefix}.down_proj")

    def rotate(self, x: Tensor) -> Tensor:  # [heads, T, head_dim]
        half = self.config.head_dim // 2
        angles = torch.outer(torch.arange(len(self.tokens)), 10000.0 ** -(torch.arange(half) / half))
        first, second = x.split(half, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def attention(self, h: Tensor, prefix: str) -> Tensor:
        head_dim = self.config.head_dim
        q, k, v = (
            self.linear(h, f"{prefix}.{each}_proj").unflatten(1, (-1, head_dim)).transpose(0, 1) for each in "qkv"
        )
        copies = self.config.num_attention_heads // self.config.num_key_value_heads
        k, v = (each.repeat_interleave(copies, dim=0) for each in (self.rotate(k), v))
        scores = self.rotate(q) @ k.transpose(1, 2) / math.sqrt(head_dim)
        scores += torch.full(scores.shape[1:], -math.inf).triu(1)
        return self.linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), f"{prefix}.o_proj")

    def logits(self) -> Tensor:
        """`[T, vocab]`."""
        x = self.weights["model.embed_tokens.weight"][self.tokens]
        for layer in range(self.config.num_hidden_layers):
            x = self.layer(x, f"model.layers.{layer}", layer)
        return self.linear(self.norm(x, "model.norm"), "lm_head")

    def layer(self, x: Tensor, name: str, layer: int) -> Tensor:
        raise NotImplementedError


class PlainParallelLlama(PlainLlama):
    """The document's `my_model`."""

    def layer(self, x: Tensor, name: str, layer: int) -> Tensor:
        h = self.norm(x, f"{name}.input_layernorm")
        return x + self.attention(h, f"{name}.self_attn") + self.mlp(h, f"{name}.mlp")


class PlainMoeLlama(PlainLlama):
    """The document's `my_moe`: 2 of 4 experts in layer 0, an MLP in layer 1."""

    def layer(self, x: Tensor, name: str, layer: int) -> Tensor:
        x = x + self.attention(self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attn")
        h = self.norm(x, f"{name}.post_attention_layernorm")
        if layer == 1:
            return x + self.mlp(h, f"{name}.mlp")
        rows = []
        for token, probabilities in zip(h, self.linear(h, f"{name}.mlp.gate").softmax(-1), strict=True):
            best = sorted(range(4), key=probabilities.neg().__getitem__)[:2]
            rows.append(sum(probabilities[expert] * self.mlp(token, f"{name}.mlp.experts.{expert}") for expert in best))
        return x + torch.stack(rows)


@pytest.mark.parametrize(
    ("module", "checkpoint", "plain"),
    [("my_model", "parallel-llama", PlainParallelLlama), ("my_moe", "moe-llama", PlainMoeLlama)],
)
def test_the_added_architecture_computes_what_plain_torch_does(
    extended: tuple[Path, str, list[str]], module: str, checkpoint: str, plain: type[PlainLlama]
) -> None:
    directory = extended[0]
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(1))
    run_python(
        f"""
import torch, {module}
from safetensors.torch import save_file
from infinilm import InferEngine
from infinilm.cache import StaticKVCacheConfig
from infinilm.distributed import DistConfig

tokens = torch.tensor({tokens.tolist()})
logits = {{}}
for tp_size in (1, 2):
    with InferEngine("{checkpoint}", DistConfig(tp_size), "cpu") as engine:
        logits[f"whole{{tp_size}}"] = engine(input_ids=tokens, return_logits=True).logits
        engine.reset_cache(StaticKVCacheConfig(2, 64))
        chunks = [(0, 23), (23, 24), (24, 40)]
        parts = [
            engine(input_ids=tokens[:, start:end], cache_lengths=[start] * 2, return_logits=True).logits
            for start, end in chunks
        ]
        logits[f"chunks{{tp_size}}"] = torch.cat(parts, dim=1)
save_file(logits, "logits.safetensors")
""",
        directory,
    )
    config = LlamaConfig(  # what the document's is but for the name, which this process does not know
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    weights = load_file(directory / checkpoint / "model.safetensors")
    expected = torch.stack([plain(row, weights, config).logits() for row in tokens])
    assert expected.std() > 0.5
    found = load_file(directory / "logits.safetensors")
    assert sorted(found) == ["chunks1", "chunks2", "whole1", "whole2"]
    for logits in found.values():
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_default_that_is_no_setting_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"'other'.*no setting qk_nrom; it has model_type, vocab_size"):
        register_model("other", "OtherForCausalLM", defaults={"qk_norm": True, "qk_nrom": True})
    assert "other" not in FAMILIES


def table_after(document: str, heading: str) -> list[list[str]]:
    """The cells of the table under its first column's heading."""
    _, table = re.split(rf"^\| {heading} \|.*\n\|[-|]+\|\n", read(document), flags=re.MULTILINE)
    rows = present(re.match(r"(\|.*\n)+", table))[0].splitlines()
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


@pytest.mark.parametrize(
    ("heading", "points"),
    [
        ("point", POINTS),
        ("point of a layer with experts.*?", EXPERT_POINTS),
        ("point of a recurrent layer.*?", STATE_POINTS),
    ],
)
def test_the_table_of_points_is_the_hooks_own(heading: str, points: dict[str, str]) -> None:
    expected = []
    for point, shape in points.items():
        names = [point, ALIASES[point]] if point in ALIASES else [point]
        array, end, rest = shape.partition("]")
        expected.append([", ".join(f"`{name}`" for name in names), f"`{array}{end}`{rest}"])
    assert table_after("docs/low-level.md", heading) == expected


def test_the_table_of_inputs_has_every_field() -> None:
    assert sorted(row[0].strip("`") for row in table_after("docs/low-level.md", "field")) == sorted(TENSOR_FIELDS)


def test_the_table_of_models_has_every_family() -> None:
    """`make model-table` writes it; the last columns, which it measures, are not compared."""
    spec = present(spec_from_file_location("model_table", ROOT / "docs/model_table.py"))
    script = module_from_spec(spec)
    present(spec.loader).exec_module(script)
    expected = [line.split(" | ")[:4] for line in script.make_table({}).splitlines()[2:]]
    found = table_after("docs/models.md", "`model_type`")
    built_in = [row for row in expected if row[0].strip("| `") in _BUILT_IN]
    assert [row[:4] for row in found] == [[cell.strip("| ") for cell in row] for row in built_in]
    assert all(0 < float(row[5]) < 1e-4 for row in found)


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CHANGELOG.md",
        *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")),
    ],
)
def test_links_lead_to_files(document: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", read(document)):
        if "://" not in link:
            assert ((ROOT / document).parent / link).exists(), link


def test_the_api_reference_has_every_public_name(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "docs/api_reference.py", tmp_path],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "infinilm.html").read_text(encoding="utf-8")
    assert [name for name in infinilm.__all__ if f'id="{name}"' not in page] == []
    assert 'id="LLMEngine.generate"' in page
