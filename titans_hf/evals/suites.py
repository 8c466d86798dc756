"""The suites of long context: their tasks, their lengths, and how a record names what they measure."""

from collections.abc import Iterable
from pathlib import Path

from .paper_tables import Column
from .texts import books, story_file

TASKS = {
    "table2": {"niah_single_1": "niah_pk", "niah_single_2": "niah_n", "niah_single_3": "niah_w"},
    "babilong": {f"babilong_qa{number}": f"babilong_qa{number}" for number in range(1, 6)},
}
LENGTHS = {"table2": "2k,4k,8k,16k", "babilong": "0k,1k,2k,4k,8k,16k"}
K = 1024


def read_lengths(suite: str, given: str | int | Iterable | None = None) -> list[int]:
    """Lengths in tokens, each once: those given ("2k,4k" or numbers of tokens), or the suite's own, if it has any."""
    if suite not in LENGTHS:
        if given:
            raise ValueError(f"lengths: {suite} has none; leave them out, or choose {' or '.join(LENGTHS)}")
        return []
    asked = given or LENGTHS[suite]
    parts = asked.replace(",", " ").split() if isinstance(asked, str) else [asked] if isinstance(asked, int) else asked
    found = list(dict.fromkeys(_length(part) for part in parts))
    if not found:
        raise ValueError(f"lengths: {given!r} holds none; write them as {LENGTHS[suite]}")
    if suite == "table2" and 0 in found:
        raise ValueError("lengths: a haystack of 0k has no room for a needle; table2 begins at 1k")
    return found


def _length(part: str | int) -> int:
    text = str(part).lower()
    digits, scale = (text[:-1], K) if text.endswith("k") else (text, 1)
    if not digits.isdecimal() or not digits.isascii():
        raise ValueError(f"lengths: {part!r} is not one; write them as 2k,4k,16k or in tokens as 2048,4096")
    return int(digits) * scale


def length_name(length: int) -> str:
    """A length as the paper writes it: 2k for 2,048 tokens."""
    return str(length) if length % K else f"{length // K}k"


def metric_name(suite: str, length: int) -> str:
    """What the tasks call their figure of a length: RULER's are named by tokens, BABILong's as its files are."""
    return str(length) if suite == "table2" else length_name(length)


def columns(suite: str, tasks: Iterable[str], lengths: Iterable[int]) -> list[Column]:
    """The figures of a run, as columns. Those of Table 2 have the names of the paper's."""
    return [
        Column(f"{TASKS[suite][task]}_{length_name(length)}", task, "%", "higher", task, metric_name(suite, length))
        for task in tasks
        for length in lengths
    ]


def check_texts(tasks: Iterable[str], folder: Path) -> None:
    """Refuse a folder that lacks the texts of a task, before anything slow begins."""
    for task in tasks:
        if task != "niah_single_1":
            books(folder)
        if task.startswith("babilong_"):
            story_file(task.removeprefix("babilong_"), folder)
