"""`titans surprise` shows how surprising a text was to the memory: in the terminal, as a page, as a plot."""

from pathlib import Path
from typing import Annotated

import typer

from ..hub.loading import CommandError, Dtype, load, say, size
from .support import DeviceOption, DtypeOption, ModelOption, check_inputs, check_model, check_output

SUFFIXES = {".png": "save_png", ".html": "save_html"}


def surprise(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="UTF-8 text.")],
    model: ModelOption = None,
    memory: Annotated[
        Path | None, typer.Option("--memory", metavar="FILE", help="What was read before; it stays as it is.")
    ] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option("--out", "-o", metavar="FILE", help="Draw it as .png or .html; may be given several times."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Tokens of the text to read.")] = 4096,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = "auto",
) -> None:
    """Show how surprising each token was to the memory.

    Surprise is the memory's own loss before it writes the token, relative to the token's size: 0 where it was
    predicted, 1 where nothing was known. Prints the text coloured by it, and by layer the gates and the memory's size.

    \b
    titans surprise book.txt --model runs/demo
    titans surprise book.txt --model runs/demo --out book.png --out book.html
    """
    check_model(model, memory)
    check_inputs([file, *([memory] if memory else [])])
    for path in out or []:
        if path.suffix not in SUFFIXES:
            raise typer.BadParameter(f"{path} must end in .png or .html", param_hint="--out")
        check_output(path, memory=False)
    loaded = load(model, memory, dtype, device)
    ids = first_tokens(file, loaded.tokenizer, limit, fresh=memory is None)
    trace = loaded.model.trace_surprise(ids, loaded.recall(memory), loaded.tokenizer)
    trace.show()
    for path in out or []:
        getattr(trace, SUFFIXES[path.suffix])(path, f"Surprise: {file.name}, {len(trace):,} tokens")
        say(f"saved: {path}, {size(path.stat().st_size)}")


def first_tokens(file: Path, tokenizer, limit: int, fresh: bool):
    """The first tokens of a file; the rest of it is not read."""
    import torch

    from .reading import characters, opening_tokens, tokens

    ids = opening_tokens(tokenizer) if fresh else []
    opening = len(ids)
    with file.open("rb") as source:
        for some in tokens(characters(source, str(file)), tokenizer):
            ids += some
            if len(ids) >= limit:
                break
    if len(ids) == opening:
        raise CommandError(f"there is no text in {file}")
    return torch.tensor(ids[:limit])
