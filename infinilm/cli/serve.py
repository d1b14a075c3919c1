"""`infinilm serve`: a model behind OpenAI's API."""

import logging
import os
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infinilm.cli.display import console, make_facts, note
from infinilm.cli.options import ModelArgument, takes_config
from infinilm.config import Config
from infinilm.errors import InvalidValueError

if TYPE_CHECKING:
    from infinilm.server.messages import Ready
    from infinilm.server.service import Service

logger = logging.getLogger(__name__)

KEY_VARIABLE = "INFINILM_API_KEY"
Listen = Annotated[str, typer.Option(help="The address to listen on. One that others can reach needs an API key.")]
Keys = Annotated[
    list[str] | None,
    typer.Option(
        help="A key that clients must give. Every user of this machine can see it (ps): prefer --api-key-file or "
        f"{KEY_VARIABLE}. Can be given several times.",
        show_default=False,
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        help=f"A file with a key in each line. Another way: the environment variable {KEY_VARIABLE}.",
        show_default=False,
    ),
]
LimitPairs = Annotated[
    list[str] | None,
    typer.Option("--limit", metavar="NAME=VALUE", help="Change a limit; --limit help lists them.", show_default=False),
]


@takes_config(without=("model",))
def serve(
    model: ModelArgument = None,
    *,
    host: Listen = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.")] = 8000,
    api_key: Keys = None,
    api_key_file: KeyFile = None,
    model_name: Annotated[
        str | None, typer.Option(help="What requests call the model. Default: its file's name.", show_default=False)
    ] = None,
    tool_call_parser: Annotated[
        str | None, typer.Option(help="How the model writes tool calls. Default: by its template.", show_default=False)
    ] = None,
    limit: LimitPairs = None,
    log_requests: Annotated[bool, typer.Option("--log-requests", help="Log a line for each request.")] = False,
    parse_special_tokens: Annotated[
        bool, typer.Option("--parse-special-tokens", help="Let messages hold control tokens. Only for trusted clients.")
    ] = False,
    config: Config,
) -> None:
    """Serve a model over HTTP, as OpenAI's API does.

    Ctrl-C, SIGTERM or SIGHUP lets the requests at work finish; a second Ctrl-C or SIGTERM does not.
    """
    _check_installed()
    from infinilm.server.logs import install_logging
    from infinilm.server.run import run
    from infinilm.server.service import Service
    from infinilm.server.settings import Limits, ServerSettings

    if limit == ["help"]:
        console().print(make_facts({item.name: f"{item.default}" for item in fields(Limits)}))
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
        limits=Limits.from_pairs(limit or []),
    )
    service = Service(config.replace(model=model), settings, tool_call_parser=tool_call_parser)
    run(service, lambda ready, address: _announce(service, ready, address))


def _check_installed() -> None:
    try:
        for name in ("fastapi", "httptools", "msgspec", "prometheus_client", "uvicorn"):
            import_module(name)
    except ImportError as error:
        raise InvalidValueError(f"serving needs {error.name}; install it with: pip install 'infinilm[serve]'") from None


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
    blocks = f"{ready.num_blocks:,} blocks of {ready.block_size} tokens"
    facts = {
        "address": address,
        "model": f"{service.model_name}, {ready.dtype} on {ready.device}, loaded in {ready.load_seconds:.1f} s",
        "context": f"{ready.max_model_len:,} tokens; KV cache of {blocks}",
        "limits": f"{limits.max_requests:,} requests, {limits.max_total_tokens:,} tokens, "
        f"{limits.request_timeout:g} s per request",
        "access": f"{len(settings.api_keys)} API keys" if settings.api_keys else "this machine only, no API key",
    }
    console(err=True).print(make_facts(facts))
    key = " -H 'Authorization: Bearer <key>'" if settings.api_keys else ""
    note(
        f"Try:  curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key} "
        """-d '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 50}'"""
    )
