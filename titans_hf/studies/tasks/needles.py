"""A needle in a haystack (RULER's S-NIAH, the paper's Table 2) at the size of models that are trained in minutes.

`passkey`   a number of seven digits in one sentence of noise, repeated
`number`    the same in prose
`uuid`      a UUID in prose; only what chance draws of it is asked

Samples are those of `titans eval --suite table2` with other seeds. That suite itself asks for more than such models
can: to follow a question after nothing but text, in a vocabulary of thousands of word pieces. Here training asks the
test's own questions, words are hashed into a small vocabulary, and digits stand alone. The answer is read along with
the question, every character after the right ones before it: all are the most likely ones exactly where a greedy
continuation is the answer. A needle is further from its answer than windows reach.

Training takes its prose from the documents of `folder` (`scripts/train/small_text.py`), tests from its held-out novels.

Axes: R rows, T tokens.
"""

import json
import random
import re
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .task import UNLABELLED, Reading, Task
from .text import digests

KINDS = {"passkey": "niah_single_1", "number": "niah_single_2", "uuid": "niah_single_3"}
CHARACTERS = "0123456789abcdef-"  # of an answer, a token each
WORD = re.compile(r"\d|[^\W\d]+|[^\w\s]")
QUESTION, BEGUN = 30, 14  # tokens of a question with the words that begin its answer, and of these
NEEDLE = "One of the special magic"  # how RULER's begins
PROSE = 300_000  # words to take haystacks from
UUID_FIXED = (8, 13, 14, 18, 23)  # hyphens, and the digit that says the version
NUMBER = (1 / 9 + 6 / 10) / 7  # of a character: no number begins with 0
CHANCE = {"passkey": NUMBER, "number": NUMBER, "uuid": (30 / 16 + 1 / 4) / 31}
K = 1024


@dataclass(frozen=True)
class NeedleTask(Task):
    """Answers count as a whole; single characters are values of their own."""

    def values(self, name: str, scores: list[Tensor]) -> dict[str, float]:
        rows = [score[~score.isnan()].view(len(score), -1) for score in scores]
        whole = torch.cat([(row == 1).all(1).float() for row in rows])
        return {name: whole.mean().item(), f"{name} characters".strip(): torch.cat(rows).mean().item()}

    def readings(self) -> dict[str, Reading]:
        return {**super().readings(), "memory reset": forgetting}


def needles(
    folder: str = "runs/small",
    kinds: list = tuple(KINDS),
    trained: list = (256, 512, 1024),
    tested: list = (1024, 2048, 4096, 8192, 16384),
    apart: int = 128,
    words: int = 2048,
    rows: int = 32,
) -> NeedleTask:
    """Lengths to train on and to test at, and the shortest tested one again with the needle left out ("absent").

    Args:
        apart: tokens between a needle and the first character of its answer, at least.
        words: the vocabulary beside the characters of answers.
        rows: of every test.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ValueError(f"`kinds` must be some of {', '.join(KINDS)}; got {list(kinds)}")
    files = digests(Path(folder)) if set(kinds) != {"passkey"} else {}
    points = [(kind, tokens) for kind in kinds for tokens in tested]
    tests = {f"{kind} {_name(tokens)}": {"kind": kind, "tokens": tokens, "held_out": True} for kind, tokens in points}
    absent = {f"{kind} absent": {"kind": kind, "tokens": min(tested), "held_out": True} for kind in kinds}
    return NeedleTask(
        vocabulary=len(CHARACTERS) + words,
        sample=partial(sample, Path(folder), words, apart),
        trained=tuple({"kind": kind, "tokens": tokens} for tokens in trained for kind in kinds),
        tested={**tests, **{name: {**point, "absent": True} for name, point in absent.items()}},
        chance=0.0,
        shown=tuple(tests),
        tested_rows=rows,
        about={"chance of a character": {kind: CHANCE[kind] for kind in kinds}, **files},
    )


def _name(tokens: int) -> str:
    return str(tokens) if tokens % K else f"{tokens // K}k"


def forgetting(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> Tensor:
    """Hidden states of a Titans model whose memory returns to its start at the question.

    More exactly at the beginning of the segment of its first token, as retrieving goes by segments in mac. Windows and
    convolutions go on, with what they had of the memory.
    """
    from ...cache_titans import TitansCache
    from ...evals.model import put_back

    place = int((labels != UNLABELLED).int().argmax(1).min()) + 1 - QUESTION
    place -= place % model.config.segment_size
    cache, start = (TitansCache(model.config, rewind=False) for _ in range(2))
    model.base_model(ids[:, :1], past_key_values=start, use_cache=True, memory_read_only=True)
    before = model.base_model(ids[:, :place], past_key_values=cache, use_cache=True).last_hidden_state
    put_back(cache, start)
    after = model.base_model(ids[:, place:], past_key_values=cache, use_cache=True).last_hidden_state
    return torch.cat((before, after), dim=1)


def sample(
    folder: Path,
    words: int,
    apart: int,
    rows: int,
    generator: torch.Generator,
    kind: str,
    tokens: int,
    held_out: bool = False,
    absent: bool = False,
) -> tuple[Tensor, Tensor]:
    """Prompts with all of the answer but its last character; a label is the answer's next character."""
    haystack = Haystack([]) if kind == "passkey" else haystack_of(folder, held_out)
    seeds = torch.randint(2**62, (rows,), generator=generator).tolist()
    made = [row(kind, haystack, tokens, apart, seed, absent) for seed in seeds]
    ids = torch.tensor([[numbered(word, words) for word in prompt] for prompt, _ in made])
    labels = torch.full_like(ids, UNLABELLED)
    for own, (_, answer) in zip(labels, made):
        for place, character in enumerate(answer):
            if kind != "uuid" or place not in UUID_FIXED:
                own[tokens - len(answer) + place] = CHARACTERS.index(character)
    return ids, labels


