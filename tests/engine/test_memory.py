"""What memory is planned for, what is refused, and what happens when it runs out all the same."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import hungry_model
import interpreter  # noqa: F401
import pytest
import torch
from hungry_model import save_hungry
from narrow import present, worker_of
from processes import ranks
from troubled_model import save_troubled, trouble

from infinilm import LLM, Config, InferEngine, RequestOutput, SamplingParams
from infinilm.attention.triton_backend import TritonAttention
from infinilm.distributed import DistConfig
from infinilm.errors import EngineError, InvalidValueError, OutOfMemoryError
from infinilm.executor import model_runner
from infinilm.executor.memory import MemoryLedger, Workspace, explain_oom, is_out_of_memory, plan_memory
from infinilm.executor.step_graphs import Shape, launch_bound_tokens, mixed_sizes
from infinilm.executor.workspace import (
    GRAPH_BYTES,
    StepShape,
    decode_attention_bytes,
    estimate_workspace,
    graph_shapes,
    graph_table_rows,
    uses_graphs,
)
from infinilm.models import LlamaConfig

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
CPU = torch.device("cpu")

MODEL = LlamaConfig(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
    max_position_embeddings=1000,
)
SHAPE = StepShape(
    num_tokens=32, num_rows=4, hidden=8, queries=4 * 2, keys=2 * 2, channels=36, vocab=10, itemsize=2
)  # in bfloat16


# --- estimates --------------------------------------------------------------------------------------------


def test_the_largest_step_is_what_the_settings_allow() -> None:
    config = Config(max_num_batched_tokens=32, max_num_seqs=4)
    assert StepShape.of(config, MODEL, torch.bfloat16, max_model_len=1000) == SHAPE
    # Four texts of seven tokens are all that there can be.
    assert StepShape.of(config, MODEL, torch.bfloat16, max_model_len=7) == replace(SHAPE, num_tokens=28)
    halves = StepShape.of(config, MODEL, torch.bfloat16, max_model_len=1000, tp_size=2)
    assert halves == replace(SHAPE, queries=4, keys=2, channels=18)
    # With more ranks than heads of keys and values each has one.
    assert StepShape.of(config, MODEL, torch.bfloat16, max_model_len=1000, tp_size=4).keys == 2


def test_a_layer_by_hand() -> None:
    # Residual and norm 8 + 8; queries, keys, values 8 + 4 + 4; queries turned 8, attended 8; gate, up 24; activated 12.
    assert SHAPE.layer_bytes(1) == 2 * (16 + 16 + 8 + 8 + 24 + 12)
    assert SHAPE.layer_bytes(32) == 5376


def test_logits_by_hand() -> None:
    # 32 rows, which may all be of a prompt whose log-probabilities are asked for.
    assert SHAPE.logits_bytes() == 32 * 10 * (2 + 4 + 3 * 4)
    assert replace(SHAPE, num_tokens=5000).logits_bytes() == 256 * 10 * 18
    assert replace(SHAPE, num_tokens=5000, num_rows=300).logits_bytes() == 300 * 10 * 18
    assert replace(SHAPE, itemsize=4).logits_bytes() == 32 * 10 * (4 + 3 * 4)


def test_a_long_prompt_by_hand() -> None:
    assert SHAPE.long_prefill_bytes() == (32 + 4096) * 8 * (4 * 2 + 2 * 4)


def test_graphs_by_hand() -> None:
    # Steps of one and of four rows, and of up to eight tokens in two rows.
    shapes = [Shape(*size, samples) for size in ((1, 0), (4, 0), (2, 8)) for samples in (True, False)]
    layer, logits = 8 * 168, 20  # eight tokens; one row
    assert SHAPE.graph_bytes(shapes) == 2 * (layer + 4 * logits) + (1 + 4 + 2) * logits + 6 * GRAPH_BYTES
    assert graph_table_rows(shapes) == 4 + 2
    assert (SHAPE.graph_bytes([]), graph_table_rows([])) == (0, 0)


def test_the_graphs_that_may_be_captured() -> None:
    shapes = graph_shapes(num_rows=20, num_tokens=100)
    assert [shape.num_rows for shape in shapes if shape.num_tokens == 0 and shape.samples] == [1, 2, 4, 8, 16, 20]
    assert {(shape.num_rows, shape.num_tokens) for shape in shapes if shape.num_tokens} == {
        (16, 64),
        (16, 128),
        (20, 64),
        (20, 128),
    }
    assert sum(shape.samples for shape in shapes) == len(shapes) / 2
    # More than 256 rows have more than 256 tokens.
    many = {shape.num_tokens for shape in graph_shapes(512, 16384) if shape.num_rows == 512 and shape.num_tokens}
    assert many == {512, 1024, 2048}


@pytest.mark.parametrize(
    ("weight_bytes", "tokens", "limit"), [(1 << 30, 2048, 2048), (16 << 30, 256, 0), (60 << 30, 64, 0)]
)
def test_steps_are_kept_within_a_graph_only_if_larger_ones_wait_for_the_host(
    weight_bytes: int, tokens: int, limit: int
) -> None:
    sizes = mixed_sizes(16384, weight_bytes)
    assert sizes[-1] == tokens
    assert launch_bound_tokens(sizes) == limit


def test_the_workspaces_of_decode_attention_are_covered() -> None:
    backend = TritonAttention()
    for num_rows in (1, 65, 200, 500):
        backend.workspace(num_rows, 4, 16, CPU)
    tensors = [tensor for made in backend._workspaces for tensor in vars(made).values() if torch.is_tensor(tensor)]
    estimate = decode_attention_bytes(500, 4, 16)
    assert estimate / 2 < sum(tensor.nbytes for tensor in tensors) <= estimate


def test_a_cpu_has_activations_and_tables_only() -> None:
    config = Config(max_num_batched_tokens=32, max_num_seqs=4)
    estimated = estimate_workspace(config, MODEL, torch.bfloat16, CPU, max_model_len=1000)
    # Per token two angles, and 12 bytes in four rows' tables for each block of 16.
    assert estimated == Workspace(activations=5376 + 5760, per_position=2 * 4 + 4 * 12 // 16)
    assert not uses_graphs(config, CPU)


# --- the ledger -------------------------------------------------------------------------------------------

WORKSPACE = Workspace(activations=1000, attention=200, graphs=300, libraries=400, per_position=5)
BLOCK_BYTES = 16 * 3 * 2 * 4 * 2  # tokens, layers, keys and values, numbers, bytes


def plan(
    free_bytes: int,
    device: str = "cuda",
    max_model_len: int = 100,
    num_ranks: int = 1,
    model: LlamaConfig = MODEL,
    **settings: object,
) -> MemoryLedger:
    config = Config(**{"max_num_seqs": 50, "gpu_memory_utilization": 0.5, **settings})  # type: ignore[arg-type]
    return plan_memory(
        config,
        model,
        device=torch.device(device),
        kv_dtype=torch.bfloat16,
        weight_bytes=10_000,
        workspace=WORKSPACE,
        free_bytes=free_bytes,
        max_model_len=max_model_len,
        tp_size=num_ranks,
    )


def test_a_ledger_by_hand() -> None:
    ledger = plan(2 * (10_000 + 1900 + 100 * 5 + 20 * BLOCK_BYTES + 700))
    assert (ledger.num_blocks, ledger.kv_bytes, ledger.max_model_len) == (20, 20 * BLOCK_BYTES, 100)
    assert ledger.total_bytes == 10_000 + 1900 + 500 + 20 * BLOCK_BYTES
    assert ledger.allowed_bytes == ledger.total_bytes + 700
    assert str(ledger) == (
        "memory on cuda: 55.6 KiB free at start, of which 50% may be used (gpu_memory_utilization): 27.8 KiB. Used at "
        "most: 27.1 KiB: weights 9.8 KiB, intermediate results 1000 B, attention 200 B, CUDA graphs 300 B, CUDA "
        "libraries 400 B, positions of 100 tokens 500 B, conversations (KV cache) 15.0 KiB for 320 tokens in 20 "
        "blocks; their number is decided by gpu_memory_utilization=0.5"
    )


@pytest.mark.parametrize("max_model_len", [10, 100, 2**50])
@pytest.mark.parametrize("free_bytes", [26_000, 40_000, 100_003, 10**6, 10**7])
def test_no_more_is_planned_than_is_allowed_and_no_block_less_than_fits(free_bytes: int, max_model_len: int) -> None:
    ledger = plan(free_bytes, max_model_len=max_model_len, max_num_seqs=10**6)
    assert ledger.total_bytes <= ledger.allowed_bytes
    assert ledger.max_model_len == min(max_model_len, ledger.num_blocks * 16)
    asked: dict[str, Any] = {"max_model_len": max_model_len, "num_kvcache_blocks": ledger.num_blocks}
    assert plan(free_bytes, **asked) == replace(ledger, limited_by="num_kvcache_blocks")
    asked["num_kvcache_blocks"] += 1
    with pytest.raises(InvalidValueError, match=f"lower it to {ledger.num_blocks} or less") as caught:
        plan(free_bytes, **asked)
    assert "raise gpu_memory_utilization" in str(caught.value)
    assert "weights 9.8 KiB, intermediate results 1000 B, attention 200 B, CUDA graphs 300 B" in str(caught.value)


MIXED = {"sliding_window": 20, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
WINDOW_BLOCKS = 50 * (2 + 1 + 4) + 2 * 4  # 50 rows of a window, and two steps of 64 tokens


@pytest.mark.parametrize("num_blocks", [20, 1000])
def test_layers_with_a_window_take_no_more_blocks_than_rows_can_use(num_blocks: int) -> None:
    model = LlamaConfig(**asdict(MODEL) | MIXED)
    windowed = min(num_blocks, WINDOW_BLOCKS)
    kv_bytes = num_blocks * BLOCK_BYTES // 3 + windowed * BLOCK_BYTES * 2 // 3
    free_bytes = 2 * (10_000 + 1900 + 5 * 16 * num_blocks + kv_bytes)
    settings: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 50, "max_model_len": 2**50}
    ledger = plan(free_bytes, model=model, **settings)
    assert (ledger.num_blocks, ledger.group_blocks) == (num_blocks, [num_blocks, windowed])
    assert (ledger.kv_bytes, ledger.max_model_len) == (kv_bytes, 16 * num_blocks)
    assert str(ledger).endswith(f"{windowed:,} blocks for windows of 20")
    assert plan(free_bytes - 2, model=model, **settings).num_blocks == num_blocks - 1


def test_where_all_layers_have_a_window_a_text_may_be_longer_than_the_cache() -> None:
    model = LlamaConfig(**asdict(MODEL) | {"sliding_window": 20})
    assert plan(10**9, model=model, num_kvcache_blocks=7, max_model_len=1000).max_model_len == 1000
    assert plan(10**9, model=model, num_kvcache_blocks=6, max_model_len=1000).max_model_len == 6 * 16
    # More than rows can use at once is kept if it was asked for.
    asked = plan(10**9, model=model, num_kvcache_blocks=500, max_num_batched_tokens=64)
    assert (asked.num_blocks, asked.group_blocks) == (500, [500])
    chosen = plan(10**9, model=model, max_num_batched_tokens=64, max_model_len=1000)
    assert (chosen.num_blocks, chosen.limited_by) == (
        WINDOW_BLOCKS,
        "what max_num_seqs and max_model_len can use",
    )


def test_there_are_no_more_blocks_than_can_be_of_use() -> None:
    assert plan(10**9).num_blocks == 50 * 7
    assert plan(10**9).limited_by == "what max_num_seqs and max_model_len can use"


def test_without_room_for_a_block_the_ledger_says_why() -> None:
    needed = 2 * (10_000 + 1900 + 16 * 5 + BLOCK_BYTES)
    assert plan(needed).num_blocks == 1
    with pytest.raises(InvalidValueError, match="no memory is left for a KV cache; raise gpu_mem") as caught:
        plan(needed - 2)
    assert "max_num_batched_tokens, max_num_seqs or max_model_len" in str(caught.value)
    assert "24.9 KiB free at start, of which 50% may be used (gpu_memory_utilization): 12.4 KiB" in str(caught.value)


def test_an_engine_has_the_ledger_of_its_settings(tiny_dir: Path) -> None:
    with LLM(tiny_dir, num_kvcache_blocks=7, max_num_batched_tokens=64, max_num_seqs=3) as llm:
        ledger = llm.memory
        weights = worker_of(llm.executor).model.num_bytes()
        taken = present(worker_of(llm.executor).cache).memory.num_bytes
    # 720 numbers per token in a layer; angles, and three rows' tables per position.
    assert ledger.workspace == Workspace(64 * 720 * 4 + 64 * 300 * 16, per_position=16 * 4 + 3)
    assert ledger.kv_bytes == taken == 7 * 16 * 2 * 2 * 32 * 4
    assert ledger.max_model_len == llm.max_model_len == 7 * 16
    # The angles are counted with the positions; of the weights' outline they have one row.
    assert ledger.weight_bytes == weights - (7 * 16 - 1) * 16 * 4


# --- running out at start ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hungry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hungry(tmp_path_factory.mktemp("hungry"))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_settings_too_large_for_the_weights_are_refused_and_smaller_ones_work(hungry: Path, num_ranks: int) -> None:
    settings = {"num_kvcache_blocks": 16, "tensor_parallel_size": num_ranks}
    before = ranks()
    with pytest.raises(InvalidValueError, match="loading the model ran out of memory; lower num_kvcache_bl") as caught:
        LLM(hungry, **settings)
    message = str(caught.value)
    assert "max_num_batched_tokens or max_num_seqs for smaller steps, or max_model_len" in message
    assert "tried to allocate 7 GiB (memory on cpu" in message
    assert "KV cache" in message
    assert len(hungry_model.alive) == 0, "all is given back while the error is still held"
    assert ranks() == before
    with LLM(hungry, max_model_len=hungry_model.MAX_LEN, **settings) as llm:
        assert len(llm.generate([5, 6], GREEDY, use_tqdm=False)[0].token_ids) == 5


def test_settings_too_large_for_the_cache_are_refused_and_smaller_ones_work(tiny_dir: Path) -> None:
    num_blocks = (2 << 30) // (16 * 2 * 2 * 32 * 4)
    with (
        limited_memory(1 << 30),
        pytest.raises(InvalidValueError, match=r"lower num_kvcache_blocks.*for a KV cache: .* \(KV cache\) 2\.0 GiB"),
    ):
        LLM(tiny_dir, num_kvcache_blocks=num_blocks)
    with LLM(tiny_dir, num_kvcache_blocks=num_blocks // 64) as llm:
        assert len(llm.generate("to", GREEDY, use_tqdm=False)[0].token_ids) == 5


@contextmanager
def limited_memory(more_bytes: int) -> Iterator[None]:
    """Let this process have no more than so many bytes besides those it has."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (num_pages * resource.getpagesize() + more_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_an_infer_engine_that_does_not_fit_leaves_nothing(hungry: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="7 GiB") as caught:
        InferEngine(hungry, DistConfig(1), "cpu")
    assert len(hungry_model.alive) == 0, f"though {caught.value} is still held"
    large = LlamaConfig(hidden_size=2**16, intermediate_size=2**18, num_hidden_layers=64)
    with pytest.raises(
        InvalidValueError, match=r"the model needs \d+\.\d GiB on cpu, where .* are free; use more ranks"
    ):
        InferEngine(large, DistConfig(1), "cpu")


