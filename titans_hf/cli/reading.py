"""Read text of any length into a cache, at constant memory: bytes to characters, to tokens, to the model.

Axis letters: T tokens of a piece.
"""

import codecs
import io
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cache_titans import TitansCache

BLOCK = 1 << 14  # bytes read at a time
WINDOW = 1 << 14  # characters tokenised at a time
OVERLAP = 1 << 10  # characters that two windows share
AGREEING = 8  # tokens on each side of a cut on which two windows must agree
HEAD_ROWS = 512  # tokens whose logits are in memory at a time


def characters(file: BinaryIO, name: str, report: Callable[[int], None] = lambda count: None) -> Iterator[str]:
    """A UTF-8 file's text as it comes, newlines as Python reads them; `report` is called with each block's size."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
    read, block = 0, b""
    take = getattr(file, "read1", file.read)  # a pipe returns what is available
    try:
        while block := take(BLOCK):
            yield decoder.decode(block)
            read += len(block)
            report(len(block))
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        place = read + len(block) - len(error.object) + error.start
        raise ValueError(f"{name} is not UTF-8 text: see byte {place:,}") from error


class Token(NamedTuple):
    """A token and its characters in the text."""

    id: int
    start: int
    end: int


def tokens(text: Iterable[str], tokenizer, window: int = WINDOW, overlap: int = OVERLAP) -> Iterator[list[int]]:
    """The tokens of a text that comes in parts, without special ones: those of the whole text at once.

    Where a text may be cut depends on the tokenizer: one joins blank lines, another a full stop and the line's end.
    So windows overlap, and the cut is made inside the overlap, where both windows have the same tokens. Where they
    share none (an overlap of one endless word), it is made at the window's end. A tokenizer that does not tell which
    characters a token stands for has its windows cut at line ends.
    """
    if not tokenizer.is_fast:
        for lines in _lines(text, window):
            yield tokenizer(lines, add_special_tokens=False).input_ids
        return
    pending: list[Token] = []
    for place, part in _windows(text, window, overlap):
        new = _encode(tokenizer, part, place)
        if place:
            cut = _meeting(pending, new, place + overlap // 2)
            if cut is None:
                cut, new = (len(pending), 0), _encode(tokenizer, part[overlap:], place + overlap)
            yield [token.id for token in pending[: cut[0]]]
            new = new[cut[1] :]
        pending = new
    yield [token.id for token in pending]


def _windows(text: Iterable[str], window: int, overlap: int) -> Iterator[tuple[int, str]]:
    """Where each window begins, and its characters; the next one begins `overlap` before its end."""
    place, held = 0, ""
    for part in text:
        held += part
        while len(held) > window + overlap:
            yield place, held[: window + overlap]
            place, held = place + window, held[window:]
    yield place, held


def _lines(text: Iterable[str], window: int) -> Iterator[str]:
    held = ""
    for part in text:
        held += part
        if len(held) > window:
            cut = held.rfind("\n") + 1 or len(held)
            yield held[:cut]
            held = held[cut:]
    yield held


def _encode(tokenizer, text: str, place: int) -> list[Token]:
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans = zip(found.input_ids, found.offset_mapping, strict=True)
    return [Token(token, place + start, place + end) for token, (start, end) in spans]


def _meeting(old: list[Token], new: list[Token], middle: int) -> tuple[int, int] | None:
    """Where, nearest to the middle of their overlap, two windows have the same tokens on both sides of a cut."""
    where = {token: k for k, token in enumerate(new)}
    shared = [i for i, token in enumerate(old) if token in where]
    for i in sorted(shared, key=lambda i: abs(old[i].start - middle)):
        k = where[old[i]]
        whole = i >= AGREEING <= k and old[i].start >= old[i - 1].end  # several tokens may share one character
        if whole and old[i - AGREEING : i + AGREEING] == new[k - AGREEING : k + AGREEING]:
            return i, k
    return None


def opening_tokens(tokenizer) -> list[int]:
    """What the tokenizer puts before a text by itself, such as a beginning-of-text token."""
    bare = tokenizer("a", add_special_tokens=False).input_ids
    dressed = tokenizer("a").input_ids
    starts = [i for i in range(len(dressed)) if dressed[i : i + len(bare)] == bare]
    return dressed[: starts[0]] if starts else []


def pieces(lists: Iterable[list[int]], size: int) -> Iterator[list[int]]:
    """The same tokens in pieces of one size, the last one may be shorter."""
    held: list[int] = []
    for some in lists:
        held += some
        whole = len(held) // size * size
        yield from (held[i : i + size] for i in range(0, whole, size))
        held = held[whole:]
    if held:
        yield held


def as_row(model, ids: list[int]) -> Tensor:
    """The tokens as the one row [1, T] of a batch."""
    if max(ids) >= model.config.vocab_size:
        raise ValueError(f"the tokenizer has a token {max(ids)}, the model only {model.config.vocab_size}: not a pair")
    return torch.tensor([ids], device=model.device)


@dataclass
class Reader:
    """Reads pieces of one text into a cache, and sums how well the model predicted them."""

    model: nn.Module
    cache: TitansCache
    tokens: int = 0
    loss: float = 0.0
    foreseen: int = 0
    last: Tensor | None = None  # [1, hidden] of the last token

    @torch.no_grad()
    def read(self, ids: list[int]) -> None:
        row = as_row(self.model, ids)
        states = self.model.model(input_ids=row, past_key_values=self.cache).last_hidden_state[0]  # [T, hidden]
        before = states[:-1] if self.last is None else torch.cat((self.last, states[:-1]))
        targets = row[0, len(ids) - len(before) :]
        for some, following in zip(before.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True):
            logits = self.model.lm_head(some).float()
            self.loss += F.cross_entropy(logits, following, reduction="sum").item()
        self.last = states[-1:].clone()  # a view would keep the whole piece
        self.tokens, self.foreseen = self.tokens + len(ids), self.foreseen + len(before)

    @property
    def perplexity(self) -> float | None:
        if not self.foreseen:
            return None
        return math.exp(min(self.loss / self.foreseen, 700.0))
