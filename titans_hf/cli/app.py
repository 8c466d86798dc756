"""The `titans` command: what a Titans model is, what it remembers, and talking to it.

Each command is a module of its own, named here. Commands raise where something is wrong; this module turns that into
one line and an exit code.
"""

import sys
from typing import Annotated

import typer
from typer.core import TyperGroup

from .. import __version__
from ..hub.loading import CommandError
from .card import card
from .chat import chat
from .eval import evaluate, table
from .eval_series import eval_series
from .graft import graft
from .info import info
from .memory import ask, remember
from .probe import probe
from .push import push
from .studio import studio
from .study import study
from .surprise import surprise

UsageError = typer.BadParameter.__base__  # typer has no public name for it
EXPECTED = (CommandError, OSError, ValueError, RuntimeError, ImportError)  # bad input, full disks, missing extras


def complain(where: str, message: object) -> None:
    typer.echo(f"{where}: {' '.join(str(message).split())}", err=True)


def reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


class Commands(TyperGroup):
    """Runs a command. Its errors are one line each; exit codes are 2 for usage, 130 for Ctrl-C and 1 for the rest."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except EXPECTED as error:
            if ctx.params.get("debug"):
                raise
            complain("titans", reason(error))
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            complain("titans", "interrupted")
            raise typer.Exit(130) from error

    def main(self, *args, **kwargs):
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except UsageError as error:
            path = error.ctx.command_path if error.ctx else "titans"
            complain(path, f"{error.format_message()} (see `{path} --help`)")
            code = error.exit_code
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    name="titans",
    cls=Commands,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def titans(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="TITANS_DEBUG", help="Show where an error comes from.")
    ] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Titans models: what they are, what they remember, and talking to them.

    \b
    titans info titans-mac-340m
    titans graft path/to/llama --out runs/graft --window 256
    titans remember book.txt --model runs/demo --out book.safetensors
    titans ask --memory book.safetensors "What is a class?"
    titans chat --model runs/demo --memory talk.safetensors
    titans surprise book.txt --model runs/demo --out book.png
    """
    if version:
        typer.echo(f"titans-hf {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


for command in (info, graft, remember, ask, chat, surprise, probe, study, studio, table, eval_series, card, push):
    app.command()(command)
app.command("eval")(evaluate)  # the word is Python's


def main() -> None:
    app(prog_name="titans")
