"""Which layers are computed where only their kernels matter."""

from pathlib import Path

import pytest
from checkpoints import make_reference, save
from narrow import worker_of

from infinilm import LLM, SamplingParams
from infinilm.models.decoder import Decoder, skipping_like_layers

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama-gqa", [0]),
        ("smollm3", [0]),  # layers without rotary embedding have another table, but the same kernels
        ("qwen3-moe-mixed", [0, 1]),  # dense and sparse ones
    ],
)
def test_one_layer_of_each_kind_is_computed(name: str, kinds: list[int], tmp_path: Path) -> None:
    settings = {"attention_backend": "torch", "num_kvcache_blocks": 16}  # the native library calls no modules
    with LLM(save(make_reference(name), tmp_path), device="cpu", **settings) as llm:
        model = worker_of(llm.executor).model
        assert isinstance(model, Decoder)
        computed: list[int] = []
        for index, layer in enumerate(model.layers):
            layer.register_forward_hook(lambda *_, index=index: computed.append(index))
        before = llm.generate([[3, 1, 4]], PARAMS, use_tqdm=False)[0].token_ids
        assert sorted(set(computed)) == list(range(len(model.layers)))
        computed.clear()
        with skipping_like_layers(model):
            llm.generate([[2, 7, 1]], PARAMS, use_tqdm=False)
        assert sorted(set(computed)) == kinds
        assert llm.generate([[3, 1, 4]], PARAMS, use_tqdm=False)[0].token_ids == before
