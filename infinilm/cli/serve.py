"""`infinilm serve`: a model behind OpenAI's API."""

import logging
import os
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infinilm.cli.answering import require_extra
from infinilm.cli.display import console, make_facts, make_table, note
from infinilm.cli.options import ModelArgument, takes_config
from infinilm.config import Config
from infinilm.errors import InvalidValueError

if TYPE_CHECKING:
    from rich.table import Table

    from infinilm.server.messages import Ready
    from infinilm.server.service import Service
    from infinilm.server.settings import ServerSettings

logger = logging.getLogger(__name__)

KEY_VARIABLE = "INFINILM_API_KEY"
Listen = Annotated[
    str, typer.Option(metavar="ADDRESS", help="The address to listen on. One that others can reach needs an API key.")
]
Keys = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="A key that clients must give. Every user of this machine can see it (ps): prefer --api-key-file or "
        f"{KEY_VARIABLE}. Can be given several times.",
        show_default=False,
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help=f"A file with a key in each line. Another way: the environment variable {KEY_VARIABLE}.",
        show_default=False,
    ),
]
ToolCallParser = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="How the model writes tool calls. Default: found by its template.", show_default=False
    ),
]
ReasoningParser = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="How the model marks its reasoning; none: leave it in the text. Default: found by its template.",
        show_default=False,
    ),
]
LimitPairs = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=VALUE",
        help="Change a limit, such as max_requests=64; --limit help lists all with units. Can be given several times.",
        show_default=False,
    ),
]


@takes_config(without=("model",), has_short_tp=True)
def serve(
    model: ModelArgument = None,
    *,
    host: Listen = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="The port to listen on; 0: any that is free.")] = 8000,
    api_key: Keys = None,
    api_key_file: KeyFile = None,
    model_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The model's name in requests. Default: its file's name.", show_default=False
        ),
    ] = None,
    tool_call_parser: ToolCallParser = None,
    reasoning_parser: ReasoningParser = None,
    limit: LimitPairs = None,
    log_requests: Annotated[bool, typer.Option("--log-requests", help="Log a line for each request.")] = False,
    parse_special_tokens: Annotated[
        bool,
        typer.Option(
            "--parse-special-tokens", help="Let messages contain the model's control tokens. For trusted clients only."
        ),
    ] = False,
    config: Config,
) -> None:
    """Serve a model over HTTP: a page to chat in, and OpenAI's API.

    Without options: the embedded model at http://127.0.0.1:8000, for this machine only. Ctrl-C, SIGTERM or SIGHUP
    lets the requests in progress finish; a second Ctrl-C or SIGTERM ends at once.
    """
    require_extra("serve", "serving", "fastapi", "httptools", "msgspec", "prometheus_client", "uvicorn")
    from infinilm.server.logs import install_logging
    from infinilm.server.settings import Limits, ServerSettings

    if limit and "help" in limit:
        console().print(_list_limits())
        return
    install_logging()
    if api_key:
        logger.warning(
            "--api-key shows in the list of processes, for every user of this machine; use --api-key-file or %s",
            KEY_VARIABLE,
        )
    settings = ServerSettings(
        host=host,
        port=port,
        api_keys=collect_keys(api_key or [], api_key_file),
        model_name=model_name,
        log_requests=log_requests,
        parse_special_tokens=parse_special_tokens,
        reasoning_parser=reasoning_parser,
        limits=Limits.from_pairs(limit or []),
    )
    _run(config.replace(model=model), settings, tool_call_parser)


def _run(config: Config, settings: "ServerSettings", tool_call_parser: str | None) -> None:
    from infinilm.loading.sources import resolve
    from infinilm.server.engine_start import start_engine_process

    resolve(config.model)  # may download it; a missing model is reported before an engine is started
    process = start_engine_process()  # it imports while this process imports the server and reads the tokenizer
    try:
        from infinilm.server.run import run
        from infinilm.server.service import Service

        service = Service(config, settings, tool_call_parser=tool_call_parser, process=process)
        run(service, lambda ready, address: _announce(service, ready, address))
    finally:
        process.kill()  # unless it has ended
        process.wait()


def _list_limits() -> "Table":
    from infinilm.server.settings import Limits

    table = make_table("limit", "default", "meaning")
    table.columns[2].justify = "left"
    for item in fields(Limits):
        table.add_row(item.name, "by device" if item.default is None else f"{item.default:,}", item.metadata["meaning"])
    return table


def collect_keys(given: list[str], file: Path | None) -> tuple[str, ...]:
    keys = list(given)
    if file is not None:
        try:
            keys += file.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidValueError(f"--api-key-file {file} can't be read: {error}") from None
    keys += os.environ.pop(KEY_VARIABLE, "").split()  # not inherited by the engine's process
    return tuple(dict.fromkeys(keys))


def _announce(service: "Service", ready: "Ready", address: str) -> None:
    limits, settings = service.limits, service.settings
    num_tokens = ready.num_blocks * ready.block_size
    facts = {
        "address": address,
        "chat page": f"{address}/ (open it in a browser)",
        "OpenAI's API": f"{address}/v1",
        "model": f"{service.model_name}, {ready.dtype} on {ready.device}, loaded in {ready.load_seconds:.1f} s",
        "conversations": f"up to {ready.max_model_len:,} tokens each, {num_tokens:,} at a time",
        "deterministic": ready.guarantee,
        "limits": f"{limits.max_requests:,} requests at a time, {limits.request_timeout:g} s each; change them with "
        "--limit",
        "access": f"{len(settings.api_keys)} API keys" if settings.api_keys else "this machine only, no API key",
    }
    if find_spec("llguidance") is None:
        facts["missing"] = "llguidance, for structured output; install it with: pip install 'infinilm[structured]'"
    if logger.isEnabledFor(logging.DEBUG):
        facts["memory"] = ready.memory.partition(": ")[2]
        facts["start"] = ", ".join(
            f"{cause} {seconds:.1f} s" for cause, seconds in ready.seconds.items() if seconds >= 0.05
        )
    console(err=True).print(make_facts(facts))
    key = " -H 'Authorization: Bearer <key>'" if settings.api_keys else ""
    note(
        f"Try:  curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key} "
        """-d '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 50}'"""
    )
