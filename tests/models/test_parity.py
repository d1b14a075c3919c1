"""Every architecture and rope variant against transformers, in one go, in chunks, and in company."""

import random

import pytest
import torch
from checkpoints import ARCHITECTURES, load, make_reference, reference_logits
from drive import Driver
from packing import needs_native

from infinilm.attention import AttentionBackend, NativeAttention, TorchAttention

HALF_HEAD = 8  # of llama-gqa: 64 / 4 / 2
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0 + 0.1 * i for i in range(HALF_HEAD)],
        "long_factor": [1.0 + 0.7 * i for i in range(HALF_HEAD)],
    },
}


def with_rope(name: str):
    rope = {"rope_theta": 10000.0, **ROPES[name]}
    return make_reference("llama-gqa", rope_parameters=rope)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(160) for _ in range(count)]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_architectures_in_float32(kind: str) -> None:
    reference = make_reference(kind)
    tokens = random_tokens(100)
    expected = reference_logits(reference, tokens)
    assert expected.std() > 0.3, "logits must tell tokens apart for the comparison to mean anything"
    torch.testing.assert_close(Driver(load(reference)).run(tokens), expected, atol=1e-4, rtol=0)


@needs_native
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_token_mixers_of_the_native_library(kind: str) -> None:
    reference = make_reference(kind)
    tokens = random_tokens(100)
    driver = Driver(load(reference), backend=NativeAttention())
    torch.testing.assert_close(driver.run(tokens), reference_logits(reference, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        *((kind, TorchAttention) for kind in ARCHITECTURES),
        *(pytest.param(kind, NativeAttention, marks=needs_native) for kind in ("qwen3.5", "deepseek-v3")),
    ],
)
def test_architectures_in_bfloat16(kind: str, backend: type[AttentionBackend]) -> None:
    reference = make_reference(kind)
    tokens = random_tokens(100)
    exact = reference_logits(reference, tokens)
    ours = Driver(load(reference, dtype=torch.bfloat16), backend=backend()).run(tokens)
    theirs = reference_logits(reference.to(torch.bfloat16), tokens)
    # Logits are of order 1. Rounding leaves both near the exact result, not always on the same side of it.
    assert (ours - theirs).abs().mean() < 2e-2
    assert (ours - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean()


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("num_tokens", [60, 150])
def test_ropes(name: str, num_tokens: int) -> None:
    """Texts within and beyond the original length of 64 positions."""
    reference = with_rope(name)
    tokens = random_tokens(num_tokens)
    # longrope chooses its factors by the longest text the engine will take.
    max_len = 64 if num_tokens <= 64 else 256
    ours = Driver(load(reference, max_len=max_len)).run(tokens)
    torch.testing.assert_close(ours, reference_logits(reference, tokens), atol=1e-4, rtol=0)


def test_dynamic_rope_beyond_the_trained_length_is_transformers_token_by_token() -> None:
    reference = make_reference(
        "llama-gqa", max_position_embeddings=40, rope_parameters={**ROPES["dynamic"], "rope_theta": 10000.0}
    )
    tokens = random_tokens(80)
    cache, expected = None, []
    with torch.inference_mode():
        for token in tokens:
            output = reference(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            expected.append(output.logits[0, -1])
    ours = Driver(load(reference, max_len=80)).run(tokens)
    torch.testing.assert_close(ours, torch.stack(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [*ARCHITECTURES, *(f"rope-{name}" for name in ROPES)])
def test_chunks_agree_with_one_go(kind: str) -> None:
    rope = kind.removeprefix("rope-")
    model = load(with_rope(rope) if rope in ROPES else make_reference(kind))
    tokens = random_tokens(100)
    whole = Driver(model).run(tokens)
    for chunk in (1, 7, 64):
        torch.testing.assert_close(Driver(model).run(tokens, chunk), whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("kind", ["llama-gqa", "mistral", "qwen2-window", "qwen3"])
def test_company_changes_nothing(kind: str, block_size: int) -> None:
    """Prefill, chunks and decoding of several requests in the same steps, in shuffled blocks."""
    model = load(make_reference(kind))
    texts = {"a": random_tokens(70, 1), "b": random_tokens(33, 2), "c": random_tokens(5, 3), "d": random_tokens(90, 4)}
    alone = {name: Driver(model, block_size=block_size).run(tokens) for name, tokens in texts.items()}
    driver = Driver(model, block_size=block_size)
    generator = random.Random(5)
    done: dict[str, list[torch.Tensor]] = {name: [] for name in texts}
    while any(driver.lengths.get(name, 0) < len(tokens) for name, tokens in texts.items()):
        chunks = {}
        for name, tokens in texts.items():
            start = driver.lengths.get(name, 0)
            size = generator.choice([0, 1, 1, 1, 9, 40])
            if tokens[start : start + size]:
                chunks[name] = tokens[start : start + size]
        if chunks:
            for name, logits in driver.step(chunks).items():
                done[name].append(logits)
    for name, logits in alone.items():
        torch.testing.assert_close(torch.cat(done[name]), logits, atol=1e-4, rtol=0)
