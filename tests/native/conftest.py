"""Every test of a kernel runs on every instruction set that this machine has, and on two threads."""

from collections.abc import Iterator
from typing import Any

import pytest
from packing import library

INSTRUCTION_SETS = library().instruction_sets() if library() is not None else ["none"]


@pytest.fixture(params=INSTRUCTION_SETS)
def native(request: pytest.FixtureRequest) -> Iterator[Any]:
    module = library()
    if module is None:
        pytest.skip("the native library was not built")
    before = module.instruction_set(), module.num_threads()
    module.use_instruction_set(request.param)
    module.set_num_threads(2)
    yield module
    module.use_instruction_set(before[0])
    module.set_num_threads(before[1])
