"""What a task is to the room of studies: sequences with labels, how answers are scored, and how a test is read.

Axes: N answers, R rows, T tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

Point = dict[str, Any]  # arguments of `sample`: how long, how hard
Reading = Callable[[PreTrainedModel, Tensor, Tensor], Tensor]  # model, ids, labels to hidden states
UNLABELLED = -100
AS_TRAINED, OFF = "as trained", "memory off"


@dataclass(frozen=True)
class Metric:
    """How answers are scored, and how scores are written.

    Attributes:
        name: above columns and beside axes.
        higher: whether more is better.
        score: a number for each answer [N], of logits [N, vocabulary] and the tokens that are wanted [N].
        scale, decimals: from a score to what a table writes.
        learned: the score of training batches from which a model counts as having learned its task, if there is one.
    """

    name: str
    higher: bool
    score: Callable[[Tensor, Tensor], Tensor]
    scale: float = 1.0
    decimals: int = 1
    learned: float | None = None

    def best(self, values: list[float]) -> float:
        return max(values) if self.higher else min(values)

    def write(self, values: list[float]) -> str | None:
        """The mean of several seeds, with their standard deviation."""
        if not values:
            return None
        spread = f" ± {self.scale * stdev(values):.{self.decimals}f}" if len(values) > 1 else ""
        return f"{self.scale * mean(values):.{self.decimals}f}{spread}"


def hits(logits: Tensor, wanted: Tensor) -> Tensor:
    return (logits.argmax(-1) == wanted).float()


def nats(logits: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(logits, wanted, reduction="none")


RIGHT = Metric("right answers (%)", True, hits, scale=100, learned=0.9)
NATS = Metric("nats per token", False, nats, decimals=4)
METRICS = {metric.name: metric for metric in (RIGHT, NATS)}


def plainly(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> Tensor:
    return model.base_model(ids, use_cache=False).last_hidden_state


def without_writing(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> Tensor:
    """A Titans model whose memory stays as it was trained."""
    return model.base_model(ids, use_cache=False, memory_read_only=True).last_hidden_state


@dataclass(frozen=True)
class Task:
    """Sequences with labels, drawn by `sample`. A task that draws or sums up otherwise overrides the methods.

    Attributes:
        vocabulary: number of tokens.
        sample: `sample(rows, generator, **point)` gives ids and labels [R, T]. A label is what the model must say at
            that very place, after it has read the token there; `UNLABELLED` where nothing is asked.
        trained: the points that training takes in turn.
        tested: points to test at, by name.
        chance: the score of a guess, if it has one.
        decoder: makes what says the answers in place of the model's own head, for a hidden size; it gets the hidden
            states [R, T, hidden] and gives logits for the first places.
        chosen_by: points that learning rates are chosen by; by default those of training, drawn anew.
        compared_by: the value that models are compared by; by default the mean of all that are shown.
        shown: the values that tables and plots show; by default all.
        tested_rows: how many rows a test has at least.
        about: where the text is from, for the record.
    """

    vocabulary: int
    sample: Callable[..., tuple[Tensor, Tensor]] | None
    trained: tuple[Point, ...]
    tested: dict[str, Point]
    chance: float | None
    decoder: Callable[[int], nn.Module] | None = None
    metric: Metric = RIGHT
    chosen_by: tuple[Point, ...] | None = None
    compared_by: str | None = None
    shown: tuple[str, ...] | None = None
    tested_rows: int = 64
    about: dict[str, Any] = field(default_factory=dict)

    def batch(self, batch_tokens: int, generator: torch.Generator, point: Point) -> tuple[Tensor, Tensor]:
        """As many rows of a point as have that many tokens, at least one."""
        return self.sample(max(1, batch_tokens // longest(point)), generator, **point)

    def training_batch(self, step: int, batch_tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """What training reads in the step of that number, from 0."""
        return self.batch(batch_tokens, generator, self.trained[step % len(self.trained)])

    def test_batches(self, point: Point, batch_tokens: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Fresh sequences, until there are enough rows."""
        generator, rows = torch.Generator().manual_seed(seed), 0
        while rows < self.tested_rows:
            ids, labels = self.batch(batch_tokens, generator, point)
            rows += len(ids)
            yield ids, labels

    def test_tokens(self, point: Point) -> int:
        """About how many tokens a test reads."""
        return self.tested_rows * longest(point)

    def values(self, name: str, scores: list[Tensor]) -> dict[str, float]:
        """What a test of that name found, of the scores of its batches: each [R, T], NaN where nothing was asked."""
        answers = torch.cat([score[~score.isnan()] for score in scores])
        return {name: answers.mean().item()}

    def readings(self) -> dict[str, Reading]:
        """How a trained Titans model is read in the tests: as it was trained, and with its memory switched off."""
        return {AS_TRAINED: plainly, OFF: without_writing}

    def overall(self, values: dict[str, float]) -> float:
        """The one value that models are compared by."""
        if self.compared_by in values:
            return values[self.compared_by]
        shown = [value for name, value in values.items() if self.shown is None or name in self.shown]
        return mean(shown or values.values())


def longest(point: Point) -> int:
    """The tokens of a point's rows, or the most that they may have."""
    return point["tokens"] if isinstance(point["tokens"], int) else max(point["tokens"])
