"""The paper's Tables 1, 2 and 5 as data, and what their columns mean. The files say where their figures come from."""

import json
from collections.abc import Container
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean

FOLDER = Path(__file__).parent / "paper"
NUMBERS = (1, 2, 5)


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        key: its name in records.
        name, unit: what the paper writes above it; the unit is "ppl" or "%".
        task, metric: what lm-eval calls it.
        mean: keys of the figures whose mean it is, where it is one.
    """

    key: str
    name: str
    unit: str
    better: str
    task: str | None = None
    metric: str | None = None
    mean: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """From lm-eval's figures to the paper's, which counts accuracies in percent."""
        return 100.0 if self.unit == "%" else 1.0

    def best(self, values: list[float]) -> float:
        return min(values) if self.better == "lower" else max(values)


@dataclass(frozen=True)
class Row:
    """A model's figures, by column key. Its kind is "simple" (recurrent or attention alone) or "hybrid"."""

    model: str
    kind: str
    values: dict[str, float]


@dataclass(frozen=True)
class Table:
    """A table: its columns, and its rows by group (the size of the models)."""

    number: int
    title: str
    source: dict
    highlight: bool
    decimals: int
    columns: tuple[Column, ...]
    groups: dict[str, list[Row]]

    def column(self, key: str) -> Column:
        return next(column for column in self.columns if column.key == key)

    @property
    def tasks(self) -> tuple[str, ...]:
        """lm-eval's tasks behind the columns, in their order."""
        return tuple(dict.fromkeys(column.task for column in self.columns if column.task))

    def with_means(self, values: dict[str, float]) -> dict[str, float]:
        """The figures, and those columns which are means of figures that are all there."""
        return {**values, **{column.key: mean([values[key] for key in column.mean]) for column in self.means(values)}}

    def means(self, known: Container[str]) -> list[Column]:
        """The columns that are means of figures which are all known."""
        return [column for column in self.columns if column.mean and all(key in known for key in column.mean)]


@cache
def paper_table(number: int) -> Table:
    if number not in NUMBERS:
        raise ValueError(f"there is no Table {number} here: --table is one of {', '.join(map(str, NUMBERS))}")
    held = json.loads((FOLDER / f"table{number}.json").read_text(encoding="utf-8"))
    columns = tuple(Column(**{**column, "mean": tuple(column.get("mean", ()))}) for column in held["columns"])
    keys = [column.key for column in columns]

    def row(model: str, kind: str, *values: float) -> Row:
        return Row(model, kind, dict(zip(keys, values, strict=True)))

    groups = {group["name"]: [row(*cells) for cells in group["rows"]] for group in held["groups"]}
    own = (held[name] for name in ("table", "title", "source", "highlight", "decimals"))
    return Table(*own, columns, groups)
