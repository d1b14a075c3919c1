"""Some of the fuzzer's cases on every path, and the fuzzer itself: it must notice what is broken."""

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
from packing import needs_native

from fuzz.cases import PATHS, make_case
from fuzz.oracle import Oracle, make_checkpoint
from fuzz.runs import Lab, reproduce
from infinilm import LLM
from infinilm.engine.block_manager import BlockManager, BlockPool
from infinilm.engine.sequence import Sequence
from infinilm.text.detokenizer import Detokenizer

CASES_PER_PATH = 40
SERVED_CASES = 24
NATIVE_CASES = 12


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(Oracle(make_checkpoint(tmp_path_factory.mktemp("fuzz")))) as lab:
        yield lab


@pytest.mark.parametrize("path", PATHS)
def test_company_changes_nothing(lab: Lab, path: str) -> None:
    for seed in range(SERVED_CASES if path == "server" else CASES_PER_PATH):
        report = lab.run(make_case(seed, path))
        assert not report.problems, reproduce(report.case)


@needs_native
@pytest.mark.parametrize("path", [path for path in PATHS if path != "server"])
def test_the_native_library_alone_gives_the_bits_that_it_gives_under_torch(lab: Lab, path: str) -> None:
    oracle = Oracle(lab.oracle.model, tolerance=0.0, quantization="q8")
    with Lab(oracle) as packed:
        for seed in range(NATIVE_CASES):
            report = packed.run(replace(make_case(seed, path), fault_at=None))  # hooks need torch
            assert not report.problems, reproduce(report.case)


def lose_a_block(pool: BlockPool, blocks: list[int], release=BlockPool.release) -> None:
    release(pool, blocks[:-1] if len(blocks) > 2 else blocks)


def find_anything(manager: BlockManager, seq: Sequence) -> list[list[int]]:
    count = (seq.num_tokens - 1) // manager.block_size
    return [list(pool.key_of)[:count] for pool in manager.pools]


def lose_a_letter(detokenizer: Detokenizer, ids: list[int], feed=Detokenizer.feed) -> str:
    return feed(detokenizer, ids).replace("h", "")


def abort_all(engine: LLM, request_id: str, answer: int | None = None, abort=LLM.abort) -> bool:
    for each in list(engine._requests):
        abort(engine, each)
    return True


@pytest.mark.parametrize(
    ("target", "name", "fault"),
    [
        (BlockPool, "release", lose_a_block),
        (BlockManager, "find_prefix", find_anything),
        (Detokenizer, "feed", lose_a_letter),
        (LLM, "abort", abort_all),
    ],
)
def test_a_fault_is_found(lab: Lab, target: type, name: str, fault: object) -> None:
    for seed in range(CASES_PER_PATH):
        case = make_case(seed, "step")
        assert not lab.run(case).problems
        with patch.object(target, name, fault):
            if lab.run(case).problems:
                return
    pytest.fail(f"{fault} was not found by {CASES_PER_PATH} cases")
