"""Numbers of the design that a reader feels. They may only be tightened."""

import sys
from pathlib import Path
from types import FrameType

import pytest

from infinilm import LLM, SamplingParams

PACKAGE = Path(__file__).parents[1] / "infinilm"
FILES = sorted(PACKAGE.rglob("*.py"))

MAX_FILES_CROSSED = 9
MAX_FUNCTION_LINES = 60
MODEL_CODE = ("models", "layers", "attention", "kernels")


@pytest.mark.parametrize("quantization", ["none", "q8"])
def test_files_crossed_by_a_steady_decode_step(tiny_dir: Path, quantization: str) -> None:
    crossed: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            crossed.add(str(path.relative_to(PACKAGE)))

    with LLM(tiny_dir, num_kvcache_blocks=64, quantization=quantization) as llm:
        for prompt in ([3, 4, 5], [6, 7]):
            llm.add_request(prompt, SamplingParams(max_tokens=40, ignore_eos=True))
        for _ in range(3):
            llm.step_deltas()
        sys.setprofile(note)
        try:
            for _ in range(5):
                llm.step_deltas()
        finally:
            sys.setprofile(None)
    found = {name for name in crossed if name.partition("/")[0] not in MODEL_CODE}
    assert len(found) <= MAX_FILES_CROSSED, "\n".join(sorted(found))
