"""Text for the long-context tasks from files on disk: books as haystacks, and bAbI's stories.

    text/books/*.md, *.txt          prose; Markdown's headings, rules and emphasis are left out
    babi/en-10k/qa1_*_test.txt ...  bAbI v1.2, as its authors publish it

The folder that is given holds these; it may be the folder of the books, or of the stories, itself.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from .files import VARIABLE

BOOKS = ("text/books", "books", ".")
STORIES = ("babi/en-10k", "en-10k", "babi", ".")
FIX = f"--data-dir (or {VARIABLE}) must name the folder that holds"
TITLES = ("Mr.", "Mrs.", "Dr.", "St.")  # abbreviations: their full stops end no sentence
ENDS = re.compile(r"""([.!?]["'”’)\]]?)\s+(?=["'“‘(\[]?[A-Z])""")
NO_PROSE = re.compile(r"^(?:#.*|\s*(?:[-*_]\s*){3,})$", re.MULTILINE)


def sentences(text: str) -> list[str]:
    """The sentences of a text, by a rule that needs no download: a full stop, white space, a capital letter."""
    found, start = [], 0
    for end in ENDS.finditer(text):
        if not text.endswith(TITLES, start, end.end(1)):
            found.append(text[start : end.end(1)])
            start = end.end()
    return [*found, text[start:]] if text[start:] else found


def prose(markdown: str) -> str:
    """A book's sentences on one line."""
    return re.sub(r"\s+", " ", re.sub(r"[*_]", "", NO_PROSE.sub("", markdown))).strip()


@dataclass(frozen=True)
class Book:
    """A file of prose, read when it is needed."""

    path: Path

    @cached_property
    def text(self) -> str:
        try:
            return prose(self.path.read_text(encoding="utf-8-sig"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path} is not UTF-8: {error}") from error

    @cached_property
    def sentences(self) -> list[str]:
        return sentences(self.text)


book_of = cache(Book)  # the tasks of a suite share them


def books(folder: Path) -> list[Book]:
    """The books of a folder, by name."""
    for place in BOOKS:
        found = sorted(path for path in (folder / place).glob("*") if _is_book(path))
        if found:
            return [book_of(path) for path in found]
    raise FileNotFoundError(f"{folder} holds no books: {FIX} text/books/*.md (or *.txt), text to hide things in")


def _is_book(path: Path) -> bool:
    of_babi = re.match(r"qa\d+_", path.name)
    return path.is_file() and path.suffix in (".md", ".txt") and path.stem != "README" and not of_babi


def words(books: list[Book], count: int) -> tuple[list[str], list[Book]]:
    """The first words of the books, and the books that they are from."""
    found, used = [], []
    for book in books:
        if len(found) >= count:
            break
        found, used = found + book.text.split(" "), [*used, book]
    return found[:count], used


@dataclass(frozen=True)
class Question:
    """A question of bAbI, and the facts that were told before it."""

    facts: tuple[str, ...]
    question: str
    answer: str


def story_file(task: str, folder: Path) -> Path:
    """The test file of a task of bAbI, such as qa1."""
    for place in STORIES:
        found = sorted((folder / place).glob(f"{task}_*_test.txt"))
        if found:
            return found[0]
    raise FileNotFoundError(f"{folder} holds no {task}_*_test.txt of bAbI: {FIX} babi/en-10k")


def questions(path: Path) -> list[Question]:
    """All questions of a file of bAbI, in its order: lines `3 Fact.` and `4 Question?<tab>answer<tab>3`."""
    found = list(_questions(path))
    if not found:
        raise ValueError(f"{path} holds no questions: is it a file of bAbI?")
    return found


def _questions(path: Path) -> Iterator[Question]:
    facts: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        place, _, rest = line.partition(" ")
        if not place.isdigit() or not rest:
            raise ValueError(f"{path}, line {number} is not bAbI's: it begins with a number and a space")
        if place == "1":
            facts = []
        text, *answer = (part.strip() for part in rest.split("\t"))
        if answer:
            yield Question(tuple(facts), text, answer[0])
        else:
            facts.append(text)


def file_digests(paths: list[Path], folder: Path) -> dict[str, str]:
    """SHA-256 of files, by their names in the folder."""
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
