"""The examples, run as their reader would run them, do what they say."""

import importlib.util
import os
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from narrow import present
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from infinilm import LLM, SamplingParams
from infinilm.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]


def run_example(name: str, *arguments: str) -> str:
    """What an example prints."""
    done = subprocess.run(
        [sys.executable, f"examples/{name}.py", *arguments],
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # busy cores make threads wait for each other
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def load_example(name: str) -> ModuleType:
    """An example's functions."""
    spec = present(importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py"))
    module = importlib.util.module_from_spec(spec)
    present(spec.loader).exec_module(module)
    return module


def test_every_example_is_tested_here() -> None:
    tested = set(re.findall(r'run_example\("(\w+)"', Path(__file__).read_text()))
    assert tested == {path.stem for path in ROOT.glob("examples/*.py")}


def test_seed_engine_draws_what_transformers_logits_say() -> None:
    engine, ids, shape, num_blocks = run_example("seed_engine").splitlines()
    assert engine == "<InferEngine: DistConfig(tp_device_ids=[0, 1, 2, 3])>"
    assert shape == "model.layers.0.self_attn.q_proj.weight: [32, 128] on each of 4 ranks"
    assert num_blocks == "2048"
    expected = [draw(logits, temperature=0.8, top_k=50, top_p=0.95, random_val=0.1) for logits in seed_logits()]
    assert ids == f"tensor({expected})"


def seed_logits() -> torch.Tensor:
    """`[2, vocab]` after each row of the example's batch, by transformers."""
    config = {"hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 256, "vocab_size": 1000}
    from infinilm.models import LlamaConfig as OurConfig

    weights = load_example("seed_engine").make_weights(OurConfig(**config, num_layers=4))
    reference = LlamaForCausalLM(LlamaConfig(**config, num_hidden_layers=4)).eval()
    reference.load_state_dict(weights)
    with torch.inference_mode():
        return reference(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])).logits[:, -1]


def draw(logits: torch.Tensor, *, temperature: float, top_k: int, top_p: float, random_val: float) -> int:
    """The engine's sampling rule, written out."""
    values, order = logits.sort(descending=True, stable=True)
    sums = ((values - values[0]) / temperature).double().exp().cumsum(0)
    threshold = random_val * min(sums[top_k - 1], top_p * sums[-1])
    return int(order[int((sums >= threshold).int().argmax())])


def test_seed_llm_answers_as_the_engine_does() -> None:
    text = run_example("seed_llm")
    with LLM("smollm2-135m", num_kvcache_blocks=64) as llm:
        prompts = ["Hello, who are you?", "Write a short poem about MindNLP."]
        beginnings = llm.generate(prompts, SamplingParams(temperature=0.7, max_tokens=8), use_tqdm=False)
    first, second = (output.text for output in beginnings)
    assert len(first) > 20
    assert text.startswith(first)
    assert f"\n{second}" in text[len(first) :]


def test_continuous_batching_gives_what_each_request_gives_alone() -> None:
    lines = run_example("continuous_batching").splitlines()
    steps, answers = [line for line in lines if "free" in line], [line for line in lines if "alone" in line]
    assert len(steps) + len(answers) == len(lines)
    assert all(answer.endswith(", same alone") for answer in answers)
    assert answers[0].startswith("0: 'The capital of France is Paris.")
    assert answers[1].startswith("1: 'One, two, three, four, five, six,'")
    assert len(answers) == 5
    # Requests join as blocks come free, while others are decoded.
    assert steps[0] == "0: prefill 5, 1: prefill 6, 2: prefill 5; 1 blocks free"
    assert "0: decode, 1: decode, 3: prefill 17; 0 blocks free" in steps
    assert "0: decode, 3: decode, 4: prefill 3; 0 blocks free" in steps


def read_png(path: Path) -> np.ndarray:
    """Grey pixels `[height, width]`, of a file without filters, with its checksums checked."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, place = {}, 8
    while place < len(data):
        (length,) = struct.unpack_from(">I", data, place)
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        assert struct.unpack_from(">I", data, place + 8 + length)[0] == zlib.crc32(kind + body)
        chunks[kind] = body
        place += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *format_ = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert format_ == [8, 0, 0, 0, 0]
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not lines[:, 0].any()
    return lines[:, 1:]


def read_maps(path: Path, num_heads: int, num_tokens: int) -> np.ndarray:
    """The attention weights `[heads, T, T]` that the example's picture shows."""
    picture = read_png(path)
    side = 12 * num_tokens + 12
    assert picture.shape == (-(-num_heads // 3) * side + 12, 3 * side + 12)
    maps = []
    for head in range(num_heads):
        top, left = (12 + side * place for place in divmod(head, 3))
        panel = picture[top : top + 12 * num_tokens, left : left + 12 * num_tokens]
        cells = panel.reshape(num_tokens, 12, num_tokens, 12).transpose(0, 2, 1, 3).reshape(num_tokens, num_tokens, -1)
        assert (cells == cells[..., :1]).all()
        maps.append((1 - cells[..., 0] / 255) ** 2)
    return np.stack(maps)


def test_attention_inputs_draws_what_transformers_attends_to(tiny_dir: Path, tmp_path: Path) -> None:
    prompt, out = "hello hooks", tmp_path / "tiny.png"
    run_example("attention_inputs", "--model", str(tiny_dir), "--prompt", prompt, "--layer", "1", "--out", str(out))
    tokens = present(Tokenizer.from_directory(tiny_dir)).encode(prompt)
    reference = AutoModelForCausalLM.from_pretrained(tiny_dir, attn_implementation="eager")
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens]), output_attentions=True).attentions[1][0]
    # A step of grey is 1/255 of the root of a weight.
    np.testing.assert_allclose(read_maps(out, *expected.shape[:2]), expected, atol=1 / 255)


