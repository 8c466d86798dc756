"""Reading text: nats per token by place, of novels that were never trained on.

`folder` is what `scripts/train/small_text.py` makes: documents to train on (`text.jsonl`), two novels to choose
learning rates by and two to report (`novels.jsonl`), and a tokenizer. Training reads the documents in their order, the
same for every model and seed. Values are of texts as long as a row of training, by place ("512-1024"), and of longer
ones to their end ("far 512-1024").

Axes: R rows, T tokens.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from ...snapshots import whole_file
from ..places import places
from .task import NATS, UNLABELLED, Point, Task

FILES = ("text.jsonl", "novels.jsonl")


@dataclass(frozen=True)
class TextTask(Task):
    """Rows of a folder's text, in order; tests are texts of its held-out novels, one by one."""

    folder: Path = Path()
    row: int = 1024

    def training_batch(self, step: int, batch_tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows, ids = max(1, batch_tokens // self.row), training_tokens(self.folder)
        end = (step + 1) * rows * self.row
        if end > len(ids):
            raise ValueError(f"`training`: step {step + 1:,} needs {end:,} tokens, {self.folder} has {len(ids):,}")
        return labelled(ids[end - rows * self.row : end].long().view(rows, self.row))

    def test_batches(self, point: Point, batch_tokens: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        for text in held_out_texts(self.folder, point["part"], point["tokens"], point["texts"]):
            yield labelled(text[None])

    def test_tokens(self, point: Point) -> int:
        return point["texts"] * point["tokens"]

    def values(self, name: str, scores: list[Tensor]) -> dict[str, float]:
        found = torch.cat(scores)[:, :-1].mean(0)  # [T - 1]: nothing comes after the last token
        return {
            f"{name} {start}-{end}".strip(): round(found[start:end].mean().item(), 4)
            for start, end in places(len(found) + 1)
        }


def text(
    folder: str = "runs/small", row: int = 1024, choose: int = 24, report: int = 32, far: int = 2, far_rows: int = 16
) -> TextTask:
    """Texts to choose and to report by, as long as a row of training; `far` texts have `far_rows` times its tokens."""
    home = Path(folder)
    files = digests(home)
    start, end = places(row)[-1]
    compared, long = f"{start}-{end}", {"part": "report", "tokens": far_rows * row, "texts": far}
    return TextTask(
        vocabulary=len(tokenizer_of(home)),
        sample=None,
        trained=({"tokens": row},),
        tested={"": {"part": "report", "tokens": row, "texts": report}, **({"far": long} if far else {})},
        chance=None,
        metric=NATS,
        chosen_by=({"part": "choose", "tokens": row, "texts": choose},),
        compared_by=compared,
        shown=(compared, *(f"far {start}-{end}" for start, end in places(far_rows * row) if end >= row and far)),
        about=files,
        folder=home,
        row=row,
    )


@cache
def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the files in the folder; refuses one that lacks them."""
    for name in (*FILES, "tokenizer"):
        if not (folder / name).exists():
            raise ValueError(f"`folder`: {folder / name} is not there; make it with scripts/train/small_text.py")
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}


def labelled(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Rows, and at every place the token that follows it."""
    labels = torch.full_like(ids, UNLABELLED)
    labels[:, :-1] = ids[:, 1:]
    return ids, labels


@cache
def tokenizer_of(folder: Path):
    return AutoTokenizer.from_pretrained(folder / "tokenizer")


@cache
def training_tokens(folder: Path) -> Tensor:
    """The training documents in a row, kept in a file beside them for the next run."""
    kept, source = folder / "tokens.pt", folder / "text.jsonl"
    if not kept.exists() or kept.stat().st_mtime < source.stat().st_mtime:
        tokenizer = tokenizer_of(folder)
        texts = (json.loads(line)["text"] for line in source.read_text(encoding="utf-8").splitlines())
        ids = (tokenizer(text, verbose=False).input_ids + [tokenizer.eos_token_id] for text in texts)
        with whole_file(kept) as file:
            torch.save(torch.tensor([token for text in ids for token in text], dtype=torch.int32), file)
    return torch.load(kept)


@cache
def held_out_texts(folder: Path, part: str, length: int, texts: int) -> list[Tensor]:
    """Texts of that many tokens, taken evenly from the novels that are kept to choose by or to report."""
    found, novels = [], novels_of(folder, part)
    for ids in novels:
        rows = ids[: len(ids) // length * length].view(-1, length)
        found += rows[:: max(1, len(rows) * len(novels) // texts)]
    if not found:
        raise ValueError(f"{folder / 'novels.jsonl'} holds no text of {length:,} tokens to {part}")
    return found[:texts]


@cache
def novels_of(folder: Path, part: str) -> list[Tensor]:
    """The tokens of each novel of a part."""
    lines = map(json.loads, (folder / "novels.jsonl").read_text(encoding="utf-8").splitlines())
    tokenizer = tokenizer_of(folder)
    return [torch.tensor(tokenizer(line["text"], verbose=False).input_ids) for line in lines if line["part"] == part]
