"""Table 2 as tasks of lm-eval: RULER's single needles (S-NIAH), hidden in noise or in books.

niah_single_1   pass-key    a number, in one sentence of noise, repeated
niah_single_2   number      a number, in prose
niah_single_3   word        a UUID, in prose

lm-eval draws needles, writes samples and scores answers. Ours are where the prose is from (books of a folder; without
one, Paul Graham's essays from the Hub), how sentences are split (by a rule, where lm-eval downloads a model), and
the fit: lm-eval fills a length in steps of 500 words or 25 sentences, here a sample takes all that fits. As in RULER,
that is the prompt up to the answer's first words, and 128 tokens of answer. Each sample has a seed of its own.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, cached_property, lru_cache
from importlib.metadata import version

import nltk

from .long_context import LongTask, Samples
from .suites import length_name, metric_name
from .texts import Book, books, file_digests, sentences, words


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute's value within a `with` block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


with replaced(nltk.data, "find", lambda *args, **kwargs: ""):  # else lm-eval downloads a model when this is imported
    from lm_eval.tasks.ruler import prepare_niah
    from lm_eval.tasks.ruler.niah_utils import TEMPLATE

COUNT = 500  # samples of each length, as in RULER
SEED = 42
HAYSTACKS = {"niah_single_1": "repeat", "niah_single_2": "essay", "niah_single_3": "essay"}
VALUES = {"niah_single_1": "numbers", "niah_single_2": "numbers", "niah_single_3": "uuids"}
sentences_of = lru_cache(maxsize=64)(sentences)  # most samples of a length have the same prose


@contextmanager
def seeded(seed: str) -> Iterator[None]:
    """Seed Python's generator, which lm-eval draws from, within a `with` block."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


def draw_needle(task: str, haystack: str | list[str], units: int, seed: str) -> tuple[str, str, str]:
    """lm-eval's sample with a number of units: its text, the answer, and the words that begin the answer."""
    value = VALUES[task]
    with seeded(seed), replaced(prepare_niah, "cached_sent_tokenize", sentences_of):
        text, answers, query = prepare_niah.generate_input_output(
            units,
            haystack,
            type_haystack=HAYSTACKS[task],
            num_needle_k=1,
            type_needle_k="words",
            num_needle_v=1,
            type_needle_v=value,
            template=TEMPLATE,
        )
    return text, answers[0], f"The special magic {value[:-1]} for {query} mentioned in the provided text is"


class NeedleTask(LongTask):
    """niah_single_1, 2 or 3 at several lengths. Its units are sentences of noise, or words of prose."""

    SUITE = "table2"

    def __init__(self, config: dict):
        self.most = cache(self._most)
        super().__init__(config)

    @staticmethod
    def metric_name(length: int) -> str:
        return metric_name("table2", length)

    @property
    def kind(self) -> str:
        return HAYSTACKS[self.config.task]

    @cached_property
    def used(self) -> list[Book]:
        """The books that the haystack is from."""
        return [] if self.folder is None or self.kind == "repeat" else words(books(self.folder), max(self.lengths))[1]

    @cached_property
    def haystack(self) -> str | list[str]:
        if self.folder is None or self.kind == "repeat":
            return prepare_niah.get_haystack(self.kind)
        return words(self.used, max(self.lengths))[0]

    def fewshot_docs(self) -> None:
        """Zero-shot: lm-eval would look through all samples for examples."""

    def samples(self) -> Samples:
        for length in self.lengths:
            self.most(length)  # refuses a length before any work
        return Samples(self.lengths, COUNT, self.make)

    def make(self, length: int, number: int) -> dict:
        """A sample that fits its length: if its own needle is longer than the first one's, the haystack shrinks."""
        units = self.most(length)
        while (row := self.draw(length, number, units))["length"] > length and units > 1:
            units -= 1 if self.kind == "repeat" else min(row["length"] - length, units - 1)
        if row["length"] > length:
            raise ValueError(_no_room(length))
        return row

    def _most(self, length: int) -> int:
        """The most units with which the first sample of a length fits."""
        low, high = 1, length if self.kind == "repeat" else len(self.haystack)
        if self.draw(length, 0, low)["length"] > length:
            raise ValueError(_no_room(length))
        high = min(high, length)
        if self.kind == "essay" and high < length and self.draw(length, 0, high)["length"] <= length:
            raise ValueError(
                f"{self.config.task}: the text has {high:,} words, too few for {length_name(length)}: add books to the "
                "folder, or leave the length out"
            )
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.draw(length, 0, middle)["length"] <= length else (low, middle)
        return low

    def draw(self, length: int, number: int, units: int) -> dict:
        """A sample with a number of units."""
        seed = f"{SEED} {self.config.task} {length} {number}"
        text, answer, begun = draw_needle(self.config.task, self.haystack, units, seed)
        return {
            "index": number,
            "input": text,
            "outputs": [answer],
            "length": self.count(f"{text} {begun}") + self.config.generation_kwargs["max_gen_toks"],
            "max_length": length,
            "gen_prefix": begun,
        }

    def describe_source(self) -> dict:
        needles = f"RULER, words of wonderwords {version('wonderwords')}"
        if self.kind == "repeat":
            return {"source": "noise", "dataset": f"{needles}, one sentence repeated", "files": {}}
        if self.folder is None:
            return {"source": "hub", "dataset": f"{needles}, baber/paul_graham_essays", "files": {}}
        files = file_digests([book.path for book in self.used], self.folder)
        return {"source": "files", "dataset": f"{needles}, books", "files": files}


def _no_room(length: int) -> str:
    return f"lengths: {length} tokens leave no room for a needle, its question and the answer; ask for a longer one"
