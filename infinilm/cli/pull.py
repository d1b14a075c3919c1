"""`infinilm pull`: downloads a model."""

from typing import Annotated

import typer

from infinilm.cli.display import console, make_facts, make_table
from infinilm.cli.model_info import find_license, size_on_disk
from infinilm.cli.options import ModelArgument
from infinilm.errors import InvalidValueError


def pull(
    model: ModelArgument = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the aliases instead.")] = False,
) -> None:
    """Fetch a model into the cache and print where it is."""
    if show_list:
        if model is not None:
            raise InvalidValueError(f"--list fetches nothing; leave out {model!r} or --list")
        _print_aliases()
        return
    from infinilm.loading.sources import pull as fetch

    path = fetch(model)
    facts = {
        "path": str(path),
        "size": _megabytes(size_on_disk(path)),
        "licence": find_license(path) or "not named in the files; see where the model was published",
    }
    console().print(make_facts(facts), soft_wrap=True)


def _print_aliases() -> None:
    from infinilm.loading.sources import ALIASES, DEFAULT_MODEL

    table = make_table("alias", "size", "licence", "file")
    for alias, source in ALIASES.items():
        mark = " (default)" if alias == DEFAULT_MODEL else ""
        table.add_row(alias + mark, _megabytes(source.num_bytes), source.license, source.member.rpartition("/")[2])
    console().print(table)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
