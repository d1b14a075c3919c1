"""`infinilm info`: a model's shape and memory needs."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infinilm.cli.display import console, format_count, make_facts, make_table
from infinilm.cli.model_info import DTYPES, QUANTIZED, collect_facts
from infinilm.cli.options import ModelArgument

if TYPE_CHECKING:
    from rich.table import Table


def info(
    model: ModelArgument = None, as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False
) -> None:
    """Show what a model is and whether it fits. Reads headers only."""
    from infinilm.loading.sources import resolve

    facts = collect_facts(resolve(model))
    if as_json:
        typer.echo(json.dumps(facts, ensure_ascii=False, indent=2))
        return
    screen = console()
    screen.print(make_facts(_describe(facts)))
    screen.print()
    screen.print(_memory_table(facts))


def _describe(facts: dict[str, Any]) -> dict[str, str]:
    from infinilm.executor.memory import format_bytes

    tokenizer = facts["tokenizer"]
    rope = {name: _plain(value) for name, value in facts["rope"].items() if not isinstance(value, list)}
    rope_type = rope.pop("rope_type")
    stored = ", ".join(f"{name} ({format_count(count)})" for name, count in facts["stored_as"].items())
    return {
        "model": facts["path"],
        "licence": facts["license"] or "not named in the files",
        "architecture": facts["architecture"],
        "parameters": f"{format_count(facts['num_parameters'])}{', head tied to embedding' * facts['tied_head']}",
        "stored as": f"{stored}; {format_bytes(facts['num_bytes'])} on disk",
        "layers": f"{facts['num_layers']} of width {facts['hidden_size']}, MLP {facts['intermediate_size']}",
        "attention": f"{facts['num_attention_heads']} heads, {facts['num_key_value_heads']} for keys and values, "
        f"of {facts['head_dim']}; "
        + (f"window of {facts['sliding_window']} tokens" if facts["sliding_window"] else "no sliding window"),
        "rope": ", ".join([rope_type, *(f"{name.removeprefix('rope_')} {value}" for name, value in rope.items())]),
        "context": f"{facts['max_context_len']:,} tokens",
        "vocabulary": f"{facts['vocab_size']:,} tokens",
        "tokenizer": f"{tokenizer['kind']}, {'with' if tokenizer['has_chat_template'] else 'without'} chat template"
        if tokenizer
        else "none",
    }


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _memory_table(facts: dict[str, Any]) -> "Table":
    from infinilm.executor.memory import format_bytes

    needs, context = facts["memory"], facts["max_context_len"]
    kinds = [name for name in (*DTYPES, QUANTIZED) if name in needs]
    table = make_table("memory", *kinds)
    rows = {
        "weights": "weight_bytes",
        "workspace, at most": "workspace_bytes",
        "KV cache, one token": "kv_bytes_per_token",
        f"KV cache, {context:,} tokens": "kv_bytes_of_max_context",
    }
    for label, key in rows.items():
        table.add_row(label, *(format_bytes(needs[name][key]) for name in kinds))
    table.add_section()
    fits = [needs[name]["num_tokens_that_fit"] for name in kinds]
    where = f"{format_bytes(needs['free_bytes'])} free on {needs['device']}"
    table.add_row(f"fits here, {where}", *(f"{num_tokens:,} tokens" if num_tokens else "no" for num_tokens in fits))
    table.add_row("", *(_sequences(num_tokens, context) for num_tokens in fits), style="dim")
    return table


def _sequences(num_tokens: int, context: int) -> str:
    """How many sequences of full length fit, or how long a single one may be."""
    num_full = num_tokens // context
    return f"{num_full} × {context:,}" if num_full else f"1 × {num_tokens:,}" if num_tokens else ""
