"""`infinilm verify`: compares our results with those of transformers."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infinilm.cli.answering import open_engine
from infinilm.cli.bench import load_peer
from infinilm.cli.display import console, make_table, note
from infinilm.cli.options import ModelArgument, takes_config
from infinilm.config import Config

if TYPE_CHECKING:
    from infinilm.bench.transformers_peer import Agreement

# 16-bit types round so coarsely that likely tokens swap ranks.
TOLERANCES = {"float32": 1e-3, "float16": 1e-1, "bfloat16": 1.0}


@takes_config(without=("model",))
def verify(
    *,
    model: ModelArgument = None,
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Greedy tokens to check per prompt.")] = 32,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="X",
            help="The largest difference of log-probabilities that passes. "
            f"Default: {', '.join(f'{limit:g} in {dtype}' for dtype, limit in TOLERANCES.items())}.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    config: Config,
) -> None:
    """Compare a model's results with those of Hugging Face transformers.

    Both compute the same prompts; logits, greedy tokens and log-probabilities are compared. Weights are not
    quantised, as in transformers, unless --quantization says otherwise. Ends with exit code 1 if a difference is
    beyond the tolerance.
    """
    from infinilm.bench.transformers_peer import check_installed, compare

    check_installed()
    with open_engine(config.replace(model=model, quantization=config.quantization or "none")) as engine:
        path = Path(str(engine.config.model))
        info = engine.executor.info
        peer = load_peer(engine)
        limit = TOLERANCES[info.dtype] if tolerance is None else tolerance
        note("Comparing …")
        found = compare(engine, peer, max_tokens=max_tokens, tie_width=TOLERANCES[info.dtype])
    agrees = found.num_wrong == 0 and max(found.max_prompt_difference, found.max_output_difference) <= limit
    if as_json:
        record = {"model": path.name, "dtype": info.dtype, **asdict(found), "tolerance": limit, "agrees": agrees}
        typer.echo(json.dumps(record, indent=2))
    else:
        title = f"{path.name} in {info.dtype}, against transformers {peer.version}"
        _show(title, found, limit, agrees)
    raise typer.Exit(0 if agrees else 1)


def _show(title: str, found: "Agreement", tolerance: float, agrees: bool) -> None:
    screen = console()
    screen.print(title, style="bold", soft_wrap=True)
    screen.print()
    table = make_table("check", "result")
    table.add_row("prompts", str(found.num_prompts))
    table.add_row("greedy tokens equal", f"{found.num_equal} of {found.num_tokens}")
    table.add_row(f"ties (apart by at most {found.tie_width:g})", str(found.num_ties))
    table.add_row("greedy tokens different", str(found.num_wrong), style="red" if found.num_wrong else None)
    table.add_row("log-probabilities compared", f"{found.num_logprobs:,}")
    table.add_row("largest difference, prompt tokens", f"{found.max_prompt_difference:.2e}")
    table.add_row("largest difference, generated tokens", f"{found.max_output_difference:.2e}")
    screen.print(table)
    screen.print()
    for example in found.examples:
        screen.print(example, soft_wrap=True)
    verdict = "agrees" if agrees else "DISAGREES"
    screen.print(f"{verdict} (tolerance {tolerance:g})", style="bold green" if agrees else "bold red")
