"""Facts to be remembered: lines like `K = d`, then pages of other text, then the same lines again, in another order.

A model that has not kept the lines can only guess the values the second time.

Axis letters: B rows, F facts of a row, N tokens of a text.
"""

import string
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from .. import TitansForCausalLM


@dataclass
class Facts:
    """The tokens of facts: 26 names, and every lower-case letter that is a single token."""

    names: torch.Tensor  # [26]
    values: torch.Tensor
    equals: int
    newline: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "Facts":
        def encode(text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        letters = [ids[0] for letter in string.ascii_lowercase if len(ids := encode(f" {letter}")) == 1]
        names = [encode(f"\n{name} =")[1] for name in string.ascii_uppercase]
        newline, _, equals = encode("\nA =")
        return cls(torch.tensor(names), torch.tensor(letters), equals, newline)

    @property
    def chance(self) -> float:
        return 1 / len(self.values)

    def width(self, facts: int) -> int:
        """The number of tokens of `facts` facts: four each, and a newline before the first."""
        return 4 * facts + 1

    def rows(
        self, filler: torch.Tensor, facts: int, generator: torch.Generator | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [B, N] of facts, `filler` [B, any], and the facts again; and which tokens are asked for, [B, N] bool."""
        B = len(filler)
        order = torch.rand(B, len(self.names), generator=generator).argsort(1)[:, :facts]
        values = self.values[torch.randint(len(self.values), (B, facts), generator=generator)]
        shown = self._lines(self.names[order], values)
        again = torch.rand(B, facts, generator=generator).argsort(1)
        asked = self._lines(self.names[order.gather(1, again)], values.gather(1, again))
        ids = torch.cat((shown, filler, asked), dim=1)
        where = torch.zeros_like(ids, dtype=torch.bool)
        where[:, ids.shape[1] - asked.shape[1] + 3 :: 4] = True
        return ids, where

    def _lines(self, names: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[B, 4 F + 1]: the facts, with a newline before the first and after each."""
        equals, newline = torch.full_like(names, self.equals), torch.full_like(names, self.newline)
        lines = torch.stack((names, equals, values, newline), dim=2).flatten(1)
        return torch.cat((newline[:, :1], lines), dim=1)


def stretches(tokens: torch.Tensor, rows: int, length: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """`rows` stretches of `tokens` [N], each from a random place, [B, length]."""
    starts = torch.randint(len(tokens) - length + 1, (rows, 1), generator=generator)
    return tokens[starts + torch.arange(length)]


@torch.no_grad()
def recall(model: TitansForCausalLM, ids: torch.Tensor, where: torch.Tensor, read_only: bool = False) -> float:
    """The share of asked tokens that are the model's argmax; with `read_only` its memory is never written."""
    found = model.eval()(ids, use_cache=False, memory_read_only=read_only).logits[:, :-1].argmax(-1)
    return (found == ids[:, 1:])[where[:, 1:]].float().mean().item()
