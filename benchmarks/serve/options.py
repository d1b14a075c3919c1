"""The options of `infinilm bench serve`."""

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.serve.work import Limits, Load, Work
from infinilm.checks import check_real
from infinilm.cli.help import option
from infinilm.cli.options import Command, expand
from infinilm.errors import InvalidTypeError, InvalidValueError

DEFAULT_STREAMS = 8
DEFAULT_SECONDS = 30.0


_LOAD_OPTIONS = {
    "streams": (
        option("Load", int | None, f"Requests at a time, each stream's one after another. Default: {DEFAULT_STREAMS}."),
        None,
    ),
    "rate": (option("Load", float | None, "Requests per second, at random times (Poisson)."), None),
    "burst": (option("Load", int | None, "Requests, all at once."), None),
    "requests": (option("Load", int | None, "How many requests to send."), None),
    "seconds": (
        option("Load", float | None, f"When to send no more. Default: {DEFAULT_SECONDS:g}, without --requests."),
        None,
    ),
}
_WORK_OPTIONS = {
    "input_len": (option("Requests", int | None, "Random tokens of each prompt. Default: 256."), None),
    "output_len": (option("Requests", int, "Tokens of each answer. Default: 128."), 128),
    "prefix_len": (option("Requests", int | None, "How many of them all prompts begin with. Default: 0."), None),
    "vocab_size": (option("Requests", int | None, "Random token ids are below this. Default: 10000."), None),
    "prompts": (option("Requests", Path | None, "A file with a text in each line, instead of random tokens."), None),
    "chat": (option("Requests", bool, "Ask for chats; random prompts are words then.", "--chat"), False),
    "model": (option("Requests", str, "Default: the first in /v1/models.", "--model", "-m"), ""),
    "temperature": (option("Requests", float | None, "Default: the server's.", "--temperature", "-t"), None),
    "ignore_eos": (
        option("Requests", bool, "Whether answers go on to full length. Default: yes.", "--ignore-eos/--stop-at-eos"),
        True,
    ),
    "body": (option("Requests", str, "Further fields of each request, as a JSON object."), "{}"),
    "seed": (option("Requests", int | None, "Makes prompts and times repeatable. Default: a new one."), None),
}
_LIMIT_OPTIONS = {
    "max_ttft": (option("Report", float | None, "Count answers with a first token within so many ms …"), None),
    "max_tpot": (option("Report", float | None, "… and so many ms per further token on average."), None),
}


def takes_load() -> Callable[[Command], Command]:
    """Replace a command's parameter `load` by options."""
    return expand("load", _LOAD_OPTIONS, _make_load)


def takes_work() -> Callable[[Command], Command]:
    """Replace a command's parameter `work` by options."""
    return expand("work", _WORK_OPTIONS, _make_work)


def takes_limits() -> Callable[[Command], Command]:
    """Replace a command's parameter `limits` by options."""
    return expand("limits", _LIMIT_OPTIONS, _make_limits)


def _make_load(streams: int | None, rate: float | None, burst: int | None, **end: Any) -> Load:
    if streams is rate is burst is None:
        streams = DEFAULT_STREAMS
    if burst is None and end["requests"] is None and end["seconds"] is None:
        end["seconds"] = DEFAULT_SECONDS
    return Load(streams=streams, rate=rate, burst=burst, **end)


def _make_work(
    *,
    prompts: Path | None,
    chat: bool,
    temperature: float | None,
    ignore_eos: bool,
    body: str,
    seed: int | None,
    **sizes: Any,
) -> Work:
    given = {name: value for name, value in sizes.items() if value is not None}
    random_only = [name for name in ("input_len", "prefix_len", "vocab_size") if name in given]
    if prompts is not None and random_only:
        raise InvalidValueError(f"{random_only[0]}={given[random_only[0]]} is for random prompts; leave out --prompts")
    fields: dict[str, Any] = {"stream_options": {"include_usage": True}}
    if ignore_eos:
        fields["ignore_eos"] = True
    if temperature is not None:
        fields["temperature"] = temperature
    return Work(
        **given,
        texts=None if prompts is None else _read_texts(prompts),
        is_chat=chat,
        fields=fields | _read_fields(body),
        seed=secrets.randbelow(1 << 32) if seed is None else seed,
    )


def _make_limits(max_ttft: float | None, max_tpot: float | None) -> Limits | None:
    given = {"ttft": max_ttft, "tpot": max_tpot}
    seconds = {}
    for name, milliseconds in given.items():
        if milliseconds is not None:
            check_real(f"max_{name}", milliseconds, low=0, high=1e9, above_low=True)
            seconds[name] = milliseconds / 1000
    return Limits(**seconds) if seconds else None


def _read_texts(file: Path) -> tuple[str, ...]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValueError(f"--prompts {file} can't be read: {error}") from None
    return tuple(line for line in lines if line.strip())


def _read_fields(body: str) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise InvalidValueError(f"--body {body!r} is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidTypeError(f"--body {body!r} must be a JSON object, as in '{{\"top_p\": 0.9}}'")
    return fields
