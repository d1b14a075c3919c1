"""The kernels of latent attention against the torch version."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_reference, save
from torch import Tensor

from infinilm import LLM, SamplingParams
from infinilm.kernels.latent_attention import (
    latent_attention_torch,
    latent_decode,
    latent_prefill,
    multiply_heads,
    store_latents,
    store_latents_torch,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
SHAPES = [(5, 24, 16)]  # heads, rank, rope
if DEVICE == "cuda":
    SHAPES += [(4, 32, 8), (20, 16, 64), (16, 512, 64), (128, 512, 64)]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return numbers.to(DEVICE, dtype)


class Texts:
    """A cache in which requests of these numbers of tokens have blocks in any order; unused places are NaN."""

    def __init__(self, lengths: list[int], width: int, dtype: torch.dtype, block_size: int = 16) -> None:
        counts = [-(-length // block_size) for length in lengths]
        order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        self.cache = torch.full((len(order), block_size, 1, 1, width), torch.nan, dtype=dtype, device=DEVICE)
        self.tables = torch.full((len(lengths), max(counts) + 1), -1, dtype=torch.int32, device=DEVICE)
        first = 0
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            blocks = order[first : first + count]
            self.tables[row, :count] = blocks.int()
            tokens = torch.arange(length, device=DEVICE)
            slots = blocks[tokens // block_size] * block_size + tokens % block_size
            self.cache.flatten(0, 1)[slots] = random(length, 1, 1, width, dtype=dtype, seed=row)
            first += count
        self.lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[found.dtype], atol=TOLERANCE[found.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("heads", "rank", "rope"), SHAPES)
def test_decoding(heads: int, rank: int, rope: int, dtype: torch.dtype) -> None:
    """Lengths at the ends of blocks, tiles and chunks. A row gives the same bits alone."""
    long = [2048, 2049, 5000] if DEVICE == "cuda" else [2049] if dtype == torch.float32 else []
    lengths = [1, 0, 16, 17, 127, 128, 129, 300, *long]
    texts = Texts(lengths, rank + rope, dtype)
    query, turned = random(len(lengths), heads, rank, dtype=dtype), random(len(lengths), heads, rope, dtype=dtype)
    scale = (rank + rope) ** -0.5
    found = latent_decode(query, turned, texts.cache, texts.tables, texts.lens, scale=scale)
    starts = torch.arange(len(lengths) + 1)
    close(found, latent_attention_torch(query, turned, texts.cache, texts.tables, starts, texts.lens, scale=scale))
    for row in (3, 7):
        own = slice(row, row + 1)
        alone = latent_decode(
            query[own], turned[own], texts.cache, texts.tables[own, :20], texts.lens[own], scale=scale
        )
        assert torch.equal(alone, found[own])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("heads", "rank", "rope"), SHAPES)
def test_prompts(heads: int, rank: int, rope: int, dtype: torch.dtype) -> None:
    """Whole prompts and later chunks of them; a request that decodes is left out. A GPU decodes to the same bits."""
    new, lengths = [5, 1, 33, 1, 16, 24], [5, 0, 50, 1, 16, 4100 if DEVICE == "cuda" else 70]
    texts = Texts(lengths, rank + rope, dtype)
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    query, turned = random(sum(new), heads, rank, dtype=dtype), random(sum(new), heads, rope, dtype=dtype)
    scale = (rank + rope) ** -0.5
    arguments = (texts.cache, texts.tables, starts, texts.lens)
    found = latent_prefill(query, turned, *arguments, scale=scale)
    close(found, latent_attention_torch(query, turned, *arguments, scale=scale))
    assert not found[5].any()
    # The last request's second half alone, as another chunk.
    last = slice(sum(new) - 20, sum(new))
    half = torch.tensor([0, 20], dtype=torch.int32, device=DEVICE)
    again = latent_prefill(
        query[last], turned[last], texts.cache, texts.tables[-1:], half, texts.lens[-1:], scale=scale
    )
    assert torch.equal(again, found[last])
    if DEVICE == "cuda":
        finals = starts[1:].long() - 1
        decoded = latent_decode(query[finals], turned[finals], texts.cache, texts.tables, texts.lens, scale=scale)
        assert torch.equal(decoded, found[finals])


def test_a_token_that_is_not_finite_reaches_only_those_after_it() -> None:
    texts = Texts([60, 40], 40, torch.float32)
    texts.cache.flatten(0, 1)[int(texts.tables[0, 1]) * 16 + 9] = torch.nan  # token 25 of the first
    query, turned = random(100, 4, 32), random(100, 4, 8)
    starts = torch.tensor([0, 60, 100], dtype=torch.int32, device=DEVICE)
    found = latent_prefill(query, turned, texts.cache, texts.tables, starts, texts.lens, scale=0.2)
    is_bad = found.isnan().all(-1).all(-1)
    assert is_bad.tolist() == [25 <= token < 60 for token in range(100)]
    assert found[~is_bad].isfinite().all()
    decoded = latent_decode(query[:2], turned[:2], texts.cache, texts.tables, texts.lens, scale=0.2)
    assert decoded[0].isnan().all()
    assert decoded[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("heads", "rank", "rope"), SHAPES)
def test_storing(heads: int, rank: int, rope: int, is_interleaved: bool, dtype: torch.dtype) -> None:
    """Tokens without a slot are not stored, those that are not finite as NaN."""
    latents = random(5, rank + rope + 3, dtype=dtype)[:, 3:]
    latents[2, 1], latents[3, -1] = torch.inf, torch.nan
    query = random(5, heads, rope + 7, dtype=dtype)[..., 7:]
    positions, slots = (torch.tensor(each, device=DEVICE) for each in ([0, 3, 9, 2, 1], [4, -1, 7, 0, 11]))
    angles = random(10, rope // 2)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    options: dict[str, Any] = {"weight": random(rank, dtype=dtype), "eps": 1e-6, "is_interleaved": is_interleaved}
    found, expected = (torch.full((3, 4, 1, 1, rank + rope), 0.5, dtype=dtype, device=DEVICE) for _ in range(2))
    turned = store_latents(latents, query, positions, table, slots, found, **options)
    close(turned, store_latents_torch(latents, query, positions, table, slots, expected, **options))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=TOLERANCE[dtype], equal_nan=True)
    assert found.flatten(1).isnan().any(1).sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("num_rows", "in_size", "out_size"), [(1, 16, 32), (70, 40, 130)])
def test_products_by_head(num_rows: int, in_size: int, out_size: int, dtype: torch.dtype) -> None:
    x = random(num_rows, 3, in_size + 8, dtype=dtype)[..., 8:]
    matrix = random(3, out_size, in_size, dtype=dtype).mul_(in_size**-0.5).transpose(1, 2)
    for each in (matrix, matrix.contiguous()):
        found = multiply_heads(x, each)
        close(found, torch.einsum("thi,hio->tho", x.float(), each.float()).to(dtype))
        assert torch.equal(multiply_heads(x[:1], each), found[:1])


def test_a_model(tmp_path: Path) -> None:
    """Chunks of prompts, mixed steps and decoding, against torch's attention."""
    path = save(make_reference("deepseek-v3-halves"), tmp_path)
    prompts = [[7], list(range(3, 24))]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0)
    found = []
    for backend in ("torch", "triton"):
        options: dict[str, Any] = {"attention_backend": backend, "num_kvcache_blocks": 16, "max_num_batched_tokens": 16}
        with LLM(path, device=DEVICE, dtype="float32", **options) as llm:
            assert llm.executor.info.attention == backend
            outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append(torch.tensor([[entry.logprob for entry in output.logprobs or ()] for output in outputs]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