# --- running out in a step --------------------------------------------------------------------------------


def test_a_step_without_memory_ends_its_requests_and_no_others(tmp_path: Path) -> None:
    with LLM(save_troubled(tmp_path), num_kvcache_blocks=64, max_num_seqs=2) as llm:
        [alone] = llm.generate([5, 6, 7], GREEDY, use_tqdm=False)
        prompts = {"neighbour": [5, 6, 7, 8], "hungry": trouble("device memory"), "waiting": [5, 6, 7]}
        for name, prompt in prompts.items():
            llm.add_request(prompt, GREEDY, request_id=name)
        outputs: dict[str, RequestOutput] = {}
        while not llm.is_finished():
            outputs |= {output.request_id: output for output in llm.step() if output.finished}
        for name in ("neighbour", "hungry"):
            assert (outputs[name].finish_reason, outputs[name].token_ids) == ("abort", [])
            assert outputs[name].error == (
                "OutOfMemoryError: a step ran out of memory; lower num_kvcache_blocks for a smaller KV cache, "
                "max_num_batched_tokens or max_num_seqs for smaller steps, or max_model_len. "
                f"tried to allocate 7 GiB ({llm.memory})"
            )
        assert (outputs["waiting"].token_ids, outputs["waiting"].error) == (alone.token_ids, None)
        assert llm.stats().num_free_blocks == 64
        llm.scheduler.blocks.check_integrity([])
        assert llm.generate([5, 6, 7], GREEDY, use_tqdm=False)[0].token_ids == alone.token_ids


