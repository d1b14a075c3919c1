"""The `infinilm` command: its subcommands and exit codes."""

import os
import sys
from dataclasses import dataclass
from io import TextIOWrapper
from typing import Annotated, cast

import typer

from infinilm import __version__
from infinilm.cli.batch import batch
from infinilm.cli.bench import bench, bench_serve
from infinilm.cli.chat import chat
from infinilm.cli.cluster import cluster_serve, cluster_status, cluster_stop
from infinilm.cli.display import print_error
from infinilm.cli.generate import generate
from infinilm.cli.help import HelpCommand, help_of, make_app
from infinilm.cli.info import info, pull
from infinilm.cli.serve import serve
from infinilm.cli.verify import verify
from infinilm.errors import InfinilmError
from infinilm.platforms import require_torch

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130

# Typer's version decides whether it vendors click: this finds the right class.
_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__mro__[2])


app = make_app()
for _command in (generate, chat, batch, serve, info, pull, verify):
    app.command(cls=HelpCommand, help=help_of(_command))(_command)
_bench_app = make_app(subcommand_metavar="[COMMAND]")
_bench_app.callback(invoke_without_command=True, help=help_of(bench))(bench)
_bench_app.command(
    "serve",
    cls=HelpCommand,
    help=help_of(bench_serve),
    # Options, --help included, are parsed by the command's own parser in benchmarks/.
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(bench_serve)
app.add_typer(_bench_app, name="bench")
_cluster_app = make_app(help="Serve a model on several machines, by Ray.")
for _name, _command in (("serve", cluster_serve), ("status", cluster_status), ("stop", cluster_stop)):
    _cluster_app.command(_name, cls=HelpCommand, help=help_of(_command))(_command)
app.add_typer(_cluster_app, name="cluster")


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


app.callback(invoke_without_command=True, help=help_of(start))(start)


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
