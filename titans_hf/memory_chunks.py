"""Whole chunks of the memory's update with a hand-written backward: the fast form in torch.

`memory_closed_form.read_chunk` defines what is computed, `memory_parts` and `memory_delta` how. The backward recomputes
each chunk from its start state instead of keeping a graph. Only the state depends on the chunk before: the reads of
several chunks, and in the backward everything but the gradient of the state, are computed together.

Where forgetting leads to a `start`, what is carried from chunk to chunk is the difference from it, `M - start`: it
fades like a memory that forgets towards zero, and every layer answers with its `start` besides.

Axis letters: B batch, H heads, N chunks, C tokens of a chunk, K chunks of a piece; G = B H sequences, or K B H where a
piece's chunks are computed together. Weights are [G, in, out].
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .fast_paths import without_autocast
from .memory_closed_form import read_chunk
from .memory_delta import Before, DeltaUpdates, DeltaWrite
from .memory_parts import Coefficients, Gates, Read, Updates, Write, joined, zero_outside
from .memory_rule import DeltaRule, Rule

SEQUENCES_AT_A_TIME = 16  # chunks of all rows and heads that are computed together, if not one chunk of each


def serves(rule: Rule) -> bool:
    """Whether this form, and the decoding step that shares its `Write`, computes the rule."""
    return type(rule) in (Rule, DeltaRule)


class _Scan(torch.autograd.Function):
    """Chunks one after the other. Kept for the backward: the tokens, and the state at every chunk's start."""

    @staticmethod
    def forward(ctx, rule, chunks, depth, q, k, v, theta, eta, alpha, *state):
        starts = []
        tokens, state, start = (q, k, v, theta, eta, alpha), list(state[: 2 * depth]), list(state[2 * depth :])
        y, end = _forward(rule, chunks, depth, tokens, state, start, starts)
        ctx.rule, ctx.depth, ctx.inputs = rule, depth, len(tokens) + len(start)
        ctx.save_for_backward(chunks, *tokens, *start, *(x for before in starts for x in before))
        return y, *end

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, *d_end):
        chunks, *saved = ctx.saved_tensors
        tokens, start, states = saved[:6], saved[6 : ctx.inputs], saved[ctx.inputs :]
        starts = [states[i : i + 2 * ctx.depth] for i in range(0, len(states), 2 * ctx.depth)]
        with without_autocast(dy):
            found = _backward(ctx.rule, chunks, ctx.depth, tokens, start, starts, dy, list(d_end))
        return None, None, None, *found


def scan(rule: Rule, weights, momentum, start, tokens, chunks: Tensor | None):
    """Read whole chunks from a boundary; arguments and results as in `memory_ops.scan`."""
    depth, start = len(weights), list(start or ())
    if start:
        weights = [W - own for W, own in zip(weights, start, strict=True)]
    inputs = (*tokens, *weights, *momentum, *start)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        y, *end = _Scan.apply(rule, chunks, depth, *inputs)
    else:
        y, end = _forward(rule, chunks, depth, tokens, [*weights, *momentum], start)
    weights = [W + own for W, own in zip(end, start)] if start else end[:depth]
    return y, tuple(weights), tuple(end[depth:])


