"""What a block carries from call to call, and how its memory is taken back.

To be cropped, a layer also keeps an older memory state and the tokens written since (at most `LOG_COLUMNS`), from which
the state at any of the last `REWIND` tokens is computed again.

Axis letters: B batch, H memory heads, D head width.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .memory_layer import Written
from .memory_ops import MemoryState, neural_memory
from .rows import compact, take, where_rows
from .tails import Tail

REWIND = 64  # tokens that `crop` can remove
LOG_LIMIT = 2 * REWIND  # token columns that one pass may add to the log
LOG_COLUMNS = REWIND + LOG_LIMIT
PADDING, SEEN, WRITTEN = 0, 1, 2  # what a row holds in a column of the log


@dataclass
class LayerCarry:
    """Everything one block carries from call to call; every tensor has the batch first.

    Attributes:
        memory: weights, momentum and the open chunk, always with its open-chunk fields.
        tails: inputs of the convolution, keys and values of the window or the segment, and in the last layer the
            model's outputs.
        fixed: tensors that no token changes: attention's prefix.
        segment_weights: MAC's memory at the start of the open segment.
    """

    memory: MemoryState
    tails: dict[str, Tail] = field(default_factory=dict)
    fixed: dict[str, Tensor] = field(default_factory=dict)
    segment_weights: tuple[Tensor, ...] | None = None

    def map(self, fn: Callable[[Tensor], Tensor]) -> "LayerCarry":
        """Apply a batch operation to every tensor."""
        return self._map(lambda memory: memory.map(fn), lambda tail: tail.map(fn), fn)

    def settled(self) -> "LayerCarry":
        """The same carry in tensors that hold nothing else."""
        return self._map(lambda memory: memory.settled(), lambda tail: tail.settled(), compact)

    def without_room(self) -> "LayerCarry":
        """The same carry, its tails without room to go on."""
        return self._map(lambda memory: memory, lambda tail: Tail(tail.values), lambda x: x)

    def _map(self, memory: Callable, tail: Callable, fn: Callable) -> "LayerCarry":
        return LayerCarry(
            memory(self.memory),
            {name: tail(x) for name, x in self.tails.items()},
            {name: fn(x) for name, x in self.fixed.items()},
            None if self.segment_weights is None else tuple(map(fn, self.segment_weights)),
        )

    def named(self) -> dict[str, Tensor]:
        """Every tensor by its name, tails without their room."""
        tails = {f"tails.{name}": tail.values for name, tail in self.tails.items()}
        fixed = {f"fixed.{name}": x for name, x in self.fixed.items()}
        segment = _numbered("segment_weights", self.segment_weights)
        return {**_named_state("memory", self.memory), **tails, **fixed, **segment}

    def filled(self, named: dict[str, Tensor]) -> "LayerCarry":
        """A carry of the same form with other tensors."""
        return LayerCarry(
            _filled_state("memory", self.memory, named),
            {name: Tail(named[f"tails.{name}"]).settled() for name in self.tails},
            {name: named[f"fixed.{name}"] for name in self.fixed},
            _filled("segment_weights", self.segment_weights, named),
        )

    def without(self, name: str) -> "LayerCarry":
        """The same carry without one of its tails."""
        tails = {key: tail for key, tail in self.tails.items() if key != name}
        return LayerCarry(self.memory, tails, self.fixed, self.segment_weights)

    def tensors(self) -> list[Tensor]:
        tails = [tail.buffer for tail in self.tails.values()]
        return [*self.memory.tensors(), *tails, *self.fixed.values(), *(self.segment_weights or ())]

    def select(self, rows: Tensor, other: "LayerCarry") -> "LayerCarry":
        """Rows of this carry where `rows` [B] is True, rows of `other` elsewhere."""
        pick = lambda x, y: where_rows(rows, x, y)  # noqa: E731
        segment = self.segment_weights
        return LayerCarry(
            self.memory.select(rows, other.memory),
            {name: tail.select(rows, other.tails[name]) for name, tail in self.tails.items()},
            {name: pick(x, other.fixed[name]) for name, x in self.fixed.items()},
            None if segment is None else tuple(map(pick, segment, other.segment_weights)),
        )


def _numbered(name: str, xs: tuple[Tensor, ...] | None) -> dict[str, Tensor]:
    return {f"{name}.{i}": x for i, x in enumerate(xs or ())}


def _filled(name: str, xs: tuple[Tensor, ...] | None, named: dict[str, Tensor]) -> tuple[Tensor, ...] | None:
    return None if xs is None else tuple(named[f"{name}.{i}"] for i in range(len(xs)))


STATE = ("weights", "momentum", "inputs", "errors", "gates", "start")  # the tuples of a `MemoryState`


def _named_state(name: str, state: MemoryState) -> dict[str, Tensor]:
    named = {f"{name}.length": state.length}
    for part in STATE:
        named |= _numbered(f"{name}.{part}", getattr(state, part))
    return named


def _filled_state(name: str, state: MemoryState, named: dict[str, Tensor]) -> MemoryState:
    parts = {part: _filled(f"{name}.{part}", getattr(state, part), named) for part in STATE}
    return MemoryState(**parts, length=named[f"{name}.length"])


@dataclass
class Step:
    """One pass through a block, as its cache sees it.

    Attributes:
        seen: [B] real tokens each row had read before.
        lengths: [B] real tokens of the pass, at the front of each row; None means all of `width`.
        fresh: which rows had read nothing: True, False, or [B].
        before: the carry the pass started from.
        written: its tokens as the memory saw them.
        read_only: whether they were only read with, not written.
    """

    seen: Tensor
    lengths: Tensor | None
    width: int
    fresh: bool | Tensor
    before: LayerCarry
    written: Written
    read_only: bool

    def seen_after(self) -> Tensor:
        return self.seen + (self.width if self.lengths is None else self.lengths)


class RewindLog:
    """An older state of the memory and the tokens since, to compute the states in between again.

    Columns are added at the cursor in place; the tensors are detached, so gradients do not pass through a rewind.
    """

    def __init__(self, config: PreTrainedConfig):
        self.config = config
        self.base: MemoryState | None = None
        self.base_segment: tuple[Tensor, ...] | None = None
        self.base_seen: Tensor | None = None  # [B]
        self.tokens: Tensor | None = None  # [B, LOG_COLUMNS, H, 2 D + 3]: k, v, theta, eta, alpha
        self.kind: Tensor | None = None  # [B, LOG_COLUMNS]: PADDING, SEEN (read only) or WRITTEN
        self.cursor = 0

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a batch operation to every tensor."""
        if self.base is None:
            return
        self.base = self.base.map(fn)
        self.base_segment = None if self.base_segment is None else tuple(map(fn, self.base_segment))
        self.base_seen, self.tokens, self.kind = fn(self.base_seen), fn(self.tokens), fn(self.kind)

    def tensors(self) -> list[Tensor]:
        if self.base is None:
            return []
        return [*self.base.tensors(), *(self.base_segment or ()), self.base_seen, self.tokens, self.kind]

    def named(self) -> dict[str, Tensor]:
        """Every tensor by its name."""
        own = {"base_seen": self.base_seen, "tokens": self.tokens, "kind": self.kind}
        return {**_named_state("base", self.base), **_numbered("base_segment", self.base_segment), **own}

    def fill(self, named: dict[str, Tensor], cursor: int) -> None:
        """Take over other tensors of the same form."""
        self.base = _filled_state("base", self.base, named)
        self.base_segment = _filled("base_segment", self.base_segment, named)
        self.base_seen, self.tokens, self.kind = (named[name] for name in ("base_seen", "tokens", "kind"))
        self.cursor = cursor

    @torch.no_grad()
    def restart(self, carry: LayerCarry, seen: Tensor) -> None:
        """Rewinding begins at the given carry."""
        self.base = carry.memory.map(Tensor.clone)
        self.base_segment = None if carry.segment_weights is None else tuple(map(Tensor.clone, carry.segment_weights))
        self.base_seen, self.cursor = seen.clone(), 0
        W = carry.memory.weights[0]
        B, H, D = W.shape[:3]
        if self.tokens is None:
            self.tokens = W.new_zeros(B, LOG_COLUMNS, H, 2 * D + 3)
        self.kind = torch.full((B, LOG_COLUMNS), PADDING, dtype=torch.int8, device=W.device)

    @torch.no_grad()
    def rows_restart(self, rows: Tensor, carry: LayerCarry) -> None:
        """The given rows [B] read their first token now: for them rewinding begins at the given carry."""
        self.base = carry.memory.map(Tensor.detach).select(rows, self.base)
        if self.base_segment is not None:
            pairs = zip(carry.segment_weights, self.base_segment, strict=True)
            self.base_segment = tuple(where_rows(rows, x.detach(), old) for x, old in pairs)
        self.base_seen = self.base_seen.masked_fill(rows, 0)
        self.kind = self.kind.masked_fill(rows[:, None], PADDING)

    @torch.no_grad()
    def append(self, written: Written, lengths: Tensor | None, read_only: bool) -> None:
        """Note the tokens of one pass, at most `LOG_LIMIT`."""
        self.tokens, self.kind = _writable(self.tokens), _writable(self.kind)
        if self.cursor + written.k.shape[1] > LOG_COLUMNS:
            self._drop_oldest()
        columns = slice(self.cursor, self.cursor + written.k.shape[1])
        self.tokens[:, columns] = torch.cat((written.k, written.v, written.gates.transpose(2, 3)), dim=-1)
        kind = SEEN if read_only else WRITTEN
        if lengths is None:
            self.kind[:, columns] = kind
        else:
            real = torch.arange(written.k.shape[1], device=lengths.device) < lengths[:, None]
            self.kind[:, columns] = real.to(torch.int8) * kind
        self.cursor = columns.stop

    def _drop_oldest(self) -> None:
        """Move the base forward until the last `REWIND` tokens of every row remain."""
        order = (self.kind > PADDING).to(torch.int8).argsort(dim=1, stable=True)  # rows right-aligned, oldest first
        self.tokens, self.kind = take(self.tokens, order), self.kind.gather(1, order)
        self.cursor, passed = LOG_COLUMNS, LOG_COLUMNS - REWIND
        kept = self.kind.clone()
        kept[:, passed:] = PADDING
        self.base, self.base_segment = self.replay(kept)
        self.base_seen = self.base_seen + (kept > PADDING).sum(1)
        self.tokens, self.kind = self.tokens.roll(-passed, dims=1), self.kind.roll(-passed, dims=1)
        self.kind[:, REWIND:] = PADDING
        self.cursor = REWIND

    @torch.no_grad()
    def replay(self, kind: Tensor) -> tuple[MemoryState, tuple[Tensor, ...] | None]:
        """The memory after the base and the tokens that `kind` [B, LOG_COLUMNS] keeps, and MAC's segment start."""
        state = self._write(kind == WRITTEN)
        if self.base_segment is None:
            return state, None
        C = self.config.segment_size
        seen = (kind > PADDING).cumsum(1)
        segment_start = (self.base_seen + seen[:, -1]) // C * C
        inside = segment_start > self.base_seen
        if not bool(inside.any()):
            return state, self.base_segment
        until_start = (kind == WRITTEN) & (seen <= (segment_start - self.base_seen)[:, None])
        weights, _ = self._write(until_start).current()
        return state, tuple(where_rows(inside, *pair) for pair in zip(weights, self.base_segment, strict=True))

    def _write(self, mask: Tensor) -> MemoryState:
        if not bool(mask.any()):
            return self.base
        used = slice(0, max(1, self.cursor))
        D = (self.tokens.shape[-1] - 3) // 2
        k, v, gates = self.tokens[:, used].split((D, D, 3), dim=-1)
        _, state = neural_memory(
            k,
            k,
            v,
            *gates.unbind(-1),
            self.base,
            chunk_size=self.config.memory_chunk_size,
            max_surprise=self.config.memory_max_surprise,
            mask=mask[:, used],
        )
        return state.opened(self.config.memory_chunk_size)


def _writable(x: Tensor) -> Tensor:
    """A tensor that may be written in place here: one made under inference mode may not, outside of it."""
    return x.clone() if x.is_inference() and not torch.is_inference_mode_enabled() else x
