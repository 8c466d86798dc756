"""`titans card`: the model card of a preset, or of a trained model from its folder and its records."""

from pathlib import Path
from typing import Annotated

import typer

from ..hub.loading import CommandError, folder_name, quiet, say
from .support import check_output

RecordsOption = Annotated[
    list[Path] | None, typer.Option("--records", metavar="FILE", help="A record of `titans eval`; may be repeated.")
]
TrainingOption = Annotated[
    Path | None,
    typer.Option("--training", metavar="FILE", help="Left out, training.json in the folder or beside it."),
]


def card(
    name: Annotated[str, typer.Argument(metavar="NAME_OR_DIR", help="A preset, or the folder of a model.")],
    records: RecordsOption = None,
    training: TrainingOption = None,
    title: Annotated[str | None, typer.Option("--name", help="The model's name; left out, its folder's.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Left out, it is printed.")] = None,
) -> None:
    """Write a model card: what the model is and keeps, how it was trained, what it reached, by which commands.

    A preset's card says that it is untrained. A folder needs config.json, not the weights; records of
    `titans eval` in it are used as well.

    \b
    titans card titans-mac-340m --out titans-mac-340m.md
    titans card runs/small/mag/model --records mag-table1.json --out mag.md
    """
    from ..configuration_titans import PRESETS
    from ..hub.cards import preset_card, read_model, trained_card
    from ..hub.series_card import forecaster_card, is_forecaster
    from ..records.files import write_text

    quiet()
    if out is not None:
        check_output(out, memory=False)
    if not Path(name).exists() and name in PRESETS:
        if records or training or title:
            raise CommandError(f"{name} is a preset, which nobody trained: leave out --records, --training and --name")
        made = preset_card(name)
    elif is_forecaster(Path(name)):
        if records or training:
            raise CommandError(f"{name} is a forecaster: its records are those in its folder; leave out the options")
        made = forecaster_card(Path(name), title or folder_name(Path(name)))
    else:
        made = trained_card(read_model(model_folder(name), records or [], training, title))
    if out is None:
        typer.echo(str(made), nl=False)
    else:
        write_text(out, str(made))
        say(f"saved: {out}")


def model_folder(name: str) -> Path:
    """The folder of that name; for a name that is neither folder nor preset the error names the nearest preset."""
    if Path(name).is_file():
        raise CommandError(f"{name} is a file; pass the folder of a model")
    if not Path(name).is_dir():
        from difflib import get_close_matches

        from ..configuration_titans import PRESETS

        near = get_close_matches(name, PRESETS, n=1, cutoff=0.5)
        raise CommandError(f"no folder {name}" + (f"; the preset nearest to it is {near[0]}" if near else ""))
    return Path(name)
