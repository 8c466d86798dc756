"""What a block carries from call to call, and how its memory is rewound.

To be cropped, a block also keeps an older memory state and the tokens written since (`RewindLog`), from which the state
at any of the last `REWIND` tokens is computed again.

Axis letters: B batch, H memory heads, D head width.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .memory_layer import MemoryCarry, Written
from .memory_ops import neural_memory
from .memory_rule import rule_of
from .memory_state import MemoryState, where_all
from .rows import compact, take, where_rows
from .tails import GrowingTail, Tail

REWIND = 64  # tokens that `crop` can remove
LOG_LIMIT = 2 * REWIND  # token columns that one pass may add to the log
LOG_COLUMNS = REWIND + LOG_LIMIT
GROWING = "full attention"  # the one part of a cache that grows with every token


@dataclass
class RewindLog:
    """An older state of the memory and the tokens since, to compute the states in between again.

    A log is never changed: `append` and `without_last` return another one. Its tensors are detached, so gradients do
    not pass through a rewind.

    Attributes:
        base: the older state, always with its open-chunk fields.
        segment: MAC's memory at the start of the segment that was open then; None in the other variants.
        seen: [B] tokens each row had read by then.
        tokens: [B, LOG_COLUMNS, H, 2 D + 4], the newest last: key, value, theta, eta, alpha, and whether the token was
            written (1) or only read with (0).
        count: [B] tokens of each row since `base`.
        columns: the most tokens that any row may have since `base`.
    """

    base: MemoryState
    segment: tuple[Tensor, ...] | None
    seen: Tensor
    tokens: Tail
    count: Tensor
    columns: int = 0

    @classmethod
    @torch.no_grad()
    def starting(cls, memory: MemoryState, segment: tuple[Tensor, ...] | None, seen: Tensor) -> "RewindLog":
        """An empty log: rewinding begins at the given memory."""
        B, H, D = memory.weights[0].shape[:3]
        tokens = memory.weights[0].new_zeros(B, LOG_COLUMNS, H, 2 * D + 4)
        segment = None if segment is None else tuple(map(Tensor.clone, segment))
        return cls(memory.map(Tensor.clone), segment, seen.clone(), Tail(tokens), torch.zeros_like(seen))

    def map(self, fn: Callable[[Tensor], Tensor]) -> "RewindLog":
        """Apply a batch operation to every tensor."""
        segment = None if self.segment is None else tuple(map(fn, self.segment))
        return RewindLog(self.base.map(fn), segment, fn(self.seen), self.tokens.map(fn), fn(self.count), self.columns)

    def select(self, rows: Tensor, other: "RewindLog") -> "RewindLog":
        """Rows of this log where `rows` [B] is True, rows of `other` elsewhere."""
        return RewindLog(
            self.base.select(rows, other.base),
            None if self.segment is None else where_all(rows, self.segment, other.segment),
            where_rows(rows, self.seen, other.seen),
            self.tokens.select(rows, other.tokens),
            where_rows(rows, self.count, other.count),
            max(self.columns, other.columns),
        )

    def compact(self) -> "RewindLog":
        """The same log in tensors that hold nothing else; the base owns its bytes already."""
        return replace(self, tokens=self.tokens.compact())

    def tensors(self) -> list[Tensor]:
        return [*self.base.tensors(), *(self.segment or ()), self.seen, self.tokens.buffer, self.count]

    def named(self) -> dict[str, Tensor]:
        """Every tensor by its name in a snapshot."""
        own = {"base_seen": self.seen, "tokens": self.tokens.values, "count": self.count}
        return {**_named_state("base", self.base), **_numbered("base_segment", self.segment), **own}

    def filled(self, named: dict[str, Tensor], columns: int) -> "RewindLog":
        """A log of the same form with the tensors of a snapshot."""
        base, segment = _filled_state("base", self.base, named), _filled("base_segment", self.segment, named)
        return RewindLog(base, segment, named["base_seen"], Tail(named["tokens"]).compact(), named["count"], columns)

    @torch.no_grad()
    def append(self, written: Written, lengths: Tensor | None, read_only: bool, config) -> "RewindLog":
        """The log after the tokens of one pass, at most `LOG_LIMIT`."""
        T = written.k.shape[1]
        log = self if self.columns + T <= LOG_COLUMNS else self._moved_on(config)
        flag = written.k.new_full((*written.k.shape[:3], 1), float(not read_only))
        new = torch.cat((written.k, written.v, written.gates.transpose(2, 3), flag), dim=-1)
        _, tokens = log.tokens.append(new.detach(), lengths)
        count = log.count + (T if lengths is None else lengths)
        return replace(log, tokens=tokens, count=count, columns=log.columns + T)

    def without_last(self, removed: Tensor) -> "RewindLog":
        """The log without each row's last `removed` [B] tokens."""
        return replace(self, tokens=self.tokens.without_last(removed).compact(), count=self.count - removed)

    def written_among_last(self, removed: Tensor) -> Tensor:
        """[B] how many of each row's last `removed` [B] tokens were written."""
        age = torch.arange(LOG_COLUMNS, 0, -1, device=removed.device)  # 1: the newest
        return ((age <= removed[:, None]) & self._written()).sum(1)

    def _written(self) -> Tensor:
        return self.tokens.values[:, :, 0, -1] > 0  # [B, LOG_COLUMNS]

    def _moved_on(self, config: PreTrainedConfig) -> "RewindLog":
        """The log whose base has moved forward until the last `REWIND` tokens of every row remain."""
        passed = (self.count - REWIND).clamp(min=0)
        base, segment = self.replay(passed, config)
        return replace(
            self, base=base, segment=segment, seen=self.seen + passed, count=self.count - passed, columns=REWIND
        )

    @torch.no_grad()
    def replay(self, count: Tensor, config: PreTrainedConfig) -> tuple[MemoryState, tuple[Tensor, ...] | None]:
        """The memory after the base and the first `count` [B] tokens since, and MAC's memory at its segment's start."""
        state = self._write(count, config)
        if self.segment is None:
            return state, None
        until_segment = (self.seen + count) // config.segment_size * config.segment_size - self.seen  # [B]
        inside = until_segment > 0
        if not bool(inside.any()):
            return state, self.segment
        weights, _ = self._write(until_segment, config).current()
        return state, where_all(inside, weights, self.segment)

    def _write(self, count: Tensor, config: PreTrainedConfig) -> MemoryState:
        """The base with the first `count` [B] tokens since, of those that were written."""
        rank = torch.arange(LOG_COLUMNS, device=count.device) - (LOG_COLUMNS - self.count[:, None])
        mask = (rank >= 0) & (rank < count[:, None]) & self._written()
        if not bool(mask.any()):
            return self.base
        D, used = self.base.weights[0].shape[2], slice(LOG_COLUMNS - self.columns, None)
        k, v, gates, _ = self.tokens.values[:, used].split((D, D, 3, 1), dim=-1)
        chunk = config.memory_chunk_size
        _, state = neural_memory(
            k, k, v, *gates.unbind(-1), self.base, chunk_size=chunk, rule=rule_of(config), mask=mask[:, used]
        )
        return state.opened(chunk)


