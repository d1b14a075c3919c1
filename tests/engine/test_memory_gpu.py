"""Running out of a GPU's memory, at start and in a step, and what an engine really takes of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoints import make_reference, save

from infinilm import LLM, SamplingParams
from infinilm.errors import InvalidValueError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MIB = 1 << 20
BLOCK_BYTES = 16 * 2 * 2 * 128 * 2  # tokens, layers, keys and values, numbers, bytes
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LONG = [number % 30_000 for number in range(16_000)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 40 million parameters, the most of them in a large vocabulary."""
    model = make_reference(
        "llama-gqa",
        vocab_size=32_000,
        hidden_size=512,
        intermediate_size=2048,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
    )
    return save(model.to(torch.bfloat16), tmp_path_factory.mktemp("medium"))


@pytest.fixture(autouse=True)
def empty_cache() -> None:
    """Nothing that an earlier test has let go of counts as taken."""
    torch.cuda.empty_cache()


def free_bytes() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@contextmanager
def device_filled(leaving: int) -> Iterator[None]:
    """Have all but so many bytes of the GPU taken."""
    # A driver gives out pages of 2 MiB, and the last of them to nobody.
    taken = torch.empty((free_bytes() - leaving) // (2 * MIB) * 2 * MIB - 4 * MIB, dtype=torch.uint8, device="cuda")
    try:
        yield
    finally:
        del taken
        torch.cuda.empty_cache()


@contextmanager
def torch_limited(more_bytes: int) -> Iterator[None]:
    """Let torch have no more than so many bytes besides those it has, however many are free."""
    total = torch.cuda.get_device_properties().total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more_bytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def check_serves(checkpoint: Path) -> None:
    with LLM(checkpoint, num_kvcache_blocks=64) as llm:
        [output] = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
        assert (len(output.token_ids), output.error) == (4, None)


# --- at start ---------------------------------------------------------------------------------------------


def test_a_cache_larger_than_the_gpu_is_refused_before_anything_is_loaded(checkpoint: Path) -> None:
    before = torch.cuda.memory_allocated()
    num_blocks = torch.cuda.get_device_properties().total_memory // BLOCK_BYTES
    with pytest.raises(InvalidValueError, match=rf"num_kvcache_blocks={num_blocks} needs .* graphs .* KV cache"):
        LLM(checkpoint, num_kvcache_blocks=num_blocks)
    assert torch.cuda.memory_allocated() == before
    check_serves(checkpoint)


def test_a_gpu_that_others_have_filled_is_refused(checkpoint: Path) -> None:
    with (
        device_filled(leaving=600 * MIB),
        pytest.raises(
            InvalidValueError, match=r"no memory is left for a KV cache; .* cuda:0: \d+\.\d MiB free at start"
        ),
    ):
        LLM(checkpoint)
    check_serves(checkpoint)


@pytest.mark.parametrize(
    "room", [pytest.param(32, id="weights"), pytest.param(300, id="steps"), pytest.param(700, id="cache")]
)
def test_running_out_at_start_gives_everything_back(checkpoint: Path, room: int) -> None:
    before = torch.cuda.memory_allocated()
    with (
        torch_limited(room * MIB),
        pytest.raises(InvalidValueError, match="loading the model ran out of memory; lower num_kvcache_bl") as caught,
    ):
        LLM(checkpoint, num_kvcache_blocks=1024 * MIB // BLOCK_BYTES)
    assert "out of memory. Tried to allocate" in str(caught.value)
    assert "KV cache 1.0 GiB" in str(caught.value)
    # The error is still held, and cuBLAS keeps what it has taken for its own use.
    assert torch.cuda.memory_allocated() - before < 200 * MIB
    check_serves(checkpoint)


def test_graphs_are_in_the_ledger_if_there_will_be_any(checkpoint: Path) -> None:
    with LLM(checkpoint, num_kvcache_blocks=64) as llm:
        assert f"graphs {llm.memory.workspace.graphs / MIB:.1f} MiB" in str(llm.memory)
    with LLM(checkpoint, num_kvcache_blocks=64, enforce_eager=True) as llm:
        assert llm.memory.workspace.graphs == 0


# --- in a step --------------------------------------------------------------------------------------------


def test_a_prompt_without_memory_fails_and_the_next_is_served(checkpoint: Path) -> None:
    with LLM(checkpoint, num_kvcache_blocks=4096, enable_prefix_caching=False) as llm:
        [before] = llm.generate([LONG], GREEDY, use_tqdm=False)
        with device_filled(leaving=64 * MIB):  # gate and up alone would be 125 MiB
            [failed] = llm.generate([LONG], GREEDY, use_tqdm=False)
        assert failed.error is not None
        assert failed.error.startswith("OutOfMemoryError: a step ran out of memory; lower num_kvcache_blocks")
        assert "Tried to allocate" in failed.error
        assert failed.finish_reason == "abort"
        assert llm.stats().num_free_blocks == 4096
        [after] = llm.generate([LONG], GREEDY, use_tqdm=False)
        assert (after.token_ids, after.error) == (before.token_ids, None)


def test_decoding_without_memory_for_a_graph_does_no_lasting_harm(checkpoint: Path) -> None:
    prompts = [[number, 5, 6] for number in range(200)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(checkpoint, num_kvcache_blocks=4096, enable_prefix_caching=False) as llm:
        for prompt in prompts:
            llm.add_request(prompt, params)
        outputs = llm.step()
        with device_filled(leaving=2 * MIB):  # before there is a graph of 200 rows
            while not llm.is_finished():
                outputs += llm.step()
        ended = {output.request_id: output for output in outputs if output.finished}
        assert len(ended) == 200
        for output in ended.values():
            assert len(output.token_ids) == 20 or (output.error or "").startswith(
                "OutOfMemoryError: a step ran out of memory"
            )
        assert llm.stats().num_free_blocks == 4096
        assert [len(output.token_ids) for output in llm.generate(prompts, params, use_tqdm=False)] == [20] * 200


# --- what is really taken ---------------------------------------------------------------------------------


def test_an_engine_takes_no_more_than_its_ledger_says(checkpoint: Path) -> None:
    torch.cuda.reset_peak_memory_stats()
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    prompts = [[number, 5, 6] for number in range(512)]
    with LLM(checkpoint, num_kvcache_blocks=4096) as llm:
        llm.generate([LONG + LONG], GREEDY, use_tqdm=False)
        for params in (
            SamplingParams(max_tokens=3, ignore_eos=True, logprobs=5),
            SamplingParams(max_tokens=3, ignore_eos=True, repetition_penalty=1.2, frequency_penalty=0.1),
            SamplingParams(max_tokens=20, ignore_eos=True),
        ):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [output.error for output in outputs] == [None] * 512
        ledger = llm.memory
        taken = ledger.free_bytes - torch.cuda.mem_get_info()[0]
        assert torch.cuda.max_memory_reserved() - reserved <= ledger.total_bytes, str(ledger)
        assert taken <= ledger.total_bytes, str(ledger)
        # Nor is memory kept free that nothing could use.
        used = torch.cuda.max_memory_allocated() - allocated - ledger.weight_bytes - ledger.kv_bytes
        assert used >= ledger.workspace.activations / 4, str(ledger)