def _pieces(N: int, sequences: int) -> list[range]:
    K = max(1, SEQUENCES_AT_A_TIME // sequences)
    return [range(n, min(n + K, N)) for n in range(0, N, K)]


def _of(x: Tensor, piece: range) -> Tensor:
    """The piece's chunks of `x` [B, H, N, C, ...] as [K B H, C, ...], chunk after chunk."""
    return x[:, :, piece.start : piece.stop].movedim(2, 0).flatten(0, 2).contiguous()


def _put(whole: Tensor, piece: range, x: Tensor) -> None:
    """Back again, into its place."""
    part = whole[:, :, piece.start : piece.stop].movedim(2, 0)
    part.copy_(x.reshape(part.shape))


def _select(more: Tensor | None, new: list[Tensor], old: list[Tensor]) -> list[Tensor]:
    """`new` in the sequences [G] that have the chunk, `old` in the others."""
    if more is None:
        return new
    return [torch.where(more[:, None, None], x, y) for x, y in zip(new, old, strict=True)]


def _having(chunks: Tensor | None, piece: range, H: int) -> Tensor | None:
    """Which sequences [K, G] have each of the piece's chunks; None if all do."""
    if chunks is None:
        return None
    return (torch.arange(piece.start, piece.stop, device=chunks.device)[:, None] < chunks).repeat_interleave(H, dim=1)


class _Chunks(NamedTuple):
    """What is known of chunks before they are written, [G, C, ...] each."""

    k: Tensor
    v: Tensor
    gates: Gates
    before: Before | None

    @classmethod
    def of(cls, rule: Rule, k: Tensor, v: Tensor, gates: Gates) -> "_Chunks":
        return cls(k, v, gates, Before.of(gates) if type(rule) is DeltaRule else None)

    def each(self, K: int):
        """The K chunks one by one."""
        before = [None] * K if self.before is None else map(Before._make, zip(*(x.chunk(K) for x in self.before)))
        gates = map(Gates._make, zip(*(x.chunk(K) for x in self.gates)))
        return map(_Chunks, self.k.chunk(K), self.v.chunk(K), gates, before)

    def write(self, rule: Rule, weights, momentum, start) -> Write:
        full = [W + own for W, own in zip(weights, start, strict=True)] if start else weights
        if self.before is None:
            return Write(rule, full, self.k, self.v)
        memory = [*full[:-1], weights[-1]], momentum[-1], start[-1] if start else None
        return DeltaWrite(rule, *memory, self.k, self.v, self.before)


def _forward(rule: Rule, chunks, depth: int, tokens, state: list[Tensor], start, starts: list | None = None):
    """Outputs, and the state at the end [B, H, in, out]; `starts` collects it before every chunk, [K B H, in, out]."""
    B, H, N = tokens[0].shape[:3]
    state, start = ([x.flatten(0, 1) for x in xs] for xs in (state, start))
    y = torch.empty_like(tokens[0])
    for piece in _pieces(N, B * H):
        q, k, v = (_of(x, piece) for x in tokens[:3])
        gates, more = Coefficients(*(_of(x, piece) for x in tokens[3:])).gates, _having(chunks, piece, H)
        writes, befores = [], []
        for n, chunk in enumerate(_Chunks.of(rule, k, v, gates).each(len(piece))):
            befores.append(state)
            weights, momentum = state[:depth], state[depth:]
            writes.append(chunk.write(rule, weights, momentum, start))
            after = writes[-1].after(weights, momentum, chunk.gates)
            state = _select(None if more is None else more[n], after, state)
        before = [joined(xs) for xs in zip(*befores, strict=True)]
        X, D, steps = _joined_writes(writes, k, gates.step)
        own = _repeated(start, len(piece))
        _put(y, piece, Read(before[:depth], before[depth:], own, X, D, steps, gates, q).y)
        if starts is not None:
            starts.append(before)
    return y, [x.unflatten(0, (B, H)) for x in state]


def _repeated(start: list[Tensor], K: int) -> list[Tensor]:
    """`start` [G, in, out] for K chunks that are computed together."""
    return start if K == 1 else [own.repeat(K, 1, 1) for own in start]


def _joined_writes(writes: list[Write], k: Tensor, step: Tensor):
    """X, D and the scaled steps of a piece, from those of its chunks."""
    layers = range(len(writes[0].D))
    X = [k, *(joined([write.X[i] for write in writes]) for i in layers[1:])]
    D = [joined([write.D[i] for write in writes]) for i in layers]
    if writes[0].scale is None:
        return X, D, [step] * len(D)
    return X, D, [step * joined([write.scale[i] for write in writes])[:, None] for i in layers]


def _backward(rule: Rule, chunks, depth: int, tokens, start, starts, dy: Tensor, d_state: list[Tensor]):
    """Gradients of tokens and gates, of the state before them, and of `start`."""
    B, H, N = tokens[0].shape[:3]
    d_state, start = ([x.flatten(0, 1) for x in xs] for xs in (d_state, start))
    found, d_start = [torch.empty_like(x) for x in tokens], [torch.zeros_like(x) for x in start]
    for piece, before in zip(reversed(_pieces(N, B * H)), reversed(starts), strict=True):
        more = _having(chunks, piece, H)
        pass_back = _piece_backward
        own = [_of(x, piece) for x in tokens]
        d_tokens, d_state, d_here = pass_back(rule, depth, own, start, before, more, _of(dy, piece), d_state)
        d_start = [x + here for x, here in zip(d_start, d_here, strict=True)]
        more = None if more is None else more.flatten()
        for whole, x in zip(found, d_tokens, strict=True):
            _put(whole, piece, zero_outside(more, x))
    return [*found, *(x.unflatten(0, (B, H)) for x in (*d_state, *d_start))]


def _piece_backward(rule: Rule, depth: int, tokens, start, before, more, dy: Tensor, d_state: list[Tensor]):
    """From the gradients of a piece's outputs and end state to those of its tokens, start state and `start`."""
    (q, k, v), coefficients = tokens[:3], Coefficients(*tokens[3:])
    K, gates, d_gates = (
        len(dy) // len(d_state[0]),
        coefficients.gates,
        Gates(*map(torch.zeros_like, coefficients.gates)),
    )
    weights, momentum, own = before[:depth], before[depth:], _repeated(start, K)
    write = _Chunks.of(rule, k, v, gates).write(rule, weights, momentum, own)
    if isinstance(write, DeltaWrite) and write.acted:
        return _piece_by_autograd(rule, depth, tokens, start, before, more, dy, d_state)
    steps = [write.scaled(gates.step, i) for i in range(depth)]
    read = Read(weights, momentum, own, write.X, write.D, steps, gates, q)
    dq, *of_layers = read.backward(dy, write, d_gates)
    del read, steps
    updates = (DeltaUpdates if isinstance(write, DeltaWrite) else Updates)(
        K, write, weights, momentum, gates, *of_layers
    )
    for n in reversed(range(K)):
        d_before = updates.back(n, d_state[:depth], d_state[depth:])
        d_state = _select(None if more is None else more[n], d_before, d_state)
    more = None if more is None else more.flatten()
    dk, dv = updates.finish(d_gates)
    d_start = [zero_outside(more, x).unflatten(0, (K, -1)).sum(0) for x in updates.d_start]
    d_gates = coefficients.backward(Gates(*(zero_outside(more, x) for x in d_gates)))
    return (dq, dk, dv, *d_gates), d_state, d_start


def _piece_by_autograd(rule: Rule, depth: int, tokens, start, before, more, dy: Tensor, d_state: list[Tensor]):
    """The same by the closed form: for the rare piece where the cap acts while errors follow one another."""
    K, found, d_start = len(dy) // len(d_state[0]), [], [torch.zeros_like(x) for x in start]
    parts = zip(*(x.chunk(K) for x in (*tokens, *before, dy)), strict=True)
    for n, part in reversed(list(enumerate(parts))):
        *inputs, dy_n = (x[:, None] for x in part)  # [G, 1, ...]: one head
        inputs = [x.detach().requires_grad_() for x in (*inputs, *(x[:, None] for x in start))]
        own, weights, momentum, own_start = (
            inputs[:6],
            inputs[6 : 6 + depth],
            inputs[6 + depth : 6 + 2 * depth],
            inputs[6 + 2 * depth :],
        )
        with torch.enable_grad():
            full = [W + x for W, x in zip(weights, own_start, strict=True)] if start else weights
            y, after, pushed = read_chunk(rule, full, momentum, own_start or None, *own)
            after = [W - x for W, x in zip(after, own_start, strict=True)] if start else after
        upstream = [dy_n, *(x[:, None] for x in d_state)]
        d = torch.autograd.grad((y, *after, *pushed), inputs, upstream, materialize_grads=True)
        d = [x[:, 0] for x in d]
        here = None if more is None else more[n]
        found.insert(0, d[:6])
        d_state = _select(here, d[6 : 6 + 2 * depth], d_state)
        d_start = [x + zero_outside(here, y) for x, y in zip(d_start, d[6 + 2 * depth :], strict=True)]
    return [joined(xs) for xs in zip(*found, strict=True)], d_state, d_start
