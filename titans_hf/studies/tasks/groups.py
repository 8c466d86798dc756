"""State tracking: the product of all elements of a group so far, at every place (Theorem 4.1).

Parity and other cyclic groups, S3, A5 and S5. The word problem of S5 is complete for NC1: a model whose state changes
by diagonal steps, or in parallel like attention, cannot follow it at every length unless TC0 = NC1.
"""

import re
from functools import partial
from itertools import permutations

import torch
from torch import Tensor

from .task import UNLABELLED, Task


def table_of(group: str) -> Tensor:
    """The multiplication table [n, n] of "parity", "Z7" (addition modulo 7), "S3", "A5" and so on; element 0 is one."""
    found = re.fullmatch(r"([ZSA])([2-9]|1\d)", "Z2" if group == "parity" else group)
    if not found or (found[1] != "Z" and int(found[2]) > 6):
        raise ValueError(f"`group` must be 'parity', 'Z2' to 'Z19', or 'S2' to 'S6' or 'A3' to 'A6'; got {group!r}")
    kind, size = found[1], int(found[2])
    if kind == "Z":
        return (torch.arange(size)[:, None] + torch.arange(size)) % size
    elements = [p for p in permutations(range(size)) if kind == "S" or _even(p)]
    place = {p: i for i, p in enumerate(elements)}
    return torch.tensor([[place[tuple(p[i] for i in q)] for q in elements] for p in elements])


def _even(p: tuple[int, ...]) -> bool:
    return sum(a > b for i, a in enumerate(p) for b in p[i + 1 :]) % 2 == 0


def groups(group: str, trained: list = (3, 40), tested: list = (40, 64, 128, 256)) -> Task:
    """Lengths to train on, from and to, and to test at. A test is of the places that no shorter test has."""
    table = table_of(group)
    borders = [0, *sorted(tested)]
    tests = {str(end): {"tokens": end, "start": start} for start, end in zip(borders, borders[1:])}
    return Task(len(table), partial(sample, table), ({"tokens": tuple(trained)},), tests, chance=1 / len(table))


def sample(
    table: Tensor, rows: int, generator: torch.Generator, tokens: int | tuple[int, int], start: int = 0
) -> tuple[Tensor, Tensor]:
    """Random elements and their products so far, labelled from place `start` on; a range of lengths is drawn from."""
    if not isinstance(tokens, int):
        tokens = int(torch.randint(tokens[0], tokens[1] + 1, (), generator=generator))
    ids = torch.randint(0, len(table), (rows, tokens), generator=generator)
    product, labels = torch.zeros(rows, dtype=torch.long), torch.full_like(ids, UNLABELLED)
    for place in range(tokens):
        product = table[product, ids[:, place]]
        labels[:, place] = product
    labels[:, :start] = UNLABELLED
    return ids, labels
