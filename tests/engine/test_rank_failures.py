"""Errors on a rank: they reach the caller as what they were, and the engine works on."""

import json
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Belongings, eventually, ranks
from troubled_model import ALL_RANKS, PLACES, UNLOADABLE, TroubleError, save_troubled, trouble

from infinilm import LLM, SamplingParams
from infinilm.distributed import DistConfig, group
from infinilm.engine import InferEngine
from infinilm.errors import CheckpointError, EngineError, InvalidValueError
from infinilm.models import CausalLM, LlamaConfig, register_model
from infinilm.models.registry import FAMILIES, describe_registration

PROMPT = [5, 6, 7, 8]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_troubled(tmp_path_factory.mktemp("troubled"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> torch.Tensor:
    """The prompt's logits on one rank."""
    with InferEngine(checkpoint) as engine:
        return logits_of(engine)


@pytest.fixture(scope="module", params=[2, 3], ids=["tp2", "tp3"])
def engine(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[InferEngine]:
    with InferEngine(checkpoint, DistConfig(request.param)) as engine:
        yield engine


def logits_of(engine: InferEngine) -> torch.Tensor:
    logits = engine(input_ids=[PROMPT], return_logits=True).logits
    assert logits is not None
    return logits


ERRORS = {
    "value": (ValueError, "a bad value"),
    "own": (TroubleError, "in trouble"),
    "key": (KeyError, "'missing'"),
    "file": (FileNotFoundError, "[Errno 2] No such file or directory: 'no such file'"),
    "memory": (MemoryError, "no more"),
    "device memory": (torch.OutOfMemoryError, "tried to allocate 7 GiB"),
}


@pytest.mark.parametrize("rank", [0, 1, 2, ALL_RANKS])
@pytest.mark.parametrize(
    ("action", "place"), [*((action, "between") for action in ERRORS), *(("own", p) for p in PLACES)]
)
def test_an_error_arrives_as_what_it_was_and_the_engine_works_on(
    engine: InferEngine, expected: torch.Tensor, action: str, rank: int, place: str
) -> None:
    if rank == engine.get_dist_config().tp_size:
        pytest.skip("there is no such rank")
    before = ranks()
    kind, message = ERRORS[action]
    with pytest.raises(kind) as caught:
        engine(input_ids=[trouble(action, rank, place)])
    assert (type(caught.value), str(caught.value)) == (kind, message)
    notes = "\n".join(getattr(caught.value, "__notes__", []))
    assert ("_act" in notes and f"on rank {rank}:" in notes) == (rank in (1, 2))
    torch.testing.assert_close(logits_of(engine), expected, atol=1e-4, rtol=0)
    assert ranks() == before


@pytest.mark.parametrize(
    ("action", "message"), [("picky", "PickyError: code 7 at home"), ("leave", "SystemExit: 5")], ids=["picky", "exit"]
)
def test_an_error_that_can_not_be_made_here_is_named(
    engine: InferEngine, expected: torch.Tensor, action: str, message: str
) -> None:
    with pytest.raises(EngineError) as caught:
        engine(input_ids=[trouble(action, 1)])
    assert (type(caught.value), str(caught.value)) == (EngineError, message)
    torch.testing.assert_close(logits_of(engine), expected, atol=1e-4, rtol=0)


def test_a_rank_that_is_late_is_waited_for(
    engine: InferEngine, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(ranks()) > 1:
        pytest.skip("a third rank would only wait longer")
    monkeypatch.setattr(group, "JOIN_TIMEOUT", timedelta(seconds=0.5))
    with pytest.raises(ValueError, match="a bad value"):
        engine(input_ids=[trouble("join late", 1)])
    torch.testing.assert_close(logits_of(engine), expected, atol=1e-4, rtol=0)


def test_errors_leave_nothing_behind(engine: InferEngine) -> None:
    def fail(num_times: int) -> None:
        for number in range(num_times):
            with pytest.raises(ValueError, match="a bad value"):
                engine(input_ids=[trouble("value", number % 2)])

    fail(5)
    before = Belongings.now()
    fail(20)
    assert eventually(lambda: Belongings.now() == before), (before, Belongings.now())


def test_an_error_spoils_no_generation_but_its_own(engine: InferEngine) -> None:
    engine.reset_cache()
    first = engine.generate([PROMPT], 6, temperature=0).token_ids
    with pytest.raises(TroubleError):
        engine.generate([trouble("own", 1)], 6)
    assert engine.generate([PROMPT], 6, temperature=0).token_ids == first


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[int]:
    with LLM(checkpoint, num_kvcache_blocks=64) as llm:
        return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].token_ids


@pytest.fixture(scope="module")
def shared(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, num_kvcache_blocks=64, tensor_parallel_size=2) as llm:
        yield llm


@pytest.mark.parametrize("rank", [0, 1, 9])
def test_a_step_that_fails_ends_its_own_requests_only(shared: LLM, alone: list[int], rank: int) -> None:
    bad = shared.add_request(trouble("own", rank), GREEDY)
    (ended,) = shared.step()
    assert (ended.request_id, ended.finish_reason, ended.error) == (bad, "abort", "TroubleError: in trouble")
    (good,) = shared.generate(PROMPT, GREEDY, use_tqdm=False)
    assert (good.token_ids, good.finish_reason, good.error) == (alone, "length", None)
    # Its neighbours of the same step go with it, those that come later do not.
    outputs = shared.generate([PROMPT, trouble("own", rank)], GREEDY, use_tqdm=False)
    assert [output.error for output in outputs] == ["TroubleError: in trouble"] * 2
    assert shared.generate(PROMPT, GREEDY, use_tqdm=False)[0].token_ids == alone
    assert shared.stats().num_free_blocks == 64


def test_all_answers_of_a_request_end(shared: LLM, alone: list[int]) -> None:
    params = SamplingParams(n=3, max_tokens=4, seed=1)
    (output,) = shared.generate(trouble("value", 1), params, use_tqdm=False)
    assert output.error == "ValueError: a bad value"
    assert [answer.finish_reason for answer in output.outputs] == ["abort"] * 3
    assert shared.generate(PROMPT, GREEDY, use_tqdm=False)[0].token_ids == alone


def test_a_stream_raises(shared: LLM, alone: list[int]) -> None:
    with pytest.raises(EngineError, match="TroubleError: in trouble"):
        list(shared.stream(trouble("own", 1), GREEDY))
    assert shared.generate(PROMPT, GREEDY, use_tqdm=False)[0].token_ids == alone


def test_a_checkpoint_that_can_not_be_loaded_is_an_error_and_no_process(checkpoint: Path, tmp_path: Path) -> None:
    before = ranks()
    directory = tmp_path / "damaged"
    shutil.copytree(checkpoint, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"bos_token_id": UNLOADABLE}))
    with pytest.raises(TroubleError, match="it won't be loaded"):
        InferEngine(directory, DistConfig(2))
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        LLM(directory, tensor_parallel_size=2)
    assert ranks() == before


def test_a_builder_that_ranks_can_not_import_is_refused() -> None:
    before = ranks()

    def build(config: LlamaConfig, **options: Any) -> CausalLM:
        return CausalLM(config, **options)

    register_model("unreachable", "UnreachableForCausalLM", builder=build)
    message = r"'unreachable'.*can't be imported by other processes"
    try:
        with pytest.raises(InvalidValueError, match=message):
            InferEngine(LlamaConfig(model_type="unreachable", hidden_size=64, num_hidden_layers=1), DistConfig(2))
        build.__module__, build.__qualname__ = "__main__", "build"
        with pytest.raises(InvalidValueError, match=message):
            describe_registration("unreachable")
    finally:
        del FAMILIES["unreachable"]
    assert ranks() == before
