"""The text and the tokenizer of the small models: articles of WikiText-2 and chapters of novels, in equal parts.

    python scripts/train/small_text.py --data DATA --out runs/small

DATA holds `text/wikitext2.train.tokens` and `text/books/*.md`. Articles go through lm-eval's own detokeniser, as those
of its test do; the rare words that WikiText-2 hides stay `<unk>`. Both kinds are shuffled together, and a byte-level
BPE is learned from them. Writes `text.jsonl` with one document per line, `tokenizer/`, and `about.json` for the cards.

The last four novels by name are never trained on: `novels.jsonl` holds two to choose settings by (`"part": "choose"`)
and two to report (`"report"`), each as one long document.
"""

import argparse
import json
import random
import re
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path

from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

from ..snapshots import whole_file
from .corpus import train_tokenizer
from .outputs import whole_folder

TITLE = re.compile(r"^ = [^=].*[^=] = $", re.MULTILINE)  # of an article; section titles have more equals signs
CHAPTER = re.compile(r"^#+ .*$", re.MULTILINE)
SHORTEST = 2000  # characters of a chapter: title pages and tables of contents are shorter
VOCABULARY = 4096
SEED = 0
CHOOSE, REPORT = 2, 2  # novels


def read_articles(path: Path) -> Iterator[str]:
    """The articles of WikiText-2, detokenised."""
    text = path.read_text(encoding="utf-8")
    starts = [found.start() for found in TITLE.finditer(text)]
    for start, end in zip(starts, [*starts[1:], len(text)]):
        yield wikitext_detokenizer({"page": text[start:end]}).strip()


def split_novels(folder: Path) -> tuple[list[Path], list[Path]]:
    """The novels to train on, and those to hold out; with few novels, none is held out."""
    novels, held_out = sorted(folder.glob("*.md")), CHOOSE + REPORT
    return (novels[:-held_out], novels[-held_out:]) if len(novels) > 2 * held_out else (novels, [])


def read_chapters(novel: Path) -> list[str]:
    """The chapters of a novel, without their headings."""
    found = (chapter.strip() for chapter in CHAPTER.split(novel.read_text(encoding="utf-8")))
    return [chapter for chapter in found if len(chapter) >= SHORTEST]


def as_long_as(length: int, documents: Iterable[str]) -> list[str]:
    """The first documents, up to `length` characters."""
    documents = list(documents)
    return [text for text, so_far in zip(documents, accumulate(map(len, documents))) if so_far <= length]


def mix(articles: list[str], chapters: list[str], seed: int = SEED) -> list[str]:
    """All articles and random chapters of about the same total length, shuffled."""
    draw = random.Random(seed)
    chosen = as_long_as(sum(map(len, articles)), draw.sample(chapters, len(chapters)))
    documents = [*articles, *chosen]
    draw.shuffle(documents)
    return documents


def describe(articles: int, chapters: int, novels: int, characters: int) -> dict:
    """What the models' cards say about their text."""
    return {
        "language": "en",
        "data": f"All {articles:,} articles of WikiText-2's training set, through lm-eval's detokeniser (rare words "
        f"stay `<unk>`), and {chapters:,} chapters, drawn at random, of {novels:,} public-domain novels: equal parts, "
        f"{characters / 1e6:.1f} million characters in a random order, read from the first on. The tokenizer, a "
        f"byte-level BPE of {VOCABULARY:,} tokens, learned from the same text. Both are made by "
        "`scripts/train/small_text.py`.",
    }


def write_lines(path: Path, rows: Iterable[dict]) -> None:
    with whole_file(path) as file:
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with text/wikitext2.train.tokens, text/books")
    parser.add_argument("--out", type=Path, default=Path("runs/small"))
    args = parser.parse_args(argv)
    source, novels = args.data / "text/wikitext2.train.tokens", args.data / "text/books"
    if not source.is_file() or not novels.is_dir():
        parser.error(f"--data: {source} and {novels} are needed")
    to_train, to_hold_out = split_novels(novels)
    articles, chapters = list(read_articles(source)), [text for novel in to_train for text in read_chapters(novel)]
    documents = mix(articles, chapters)
    args.out.mkdir(parents=True, exist_ok=True)
    with whole_folder(args.out / "tokenizer") as folder:
        train_tokenizer(documents, VOCABULARY).save_pretrained(folder)
    write_lines(args.out / "text.jsonl", ({"text": text} for text in documents))
    write_lines(
        args.out / "novels.jsonl",
        (
            {
                "title": novel.stem,
                "part": "choose" if i < CHOOSE else "report",
                "text": "\n\n".join(read_chapters(novel)),
            }
            for i, novel in enumerate(to_hold_out)
        ),
    )
    characters, chosen = sum(map(len, documents)), len(documents) - len(articles)
    about = describe(len(articles), chosen, len(to_train), characters)
    with whole_file(args.out / "about.json") as file:
        file.write_text(json.dumps(about, indent=1) + "\n", "utf-8")
    print(f"{len(articles)} articles, {chosen} of {len(chapters)} chapters, {characters:,} characters")
