"""`titans study`: train and test small models side by side on a task, as a YAML file says."""

import os
from pathlib import Path
from typing import Annotated

import typer

from .support import check_output

TRIED = ("setting", "model", "lr", "validation")


def study(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A study or a YAML file; none lists them.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The reduced form: about a minute.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", min=0, help="Runs side by side; 0 in this process.")] = 0,
    out: Annotated[Path, typer.Option("--out", help="Where runs are kept, and found again.")] = Path("runs/studies"),
    record: Annotated[Path | None, typer.Option("--record", metavar="PATH", help="Writes PATH.json and .png.")] = None,
) -> None:
    """Models x settings x seeds of one task: a table, and with --record a plot. A run that is done is kept.

    \b
    titans study
    titans study mqar --quick
    titans study groups --jobs 2 --record model_cards/records/groups
    """
    from ..records.files import write_record
    from ..studies.families import ABOUT
    from ..studies.report import draw, table
    from ..studies.runner import expected_seconds, measure, tuned
    from ..studies.settings import show
    from ..studies.study import known, read_study

    if name is None:
        for path in known():
            typer.echo(f"{path.stem:<18}{read_study(str(path)).about}")
        return
    chosen, folder = read_study(name, quick), out / Path(name).stem
    if record is not None:
        check_output(record.with_suffix(".json"), memory=False)
    seconds = expected_seconds(chosen, folder, jobs)
    typer.echo(f"{chosen.about}\nabout {_in_words(seconds)}, with {max(1, jobs)} of {os.cpu_count()} cores")
    records = measure(chosen, folder, jobs)
    rows = table(records, chosen.paper)
    typer.echo(show(rows))
    if record is not None:
        tried = [{field: run[field] for field in TRIED} for run in tuned(chosen, folder, jobs)]
        about = {run["family"]: ABOUT[run["family"]] for run in records if run["family"] in ABOUT}
        write_record(record, study=chosen.model_dump(), families=about, table=rows, tried=tried, runs=records)
        draw(records, record.with_suffix(".png"))


def _in_words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds of training and tests"
    length = f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
    return f"{length} of training and tests"
