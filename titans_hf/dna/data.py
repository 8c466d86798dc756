"""Labelled DNA sequences from files: GUE's CSV, and GenomicBenchmarks as CSV or as folders; every row is checked.

    TASK/train.csv, dev.csv, test.csv     columns `sequence` (or `seq`) and `label`, a number from 0
    TASK/train/CLASS/*.txt, test/...      a file per sequence; classes are numbered in the order of their names
    TASK.csv                              one split alone: it is cut into folds

Where there is no `dev`, a tenth of `train` is kept from training to choose by.
"""

import csv
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .tokenizer import LETTERS

LONGEST = 10_000  # letters; longer than any sequence of GUE or GenomicBenchmarks
DEV_SHARE = 10
TEXT_COLUMNS = ("sequence", "seq")
SPLITS = ("train", "dev", "test")
Row = tuple[str, str, str]  # where it stands, its sequence, its label as written


@dataclass(frozen=True)
class Examples:
    """Sequences in capital letters, and the numbers of their classes."""

    sequences: list[str]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.labels)

    def pick(self, rows: Iterable[int]) -> "Examples":
        rows = list(rows)
        return Examples([self.sequences[i] for i in rows], [self.labels[i] for i in rows])


@dataclass(frozen=True)
class Task:
    """What to train on, to choose by and to report, and how many classes there are."""

    train: Examples
    dev: Examples
    test: Examples
    classes: int


def read_task(path: Path, longest: int = LONGEST, fold: int | None = None, folds: int = 5, seed: int = 0) -> Task:
    """The task in that folder with its own splits; or that fold of the CSV file, of `folds`.

    A `ValueError` names the file, the row and what is wrong with it.

    Args:
        longest: letters of the longest sequence that is accepted.
        seed: of the cut into folds, and of the tenth of the training rows that is kept where there is no `dev`.
    """
    if path.suffix == ".csv":
        return _fold_of(read_examples(path, longest), path, fold, folds, seed)
    if fold is not None:
        raise ValueError(f"{path} has splits of its own: folds are for one CSV file, leave them out")
    found = {split: _split_of(path, split) for split in SPLITS}
    for split in ("train", "test"):
        if found[split] is None:
            raise ValueError(f"{path} has no split `{split}`: it needs {split}.csv, or {split}/ with a folder a class")
    names = class_names(found["train"]) if found["train"].is_dir() else None
    read = {split: read_examples(place, longest, names) for split, place in found.items() if place is not None}
    if "dev" not in read:
        kept = stratified(read["train"].labels, DEV_SHARE, seed)
        read["dev"] = read["train"].pick(kept[0])
        read["train"] = read["train"].pick(sorted(i for part in kept[1:] for i in part))
    return checked(Task(**read, classes=1 + max(read["train"].labels)), path)


def read_examples(path: Path, longest: int = LONGEST, names: list[str] | None = None) -> Examples:
    """Every sequence and label of a CSV file, or of a folder with a folder a class."""
    rows = _folder_rows(path, names or class_names(path)) if path.is_dir() else _csv_rows(path)
    sequences, labels = [], []
    for where, sequence, label in rows:
        sequences.append(_letters(sequence, where, longest))
        labels.append(_number(label, where))
    if not labels:
        raise ValueError(f"{path} has no sequences")
    return Examples(sequences, labels)


def class_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def checked(task: Task, path: Path) -> Task:
    """The task, if its training rows have every class from 0 on, two at least, and the other splits no other."""
    known = set(task.train.labels)
    missing = sorted(set(range(max(2, task.classes))) - known)
    if missing:
        raise ValueError(f"{path}: no row of `train` has class {missing[0]}; classes are numbered from 0")
    for split in ("dev", "test"):
        other = sorted(set(getattr(task, split).labels) - known)
        if other:
            raise ValueError(f"{path}: `{split}` has class {other[0]}, which no row of `train` has")
    return task


def stratified(labels: list[int], parts: int, seed: int) -> list[list[int]]:
    """Row numbers dealt into parts, each with its share of every class. No row is in two."""
    rows, generator = defaultdict(list), torch.Generator().manual_seed(seed)
    for i in torch.randperm(len(labels), generator=generator).tolist():
        rows[labels[i]].append(i)
    order = [i for label in sorted(rows) for i in rows[label]]
    return [sorted(order[part::parts]) for part in range(parts)]


def _fold_of(examples: Examples, path: Path, fold: int | None, folds: int, seed: int) -> Task:
    if fold is None or not 0 <= fold < folds:
        raise ValueError(f"{path} is one split alone: choose `fold` from 0 to {folds - 1}, got {fold}")
    parts = stratified(examples.labels, folds, seed)
    test, rest = parts[fold], sorted(i for part in (*parts[:fold], *parts[fold + 1 :]) for i in part)
    kept = stratified([examples.labels[i] for i in rest], DEV_SHARE, seed)
    dev, *train = [[rest[i] for i in part] for part in kept]
    splits = {"train": sorted(i for part in train for i in part), "dev": dev, "test": test}
    read = {split: examples.pick(rows) for split, rows in splits.items()}
    return checked(Task(**read, classes=1 + max(examples.labels)), path)


def _split_of(folder: Path, split: str) -> Path | None:
    return next((place for place in (folder / f"{split}.csv", folder / split) if place.exists()), None)


def _csv_rows(path: Path) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or []
        text = next((name for name in TEXT_COLUMNS if name in columns), None)
        if text is None or "label" not in columns:
            raise ValueError(f"{path} needs the columns `sequence` (or `seq`) and `label`; it has {columns}")
        for number, row in enumerate(reader, 1):
            yield f"{path}, row {number}", row[text] or "", row["label"] or ""


def _folder_rows(folder: Path, names: list[str]) -> Iterator[Row]:
    for name in class_names(folder):
        if name not in names:
            raise ValueError(f"{folder} has the class {name!r}, which the training split has not")
        for path in sorted((folder / name).glob("*.txt")):
            yield str(path), path.read_text(encoding="utf-8"), str(names.index(name))


def _letters(sequence: str, where: str, longest: int) -> str:
    found = sequence.strip().upper()
    if not found:
        raise ValueError(f"{where}: the sequence is empty")
    if len(found) > longest:
        raise ValueError(f"{where}: the sequence has {len(found):,} letters, more than {longest:,}: raise the limit")
    if not set(found) <= set(LETTERS):
        unknown = next(letter for letter in found if letter not in LETTERS)
        raise ValueError(f"{where}: {unknown!r} is none of the letters {', '.join(LETTERS)}")
    return found


def _number(label: str, where: str) -> int:
    if not label.strip().isdecimal():
        raise ValueError(f"{where}: `label` must be a whole number from 0, got {label!r}")
    return int(label)
