"""`infinilm verify`: compares results with those of transformers, or with themselves in other circumstances."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infinilm.checks import check_integer
from infinilm.cli.answering import open_engine
from infinilm.cli.bench import load_peer
from infinilm.cli.display import console, make_table, note
from infinilm.cli.help import option
from infinilm.cli.options import ModelArgument, expand, takes_config
from infinilm.config import Config
from infinilm.errors import InvalidValueError

if TYPE_CHECKING:
    from infinilm.bench.determinism import Finding
    from infinilm.bench.transformers_peer import Agreement

# 16-bit types round so coarsely that likely tokens swap ranks.
TOLERANCES = {"float32": 1e-3, "float16": 1e-1, "bfloat16": 1.0}


_MATRIX_OPTIONS = {
    "determinism": (
        option("Determinism", bool, "Compare requests alone with the same in other circumstances.", "--determinism"),
        False,
    ),
    "requests": (
        option("Determinism", int, "Requests to compare, and 16 that begin alike.", show_default=True),
        16,
    ),
    "others": (option("Determinism", int, "Other requests that they are computed among.", show_default=True), 40),
    "max_prompt_len": (
        option("Determinism", int | None, "The longest prompt. Default: 2,049 tokens on a GPU, 513 elsewhere."),
        None,
    ),
    "keep_going": (
        option("Determinism", bool, "Go through all circumstances even if one differs.", "--keep-going"),
        False,
    ),
}


def _check_matrix(**given: Any) -> dict[str, Any]:
    check_integer("requests", given["requests"], low=1)
    check_integer("others", given["others"], low=0)
    if given["max_prompt_len"] is not None:
        check_integer("max_prompt_len", given["max_prompt_len"], low=1)
    return given


@takes_config(without=("model",))
@expand("matrix", _MATRIX_OPTIONS, _check_matrix)
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
    matrix: dict[str, Any],
    config: Config,
) -> None:
    """Compare a model's results with those of Hugging Face transformers.

    Both compute the same prompts; logits, greedy tokens and log-probabilities are compared. Weights are not
    quantised, as in transformers, unless --quantization says otherwise. Ends with exit code 1 if a difference is
    beyond the tolerance.

    With --determinism the engine is compared with itself: requests alone, and the same requests with others, in chunks,
    on a warm prefix cache, after preemption, and through every interface. Ends with exit code 1 at the first bit that
    differs, and names the layer where the difference begins.
    """
    if matrix["determinism"]:
        if tolerance is not None:
            raise InvalidValueError(f"--determinism compares bits; leave out --tolerance {tolerance:g}")
        _verify_determinism(config.replace(model=model), matrix, max_tokens, as_json=as_json)
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


def _verify_determinism(config: Config, matrix: dict[str, Any], max_tokens: int, *, as_json: bool) -> None:
    from infinilm.bench.circumstances import all_circumstances
    from infinilm.bench.determinism import Finding, Session, Workload, check, check_hidden_states
    from infinilm.loading.sources import resolve

    session = Session(config.replace(model=resolve(config.model), deterministic=True))
    engine = session.engine()
    info, stats, num_others = engine.executor.info, engine.stats(), matrix["others"]
    longest = engine.max_model_len - max_tokens
    if longest < 1:
        raise InvalidValueError(f"max_tokens={max_tokens} leaves no room: texts have {engine.max_model_len} tokens")
    usual = 2049 if info.device.startswith("cuda") else 513
    sizes = {"num_requests": matrix["requests"], "num_others": num_others, "max_tokens": max_tokens}
    limit = min(matrix["max_prompt_len"] or usual, longest)
    session.work = Workload.make(engine.model_config.vocab_size, max_prompt_len=limit, **sizes)
    note(f"{Path(str(session.config.model)).name} in {info.dtype} on {info.device}; deterministic: {stats.guarantee}")
    circumstances = all_circumstances(session, num_others=num_others)

    def compare() -> Iterator[Finding]:
        yield from check(session, circumstances)
        yield check_hidden_states(session)

    findings: list[Finding] = []
    try:
        for finding in compare():
            findings.append(finding)
            if not as_json:
                _show_finding(finding)
            if not (finding.is_equal or matrix["keep_going"]):
                break
    finally:
        session.close()
    holds = all(finding.is_equal for finding in findings)
    if as_json:
        record = {"model": str(session.config.model), "guarantee": stats.guarantee}
        record["system_fingerprint"] = stats.system_fingerprint
        typer.echo(json.dumps({**record, "equal": holds, "findings": [asdict(each) for each in findings]}, indent=2))
    else:
        verdict = "the same bits in every circumstance" if holds else "DIFFERENT bits in some circumstance"
        console().print(verdict, style="bold green" if holds else "bold red")
    raise typer.Exit(0 if holds else 1)


def _show_finding(finding: "Finding") -> None:
    """One line of the table, as soon as it is known: some take minutes."""
    found = f"not compared: {finding.skipped}" if finding.skipped else f"{finding.num_equal} of {finding.num_compared}"
    screen = console()
    screen.print(f"{finding.name:26} {found}", style=None if finding.is_equal else "red", soft_wrap=True)
    if finding.difference:
        screen.print(f"    {finding.difference}", soft_wrap=True)
