"""`infinilm batch`: answers the rows of a file, into another file."""

from pathlib import Path
from typing import Annotated, Any

import typer

from infinilm.cli.answering import require_extra
from infinilm.cli.display import format_rate, format_seconds, note
from infinilm.cli.options import takes_config, takes_sampling
from infinilm.config import Config


@takes_sampling(without=("logprobs",))
@takes_config()
def batch(
    input: Annotated[Path, typer.Argument(metavar="INPUT", help="A .txt, .jsonl or .parquet file.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="A new .jsonl file; with --cluster, a folder.")],
    *,
    chat: Annotated[bool, typer.Option("--chat", help="Prompts are a user's messages, for the chat template.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Start over: remove what is there of OUTPUT.")] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Run on Ray: RAY_ADDRESS, or a cluster made here.")
    ] = False,
    engines: Annotated[int, typer.Option(metavar="N", help="With --cluster: engines, each with the whole model.")] = 1,
    model_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The model's name in rows. Default: its file's name.", show_default=False),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="How the model writes tool calls. Default: found by its template.", show_default=False
        ),
    ] = None,
    config: Config,
    sampling: dict[str, Any],
) -> None:
    """Answer the rows of a file: prompts, conversations or lines of OpenAI's batch input.

    OUTPUT has the form of OpenAI's batch output. Bad rows become error rows. A job that was stopped or killed goes on
    when it is started again with the same arguments.
    """
    require_extra("serve", "a batch job", "fastapi", "httptools", "msgspec", "prometheus_client", "uvicorn")
    from infinilm.batch import run

    try:
        done = run(
            input,
            output,
            config,
            sampling=sampling,
            chat=chat,
            model_name=model_name,
            tool_call_parser=tool_call_parser,
            cluster=cluster,
            engines=engines,
            restart=restart,
        )
    except KeyboardInterrupt:
        note("stopped; the same command goes on with the rows that are missing")
        raise
    new = "" if done.num_new_rows == done.num_rows else f" ({done.num_new_rows:,} now)"
    rate = format_rate(done.num_tokens / done.seconds) if done.seconds else "0"
    note(
        f"{done.num_rows:,} rows{new}, {done.num_errors:,} of them errors · {done.num_tokens:,} tokens in "
        f"{format_seconds(done.seconds)} ({rate} tokens/s) · {output}"
    )