def test_attention_inputs_shows_heads_that_look_at_what_came_next(tmp_path: Path) -> None:
    out = tmp_path / "attention.png"
    text = run_example("attention_inputs", "--out", str(out)).splitlines()
    assert text[0] == f"{out}: layer 17, 9 heads, left to right and down"
    assert re.match(r"head 5: ' red' looks +\d\d% at ' mat' \(6\), +\d+% at the first token", text[6])
    maps = read_maps(out, num_heads=9, num_tokens=14)
    assert not np.triu(maps, 1).any()
    np.testing.assert_allclose(maps.sum(-1), 1, atol=0.05)
    # Token 8 + i is the same word as token i: head 5 looks from it at token i + 1.
    assert maps[5, range(9, 14), range(2, 7)].mean() > 0.5


def test_logit_lens_reads_what_transformers_hidden_states_say(tiny_dir: Path) -> None:
    lines = run_example("logit_lens", "--model", str(tiny_dir), "--prompt", "hello").splitlines()
    tokenizer = present(Tokenizer.from_directory(tiny_dir))
    tokens = tokenizer.encode("hello")
    reference = AutoModelForCausalLM.from_pretrained(tiny_dir)
    seen = []
    for layer in reference.model.layers:
        layer.register_forward_hook(lambda _, __, output: seen.append(output))
    with torch.inference_mode():
        answer = int(reference(torch.tensor([tokens])).logits[0, -1].argmax())
        expected = [reference.lm_head(reference.model.norm(hidden))[0, -1].softmax(-1) for hidden in seen]
    assert lines[0] == f"After 'hello' the model says {tokenizer.decode([answer])!r}."
    for layer, (line, row) in enumerate(zip(lines[2:], expected, strict=True)):
        best = [f"{tokenizer.decode([token])!r} {row[token]:.0%}" for token in row.topk(3).indices.tolist()]
        rank = int((row > row[answer]).sum()) + 1
        assert line.split(maxsplit=2) == [str(layer), str(rank), ", ".join(best)]


def test_logit_lens_ends_in_paris() -> None:
    lines = run_example("logit_lens").splitlines()
    assert lines[0] == "After 'The capital of France is' the model says ' Paris'."
    ranks = [int(line.split()[1]) for line in lines[2:]]
    assert len(ranks) == 30
    assert ranks[-1] == 1
    assert min(ranks[:20]) > 100


def test_tensor_parallel_answers_alike_and_shows_the_pieces() -> None:
    text = run_example("tensor_parallel")
    for ranks in ("[0]", "[0, 1, 2]"):
        assert f"<InferEngine: DistConfig(tp_device_ids={ranks})>: 'The capital of France is Paris." in text
    assert "The tokens are the same: [7042, 30, " in text
    table = {line.split()[0]: re.findall(r"\[.*?\]", line) for line in text.splitlines() if line.startswith("model.")}
    assert table == {
        "model.embed_tokens.weight": ["[49152, 576]", *["[16384, 576]"] * 3],
        "model.layers.0.self_attn.q_proj.weight": ["[576, 576]", *["[192, 576]"] * 3],
        "model.layers.0.self_attn.k_proj.weight": ["[192, 576]", *["[64, 576]"] * 3],
        "model.layers.0.self_attn.o_proj.weight": ["[576, 576]", *["[576, 192]"] * 3],
        "model.layers.0.mlp.up_proj.weight": ["[1536, 576]", *["[512, 576]"] * 3],
        "model.layers.0.mlp.down_proj.weight": ["[576, 1536]", *["[576, 512]"] * 3],
        "model.norm.weight": ["[576]"] * 4,
    }
    assert "Two ranks are refused: num_attention_heads=9" in text
    assert text.rstrip().endswith("use a tensor parallel size of 1, 3, 9")
