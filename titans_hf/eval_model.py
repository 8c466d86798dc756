"""lm-eval's Hugging Face model for Titans: inputs of any length in bounded memory, and none of them cut.

Plain `--model hf` gives the same results. It takes the logits of a whole batch at once, though, [B, T, V]: articles of
WikiText in a vocabulary of 32,000 are gigabytes. Here long inputs are read in pieces, through the cache.

B: rows, T: tokens of the longest, P: tokens of a piece, V: vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm

from .cache_titans import TitansCache

LOGITS = 2**25  # of a piece, over all rows: 128 MiB in float32
SHORTEST = 64  # tokens of a piece: shorter ones only cost time


@dataclass
class Wanted:
    """A continuation that is asked for, and what is known of its likelihood so far."""

    number: int
    tokens: list[int]
    likelihood: float = 0.0
    greedy: bool = True


@dataclass
class Line:
    """One input. Requests that differ in their last token alone share it, as the answers yes and no do."""

    tokens: tuple[int, ...]
    wanted: list[Wanted] = field(default_factory=list)

    @property
    def first(self) -> int:
        """The first place whose logits are needed."""
        return len(self.tokens) - max(len(each.tokens) for each in self.wanted)

    def score(self, logits: Tensor, start: int) -> None:
        """Count in the places from `start` on, whose logits [P, V] have come."""
        for each in self.wanted:
            own = len(self.tokens) - len(each.tokens)
            low, high = max(start, own), min(start + len(logits), len(self.tokens))
            if low < high:
                found = logits[low - start : high - start]
                found = found.to(torch.promote_types(found.dtype, torch.float32)).log_softmax(-1)
                target = torch.tensor(each.tokens[low - own : high - own], device=found.device)
                each.likelihood += found.gather(-1, target[:, None]).sum().item()
                each.greedy = each.greedy and torch.equal(found.argmax(-1), target)


def lines(requests: list[tuple]) -> list[Line]:
    """The inputs behind lm-eval's requests `(text, context, continuation)`, the longest first."""
    found: dict[tuple[int, ...], Line] = {}
    for number, (_, context, continuation) in enumerate(requests):
        tokens = tuple([*context, *continuation][:-1])
        found.setdefault(tokens, Line(tokens)).wanted.append(Wanted(number, list(continuation)))
    return sorted(found.values(), key=lambda line: -len(line.tokens))


class TitansLM(HFLM):
    """HFLM whose likelihoods are read in pieces of at most `logits / (B * V)` tokens."""

    def __init__(self, *args, logits: int = LOGITS, **kwargs):
        super().__init__(*args, **kwargs)
        self.logits = logits

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Whole texts, each as one continuation of the token that opens a text."""
        texts = [self.tok_encode(request.args[0]) for request in requests]
        asked = [(None, [self.prefix_token_id], text) for text in texts if text]
        found = iter(self._loglikelihood_tokens(asked, disable_tqdm))
        return [next(found)[0] if text else 0.0 for text in texts]

    def _loglikelihood_tokens(
        self, requests, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        todo, batch = lines(requests), override_bs or int(self.batch_size)
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        with tqdm(total=len(requests), desc="likelihoods", disable=disable_tqdm) as bar:
            for start in range(0, len(todo), batch):
                some = todo[start : start + batch]
                self._read(some)
                for each in (each for line in some for each in line.wanted):
                    answers[each.number] = each.likelihood, each.greedy
                    bar.update()
        return answers

    @torch.no_grad()
    def _read(self, some: list[Line]) -> None:
        """Read inputs side by side, the longest first, filled up on the right: no token sees what comes after it."""
        length, needed = len(some[0].tokens), min(line.first for line in some)
        ids = torch.zeros(len(some), length, dtype=torch.long)  # [B, T]
        for row, line in zip(ids, some):
            row[: len(line.tokens)] = torch.tensor(line.tokens)
        for start, logits in self._pieces(ids.to(self.device), needed):
            for line, found in zip(some, logits):
                line.score(found, start)

    def _pieces(self, ids: Tensor, needed: int) -> Iterator[tuple[int, Tensor]]:
        """The logits [B, P, V] of `ids`, piece by piece with the place of its first; without those before `needed`."""
        rows, length = ids.shape
        piece = max(SHORTEST, self.logits // (rows * self.model.config.vocab_size))
        cache = TitansCache(self.model.config) if length > piece else None
        for start in range(0, length, piece):
            part = ids[:, start : start + piece]
            skipped = min(max(needed - start, 0), part.shape[1] - 1)  # logits_to_keep=0 would be all
            found = self.model(
                part, past_key_values=cache, use_cache=cache is not None, logits_to_keep=part.shape[1] - skipped
            )
            yield start + skipped, found.logits
