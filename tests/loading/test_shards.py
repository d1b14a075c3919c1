"""Pieces of tensors: what the ranks read makes the whole, and no rank reads more than its piece."""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from infinilm.distributed.shard import WeightShard
from infinilm.errors import CheckpointError
from infinilm.loading import gguf_checkpoint, safetensors_checkpoint
from infinilm.loading import quantize as quantize_module
from infinilm.loading.checkpoint import Checkpoint, open_checkpoint
from infinilm.loading.gguf import GGUFFile
from infinilm.loading.gguf_checkpoint import GGUFCheckpoint
from infinilm.loading.safetensors_checkpoint import SafetensorsCheckpoint
from infinilm.loading.weights import load_weights

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCABULARY = 4, 2, 16, 512, 12, 21
SHAPES = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
    "model.layers.0.self_attn.q_proj.bias": (HEADS * HEAD_DIM,),
    "model.layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "model.layers.0.mlp.gate_proj.weight": (FFN, HIDDEN),
    "model.layers.0.mlp.gate_proj.bias": (FFN,),
}
EMBED, Q, Q_BIAS, K, GATE, GATE_BIAS = SHAPES
GGUF_NAMES = {
    EMBED: "token_embd.weight",
    Q: "blk.0.attn_q.weight",
    Q_BIAS: "blk.0.attn_q.bias",
    K: "blk.0.attn_k.weight",
    GATE: "blk.0.ffn_gate.weight",
    GATE_BIAS: "blk.0.ffn_gate.bias",
}
KINDS = ["safetensors", "F32", "F16", "BF16", "Q4_1", "Q8_0", "Q4_K", "Q6_K"]
# Where the float16 scales of a block begin: random bytes there could be infinite.
SCALES = {"Q4_K": (0, 2), "Q6_K": (208,)}

Opened = tuple[Checkpoint, dict[str, Tensor]]
"""A checkpoint and what its tensors are."""


def write_safetensors(directory: Path) -> Opened:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file(tensors, directory / "model.safetensors")
    return SafetensorsCheckpoint(directory), tensors


