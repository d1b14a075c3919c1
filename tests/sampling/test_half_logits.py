"""Logits of half precision, as a captured graph leaves them, give the samples of the same logits in float32."""

import pytest
import torch

from infinilm.sampling import Sampler
from infinilm.sampling_params import RowStart, SamplingParams

VOCAB_SIZE = 96
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, top_k=9, logprobs=4),
    SamplingParams(temperature=0, logit_bias={7: 30.0}, logprobs=2),
    SamplingParams(temperature=0.7, repetition_penalty=1.5, presence_penalty=0.4),
]


@pytest.mark.parametrize("rows", [[0, 1], [0, 1, 2, 3], [2, 2, 1]])
def test_half_precision_gives_the_same_samples(rows: list[int]) -> None:
    halves = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(3)).bfloat16()
    found = []
    for logits in (halves, halves.float()):
        sampler = Sampler(VOCAB_SIZE, torch.device("cpu"))
        for row, params in enumerate(PARAMS):
            sampler.start_row(RowStart(row, params, seed=row, stop_ids=(), prompt_token_ids=[1, 2, 3]))
        found.append(sampler.sample(logits.clone(), rows, [5] * len(rows)).to_host())
    assert found[0] == found[1]
