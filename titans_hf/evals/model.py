"""lm-eval's Hugging Face model for Titans: inputs of any length in bounded memory, none of them truncated.

Plain `--model hf` gives the same results, in bfloat16 with `softmax_dtype=float32`. It takes the logits of a whole
batch at once, though, [B, T, V]: articles of WikiText in a vocabulary of 32,000 are gigabytes. Here long inputs are
read in pieces, through the cache.

Two controls show what the memory contributes: `memory="off"` never writes into it, so that every token reads it as
trained; `memory="reset"` resets it at each segment, while attention continues.

B: rows, T: tokens of the longest, P: tokens of a piece, V: vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm

from ..cache_titans import TitansCache

MEMORY = ("on", "off", "reset")
LOGITS = 2**25  # of a piece, over all rows: 128 MiB in float32
PROMPT = 2**14  # tokens of a prompt that are read together, over all rows
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
        """Add the logits [P, V] of the places from `start` on."""
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


def put_back(cache: TitansCache, start: TitansCache) -> None:
    """Give every layer the memory of `start`, and leave it everything else."""
    for layer, fresh in zip(cache.layers, start.layers):
        layer.take_memory_of(fresh)


class CheckedLM(HFLM):
    """HFLM that reports inputs too long for the model, and computes likelihoods in float32 at least.

    A prompt for generation that is too long is refused; HFLM would cut its beginning. An input whose likelihood is
    asked for is cut as in HFLM, and counted in `inputs_cut`. Titans reads any length, so neither applies to it.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.softmax_dtype = torch.promote_types(self.model.dtype, torch.float32)
        self.inputs_cut = 0

    def _loglikelihood_tokens(self, requests, *args, **kwargs) -> list[tuple[float, bool]]:
        lengths = [len(context) + len(continuation) for _, context, continuation in requests]
        self.inputs_cut += sum(length > self.max_length + 1 for length in lengths)  # the last token is not read
        return super()._loglikelihood_tokens(requests, *args, **kwargs)

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Prompts [B, T], padded on the left or right, and their mask."""
        ids, mask = super().tok_batch_encode(strings, padding_side)
        if left_truncate_len and ids.shape[1] > left_truncate_len:
            raise ValueError(
                f"a prompt of {ids.shape[1]:,} tokens and its answer are longer than max_length={self.max_length:,}: "
                "ask for shorter ones with --lengths, or leave max_length out if you have set it"
            )
        return ids, mask


class TitansLM(CheckedLM):
    """HFLM whose likelihoods are read in pieces of at most `logits / (B * V)` tokens.

    Args:
        memory: "on", or one of the controls "off" and "reset".
    """

    def __init__(self, *args, logits: int = LOGITS, memory: str = "on", **kwargs):
        if memory not in MEMORY:
            raise ValueError(f"`memory` must be one of {', '.join(MEMORY)}; got {memory!r}")
        super().__init__(*args, **kwargs)
        self.logits, self.memory = logits, memory

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
        """Read inputs as a batch, the longest first, padded on the right: no token sees what comes after it."""
        length, needed = len(some[0].tokens), min(line.first for line in some)
        ids = torch.zeros(len(some), length, dtype=torch.long)  # [B, T]
        for row, line in zip(ids, some):
            row[: len(line.tokens)] = torch.tensor(line.tokens)
        for start, logits in self._pieces(ids.to(self.device), needed, [len(line.tokens) for line in some]):
            for line, found in zip(some, logits):
                line.score(found, start)

    def _pieces(self, ids: Tensor, needed: int, lengths: list[int] | None = None) -> Iterator[tuple[int, Tensor]]:
        """The logits [B, P, V] of `ids`, piece by piece with the place of its first; without those before `needed`.

        Of `lengths`, the longest first, rows that have ended are left out of later pieces.
        """
        rows, length = ids.shape
        piece = max(SHORTEST, self.logits // (rows * self.model.config.vocab_size))
        if self.memory == "reset":
            piece = self.model.config.segment_size
        cache = TitansCache(self.model.config, rewind=False) if length > piece else None
        start_of_all = self._unwritten(ids) if cache is not None and self.memory == "reset" else None
        for start in range(0, length, piece):
            going_on = rows if lengths is None else sum(start < own for own in lengths)
            if going_on < len(ids):
                ids = ids[:going_on]
                for held in (cache, start_of_all):
                    if held is not None:
                        held.batch_select_indices(torch.arange(going_on, device=ids.device))
            part = ids[:, start : start + piece]
            skipped = min(max(needed - start, 0), part.shape[1] - 1)  # logits_to_keep=0 would be all
            found = self.model(
                part,
                past_key_values=cache,
                use_cache=cache is not None,
                logits_to_keep=part.shape[1] - skipped,
                memory_read_only=self.memory == "off",
            )
            yield start + skipped, found.logits
            if start_of_all is not None:
                put_back(cache, start_of_all)

    def _unwritten(self, ids: Tensor) -> TitansCache:
        """A cache with the memory as trained, for rows like these."""
        cache = TitansCache(self.model.config, rewind=False)
        self.model(ids[:, :1], past_key_values=cache, use_cache=True, memory_read_only=True)
        return cache

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options) -> Tensor:
        """Generate. Long prompts are read in pieces; each row stops at its own end of text."""
        options.setdefault("eos_token_id", self._ends())
        if self.memory == "reset":
            return self._generate_with_resets(context, max_length, stop, **options)
        return super()._model_generate(
            context,
            max_length,
            stop,
            prefill_chunk_size=max(SHORTEST, PROMPT // len(context)),
            memory_read_only=self.memory == "off",
            **options,
        )

    def _ends(self) -> list[int]:
        """The tokens that end a text, as the tokenizer and the model's configuration have it."""
        own = self.model.generation_config.eos_token_id
        known = {self.eot_token_id, *(own if isinstance(own, list) else [own])}
        return sorted(end for end in known if end is not None)

    def _generate_with_resets(
        self, context: Tensor, max_length: int, stop: list[str], attention_mask: Tensor, **options
    ) -> Tensor:
        """Row by row: padding would move a row's segments. The memory is put back while reading, not while writing."""
        found = torch.full((len(context), max_length), self.tokenizer.pad_token_id, device=context.device)
        for into, row, mask in zip(found, context, attention_mask.bool()):
            padding = int((~mask).sum())
            ids = row[None, padding:]  # [1, T]
            cache, seen = self._read_with_resets(ids[:, :-1]), torch.ones_like(ids)
            written = super()._model_generate(
                ids, max_length - padding, stop, attention_mask=seen, past_key_values=cache, **options
            )
            into[padding : padding + written.shape[1]] = written[0]
        return found

    @torch.no_grad()
    def _read_with_resets(self, ids: Tensor) -> TitansCache:
        """The cache after the tokens of one row."""
        cache, start = TitansCache(self.model.config, rewind=False), self._unwritten(ids)
        for piece in ids.split(self.model.config.segment_size, dim=1):
            self.model.model(piece, past_key_values=cache, use_cache=True)
            if piece.shape[1] == self.model.config.segment_size:
                put_back(cache, start)
        return cache