def row(kind: str, haystack: "Haystack", tokens: int, apart: int, seed: int, absent: bool) -> tuple[list[str], str]:
    """The words of a row of so many tokens, and its answer; drawn again until the needle is far enough away."""
    draw, rest = random.Random(seed), shortest(kind)
    parts = (rest.head, rest.asked, rest.answer[:-1], [] if absent else rest.needle)
    needed = tokens - sum(map(len, parts))
    for _ in range(100 if needed > 0 else 0):
        parts = parts_of(kind, haystack, needed, draw).fitted(tokens, absent)
        if absent or len(parts.after) + len(parts.asked) >= apart:
            return parts.words, parts.answer
    raise ValueError(f"`trained`, `tested`: {tokens} tokens have no room for a needle {apart} tokens from its answer")


@dataclass(frozen=True)
class Parts:
    """The words of a sample, from RULER's first line to the words that begin the answer."""

    head: list[str]
    before: list[str]
    needle: list[str]
    after: list[str]
    asked: list[str]
    answer: str

    @property
    def words(self) -> list[str]:
        """The row: the answer is read along, all but its last character."""
        return self.head + self.before + self.needle + self.after + self.asked + [*self.answer][:-1]

    def fitted(self, tokens: int, absent: bool) -> "Parts":
        """So many words: of the haystack, what is too much is cut at its beginning, or else at the end."""
        whole = replace(self, needle=[]) if absent else self
        surplus = len(whole.words) - tokens
        front = min(surplus, len(self.before))
        return replace(whole, before=self.before[front:], after=self.after[: len(self.after) - (surplus - front)])


def parts_of(kind: str, haystack: "Haystack", tokens: int, draw: random.Random) -> Parts:
    """A sample of RULER's whose haystack has so many tokens or a few more. Its key is two words with a hyphen, so that
    all questions are equally long."""
    from ...evals.needles import draw_needle, prepare_niah

    if kind == "passkey":
        text = prepare_niah.get_haystack("repeat")
        units = -(-tokens // len(split(text)))
    else:
        text = haystack.stretch(tokens, draw)
        units = len(text)
    while True:
        found, answer, begun = draw_needle(KINDS[kind], text, units, str(draw.getrandbits(62)))
        if len(split(begun)) == BEGUN:
            break
    first, _, rest = found.partition("\n")
    context, _, question = rest.rpartition("\n")
    place = context.index(answer)
    start, end = context.rindex(NEEDLE, 0, place), place + len(answer)
    needle = [*split(context[start:place]), *answer]
    asked = split(f"{question} {begun}")
    return Parts(split(first), split(context[:start]), needle, split(context[end:]), asked, answer)


@cache
def shortest(kind: str) -> Parts:
    """A sample with hardly a haystack: all others have as many tokens beside theirs."""
    return parts_of(kind, Haystack(["Here", "we", "go."]), 1, random.Random(0))


def split(text: str) -> list[str]:
    """Words, punctuation and single digits."""
    return WORD.findall(text)


@lru_cache(maxsize=2**18)
def numbered(word: str, words: int) -> int:
    """The number of a character of answers, or one of `words` others, by a hash that is the same everywhere."""
    if len(word) == 1 and word in CHARACTERS:
        return CHARACTERS.index(word)
    return len(CHARACTERS) + zlib.crc32(word.encode()) % words


class Haystack:
    """Prose in words, and how many tokens each of them has."""

    def __init__(self, words: list[str]):
        self.words = words
        self.tokens = [0, *accumulate(len(split(word)) for word in words)]

    def stretch(self, tokens: int, draw: random.Random) -> list[str]:
        """Words from a random place, of so many tokens or a few more."""
        last = bisect_right(self.tokens, self.tokens[-1] - tokens)
        if last < 1:
            raise ValueError(f"`folder` holds {self.tokens[-1]:,} tokens, too few for haystacks of {tokens:,}")
        start = draw.randrange(last)
        return self.words[start : bisect_left(self.tokens, self.tokens[start] + tokens)]


@cache
def haystack_of(folder: Path, held_out: bool) -> Haystack:
    """Of the documents to train on, or of the novels to report."""
    from ...evals.texts import prose

    with (folder / ("novels.jsonl" if held_out else "text.jsonl")).open(encoding="utf-8") as lines:
        documents = (json.loads(line) for line in lines)
        return Haystack(_words(prose(found["text"]) for found in documents if found.get("part") != "choose"))


def _words(texts: Iterable[str]) -> list[str]:
    found: list[str] = []
    for text in texts:
        found += text.split(" ")
        if len(found) >= PROSE:
            break
    return found[:PROSE]
