"""When Python's garbage collector runs, and when it must not."""

import gc
from weakref import ref

import pytest

from infinilm.garbage import gc_paused


class Node:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.self = self


@pytest.mark.parametrize("is_enabled", [True, False])
def test_new_garbage_is_collected_on_request_unless_the_collector_is_off(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with gc_paused() as collect_young:
            assert not gc.isenabled()
            nodes = [ref(Node()) for _ in range(2 * gc.get_threshold()[0])]
            assert all(node() is not None for node in nodes)
            collect_young()
            assert all((node() is None) == is_enabled for node in nodes)
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_few_new_objects_are_left_alone() -> None:
    with gc_paused() as collect_young:
        gc.collect()
        node = ref(Node())
        collect_young()
        assert node() is not None
    assert gc.isenabled()
