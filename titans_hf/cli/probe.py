"""`titans probe`: what a model's memories do with a text that they read twice."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..hub.loading import CommandError, Dtype, load
from .support import DeviceOption, DtypeOption, check_inputs, check_output


def probe(
    model: Annotated[str, typer.Argument(metavar="DIR", help="Folder of the model.")],
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="The text to read; its first tokens count.")],
    tokens: Annotated[int, typer.Option("--tokens", min=16, help="Tokens of the text to read.")] = 1024,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Draw it as .png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = "auto",
) -> None:
    """Look into a model's memories: are keys different, are answers different, is the second pass less surprising?

    \b
    titans probe runs/demo --text book.txt
    titans probe runs/demo --text book.txt --out probe.png
    """
    check_inputs([text])
    if out is not None:
        if out.suffix != ".png":
            raise typer.BadParameter(f"{out} must end in .png", param_hint="--out")
        check_output(out, memory=False)
    from ..studies.probe import draw, first_tokens, in_words
    from ..studies.probe import probe as look

    loaded = load(model, None, dtype, device)
    ids = first_tokens(text, loaded.tokenizer, tokens)
    if len(ids) < 16:
        raise CommandError(f"{text} has {len(ids)} tokens: probe with 16 or more")
    found = look(loaded.model, ids)
    typer.echo(json.dumps(asdict(found), indent=1) if as_json else in_words(found))
    if out is not None:
        draw(found, out)
