"""What the commands share: options, and checks of inputs and outputs before the work begins."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ..hub.loading import CommandError, Dtype, read_memory_note

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="DIR",
        help="Folder of the model, or the Hub name of one that has been downloaded. Left out, the model that the "
        "memory's file names.",
    ),
]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Precision; auto is that of the memory or the model.")]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...; auto is a GPU if there is one.")]


def check_model(model: str | None, memory: Path | None) -> None:
    """Refuse, before anything is loaded, a command that names no model."""
    if model is None and memory is None:
        raise typer.BadParameter("which model? Pass --model DIR, or a --memory that names it", param_hint="--model")


def check_inputs(files: list[Path]) -> None:
    """Refuse files that cannot be read; `-` is the standard input."""
    for file in files:
        if str(file) != "-":
            file.open("rb").close()


def check_output(path: Path, memory: bool = True) -> None:
    """Refuse an output that cannot be written; a memory may overwrite a memory, not another file."""
    if path.is_dir():
        raise CommandError(f"{path} is a folder; name a file")
    if not path.parent.is_dir():
        raise CommandError(f"{path} cannot be written: there is no folder {path.parent}")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from error
    if memory and path.exists():
        try:
            read_memory_note(path)
        except (ValueError, OSError) as error:
            raise CommandError(f"{path} exists and is not a memory: choose another name") from error
