"""`titans eval-series`: how far a saved forecaster is off on the series of a CSV file."""

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..hub.loading import Dtype, folder_name, load_forecaster
from .support import DeviceOption, DtypeOption, check_inputs, check_output


class Split(str, Enum):
    train, val, test = "train", "val", "test"


class Memory(str, Enum):
    on, off = "on", "off"


def eval_series(
    model: Annotated[str, typer.Argument(metavar="DIR", help="Folder of the forecaster.")],
    data: Annotated[Path, typer.Option("--data", metavar="CSV", help="A `date` column, and a column per series.")],
    split: Annotated[Split, typer.Option("--split", help="Which windows to forecast.")] = Split.test,
    memory: Annotated[Memory, typer.Option("--memory", help="Control: off never writes into it.")] = Memory.on,
    irregular: Annotated[
        bool, typer.Option("--irregular", help="Take the rows as they come, whatever their dates.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="A record, .json.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = "auto",
) -> None:
    """Forecast every window of a file's test rows, and tell the mean squared and absolute error.

    The file's splits and scale are the field's: 12, 4 and 4 months for ETTh1, ETTh2, ETTm1 and ETTm2 by their names,
    7/1/2 for any other, and all columns scaled by the training rows. Look-back and horizon are the model's.

    \b
    titans eval-series runs/series/model --data DATA/timeseries/ett/ETTh1.csv
    titans eval-series runs/series/model --data weather.csv --irregular --out weather.json
    """
    check_inputs([data])
    if out is not None:
        if out.suffix != ".json":
            raise typer.BadParameter(f"{out} must end in .json", param_hint="--out")
        check_output(out, memory=False)
    from ..records.files import write_record
    from ..studies.series_runs import evaluate

    loaded = load_forecaster(model, dtype, device)
    found = {"model": folder_name(Path(model)), **evaluate(loaded, data, split.value, irregular, memory.value)}
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        typer.echo(f"{found['data']}, {split.value}: {found['windows']:,} windows of {found['channels']} channels")
        typer.echo(f"{found['look_back']} time steps read, {found['horizon']} forecast")
        typer.echo(f"MSE {found['mse']:.4f}   MAE {found['mae']:.4f}")
    if out is not None:
        write_record(out, suite="series", **found)
