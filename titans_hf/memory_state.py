"""The state of a memory: weights and momentum of the last chunk boundary, and the chunk that is open since then.

Axis letters: B batch, H heads, C chunk length, n new tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .fast_paths import without_autocast
from .memory_closed_form import OpenChunk, advance, chunk_coefficients
from .rows import compact, fill_slots, where_rows


@dataclass(frozen=True)
class MemoryState:
    """The memory of a batch, at any token.

    `weights` and `momentum` are those of the last chunk boundary, tuples over the memory's depth of [B, H, in, out].
    The other fields describe the chunk that is open since then; by default the state is at a chunk boundary.

    Attributes:
        inputs: per layer [B, H, C, in], the activations `a` of the open chunk's keys.
        errors: per layer [B, H, C, out], the back-propagated errors `g` (after the surprise cap).
        gates: `(theta, eta, alpha)` of the open chunk, each [B, H, C].
        length: [B] tokens in each row's open chunk; slots from there on are unused.
        start: per layer [B, H, in, out], where forgetting leads (`memory_rule.write`); None is zero, as printed.
        writer: what the decoding step (`memory_step`) needs to go on from this state in place. Any state may be
            without one; that of a state which was changed by `replace` is ignored.
    """

    weights: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...] | None = None
    errors: tuple[Tensor, ...] | None = None
    gates: tuple[Tensor, Tensor, Tensor] | None = None
    length: Tensor | None = None
    start: tuple[Tensor, ...] | None = None
    writer: Any = None

    def __reduce__(self):
        """Copies and pickles own their bytes, and have no writer."""
        state = self.map(compact)
        return MemoryState, tuple(getattr(state, name) for name in TENSOR_FIELDS)

    def current(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Weights and momentum after the last token read (Eqs. 13 and 14)."""
        if self.length is None:
            return self.weights, self.momentum
        last = (self.length - 1).clamp(min=0)[:, None]
        with without_autocast(self.length):
            end = chunk_coefficients(*self.gates, rows=last)
            weights, momentum = advance(self.weights, self.momentum, self.start, self.inputs, self.errors, end)
        read = self.length > 0
        return where_all(read, weights, self.weights), where_all(read, momentum, self.momentum)

    def opened(self, chunk_size: int) -> "MemoryState":
        """The same state with every open-chunk field present, so that its structure and size never change."""
        if self.length is not None:
            return self
        first = self.weights[0]
        B, H = first.shape[:2]
        slots = (B, H, chunk_size)
        return replace(
            self,
            inputs=tuple(first.new_zeros(*slots, W.shape[2]) for W in self.weights),
            errors=tuple(first.new_zeros(*slots, W.shape[3]) for W in self.weights),
            gates=tuple(first.new_zeros(slots) for _ in range(3)),
            length=torch.zeros(B, dtype=torch.long, device=first.device),
        )

    def open_chunk(self) -> OpenChunk:
        """The open chunk, for a state with its fields."""
        return OpenChunk(self.inputs, self.errors, self.gates, self.length)

    def with_tokens(self, inputs, errors, gates, count: int | Tensor) -> "MemoryState":
        """The state with n more tokens in its open chunk: [B, H, n, ...] each, of which a row has `count`."""
        parts = ((self.inputs, inputs), (self.errors, errors), (self.gates, gates))
        filled = [tuple(fill_slots(*pair, self.length) for pair in zip(old, new, strict=True)) for old, new in parts]
        return MemoryState(self.weights, self.momentum, *filled, self.length + count, self.start)

    def close(self, weights: tuple[Tensor, ...], momentum: tuple[Tensor, ...]) -> "MemoryState":
        """The state in which rows whose chunk is full are at a boundary, with the given weights and momentum."""
        full = self.length == self.gates[0].shape[-1]
        return replace(
            self,
            weights=where_all(full, weights, self.weights),
            momentum=where_all(full, momentum, self.momentum),
            length=self.length.masked_fill(full, 0),
        )

    def at_boundary(self) -> "MemoryState":
        """The state without an open chunk, for rows that all are at a boundary."""
        return MemoryState(self.weights, self.momentum, start=self.start)

    def without_writer(self) -> "MemoryState":
        """The same state, whose buffers are not written to any more: autograd may keep them."""
        if self.writer is None:
            return self
        self.writer.retire()
        return replace(self, writer=None)

    def map(self, fn: Callable[[Tensor], Tensor]) -> "MemoryState":
        """Apply `fn` to every tensor."""

        def each(field):
            return tuple(map(fn, field)) if isinstance(field, tuple) else field if field is None else fn(field)

        return MemoryState(*(each(getattr(self, name)) for name in TENSOR_FIELDS))

    def select(self, rows: Tensor, other: "MemoryState") -> "MemoryState":
        """Rows of this state where `rows` [B] is True, rows of `other` elsewhere (both in the same form)."""
        others = iter(other.tensors())
        return self.map(lambda x: where_rows(rows, x, next(others)))

    def compact(self) -> "MemoryState":
        """The same state in tensors that hold nothing else."""
        return self if self.writer is not None else self.map(compact)

    def tensors(self) -> list[Tensor]:
        """Every tensor of the state, in the order `map` visits them."""
        found: list[Tensor] = []
        self.map(lambda tensor: found.append(tensor) or tensor)
        return found


TENSOR_FIELDS = tuple(field.name for field in fields(MemoryState) if field.name != "writer")


def where_all(rows: Tensor, xs: tuple[Tensor, ...], ys: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Rows of `xs` where `rows` [B] is True, rows of `ys` elsewhere, tensor by tensor."""
    return tuple(where_rows(rows, x, y) for x, y in zip(xs, ys, strict=True))