def make_blocks(kind: GGMLQuantizationType, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if kind.name not in SCALES:
        return quantize(rng.normal(size=shape).astype(np.float32), kind)
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // block_elements, block_bytes), dtype=np.uint8)
    for start in SCALES[kind.name]:
        blocks[..., start + 1] &= 0x3F
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(path: Path, kind_name: str) -> Opened:
    """A llama, whose file keeps the rows of q and k in another order than Hugging Face."""
    writer, rng = GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    tensors = {}
    for name, shape in SHAPES.items():
        kind = GGMLQuantizationType[kind_name if len(shape) > 1 else "F32"]
        raw = make_blocks(kind, shape, rng)
        writer.add_tensor(GGUF_NAMES[name], raw, raw_dtype=kind)
        values = torch.from_numpy(dequantize(raw, kind).reshape(shape))
        if "_proj" in name and "self_attn" in name:
            values = values.unflatten(0, (-1, HEAD_DIM // 2, 2)).transpose(1, 2).flatten(0, 2)
        tensors[name] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFCheckpoint(path), tensors


@pytest.fixture(scope="module")
def all_opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Opened]]:
    directory = tmp_path_factory.mktemp("shards")
    opened = {kind: write_gguf(directory / f"{kind}.gguf", kind) for kind in KINDS[1:]}
    opened["safetensors"] = write_safetensors(directory)
    yield opened
    for checkpoint, _ in opened.values():
        checkpoint.close()


def read_piece(checkpoint: Checkpoint, name: str, starts: Sequence[int], shape: Sequence[int]) -> Tensor:
    target = torch.full(tuple(shape), math.nan)
    checkpoint.read_into(name, target, starts)
    return target


LAYOUTS = {
    "rows": (EMBED, [[0, 7, 14, 21], [0, 512]]),
    "rows, the last piece shorter": (EMBED, [[0, 6, 12, 18, 21], [0, 512]]),
    "rows, the last pieces empty": (EMBED, [[0, 11, 21, 21, 21], [0, 512]]),
    "columns": (GATE, [[0, 12], [0, 256, 512]]),
    "columns that share blocks": (GATE, [[0, 12], [0, 1, 100, 288, 301, 511, 512]]),
    "columns, an empty piece": (GATE, [[0, 12], [0, 300, 300, 512]]),
    "rows and columns": (GATE, [[0, 5, 12], [0, 200, 512]]),
    "whole": (GATE, [[0, 12], [0, 512]]),
    "a bias": (GATE_BIAS, [[0, 5, 10, 12, 12]]),
    "heads of q": (Q, [[0, 16, 48, 64], [0, 512]]),
    "heads of k": (K, [[0, 16, 32, 32], [0, 512]]),
    "heads and columns of q": (Q, [[0, 32, 64], [0, 33, 512]]),
    "heads of the bias of q": (Q_BIAS, [[0, 16, 48, 64]]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_pieces_of_all_ranks_are_the_whole(layout: str, kind: str, all_opened: dict[str, Opened]) -> None:
    checkpoint, tensors = all_opened[kind]
    name, bounds = LAYOUTS[layout]
    pieces = itertools.product(*(itertools.pairwise(along) for along in bounds))
    together = torch.full_like(tensors[name], math.nan)
    for piece in pieces:
        starts, shape = [start for start, _ in piece], [stop - start for start, stop in piece]
        together[tuple(slice(*ends) for ends in piece)] = read_piece(checkpoint, name, starts, shape)
    assert torch.equal(together, tensors[name])
    assert torch.equal(checkpoint.read(name).float(), tensors[name])


@pytest.mark.parametrize("slice_elements", [1, 700, 2**18])
@given(data=st.data(), kind=st.sampled_from(KINDS), name=st.sampled_from([EMBED, GATE, GATE_BIAS, Q]))
@settings(max_examples=200, deadline=None)
def test_any_piece_into_any_target(
    data: st.DataObject, kind: str, name: str, slice_elements: int, all_opened: dict[str, Opened]
) -> None:
    """Of any type and layout, next to memory of others, in slices that end anywhere."""
    checkpoint, tensors = all_opened[kind]
    starts, stops = [], []
    for dim, size in enumerate(SHAPES[name]):
        unit = HEAD_DIM if name == Q and dim == 0 else 1
        ends = sorted(data.draw(st.integers(0, size // unit)) * unit for _ in range(2))
        starts.append(ends[0])
        stops.append(ends[1])
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    frame = (1, 0) if data.draw(st.booleans(), "contiguous") else (1, 1)
    shape = [stop - start + 2 * wide for start, stop, wide in zip(starts, stops, frame, strict=False)]
    framed = torch.full(shape, 99, dtype=dtype)
    if framed.dim() == 2 and data.draw(st.booleans(), "transposed"):
        framed = framed.T.contiguous().T
    expected = framed.clone()
    inside = tuple(slice(wide, size - wide) for wide, size in zip(frame, shape, strict=False))
    expected[inside] = tensors[name][tuple(map(slice, starts, stops))].to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_checkpoint, "_SLICE_ELEMENTS", slice_elements)
        checkpoint.read_into(name, framed[inside], starts)
    assert torch.equal(framed, expected)


def test_a_large_piece_is_read_in_slices(tmp_path: Path) -> None:
    """Slices of safetensors are at most 2 MiB of rows for small models; here rows have 20 KiB."""
    stored = torch.arange(300 * 5000, dtype=torch.float32).view(300, 5000)
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": stored, "deep": stored.view(10, 30, 5000).clone()}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert torch.equal(read_piece(checkpoint, "w", (3, 1234), (290, 2000)), stored[3:293, 1234:3234])
    deep = read_piece(checkpoint, "deep", (1, 2, 3), (8, 20, 4000))
    assert torch.equal(deep, stored.view(10, 30, 5000)[1:9, 2:22, 3:4003])


@pytest.mark.parametrize("kind", ["safetensors", "Q8_0"])
@pytest.mark.parametrize(
    ("starts", "shape"),
    [
        ((0, 1), (12, 512)),
        ((12, 0), (1, 512)),
        ((-1, 0), (2, 512)),
        ((0, -1), (2, 1)),
        ((13, 0), (0, 512)),
        ((0,), (12, 512)),
        ((0,), (12,)),
        ((0, 0, 0), (12, 512, 1)),
        ((), ()),
    ],
)
def test_a_piece_that_is_not_inside_is_refused(
    starts: tuple[int, ...], shape: tuple[int, ...], kind: str, all_opened: dict[str, Opened]
) -> None:
    checkpoint, _ = all_opened[kind]
    target = torch.full(shape, 7.0)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read_into(GATE, target, starts)
    message = str(caught.value)
    assert f"a part of shape {list(shape)} that begins at {list(starts)} does not lie inside" in message
    assert f"'{GATE}', which has shape [12, 512]" in message
    assert str(checkpoint.path) in message
    assert (target == 7).all()


@pytest.mark.parametrize("name", [Q, K, Q_BIAS])
@pytest.mark.parametrize(("start", "num_rows"), [(0, 8), (8, 16), (16, 15)])
def test_rows_that_change_places_are_cut_between_heads_only(
    start: int, num_rows: int, name: str, all_opened: dict[str, Opened]
) -> None:
    checkpoint, _ = all_opened["Q8_0"]
    starts, shape = ((start, 0), (num_rows, HIDDEN)) if len(SHAPES[name]) == 2 else ((start,), (num_rows,))
    with pytest.raises(CheckpointError, match=f"rows {start} to {start + num_rows} of '{name}'.*whole heads of 16"):
        checkpoint.read_into(name, torch.zeros(shape), starts)


def read_packed(checkpoint: Checkpoint, name: str, format: str, starts: Sequence[int], shape: Sequence[int]) -> Tensor:
    """The piece as floats, its rows in the places that they are said to have."""
    found = torch.full(tuple(shape), math.nan)
    for blocks, places in checkpoint.read_packed(name, format, starts, shape):
        assert torch.as_tensor(blocks).is_contiguous()
        values = dequantize(np.asarray(blocks), GGMLQuantizationType[format])
        found[places] = torch.from_numpy(values.reshape(-1, shape[1]))
    return found


PACKED_LAYOUTS = [
    "rows",
    "rows, the last piece shorter",
    "rows, the last pieces empty",
    "columns",
    "heads of q",
    "whole",
]


@pytest.mark.parametrize("slice_elements", [1, 2**18])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
def test_blocks_of_all_ranks_are_the_whole(
    layout: str, kind: str, slice_elements: int, all_opened: dict[str, Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_checkpoint, "_SLICE_ELEMENTS", slice_elements)
    checkpoint, tensors = all_opened[kind]
    name, bounds = LAYOUTS[layout]
    assert checkpoint.formats()[name] == kind
    together = torch.full_like(tensors[name], math.nan)
    for piece in itertools.product(*(itertools.pairwise(along) for along in bounds)):
        starts, shape = [start for start, _ in piece], [stop - start for start, stop in piece]
        together[tuple(slice(*ends) for ends in piece)] = read_packed(checkpoint, name, kind, starts, shape)
    assert torch.equal(together, tensors[name])


@pytest.mark.parametrize("format", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("kind", ["safetensors", "F16", "BF16", "F32"])
@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
def test_plain_matrices_are_quantised_on_the_way(
    layout: str, kind: str, format: str, all_opened: dict[str, Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize_module, "_SLICE_ELEMENTS", 700)
    checkpoint, tensors = all_opened[kind]
    name, bounds = LAYOUTS[layout]
    for piece in itertools.product(*(itertools.pairwise(along) for along in bounds)):
        starts, shape = [start for start, _ in piece], [stop - start for start, stop in piece]
        found = read_packed(checkpoint, name, format, starts, shape)
        values = tensors[name][tuple(slice(*ends) for ends in piece)]
        spread = values.unflatten(1, (-1, 32)).abs().amax(2, keepdim=True)
        allowed = spread / 127 if format == "Q8_0" else 2 * spread / 15
        assert ((found - values).unflatten(1, (-1, 32)).abs() <= 0.8 * allowed).all()


@pytest.mark.parametrize(("start", "num_columns"), [(32, 480), (0, 32), (256, 128), (100, 256)])
def test_columns_that_are_not_whole_blocks(start: int, num_columns: int, all_opened: dict[str, Opened]) -> None:
    checkpoint, _ = all_opened["Q4_K"]
    message = f"columns {start} to {start + num_columns} of '{GATE}' are not whole blocks of 256, as Q4_K has them"
    with pytest.raises(CheckpointError, match=message):
        list(checkpoint.read_packed(GATE, "Q4_K", (0, start), (12, num_columns)))


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each access to a file brought, in either format, for checkpoints opened from now on."""
    seen: list[int] = []
    read_blocks = GGUFFile.read_blocks

    def read_and_count(file: GGUFFile, *piece: Any) -> np.ndarray:
        raw = read_blocks(file, *piece)
        seen.append(raw.nbytes)
        return raw

    class CountingSlice:
        def __init__(self, stored: Any) -> None:
            self._stored = stored
            self.get_dtype, self.get_shape = stored.get_dtype, stored.get_shape

        def __getitem__(self, piece: Any) -> Tensor:
            tensor: Tensor = self._stored[piece]
            seen.append(tensor.nbytes)
            return tensor

    class CountingHandle:
        """Has slices only: asking for a whole tensor is an error here."""

        def __init__(self, *arguments: Any) -> None:
            self._handle: Any = safe_open(*arguments)
            self.offset_keys = self._handle.offset_keys

        def __enter__(self) -> "CountingHandle":
            return self

        def __exit__(self, *_: object) -> None: ...

        def get_slice(self, name: str) -> CountingSlice:
            return CountingSlice(self._handle.get_slice(name))

    monkeypatch.setattr(GGUFFile, "read_blocks", read_and_count)
    monkeypatch.setattr(safetensors_checkpoint, "safe_open", CountingHandle)
    return seen


@pytest.mark.parametrize(
    ("kind", "piece", "num_bytes"),
    [
        ("safetensors", ((3, 0), (4, 512)), 4 * 512 * 4),
        ("safetensors", ((0, 100), (12, 7)), 12 * 7 * 4),
        ("F16", ((0, 100), (12, 7)), 12 * 7 * 2),
        ("Q8_0", ((3, 0), (4, 512)), 4 * 16 * 34),
        ("Q8_0", ((0, 256), (12, 256)), 12 * 8 * 34),
        ("Q8_0", ((2, 31), (5, 2)), 5 * 2 * 34),
        ("Q4_1", ((0, 33), (12, 31)), 12 * 20),
        ("Q4_K", ((0, 256), (12, 256)), 12 * 144),
        ("Q4_K", ((0, 200), (12, 100)), 12 * 2 * 144),
        ("safetensors", ((5, 5), (0, 7)), 0),
        ("Q4_K", ((5, 5), (7, 0)), 0),
    ],
)
def test_only_the_piece_is_read(
    kind: str, piece: tuple[Any, Any], num_bytes: int, all_opened: dict[str, Opened], bytes_read: list[int]
) -> None:
    checkpoint = open_checkpoint(all_opened[kind][0].path)
    read_piece(checkpoint, GATE, *piece)
    assert sum(bytes_read) == num_bytes
    checkpoint.close()


def along(tensor: Tensor, dim: int, start: int, full_size: int) -> WeightShard:
    shape, starts = list(tensor.shape), [0] * tensor.dim()
    shape[dim], starts[dim] = full_size, start
    return WeightShard(tensor, tuple(shape), tuple(starts))


def share(rank: int, size: int) -> dict[str, WeightShard]:
    """Attention by heads, the MLP by columns; with more ranks than kv heads some hold the same one."""
    num_rows, num_columns = HEADS * HEAD_DIM // size, HIDDEN // size
    kv_head, num_kv_rows = rank * KV_HEADS // size, max(1, KV_HEADS // size) * HEAD_DIM
    return {
        EMBED: WeightShard.whole(torch.zeros(VOCABULARY, HIDDEN)),
        Q: along(torch.zeros(num_rows, HIDDEN), 0, rank * num_rows, HEADS * HEAD_DIM),
        Q_BIAS: along(torch.zeros(num_rows), 0, rank * num_rows, HEADS * HEAD_DIM),
        K: along(torch.zeros(num_kv_rows, HIDDEN), 0, kv_head * HEAD_DIM, KV_HEADS * HEAD_DIM),
        GATE: along(torch.zeros(FFN, num_columns), 1, rank * num_columns, HIDDEN),
        GATE_BIAS: WeightShard.whole(torch.zeros(FFN)),
    }


@pytest.mark.parametrize("kind", ["safetensors", "F32"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_loads_its_share(size: int, kind: str, all_opened: dict[str, Opened], bytes_read: list[int]) -> None:
    opened, tensors = all_opened[kind]
    for rank in range(size):
        checkpoint, shards = open_checkpoint(opened.path), share(rank, size)
        load_weights(shards, checkpoint, show_progress=False)
        checkpoint.close()
        for name, shard in shards.items():
            assert torch.equal(shard.tensor, shard.cut(tensors[name])), name
        assert sum(bytes_read) == sum(shard.tensor.nbytes for shard in shards.values())
        bytes_read.clear()


def test_whole_shapes_are_compared_not_those_of_the_pieces(tmp_path: Path) -> None:
    checkpoint, tensors = write_safetensors(tmp_path)
    shards = {name: WeightShard.whole(torch.zeros_like(tensor)) for name, tensor in tensors.items()}
    shards[GATE] = along(torch.zeros(FFN, HIDDEN), 0, 0, full_size=2 * FFN)
    with pytest.raises(CheckpointError, match=rf"{GATE}: \[12, 512\] in the checkpoint, \[24, 512\] in the model"):
        load_weights(shards, checkpoint, show_progress=False)
    assert not any(shard.tensor.any() for shard in shards.values())
