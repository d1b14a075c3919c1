"""What layers keep, the groups they form, and the tensors of the groups."""

import pytest
import torch

from infinilm.cache.paged import CacheMemory, PagedKVCache, bytes_per_block
from infinilm.cache.specs import (
    AttentionSpec,
    CacheGroup,
    CacheSpec,
    SharedKV,
    blocks_per_row,
    group_layers,
    resolve_layers,
)
from infinilm.errors import InvalidValueError
from infinilm.models import LlamaConfig

FULL, SLIDING, WIDE = AttentionSpec(2, 8), AttentionSpec(2, 8, 24), AttentionSpec(1, 16, 24)


def test_layers_with_equal_specs_form_a_group() -> None:
    groups = group_layers([SLIDING, FULL, SLIDING, WIDE, AttentionSpec(2, 8)])
    assert groups == (CacheGroup(SLIDING, (0, 2)), CacheGroup(FULL, (1, 4)), CacheGroup(WIDE, (3,)))


def test_a_stage_has_all_groups_and_memory_for_its_own_layers() -> None:
    specs: list[CacheSpec] = [SLIDING, FULL, SharedKV(1), SLIDING, WIDE]
    assert group_layers(specs, range(1, 3)) == (CacheGroup(SLIDING, ()), CacheGroup(FULL, (1,)), CacheGroup(WIDE, ()))
    memory = CacheMemory("cpu")
    cache = PagedKVCache(specs, [3, 7, 5], 16, dtype=torch.float32, device="cpu", memory=memory, held=range(1, 3))
    assert cache.group_of == {1: 1, 2: 1}
    assert cache.layers[1].data_ptr() == cache.layers[2].data_ptr()
    assert memory.num_bytes == cache.layers[1].nbytes == 7 * bytes_per_block(cache.groups[1], 16, torch.float32)
    with pytest.raises(InvalidValueError, match=r"layer 2 uses .* of layer 1, .* another pipeline stage; use fewer"):
        group_layers(specs, range(2, 4))


def test_layers_that_share_use_the_layer_they_name() -> None:
    specs: list[CacheSpec] = [FULL, SLIDING, SharedKV(0), SharedKV(2), SharedKV(1)]
    assert resolve_layers(specs) == [0, 1, 0, 0, 1]
    assert group_layers(specs) == (CacheGroup(FULL, (0,)), CacheGroup(SLIDING, (1,)))


@pytest.mark.parametrize("layer", [1, 2, -1])
def test_only_an_earlier_layer_can_be_shared(layer: int) -> None:
    with pytest.raises(InvalidValueError, match=f"layer 1: .*layer={layer}.* must name an earlier layer, 0 to 0"):
        group_layers([FULL, SharedKV(layer)])


def test_a_config_has_a_spec_for_each_layer() -> None:
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    assert LlamaConfig(**sizes).cache_specs() == (FULL,) * 3
    assert LlamaConfig(**sizes, sliding_window=24).cache_specs() == (SLIDING,) * 3
    types = ["full_attention", "sliding_attention", "full_attention"]
    assert LlamaConfig(**sizes, sliding_window=24, layer_types=types).cache_specs() == (FULL, SLIDING, FULL)


@pytest.mark.parametrize("window", [1, 2, 16, 17, 18, 33, 1000])
def test_a_row_has_blocks_for_any_offset_of_its_window(window: int) -> None:
    spans = [range(max(position - window + 1, 0) // 16, position // 16 + 1) for position in range(3000)]
    assert max(map(len, spans)) + 3 <= blocks_per_row(window, 16) <= max(map(len, spans)) + 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_have_their_own_shapes_in_one_memory(dtype: torch.dtype) -> None:
    specs: list[CacheSpec] = [SLIDING, FULL, WIDE, SharedKV(1), SLIDING]
    memory = CacheMemory("cpu")
    cache = PagedKVCache(specs, [3, 7, 5], 16, dtype=dtype, device="cpu", memory=memory)
    shapes = {0: (3, 16, 2, 2, 8), 1: (7, 16, 2, 2, 8), 2: (5, 16, 2, 1, 16), 4: (3, 16, 2, 2, 8)}
    assert {layer: cache.layers[layer].shape for layer in shapes} == shapes
    assert list(cache.group_of.values()) == [0, 1, 2, 1, 0]
    assert memory.num_bytes == sum(cache.layers[layer].nbytes for layer in shapes)
    assert memory.num_bytes == sum(
        count * bytes_per_block(group, 16, dtype) for group, count in zip(cache.groups, [3, 7, 5], strict=True)
    )
    for layer in shapes:
        cache.layers[layer].fill_(layer + 1)
    assert all((cache.layers[layer] == layer + 1).all() for layer in shapes), "no two overlap"
    assert cache.layers[3].data_ptr() == cache.layers[1].data_ptr()


def test_one_number_of_blocks_serves_all_groups() -> None:
    assert PagedKVCache([SLIDING, FULL], 4, 16, dtype=torch.float32, device="cpu").num_blocks == [4, 4]


@pytest.mark.parametrize("num_blocks", [0, [4, 0]])
def test_a_group_without_blocks_is_refused(num_blocks: int | list[int]) -> None:
    with pytest.raises(InvalidValueError, match=r"shape \[1, 0, 16, 2, 2, 8\] holds nothing"):
        PagedKVCache([SLIDING, FULL], num_blocks, 16, dtype=torch.float32, device="cpu")
