"""What each layer keeps, and the groups of layers that share block tables. Needs no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from infinilm.errors import InvalidValueError


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Keys and values of one attention layer. With a `window` a token sees itself and the `window - 1` before it."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class SharedKV:
    """The layer reads the keys and values of an earlier `layer` and keeps none."""

    layer: int


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention: one compressed vector of `rank` and one rotary key of `rope_dim` numbers.

    Every rank keeps all of it.
    """

    rank: int
    rope_dim: int

    @property
    def window(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A recurrent layer: float32 tensors of fixed size. Ranks divide their first dimension.

    A block holds the state after the last of its tokens that is computed. So a full block holds the state at its end,
    from which any text with the same prefix can go on.
    """

    shapes: tuple[tuple[int, ...], ...]

    @property
    def window(self) -> int:
        """A token needs only the state after the token before, as if it saw that token and itself."""
        return 2


CacheSpec = AttentionSpec | SharedKV | LatentSpec | StateSpec


OwnSpec = AttentionSpec | LatentSpec | StateSpec
"""The kinds of layers that keep something themselves."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with equal specs. They have one pool of blocks and one block table per sequence."""

    spec: OwnSpec
    layers: tuple[int, ...]


def resolve_layers(specs: Sequence[CacheSpec]) -> list[int]:
    """For each layer the layer whose keys and values it uses: itself, unless it is a `SharedKV`."""
    owners: list[int] = []
    for layer, spec in enumerate(specs):
        if isinstance(spec, SharedKV):
            if not 0 <= spec.layer < layer:
                raise InvalidValueError(f"layer {layer}: {spec} must name an earlier layer, 0 to {layer - 1}")
            owners.append(owners[spec.layer])
        else:
            owners.append(layer)
    return owners


def group_layers(specs: Sequence[CacheSpec], held: range | None = None) -> tuple[CacheGroup, ...]:
    """Group layers by spec, in order of first use. `SharedKV` layers keep nothing and are in no group.

    A rank that holds only some layers, `held`, has all groups of the model, but only with those layers.
    """
    groups: dict[OwnSpec, list[int]] = {}
    for layer, owner in enumerate(resolve_layers(specs)):
        spec = specs[layer]
        if owner == layer and not isinstance(spec, SharedKV):
            own = groups.setdefault(spec, [])
            if held is None or layer in held:
                own.append(layer)
        elif held is not None and layer in held and owner not in held:
            raise InvalidValueError(
                f"layer {layer} uses the keys and values of layer {owner}, which is in another pipeline stage; "
                "use fewer stages"
            )
    return tuple(CacheGroup(spec, tuple(layers)) for spec, layers in groups.items())


def blocks_per_row(window: int, block_size: int) -> int:
    """Blocks with which one sequence can compute a text of any length under a `window`.

    They hold the `window - 1` tokens before any token, at any offset in a block. One more block is kept for sequences
    that share the text, one is the block to compute in, and two are for steps in flight.
    """
    return -(-(window - 1) // block_size) + 1 + 4


SCALE_BYTES = 2
"""The size of the scale of a key or value in 8-bit floats, a bfloat16."""


class _HasSize(Protocol):
    @property
    def itemsize(self) -> int: ...


def bytes_per_block(group: CacheGroup, block_size: int, dtype: _HasSize) -> int:
    """The bytes of one block over all layers of a group: keys and values together, or a state, which is in float32."""
    shapes = tensor_shapes(group, 1, block_size, dtype)
    sizes = [4] * len(shapes) if isinstance(group.spec, StateSpec) else [dtype.itemsize, SCALE_BYTES][: len(shapes)]
    return sum(math.prod(shape) * size for shape, size in zip(shapes, sizes, strict=True))


def tensor_shapes(group: CacheGroup, num_blocks: int, block_size: int, dtype: _HasSize) -> list[tuple[int, ...]]:
    """The shapes of a group's tensors. Keys and values in 8-bit floats have their scales in a second tensor."""
    first = (len(group.layers), num_blocks)
    match group.spec:
        case AttentionSpec(num_kv_heads, head_dim):
            scales = [(*first, num_kv_heads, block_size, 2)] if "float8" in str(dtype) else []
            return [(*first, block_size, 2, num_kv_heads, head_dim), *scales]
        case LatentSpec(rank, rope_dim):
            return [(*first, block_size, 1, 1, rank + rope_dim)]
        case StateSpec(shapes):
            return [(*first, *shape) for shape in shapes]


def kv_heads_per_rank(num_kv_heads: int, num_ranks: int) -> int:
    """The number of key-value heads that each rank computes and caches."""
    return max(1, num_kv_heads // num_ranks)
