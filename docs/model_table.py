"""Writes the table of model families in docs/models.md: `make model-table`.

The largest difference is measured: tiny random checkpoints of tests/checkpoints.py in float32, as a whole and in chunks
of 7 tokens, against transformers.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- the table begins -->\n", "<!-- the table ends -->\n"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def make_table(measured: Mapping[str, tuple[int, float]]) -> str:
    """The table; `measured` are the number of checkpoints and the largest difference by `model_type`."""
    from infinilm.loading.gguf_config import architectures
    from infinilm.models.registry import FAMILIES

    lines = [
        "| `model_type` | `architectures` | GGUF | what it is | checkpoints | largest difference |",
        "|" + "---|" * 6,
    ]
    for model_type, family in FAMILIES.items():
        files = ", ".join(f"`{name}`" for name in architectures(model_type)) or "–"
        what = " ".join((family.config.__doc__ or "").partition("\n\n")[0].split())
        count, difference = measured.get(model_type, (0, float("nan")))
        shown = f"{difference:.0e}" if count else "–"
        lines.append(f"| `{model_type}` | `{family.class_name}` | {files} | {what} | {count} | {shown} |")
    return "\n".join(lines) + "\n"


def measure() -> dict[str, tuple[int, float]]:
    import torch
    from checkpoints import ARCHITECTURES, load, make_reference, reference_logits
    from drive import Driver

    tokens = torch.randint(0, 160, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    found: dict[str, tuple[int, float]] = {}
    for kind in ARCHITECTURES:
        reference = make_reference(kind)
        expected, model = reference_logits(reference, tokens), load(reference)
        ours = [Driver(model).run(tokens), Driver(model).run(tokens, 7)]
        difference = max(float((logits - expected).abs().max()) for logits in ours)
        count, largest = found.get(model.config.model_type, (0, 0.0))
        found[model.config.model_type] = (count + 1, max(largest, difference))
        print(f"{kind}: {difference:.1e}", file=sys.stderr)
    return found


def main() -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + make_table(measure()) + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
