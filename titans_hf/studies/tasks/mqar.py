"""Multi-query associative recall, in the form of Zoology (Arora et al. 2023): how many pairs does a memory hold?

A sequence shows pairs of a key and a value, then asks for every key again, at gaps drawn from a power law; the other
places hold random tokens. What is compared is the bytes of state: a state of another size holds another number of
pairs.
"""

from functools import partial

import torch
from torch import Tensor

from .task import UNLABELLED, Task

POWER = 0.01  # of the gaps, as Zoology's default
TRAINED = ((64, 4), (128, 8), (256, 16), (256, 32), (256, 64))  # tokens, pairs
TESTED = (*TRAINED, (512, 64), (512, 128), (1024, 128), (1024, 256))


def mqar(vocabulary: int = 8192, trained: list = TRAINED, tested: list = TESTED) -> Task:
    """Points are pairs of a number of tokens and a number of key-value pairs."""
    points = [{"tokens": tokens, "pairs": pairs} for tokens, pairs in trained]
    tests = {f"{tokens}/{pairs}": {"tokens": tokens, "pairs": pairs} for tokens, pairs in tested}
    return Task(vocabulary, partial(sample, vocabulary), tuple(points), tests, chance=2 / vocabulary)


def sample(vocabulary: int, rows: int, generator: torch.Generator, tokens: int, pairs: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels, [rows, tokens]; a label is the value at the place where its key is asked."""
    places = (tokens - 2 * pairs) // 2
    if places < pairs:
        raise ValueError(f"{tokens} tokens have no room for {pairs} pairs twice")
    half = vocabulary // 2
    keys = 1 + torch.rand(rows, half - 1, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(half, vocabulary, (rows, pairs), generator=generator)
    ids = torch.randint(1, vocabulary, (rows, tokens), generator=generator)
    ids[:, : 2 * pairs] = torch.stack((keys, values), dim=2).flatten(1)
    weight = torch.arange(1, places + 1).double() ** (POWER - 1)
    gaps = torch.multinomial(weight.expand(rows, -1), pairs, generator=generator)
    asked = 2 * pairs + 2 * gaps
    labels = torch.full_like(ids, UNLABELLED)
    ids.scatter_(1, asked, keys)
    labels.scatter_(1, asked, values)
    return ids, labels
