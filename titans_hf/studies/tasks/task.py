"""What a task is to the room of studies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Point = dict[str, Any]  # arguments of `sample`: how long, how hard
UNLABELLED = -100


@dataclass(frozen=True)
class Task:
    """Sequences with labels.

    Attributes:
        vocabulary: number of tokens.
        sample: `sample(rows, generator, **point)` gives ids and labels [rows, tokens]. A label is what the model must
            say at that very place, after it has read the token there; `UNLABELLED` where nothing is asked.
        trained: the points that training takes in turn.
        tested: points to test at, by name.
        chance: the share of right answers of a guess.
        decoder: makes what says the answers in place of the model's own head, for a hidden size; it gets the hidden
            states [rows, tokens, hidden] and gives logits for the first places.
    """

    vocabulary: int
    sample: Callable[..., tuple[Tensor, Tensor]]
    trained: tuple[Point, ...]
    tested: dict[str, Point]
    chance: float
    decoder: Callable[[int], nn.Module] | None = None

    def batch(self, batch_tokens: int, generator: torch.Generator, point: Point) -> tuple[Tensor, Tensor]:
        """As many rows of a point as have that many tokens, at least one."""
        longest = point["tokens"] if isinstance(point["tokens"], int) else max(point["tokens"])
        return self.sample(max(1, batch_tokens // longest), generator, **point)