def test_a_start_tries_logits_of_all_rows_that_draw_at_once(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU their memory is measured so."""
    monkeypatch.setattr(model_runner, "PROMPT_LOGITS_AT_ONCE", 8)
    with LLM(tiny_dir, device="cpu", dtype="float32", max_num_seqs=100, num_kvcache_blocks=32) as llm:
        worker = worker_of(llm.executor)
        compute, sizes = worker.compute_logits, set[int]()

        def compute_logits(hidden: torch.Tensor, places: Any) -> torch.Tensor:
            sizes.add(len(places))
            return compute(hidden, places)

        monkeypatch.setattr(worker, "compute_logits", compute_logits)
        runner = present(worker._runner)
        monkeypatch.setattr(runner._sampler, "warm_up", lambda _logits: None)  # of a GPU's kernels
        runner._compute_all_kinds()
    assert max(sizes) == 100


def test_what_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    from_cache = EngineError("cuda:0 has no 9.00 GiB for a KV cache")
    from_cache.__cause__ = torch.OutOfMemoryError("CUDA out of memory.")
    for error in (
        caught.value,
        from_cache,
        OutOfMemoryError("a step"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be …"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ):
        assert is_out_of_memory(error), error
    for other in (RuntimeError("CUDA error: an illegal memory access"), ValueError("out of memory"), None):
        assert not is_out_of_memory(other), other


def test_an_error_while_another_is_handled_is_not_taken_for_it() -> None:
    another = ValueError("another")
    another.__context__ = torch.OutOfMemoryError("CUDA out of memory.")
    assert not is_out_of_memory(another)
    assert explain_oom(another, plan(10**6)) is another
