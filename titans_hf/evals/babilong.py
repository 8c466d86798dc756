"""BABILong (arXiv 2406.10149) as tasks of lm-eval: the facts of bAbI's stories, scattered over the text of books.

With a folder, samples are made as the benchmark's authors make theirs: sentences of a book, starting at a random place,
without those of under 10 tokens; the facts between them, in order, each at a random place; the question after it all.
As many sentences as fit: the context, question and instructions apart, is no longer than its length in the model's
tokens. 0k is the facts alone, and so is a story that fills its length. Without a folder, the authors' own samples come
from the Hub. Prompts, examples and the measure are lm-eval's.
"""

import random
from collections.abc import Iterator, Sequence
from functools import cached_property

from .long_context import LongTask, Samples, joined
from .suites import length_name, metric_name
from .texts import Book, Question, books, file_digests, questions, story_file

SEED = 42
SHORTEST = 10  # tokens of a sentence of background
TOGETHER = 64  # sentences tokenised at a time
ON_THE_HUB = ("0k", "1k", "2k", "4k", "8k", "16k", "32k", "64k", "128k")


class BabilongTask(LongTask):
    """One of qa1 to qa5 at several lengths."""

    SUITE = "babilong"

    @staticmethod
    def metric_name(length: int) -> str:
        return metric_name("babilong", length)

    @cached_property
    def questions(self) -> list[Question]:
        return questions(story_file(self.config.test_split, self.folder))

    @cached_property
    def books(self) -> list[Book]:
        return books(self.folder)

    def samples(self) -> Sequence[dict]:
        if self.folder is not None:
            return Samples(self.lengths, len(self.questions), self.make)
        held = {length: self._from_the_hub(length) for length in self.lengths}
        fewest = min(len(rows) for rows in held.values())
        return Samples(self.lengths, fewest, lambda length, number: {**held[length][number], "max_length": length})

    def _from_the_hub(self, length: int) -> Sequence[dict]:
        name = length_name(length)
        if name not in ON_THE_HUB:
            raise ValueError(f"lengths: the Hub has no BABILong of {name}: it has {', '.join(ON_THE_HUB)}")
        metadata = {**self.config.metadata, "max_seq_lengths": name}
        return self.config.custom_dataset(**metadata, **self.config.dataset_kwargs)[self.config.test_split]

    def make(self, length: int, number: int) -> dict:
        asked = self.questions[number]
        return {
            "input": self.context(asked.facts, length, f"{SEED} {self.config.task} {length} {number}"),
            "question": asked.question,
            "target": asked.answer,
            "max_length": length,
        }

    def context(self, facts: Sequence[str], length: int, seed: str) -> str:
        """Facts among the sentences of a book, no longer than the length in all."""
        room = length - self.count(joined(facts))
        between = self.background(room, seed) if room > 0 else []
        while (over := self.count(text := scatter(facts, between, seed)) - length) > 0 and between:
            between = between[: -max(1, over // 100)]  # joined sentences may tokenise differently
        return text

    def background(self, room: int, seed: str) -> list[str]:
        """Sentences that follow each other in a book, as many as there is room for."""
        found: list[str] = []
        for sentence, tokens in self.from_a_random_place(random.Random(seed)):
            room -= tokens
            if room < 0:
                break
            found.append(sentence)
        return found

    def from_a_random_place(self, rng: random.Random) -> Iterator[tuple[str, int]]:
        """Sentences that are long enough, and their tokens; after the last book comes the first again."""
        first = rng.randrange(len(self.books))
        start = rng.randrange(max(1, len(self.books[first].sentences)))
        yield from self.measured(self.books[first].sentences[start:])
        while True:
            none = True
            for book in self.books[first + 1 :] + self.books[: first + 1]:
                for sentence in self.measured(book.sentences):
                    none = False
                    yield sentence
            if none:
                raise ValueError(f"{self.books[0].path.parent} holds no sentence of {SHORTEST} tokens: add books to it")

    def measured(self, given: Sequence[str]) -> Iterator[tuple[str, int]]:
        for place in range(0, len(given), TOGETHER):
            some = given[place : place + TOGETHER]
            counts = map(len, self.tokenizer([f" {each}" for each in some], add_special_tokens=False).input_ids)
            yield from ((each, tokens) for each, tokens in zip(some, counts) if tokens >= SHORTEST)

    def describe_source(self) -> dict:
        if self.folder is None:
            return {"source": "hub", "dataset": self.DATASET_PATH, "files": {}}
        paths = [story_file(self.config.test_split, self.folder), *(book.path for book in self.books)]
        return {"source": "files", "dataset": "bAbI, books", "files": file_digests(paths, self.folder)}


def scatter(facts: Sequence[str], between: Sequence[str], seed: str) -> str:
    """Facts in their order, each before a sentence drawn at random or after the last."""
    rng = random.Random(f"{seed} places")
    places = sorted(rng.randrange(len(between) + 1) for _ in facts)
    before: list[list[str]] = [[] for _ in range(len(between) + 1)]
    for place, fact in zip(places, facts):
        before[place].append(fact)
    return joined(text for told, sentence in zip(before, [*between, ""]) for text in (*told, sentence))