@dataclass
class LayerCarry:
    """Everything one block carries from call to call; every tensor has the batch first.

    Attributes:
        own: the memory's state, always with its open-chunk fields, and the tail of its convolution; None in a block
            without a memory.
        tails: keys and values of the window or the segment, and in MAC the inputs of the retrieval's convolution.
        fixed: tensors that no token changes: attention's prefix.
        segment_weights: MAC's memory at the start of the open segment.
        log: what rewinding needs; None in a cache that cannot be cropped, and in a block without a memory.
        outputs: in the last layer, the model's last outputs.
    """

    own: MemoryCarry | None
    tails: dict[str, Tail] = field(default_factory=dict)
    fixed: dict[str, Tensor] = field(default_factory=dict)
    segment_weights: tuple[Tensor, ...] | None = None
    log: RewindLog | None = None
    outputs: Tail | None = None

    @property
    def memory(self) -> MemoryState | None:
        return None if self.own is None else self.own.state

    @property
    def dtype(self) -> torch.dtype:
        """What the block computes in, outside of its memory."""
        tail = self.tails["keys"] if self.own is None else self.own.tail
        return tail.buffer.dtype

    @property
    def growing(self) -> list[str]:
        """The names in a snapshot of the tails that grow with every token."""
        return [f"tails.{name}" for name, tail in self.tails.items() if isinstance(tail, GrowingTail)]

    def map(self, fn: Callable[[Tensor], Tensor]) -> "LayerCarry":
        """Apply a batch operation to every tensor."""
        return self._map(lambda part: part.map(fn), lambda part: part.map(fn), fn)

    def compact(self) -> "LayerCarry":
        """The same carry in tensors that hold nothing else."""
        return self._map(lambda memory: memory.compact(), lambda part: part.compact(), compact)

    def without_room(self) -> "LayerCarry":
        """The same carry, its tails without room to grow."""
        return self._map(lambda memory: memory, lambda tail: type(tail)(tail.values), lambda x: x)

    def _map(self, state: Callable, tail: Callable, fn: Callable) -> "LayerCarry":
        return LayerCarry(
            None if self.own is None else MemoryCarry(state(self.own.state), tail(self.own.tail)),
            {name: tail(x) for name, x in self.tails.items()},
            {name: fn(x) for name, x in self.fixed.items()},
            None if self.segment_weights is None else tuple(map(fn, self.segment_weights)),
            None if self.log is None else tail(self.log),
            None if self.outputs is None else tail(self.outputs),
        )

    def select(self, rows: Tensor, other: "LayerCarry") -> "LayerCarry":
        """Rows of this carry where `rows` [B] is True, rows of `other` elsewhere; the outputs are all of `other`."""
        segment, own = self.segment_weights, self.own
        if own is not None:
            own = MemoryCarry(own.state.select(rows, other.memory), own.tail.select(rows, other.own.tail))
        return LayerCarry(
            own,
            {name: tail.select(rows, other.tails[name]) for name, tail in self.tails.items()},
            {name: where_rows(rows, x, other.fixed[name]) for name, x in self.fixed.items()},
            None if segment is None else where_all(rows, segment, other.segment_weights),
            None if self.log is None else self.log.select(rows, other.log),
            other.outputs,
        )

    def named(self) -> dict[str, Tensor]:
        """Every tensor by its name in a snapshot, tails without their room."""
        tails = {f"tails.{name}": tail.values for name, tail in self._all_tails().items()}
        fixed = {f"fixed.{name}": x for name, x in self.fixed.items()}
        log = {} if self.log is None else {f"log.{name}": x for name, x in self.log.named().items()}
        segment = _numbered("segment_weights", self.segment_weights)
        memory = {} if self.own is None else _named_state("memory", self.memory)
        return {**memory, **tails, **fixed, **segment, **log}

    def _all_tails(self) -> dict[str, Tail]:
        """Every tail by its name in a snapshot."""
        outputs = {} if self.outputs is None else {"output": self.outputs}
        convolution = {} if self.own is None else {"conv": self.own.tail}
        return {**convolution, **self.tails, **outputs}

    def filled(self, named: dict[str, Tensor], columns: int) -> "LayerCarry":
        """A carry of the same form with the tensors of a snapshot; `columns` are those of its log."""
        log = {name.removeprefix("log."): x for name, x in named.items() if name.startswith("log.")}
        tails = {name: type(tail)(named[f"tails.{name}"]).compact() for name, tail in self._all_tails().items()}
        own = None if self.own is None else MemoryCarry(_filled_state("memory", self.memory, named), tails["conv"])
        return LayerCarry(
            own,
            {name: tails[name] for name in self.tails},
            {name: named[f"fixed.{name}"] for name in self.fixed},
            _filled("segment_weights", self.segment_weights, named),
            self.log.filled(log, columns) if log else None,
            tails.get("output"),
        )

    def tensors(self) -> list[Tensor]:
        tails = [tail.buffer for tail in self._all_tails().values()]
        log = [] if self.log is None else self.log.tensors()
        memory = [] if self.own is None else self.memory.tensors()
        return [*memory, *tails, *self.fixed.values(), *(self.segment_weights or ()), *log]

    def parts(self) -> dict[str, int]:
        """The bytes of every part."""
        tails = {name: tail.buffer for name, tail in self._all_tails().items()}
        outputs = [tails.pop("output")] if "output" in tails else []
        convolution = [tails.pop(name) for name in list(tails) if name.startswith("conv")]
        growing = [tails.pop(name.removeprefix("tails.")) for name in self.growing]
        found = {
            **_memory_parts(self.memory),
            "segment start": self.segment_weights or (),
            "attention": (*tails.values(), *self.fixed.values()),
            GROWING: growing,
            "convolution": convolution,
            "last outputs": outputs,
            "rewinding": () if self.log is None else self.log.tensors(),
        }
        return {name: sum(x.nbytes for x in xs) for name, xs in found.items()}

    def noting(self, written: Written, lengths: Tensor | None, read_only: bool, config) -> "LayerCarry":
        """The carry whose log has the tokens of this pass; a log that is not kept notes nothing."""
        if self.log is None:
            return self
        return replace(self, log=self.log.append(written, lengths, read_only, config))

    def restarting(self, seen: Tensor) -> "LayerCarry":
        """The carry whose log starts here, at `seen` [B] tokens."""
        return replace(self, log=RewindLog.starting(self.memory, self.segment_weights, seen))

    @torch.no_grad()
    def without_last(self, removed: Tensor, seen: Tensor, config: PreTrainedConfig) -> "LayerCarry":
        """The carry before each row's last `removed` [B] real tokens, when it had read `seen` [B]."""
        shorten = lambda tail: tail.without_last(removed).compact()  # noqa: E731
        tails = {name: shorten(tail) for name, tail in self.tails.items()}
        outputs = None if self.outputs is None else shorten(self.outputs)
        if self.own is None:
            return replace(self, tails=tails, outputs=outputs)
        unwritten, log = self.log.written_among_last(removed), self.log.without_last(removed)
        memory, segment = self.memory, self.segment_weights
        same_segment = segment is None or bool(_same_cell(seen, seen - removed, config.segment_size))
        if same_segment and bool((unwritten <= memory.length).all()):
            memory = replace(memory, length=memory.length - unwritten).map(Tensor.detach)
        else:
            memory, segment = log.replay(log.count, config)
        return LayerCarry(MemoryCarry(memory, shorten(self.own.tail)), tails, self.fixed, segment, log, outputs)


def _memory_parts(state: MemoryState | None) -> dict[str, tuple[Tensor, ...]]:
    """The tensors of a memory's state by what they are for; empty parts without one."""
    if state is None:
        return {"memory": (), "where forgetting leads": (), "open chunk": ()}
    return {
        "memory": (*state.weights, *state.momentum),
        "where forgetting leads": state.start or (),
        "open chunk": (*state.inputs, *state.errors, *state.gates, state.length),
    }


def _same_cell(x: Tensor, y: Tensor, period: int) -> Tensor:
    return (x // period == y // period).all()


# Names in a snapshot


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


def log_of_first_version(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """The log of a version 1 snapshot, whose columns held padding, under today's names."""
    kind = named.pop("log.kind")  # [B, LOG_COLUMNS]: 0 padding, 1 read only, 2 written
    order = (kind > 0).to(torch.int8).argsort(dim=1, stable=True)
    written = (kind.gather(1, order) == 2).to(named["log.tokens"].dtype)
    tokens = take(named["log.tokens"], order)
    flag = written[:, :, None, None].expand(*tokens.shape[:3], 1)
    return {**named, "log.tokens": torch.cat((tokens, flag), dim=-1), "log.count": (kind > 0).sum(1)}
