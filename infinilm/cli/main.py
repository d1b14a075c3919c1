"""The `infinilm` command: its subcommands and exit codes."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any, cast

import typer

from infinilm import __version__
from infinilm.cli.display import print_error
from infinilm.cli.help import HelpCommand, help_of, make_app
from infinilm.errors import InfinilmError
from infinilm.platforms import require_torch

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130

# Typer's version decides whether it vendors click: this finds the right class.
_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__mro__[2])


# The modules of the commands, in the order of the help page. Only the module of the command that runs is imported.
_COMMANDS = {
    "generate": "generate",
    "chat": "chat",
    "batch": "batch",
    "serve": "serve",
    "info": "info",
    "pull": "info",
    "verify": "verify",
    "bench": "bench",
    "cluster": "cluster",
}


def _make_app(args: Sequence[str]) -> typer.Typer:
    """The app with the command that the arguments begin with, or with all commands."""
    app = make_app()
    app.callback(invoke_without_command=True, help=help_of(start))(start)
    for name in args[:1] if args and args[0] in _COMMANDS else _COMMANDS:
        module = import_module(f"infinilm.cli.{_COMMANDS[name]}")
        if name in _GROUPS:
            app.add_typer(_GROUPS[name](module), name=name)
        else:
            command = getattr(module, name)
            app.command(cls=HelpCommand, help=help_of(command))(command)
    return app


def _make_bench(module: Any) -> typer.Typer:
    app = make_app(subcommand_metavar="[COMMAND]")
    app.callback(invoke_without_command=True, help=help_of(module.bench))(module.bench)
    app.command(
        "serve",
        cls=HelpCommand,
        help=help_of(module.bench_serve),
        # Options, --help included, are parsed by the command's own parser in benchmarks/.
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(module.bench_serve)
    return app


def _make_cluster(module: Any) -> typer.Typer:
    app = make_app(help="Serve a model on several machines, by Ray.")
    for name in ("serve", "status", "stop"):
        command = getattr(module, f"cluster_{name}")
        app.command(name, cls=HelpCommand, help=help_of(command))(command)
    return app


_GROUPS = {"bench": _make_bench, "cluster": _make_cluster}


@dataclass
class Settings:
    debug: bool = False


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"infinilm {__version__}")
        raise typer.Exit


def start(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show where in the code an error came from.")] = False,
    version: Annotated[  # noqa: ARG001 (its callback acts)
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Run language models on this machine: generate text, chat, or serve them over HTTP.

    To begin: infinilm chat. It downloads a small model (98 MB) the first time. 'infinilm COMMAND -h' explains a
    command.
    """
    context.ensure_object(Settings).debug = debug
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(args: list[str] | None = None) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # for terminals with a limited character set
    sys.exit(run(args))


def run(args: list[str] | None = None) -> int:
    """Run the command line. Errors made by the user or the model's files become one line and exit code 2."""
    settings = Settings()
    try:
        with require_torch("this command"):
            app = _make_app(sys.argv[1:] if args is None else args)
            return app(args=args, prog_name="infinilm", standalone_mode=False, obj=settings) or 0
    except (InfinilmError, _UsageError) as error:
        if settings.debug:
            raise
        print_error(_describe(error))
        return EXIT_ERROR
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout is gone; without this Python would report the error again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _describe(error: BaseException) -> str:
    """The error as one line; for a usage error, with the command that prints the help."""
    context = getattr(error, "ctx", None)
    message = error.format_message() if isinstance(error, _UsageError) else str(error)
    if not context:
        return message
    link = " See" if message.endswith("?") else "; see"
    return f"{message.rstrip('.')}{link} '{context.command_path} --help'"
