"""The documents of Table 1 from files on disk, row for row as lm-eval's tasks get them from the Hub.

The folder holds the files as their authors publish them, one folder a benchmark:

    wikitext2/wiki.test.raw             lambada/lambada_test.jsonl          hellaswag/hellaswag_val.jsonl
    piqa/valid.jsonl, valid-labels.lst  winogrande/validation.jsonl         boolq/val.jsonl (SuperGLUE's form)
    arc_easy/ARC-Easy-Test.jsonl        arc_challenge/ARC-Challenge-Test.jsonl
    social_iqa/dev.jsonl, dev-labels.lst
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

VARIABLE = "TITANS_EVAL_DATA"
FIX = f"--data-dir (or {VARIABLE}) must name the folder that holds it"


def given_folder(given: str | os.PathLike | None = None) -> Path | None:
    """The folder given, or the one that the environment names; None is the Hub."""
    name = given or os.environ.get(VARIABLE)
    if not name:
        return None
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: --data-dir (or {VARIABLE}) must name that of the files")
    return folder


def data_folder(given: str | os.PathLike | None = None) -> Path | None:
    """The folder of the files: the one given, or its `lm_eval` folder; None is the Hub."""
    folder = given_folder(given)
    return folder / "lm_eval" if folder and (folder / "lm_eval").is_dir() else folder


def documents(task: str, folder: Path) -> list[dict]:
    """Every document of a task, in the order of its file."""
    if task not in READERS:
        raise ValueError(f"task {task!r} has no files: it is one of {', '.join(READERS)}")
    names, read = READERS[task]
    rows = list(read(*(folder / name for name in names)))
    if not rows:
        raise ValueError(f"{folder / names[0]} is empty")
    return rows


def check_files(tasks: Iterable[str], folder: Path) -> None:
    """Refuse a folder that lacks a file, before any slow step."""
    for path in (folder / name for task in tasks for name in READERS[task][0]):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not there: {FIX}")


def digests(task: str, folder: Path) -> dict[str, str]:
    """SHA-256 of the files behind a task."""
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in READERS[task][0]}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} is not there: {FIX}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error


def _json_lines(path: Path, *fields: str) -> Iterator[dict]:
    """The rows of a file of JSON lines, each with the given fields."""
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        for field in fields:
            if not isinstance(row, dict) or field not in row:
                raise ValueError(f"{path}, line {number} lacks {field!r}: is it the file of another benchmark?")
        yield row


def _labelled(path: Path, labels: Path, *fields: str) -> Iterator[tuple[dict, str]]:
    """Rows whose labels are in a separate file, one per line."""
    rows, found = list(_json_lines(path, *fields)), _text(labels).split()
    if len(rows) != len(found):
        raise ValueError(f"{labels} has {len(found)} labels for the {len(rows)} rows of {path.name}")
    yield from zip(rows, found)


def _wikitext(path: Path) -> Iterator[dict]:
    """Whole articles: one begins at each heading of the first level, ` = Title = `."""
    article: list[str] = []
    for line in _text(path).split("\n"):
        if _is_title(line.strip()):
            if any(held.strip() for held in article):
                yield {"page": "\n".join(article)}
            article = []
        article.append(line)
    if any(held.strip() for held in article):
        yield {"page": "\n".join(article)}


def _is_title(line: str) -> bool:
    deeper = line.startswith("= =") or line.endswith("= =")
    return line.startswith("= ") and line.endswith(" =") and not deeper


def _lambada(path: Path) -> Iterator[dict]:
    for row in _json_lines(path, "text"):
        yield {"text": row["text"]}


def _piqa(path: Path, labels: Path) -> Iterator[dict]:
    for row, label in _labelled(path, labels, "goal", "sol1", "sol2"):
        yield {"goal": row["goal"], "sol1": row["sol1"], "sol2": row["sol2"], "label": int(label)}


def _hellaswag(path: Path) -> Iterator[dict]:
    texts = ("activity_label", "ctx_a", "ctx_b", "ctx", "endings", "source_id", "split", "split_type")
    for row in _json_lines(path, "ind", "label", *texts):
        yield {"ind": row["ind"], **{field: row[field] for field in texts}, "label": str(row["label"])}


def _winogrande(path: Path) -> Iterator[dict]:
    fields = ("sentence", "option1", "option2", "answer")
    for row in _json_lines(path, *fields):
        yield {field: row[field] for field in fields}


def _arc(path: Path) -> Iterator[dict]:
    for row in _json_lines(path, "id", "question", "answerKey"):
        choices = row["question"]["choices"]
        columns = {field: [choice[field] for choice in choices] for field in ("text", "label")}
        yield {
            "id": row["id"],
            "question": row["question"]["stem"],
            "choices": columns,
            "answerKey": row["answerKey"],
        }


def _social_iqa(path: Path, labels: Path) -> Iterator[dict]:
    fields = ("context", "question", "answerA", "answerB", "answerC")
    for row, label in _labelled(path, labels, *fields):
        yield {**{field: row[field] for field in fields}, "label": label}


def _boolq(path: Path) -> Iterator[dict]:
    for row in _json_lines(path, "question", "passage", "idx", "label"):
        yield {"question": row["question"], "passage": row["passage"], "idx": row["idx"], "label": int(row["label"])}


READERS: dict[str, tuple[tuple[str, ...], Callable[..., Iterator[dict]]]] = {
    "wikitext": (("wikitext2/wiki.test.raw",), _wikitext),
    "lambada_openai": (("lambada/lambada_test.jsonl",), _lambada),
    "piqa": (("piqa/valid.jsonl", "piqa/valid-labels.lst"), _piqa),
    "hellaswag": (("hellaswag/hellaswag_val.jsonl",), _hellaswag),
    "winogrande": (("winogrande/validation.jsonl",), _winogrande),
    "arc_easy": (("arc_easy/ARC-Easy-Test.jsonl",), _arc),
    "arc_challenge": (("arc_challenge/ARC-Challenge-Test.jsonl",), _arc),
    "social_iqa": (("social_iqa/dev.jsonl", "social_iqa/dev-labels.lst"), _social_iqa),
    "boolq": (("boolq/val.jsonl",), _boolq),
}
COUNTS = {  # documents of the whole benchmark
    "wikitext": 62,
    "lambada_openai": 5153,
    "piqa": 1838,
    "hellaswag": 10042,
    "winogrande": 1267,
    "arc_easy": 2376,
    "arc_challenge": 1172,
    "social_iqa": 1954,
    "boolq": 3270,
}
