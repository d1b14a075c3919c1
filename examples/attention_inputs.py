"""Draws the attention maps of a layer, from queries and keys that hooks capture.

Run it: `python examples/attention_inputs.py --out attention.png`

The picture has one panel per head, three in a row. In a panel, row i shows the tokens that token i attends to, and
column j the tokens that attend to token j. Darker means more. The text repeats a sentence. Heads 4 and 5 of this layer
do what makes language models repeat and copy: from each word of the second sentence they attend to the word that
followed it in the first sentence.
"""

import argparse
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from infinilm import InferEngine
from infinilm.debug import HookRegistry

PROMPT = "The cat sat on a red mat. The cat sat on a red"
PANELS_IN_A_ROW, CELL, GAP = 3, 12, 12
"""Panels, and the pixels of a cell and between panels."""


def capture(engine: InferEngine, tokens: list[int], layer: int) -> tuple[Tensor, Tensor]:
    """The layer's queries `[T, heads, head_dim]` and keys `[T, kv_heads, head_dim]`, after rotation."""
    seen: dict[str, Tensor] = {}

    def keep(name: str, tensor: Tensor, _: int) -> None:
        seen[name] = tensor.float().cpu()

    registry = HookRegistry()
    registry.register_hook(f"layer{layer}_attention_*_after_rope", keep)
    engine.set_hook_registry(registry)
    engine.forward(input_ids=tokens)
    engine.set_hook_registry(None)
    return seen[f"layer{layer}_attention_q_after_rope"], seen[f"layer{layer}_attention_k_after_rope"]


def attention_maps(query: Tensor, key: Tensor) -> Tensor:
    """The attention weights `[heads, T, T]` of each token (row) on each token (column). Rows sum to 1."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)  # query heads share keys in groups
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[2])
    is_later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return scores.masked_fill(is_later, -math.inf).softmax(dim=-1)


def draw(maps: Tensor) -> Tensor:
    """All maps in one greyscale picture `[height, width]` of bytes, on a grey background."""
    # The square root makes small weights visible; most weights are small.
    panels = (255 * (1 - maps.sqrt())).round().to(torch.uint8)
    panels = panels.repeat_interleave(CELL, dim=1).repeat_interleave(CELL, dim=2)
    side = panels.shape[1] + GAP
    num_rows = -(-len(panels) // PANELS_IN_A_ROW)
    picture = torch.full((num_rows * side + GAP, PANELS_IN_A_ROW * side + GAP), 160, dtype=torch.uint8)
    for index, panel in enumerate(panels):
        top, left = (GAP + side * place for place in divmod(index, PANELS_IN_A_ROW))
        picture[top : top + len(panel), left : left + len(panel)] = panel
    return picture


def write_png(path: Path, picture: Tensor) -> None:
    """Write grey pixels `[height, width]`."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = picture.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)  # 8 bits of grey
    lines = b"".join(b"\0" + row.numpy().tobytes() for row in picture)  # 0: no filter
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)


def main() -> None:
    """Draw the maps, and print which tokens the last token attends to."""
    parser = argparse.ArgumentParser(description="Draw the attention maps of a layer.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--layer", type=int, default=17)
    parser.add_argument("--out", type=Path, default=Path("attention.png"))
    options = parser.parse_args()

    engine = InferEngine(options.model)
    tokenizer = engine.tokenizer
    assert tokenizer is not None, f"{options.model} has no tokenizer"
    tokens = tokenizer.encode(options.prompt)
    words = [tokenizer.decode([token]) for token in tokens]
    maps = attention_maps(*capture(engine, tokens, options.layer))
    write_png(options.out, draw(maps))
    print(f"{options.out}: layer {options.layer}, {len(maps)} heads, left to right and down")
    for head, weights in enumerate(maps[:, -1]):
        # Heads attend to the first token if no other token is relevant, so it is left out.
        place = 1 + int(weights[1:].argmax())
        looks = f"{weights[place]:4.0%} at {words[place]!r} ({place})"
        print(f"head {head}: {words[-1]!r} looks {looks}, {weights[0]:4.0%} at the first token")


if __name__ == "__main__":
    main()
