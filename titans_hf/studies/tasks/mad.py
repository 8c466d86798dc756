"""The six tasks of Mechanistic Architecture Design (Poli et al. 2024, arXiv 2403.17844), at sizes of one's own.

`recall`        pairs of a key and a value, which a sequence draws anew; a key that returns asks for its value
`fuzzy`         the same with keys and values of one to three tokens
`noisy`         the same with tokens of noise in between
`copying`       tokens scattered among blanks, to be said again in order once the sequence has ended
`compression`   a sequence whose last token must hold all of it: a small network reads every place out of it alone
`memorization`  keys whose values never change and are shown in no sequence: the weights must know them

Published: models of two blocks of width 128 on 12,800 sequences, which are seen many times (memorization: 256). Here
every batch is drawn anew, so that a task asks for skill and not for resistance to overfitting.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .task import UNLABELLED, Task

NOISE = 16  # tokens of a vocabulary of their own
LONGEST_MOTIF = 3


def mad(kind: str, tokens: int = 128, vocabulary: int = 16, **settings) -> Task:
    """One of the tasks at one length; `settings` are those of its function below."""
    if kind not in KINDS:
        raise ValueError(f"`kind` must be one of {', '.join(KINDS)}; got {kind!r}")
    sample, extra, answers = KINDS[kind]
    return Task(
        vocabulary + extra,
        partial(sample, vocabulary, **settings),
        ({"tokens": tokens},),
        {str(tokens): {"tokens": tokens}},
        chance=1 / answers(vocabulary),
        decoder=partial(Decoder, vocabulary, tokens - 1) if kind == "compression" else None,
    )


def recall(
    vocabulary: int, rows: int, generator: torch.Generator, tokens: int, noise: float = 0.0, motif: int = 1
) -> tuple[Tensor, Tensor]:
    """Key, value, key, value: a key that was there before is labelled with its value.

    Args:
        noise: the share of tokens between pairs that mean nothing.
        motif: the most tokens of a key or of a value; every token of a known value is asked.
    """
    made = [_pairs(vocabulary, generator, tokens, noise, motif) for _ in range(rows)]
    ids, labels = zip(*made, strict=True)
    return torch.tensor(ids), torch.tensor(labels)


def _pairs(vocabulary: int, generator, tokens: int, noise: float, motif: int) -> tuple[list[int], list[int]]:
    """One row. Its first `motif` tokens are never asked; a row that would ask nothing is drawn again."""
    draw = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    half = vocabulary // 2
    keys = _motifs(range(half), motif, generator)
    values = {key: tuple(draw(half, vocabulary) for _ in range(draw(1, motif + 1))) for key in keys}
    ids, labels, seen = [], [], set()
    while len(ids) < tokens:
        if noise and torch.rand((), generator=generator) < noise:
            ids.append(vocabulary + draw(0, NOISE))
            labels.append(UNLABELLED)
            continue
        key = keys[draw(0, len(keys))]
        value = values[key]
        ids += [*key, *value]
        asked = value if key in seen else (UNLABELLED,) * len(value)
        labels += [*(UNLABELLED,) * (len(key) - 1), *asked, UNLABELLED]
        seen.add(key)
    if all(label == UNLABELLED for label in labels[:tokens]):
        return _pairs(vocabulary, generator, tokens, noise, motif)
    return ids[:tokens], labels[:tokens]


def _motifs(alphabet: range, longest: int, generator) -> list[tuple[int, ...]]:
    """As many keys as the alphabet has tokens, no key the beginning of another: each begins with a token of its own."""
    lengths = torch.randint(1, longest + 1, (len(alphabet),), generator=generator).tolist()
    rest = torch.randint(0, len(alphabet), (len(alphabet), longest), generator=generator).tolist()
    return [(first, *more[: length - 1]) for first, length, more in zip(alphabet, lengths, rest)]


def copying(
    vocabulary: int, rows: int, generator: torch.Generator, tokens: int, copied: int = 16
) -> tuple[Tensor, Tensor]:
    """`copied` tokens among blanks, the sign to begin, and as many blanks, at which the tokens are asked in order."""
    blank, begin, shown = vocabulary, vocabulary + 1, tokens - copied - 1
    if shown < copied:
        raise ValueError(f"`tokens` ({tokens}) must be more than twice `copied` ({copied})")
    content = torch.randint(0, vocabulary, (rows, copied), generator=generator)
    places = torch.rand(rows, shown, generator=generator).argsort(1)[:, :copied].sort(1).values
    ids = torch.full((rows, tokens), blank).scatter_(1, places, content)
    ids[:, shown] = begin
    labels = torch.full_like(ids, UNLABELLED)
    labels[:, shown + 1 :] = content
    return ids, labels


def compression(vocabulary: int, rows: int, generator: torch.Generator, tokens: int) -> tuple[Tensor, Tensor]:
    """Random tokens and the sign to compress them. Labels are the tokens; a `Decoder` says them from the sign alone."""
    ids = torch.randint(0, vocabulary, (rows, tokens), generator=generator)
    ids[:, -1] = vocabulary
    labels = ids.clone()
    labels[:, -1] = UNLABELLED
    return ids, labels


def memorization(vocabulary: int, rows: int, generator: torch.Generator, tokens: int) -> tuple[Tensor, Tensor]:
    """Keys and blanks in turn; at each key its value is asked, which is the same in every sequence."""
    half, blank = vocabulary // 2, vocabulary
    values = half + torch.randperm(half, generator=torch.Generator().manual_seed(1234))
    ids = torch.full((rows, tokens), blank)
    ids[:, ::2] = torch.randint(0, half, (rows, (tokens + 1) // 2), generator=generator)
    labels = torch.full_like(ids, UNLABELLED)
    labels[:, ::2] = values[ids[:, ::2]]
    return ids, labels


class Decoder(nn.Module):
    """Every place of a sequence from the hidden state of its last token: a network of one hidden layer."""

    def __init__(self, vocabulary: int, places: int, hidden_size: int):
        super().__init__()
        self.place = nn.Embedding(places, hidden_size)
        self.inner = nn.Linear(2 * hidden_size, 2 * hidden_size)
        self.outer = nn.Linear(2 * hidden_size, vocabulary)

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, tokens, hidden] to logits [rows, tokens - 1, vocabulary]."""
        places = self.place.weight.expand(len(hidden), -1, -1)
        whole = hidden[:, -1:].expand(-1, places.shape[1], -1)
        return self.outer(F.gelu(self.inner(torch.cat((whole, places), dim=-1))))


KINDS = {  # how to sample, tokens beside the vocabulary, and how many answers there are
    "recall": (recall, 0, lambda vocabulary: vocabulary // 2),
    "fuzzy": (partial(recall, motif=LONGEST_MOTIF), 0, lambda vocabulary: vocabulary // 2),
    "noisy": (partial(recall, noise=0.2), NOISE, lambda vocabulary: vocabulary // 2),
    "copying": (copying, 2, lambda vocabulary: vocabulary),
    "compression": (compression, 1, lambda vocabulary: vocabulary),
    "memorization": (memorization, 1, lambda vocabulary: vocabulary // 2),
}
