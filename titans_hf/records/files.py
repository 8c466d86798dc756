"""Files written completely or not at all: text, JSON records with their provenance, CSV tables. And matplotlib."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

from ..snapshots import whole_file
from .provenance import provenance


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_record(path: Path, **content) -> Path:
    """Write the present run's provenance and content as `<path>.json`; returns that path."""
    path = path.with_suffix(".json")
    origin = provenance()
    versions = origin.pop("versions")
    record = {**origin, "torch": versions["torch"], "transformers": versions["transformers"], **content}
    write_text(path, json.dumps(record, indent=1) + "\n")
    return path


def csv_text(rows: list[dict], columns: Sequence[str] | None = None) -> str:
    """Rows as CSV, by default with the columns of all of them; missing values are empty."""
    text = io.StringIO()
    names = columns or list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_csv(path: Path, rows: list[dict]) -> None:
    """Write rows as `<path>.csv`."""
    write_text(path.with_suffix(".csv"), csv_text(rows))


def plots():
    """matplotlib without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot
