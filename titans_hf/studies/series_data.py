"""Time series from a CSV file: dates, missing values, the field's splits, and windows of look-back and horizon.

Axis letters: R rows of a file, C channels, W windows, L look-back, F forecast steps.
"""

import csv
import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import torch
from torch import Tensor

MONTH = 30 * 24  # hours
ETT_STEPS = {"ETTh1": 1, "ETTh2": 1, "ETTm1": 4, "ETTm2": 4}  # an hour
DATES = ("%Y/%m/%d %H:%M", "%Y/%m/%d %H:%M:%S", "%m/%d/%Y %H:%M", "%Y/%m/%d")
SPLITS = ("train", "val", "test")
MISSING = ("", "nan", "na", "null")


@dataclass(frozen=True)
class Series:
    """The channels of a file, scaled by the mean and deviation of its training rows.

    Attributes:
        values: [R, C], NaN where missing.
        rows: first and last row (excluded) of each split, without the look-back before it.
    """

    name: str
    channels: list[str]
    values: Tensor
    rows: dict[str, tuple[int, int]]

    def windows(self, split: str, look_back: int, horizon: int) -> Tensor:
        """[W, C, L + F], every window whose targets are all in the split; a view, nothing is copied."""
        start, stop = self.rows[split]
        first = start if split == "train" else start - look_back
        if first < 0 or stop - first < look_back + horizon:
            raise ValueError(
                f"look-back {look_back} and horizon {horizon} do not fit into the {split} rows of {self.name}, {start} "
                f"to {stop}: choose shorter ones"
            )
        return self.values[first:stop].unfold(0, look_back + horizon, 1)


def read_series(path: Path, irregular: bool = False) -> Series:
    """The series of a CSV file with a `date` column; all other columns are channels.

    Args:
        irregular: take the rows as they come, as the field does, where the dates are not equally far apart.
    """
    dates, channels, values = read_csv(path)
    if not irregular:
        check_steps(dates, path)
    rows = split_rows(path.stem, len(values))
    start, stop = rows["train"]
    train = values[start:stop]
    nothing = [name for name, seen in zip(channels, (~train.isnan()).any(0).tolist()) if not seen]
    if nothing:
        raise ValueError(f"{path}: column {nothing[0]!r} has no number in the training rows: take it out of the file")
    mean = train.nanmean(0)
    deviation = (train - mean).square().nanmean(0).sqrt()
    deviation = torch.where(deviation > 0, deviation, torch.ones_like(deviation))
    return Series(path.stem, channels, ((values - mean) / deviation).float(), rows)


def read_csv(path: Path) -> tuple[list[datetime], list[str], Tensor]:
    """Dates, names of the channels and values [R, C], NaN where there is no number."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        names = next(reader, [])
        if "date" not in names:
            raise ValueError(f"{path} has no `date` column, only {', '.join(names[:8]) or 'nothing'}: name one `date`")
        place = names.index("date")
        channels = [name for i, name in enumerate(names) if i != place]
        if not channels:
            raise ValueError(f"{path} has no column beside `date`: nothing to forecast")
        dates, rows = [], []
        for number, row in enumerate(reader, start=2):
            if len(row) != len(names):
                raise ValueError(f"{path}, line {number}: {len(row)} fields, and the first line has {len(names)}")
            dates.append(_date(row[place], path, number))
            rows.append([_number(cell, path, number) for i, cell in enumerate(row) if i != place])
    return dates, channels, torch.tensor(rows, dtype=torch.float64).view(len(rows), len(channels))


def _date(text: str, path: Path, line: int) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        for form in DATES:
            try:
                return datetime.strptime(text, form)
            except ValueError:
                continue
    raise ValueError(f"{path}, line {line}: `date` is {text!r}: write dates as 2016-07-01 00:00:00")


def _number(text: str, path: Path, line: int) -> float:
    if text.strip().lower() in MISSING:
        return math.nan
    try:
        found = float(text)
    except ValueError as error:
        raise ValueError(f"{path}, line {line}: {text!r} is not a number: leave missing values empty") from error
    if math.isinf(found):
        raise ValueError(f"{path}, line {line}: {text!r} is not finite: leave missing values empty")
    return found


def check_steps(dates: list[datetime], path: Path) -> None:
    """Refuse dates that are not equally far apart, or further apart than those of a known file."""
    steps = [after - before for before, after in zip(dates, dates[1:])]
    if not steps:
        raise ValueError(f"{path} has {len(dates)} rows: nothing to forecast")
    step, hourly = steps[0], ETT_STEPS.get(path.stem)
    if hourly is not None and step != timedelta(hours=1) / hourly:
        raise ValueError(
            f"{path}: `date` goes on by {step}, and {path.stem} by {timedelta(hours=1) / hourly}: the splits in months "
            "need that frequency; rename the file for splits of 7/1/2"
        )
    for number, found in enumerate(steps, start=3):
        if found != step:
            raise ValueError(
                f"{path}, line {number}: `date` goes on by {found}, and before by {step}: fill the gap with rows "
                "without values, or take the rows as they come with --irregular"
            )


def split_rows(name: str, rows: int) -> dict[str, tuple[int, int]]:
    """First and last row (excluded) of each split: 12, 4 and 4 months of an ETT file, 7/1/2 of any other."""
    if name in ETT_STEPS:
        month = MONTH * ETT_STEPS[name]
        ends = [12 * month, 16 * month, 20 * month]
        if rows < ends[-1]:
            raise ValueError(f"{name} has {rows} rows, fewer than the {ends[-1]} of 20 months: it is not complete")
    else:
        train, test = int(0.7 * rows), int(0.2 * rows)
        ends = [train, rows - test, rows]
    return dict(zip(SPLITS, zip([0, *ends], ends)))
