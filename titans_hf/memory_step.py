"""One token into an open chunk, without gradients: the decoding step in torch.

The time of a single token is the number of operations it takes, so here they are few: the state lies in few buffers,
whose slots are filled in place (`tails.Cursor`), and what the present memory is made of is carried from token to token
by Eqs. 13 and 14 themselves. `memory_ops.extend` defines what is computed.

Axis letters: B batch, H heads, G = B H, C tokens of a chunk, D head width.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .memory_closed_form import chunk_coefficients, negligible
from .memory_parts import Write
from .memory_rule import DeltaRule, Rule
from .memory_state import MemoryState
from .rows import on_host
from .tails import Cursor

SHARED = ("weights", "momentum", "start", "inputs", "errors", "gates", "length")  # fields of a state in the buffers


def step(rule: Rule, state: MemoryState, q: Tensor, k: Tensor, v: Tensor, gates) -> tuple[Tensor, MemoryState] | None:
    """Write a token into the open chunk of every row, then read it: q, k, v [B, H, 1, D], gates [B, H, 1].

    Returns the outputs [B, H, 1, D] and the next state, or None where rows are at different places of their chunks.
    """
    writer = writer_of(state)
    if writer is None:
        return None
    B, H = q.shape[:2]
    q, k, v, *gates = (x.flatten(0, 1) for x in (q, k, v, *gates))
    writer = writer.write(rule, k, v, gates)
    return writer.read(q).unflatten(0, (B, H)), writer.after(state)


def native_step(operators, rule: Rule, state: MemoryState, q: Tensor, k: Tensor, v: Tensor, gates):
    """`step` by the C++ operator (`fast_paths.operators`), for tensors of one token in any shape: y has that of q."""
    writer = writer_of(state)
    if writer is None:
        return None
    writer = writer.appendable()
    y, of_M, of_S = operators.step(q, k, v, *gates, *writer.buffers(), *native_fields(rule))
    return y, writer.written(of_M, of_S).after(state)


def native_fields(rule: Rule) -> tuple[float, bool, float, bool]:
    """A rule as the C++ operators know it."""
    cap = float("inf") if rule.max_surprise is None else rule.max_surprise
    return cap, rule.normalised, rule.hidden_step, isinstance(rule, DeltaRule)


def writer_of(state: MemoryState) -> "ChunkWriter | None":
    """The writer that the state brings, or a new one; None where rows are at different places of their chunks."""
    if state.writer is not None and state.writer.describes(state):
        return state.writer
    places = on_host(state.length)
    if places is None or len(set(places)) > 1:
        return None
    return ChunkWriter.of(state, places[0])


@dataclass(frozen=True)
class ChunkWriter:
    """The buffers of an open chunk, and what the memory after its last token is made of.

    Attributes:
        batch: B and H.
        widths: the width of every layer's input.
        layers: per layer [G, 2 in + C, out]: weights, momentum, and an error for every token. Where forgetting leads to
            a start, [G, 3 in + C, out]: it comes before the errors.
        slots: [G, C, all inputs + 3], the inputs of all layers and the gates of every token.
        of_M, of_S: [G, 2 + C], the shares of `M_0`, `S_0` and the chunk's gradients (negative) in `M_t` and `S_t`.
        filled: tokens in the chunk.
        fields: the buffers as fields of a `MemoryState`.
    """

    batch: tuple[int, int]
    widths: list[int]
    layers: list[Tensor]
    slots: Tensor
    of_M: Tensor
    of_S: Tensor
    filled: int
    cursor: Cursor
    fields: dict[str, tuple[Tensor, ...] | Tensor]

    @classmethod
    def of(cls, state: MemoryState, filled: int) -> "ChunkWriter":
        """Buffers of its own for a state whose rows all have `filled` tokens in their chunk."""
        blocks = [x for x in (state.weights, state.momentum, state.start) if x is not None]
        layers = [torch.cat(part, dim=2).flatten(0, 1) for part in zip(*blocks, state.errors, strict=True)]
        slots = torch.cat((*state.inputs, *(gate[..., None] for gate in state.gates)), dim=-1).flatten(0, 1)
        widths, batch = [W.shape[2] for W in state.weights], tuple(state.weights[0].shape[:2])
        return cls._over(batch, widths, layers, slots, *_shares_now(state, filled), filled)

    @classmethod
    def _over(cls, batch, widths, layers: list[Tensor], slots: Tensor, of_M, of_S, filled: int) -> "ChunkWriter":
        size = slots.shape[1]
        split = [
            layer.unflatten(0, batch).tensor_split(tuple(range(n, layer.shape[1] - size + 1, n)), dim=2)
            for layer, n in zip(layers, widths, strict=True)
        ]
        weights, momentum, *start, errors = map(tuple, zip(*split, strict=True))
        *inputs, gates = slots.unflatten(0, batch).split([*widths, 3], dim=-1)
        fields = dict(weights=weights, momentum=momentum, start=start[0] if start else None, errors=errors)
        fields |= dict(inputs=tuple(inputs), gates=gates.unbind(-1), length=None)
        return cls(batch, widths, layers, slots, of_M, of_S, filled, Cursor(filled), fields)

    def attach(self, length: Tensor) -> MemoryState:
        """The state whose next token this writer writes."""
        fields = {**self.fields, "length": length}
        own = (self.batch, self.widths, self.layers, self.slots, self.of_M, self.of_S, self.filled, self.cursor)
        return MemoryState(**fields, writer=ChunkWriter(*own, fields))

    def after(self, state: MemoryState) -> MemoryState:
        """The state one token after the given one; at a chunk boundary if the token has filled the chunk."""
        if not self.is_full():
            return self.attach(state.length + 1)
        weights, momentum = self.memory()
        closed = replace(self.attach(torch.zeros_like(state.length)), writer=None)
        return replace(closed, weights=weights, momentum=momentum)

    def describes(self, state: MemoryState) -> bool:
        """Whether the state is the one it was attached to, field by field, and was not changed by `replace` since."""
        return all(getattr(state, name) is self.fields[name] for name in SHARED)

    def retire(self) -> None:
        """Leave the buffers as they are from now on."""
        self.cursor.retire()

    def is_full(self) -> bool:
        return self.filled == self.slots.shape[1]

    def write(self, rule: Rule, k: Tensor, v: Tensor, gates: list[Tensor]) -> "ChunkWriter":
        """The writer after a token with key and value [G, 1, D] and gates [G, 1]."""
        own = self.appendable()
        if own is not self:
            return own.write(rule, k, v, gates)
        weights = [x[:, :n] for x, n in zip(self.layers, self.widths, strict=True)]
        if isinstance(rule, DeltaRule):
            factors = _PresentWrite(rule, weights, k, v, self)
        else:
            factors = Write(rule, weights, k, v)
        self.slots[:, self.filled] = torch.cat((*(x[:, 0] for x in factors.X), *gates), dim=-1)
        for layer, d in zip(self.layers, factors.scaled_errors(), strict=True):
            layer[:, layer.shape[1] - self.slots.shape[1] + self.filled] = d[:, 0]
        theta, eta, alpha = gates
        of_S = self.of_S * eta  # Eq. 14, and below Eq. 13, for the shares
        of_S[:, 2 + self.filled] = -theta[:, 0]
        of_M = F.hardshrink(torch.addcmul(of_S, self.of_M, 1 - alpha), negligible(of_S.dtype))
        of_S = F.hardshrink(of_S, negligible(of_S.dtype))
        return self.written(of_M, of_S)

    def appendable(self) -> "ChunkWriter":
        """This writer, or the same in buffers of its own where these are not its to append to."""
        if self.cursor.allows(self.filled, self.slots):
            return self
        layers, slots = [x.clone() for x in self.layers], self.slots.clone()
        return ChunkWriter._over(self.batch, self.widths, layers, slots, self.of_M, self.of_S, self.filled)

    def buffers(self) -> tuple:
        """What a C++ operator fills, and the place of the next token."""
        return self.layers, self.slots, self.of_M, self.of_S, self.filled

    def written(self, of_M: Tensor, of_S: Tensor) -> "ChunkWriter":
        """The writer after a token that the next slots hold already."""
        self.cursor.end = filled = self.filled + 1
        own = (self.batch, self.widths, self.layers, self.slots, of_M, of_S, filled, self.cursor, self.fields)
        return ChunkWriter(*own)  # `replace` takes three times as long

    def read(self, q: Tensor) -> Tensor:
        """The query [G, 1, D] through the present memory (Eq. 15)."""
        for i in range(len(self.layers)):
            q = self.through(i, F.silu(q) if i else q)
        return q

    def through(self, i: int, x: Tensor) -> Tensor:
        """An input [G, 1, in] through the present weights of layer i: [G, 1, out]."""
        of_state, of_u = self._shares(self.of_M, i)
        parts = [x] * (of_state.shape[-1] // x.shape[-1])
        shares = torch.cat((of_state, of_u), dim=-1)
        parts = torch.cat((*parts, torch.bmm(x, self._inputs()[i].mT)), dim=-1).mul_(shares)
        return torch.bmm(parts, self._used(i))

    def back_through(self, i: int, error: Tensor) -> Tensor:
        """An error [G, 1, out] back through them: [G, 1, in]."""
        of_state, of_u = self._shares(self.of_M, i)
        by_state, by_u = torch.bmm(error, self._used(i).mT).split((of_state.shape[-1], self.filled), dim=-1)
        found = (by_state * of_state).unflatten(-1, (-1, self.widths[i])).sum(-2)
        return found.baddbmm_(by_u * of_u, self._inputs()[i])

    def memory(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The present weights and momentum, [B, H, in, out] each (Eqs. 13 and 14)."""
        made = [tuple(self._made_of(i, of) for i in range(len(self.layers))) for of in (self.of_M, self.of_S)]
        return made[0], made[1]

    def _made_of(self, i: int, of: Tensor) -> Tensor:
        of_state, of_u = self._shares(of, i)
        state, g = self._used(i).split((of_state.shape[-1], self.filled), dim=1)
        found = (state * of_state.mT).unflatten(1, (-1, self.widths[i])).sum(1)
        return found.baddbmm_((self._inputs()[i] * of_u.mT).mT, g).unflatten(0, self.batch)

    def _used(self, i: int) -> Tensor:
        """The buffer of layer i up to its last error."""
        return self.layers[i][:, : self.layers[i].shape[1] - self.slots.shape[1] + self.filled]

    def _inputs(self) -> list[Tensor]:
        """Per layer [G, filled, in], the inputs of the tokens so far."""
        return list(self.slots[:, : self.filled].split([*self.widths, 3], dim=-1)[:-1])

    def _shares(self, of: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """The shares of layer i's weights, momentum and start, [G, 1, 2 in or 3 in], and of the errors, [G, 1, filled].

        What has been forgotten of the weights has come back as a share of the start; there is no start in `S_t`.
        """
        of_state = of[:, :2]
        if self.fields["start"] is not None:
            of_start = 1 - of[:, :1] if of is self.of_M else torch.zeros_like(of[:, :1])
            of_state = torch.cat((of_state, of_start), dim=-1)
        return of_state.repeat_interleave(self.widths[i], dim=-1)[:, None], of[:, None, 2 : 2 + self.filled]


class _PresentWrite(Write):
    """The write of one token by delta: its error in the last layer is that of the present weights."""

    def __init__(self, rule: Rule, weights, k: Tensor, v: Tensor, writer: ChunkWriter):
        self.writer = writer
        super().__init__(rule, weights, k, v)

    def last_errors(self, W: Tensor, v: Tensor) -> Tensor:
        return (self.writer.through(len(self.Z), self.X[-1]) - v).mul_(2)

    def through_last(self, W: Tensor) -> Tensor:
        return self.writer.back_through(len(self.Z), self.D[0])


def _shares_now(state: MemoryState, filled: int) -> tuple[Tensor, Tensor]:
    """`ChunkWriter.of_M` and `of_S` after the state's last token."""
    if filled:
        end = chunk_coefficients(*state.gates, rows=(state.length - 1)[:, None])
        parts = (end.A, end.B, -end.C), (torch.zeros_like(end.A), end.m, -end.N)
        return tuple(torch.cat(part, dim=-1).flatten(0, 2) for part in parts)
    B, H, C = state.gates[0].shape
    of_M, of_S = state.gates[0].new_zeros(2, B * H, 2 + C)
    of_M[:, 0] = of_S[:, 1] = 1
    return of_M, of_S
