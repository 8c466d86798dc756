"""Whole chunks of the memory's update with their derivative written out: the fast form in torch.

`memory_ops` defines what is computed. Here the same is arranged for speed: products accumulate into their result, rows
are scaled on their narrower side, the cap goes with the coefficients, and the backward computes each chunk again from
its start state instead of leaving a graph behind. Nothing divides by a gate, so gates of exactly 0 and 1 are ordinary.

Axis letters: B batch, H heads, G = B H, N chunks, C tokens of a chunk. Per layer, `X` are the keys' inputs, `Z = X W`,
`D` the errors before the cap, `U` those before the slope; `Xb` and `Zb` belong to the read. Weights are [G, in, out].
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNKS_AT_A_TIME = 16  # whose coefficients are computed together


def without_autocast(x: Tensor):
    """A context in which matrix products keep the state's precision, whatever autocast would make of them."""
    device = x.device.type
    active = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if active else nullcontext()


class Gates(NamedTuple):
    """What the state after each token of a chunk is made of.

    `M_t = decay_t M_0 + drift_t S_0 - sum_i step[t, i] u_i`, and `S = momentum S_0 - sum_i to_S[i] u_i` after the last.
    """

    step: Tensor  # [..., C, C]
    to_S: Tensor  # [..., C]
    decay: Tensor  # [..., C]
    drift: Tensor  # [..., C]
    momentum: Tensor  # [...]


def gates_of(theta: Tensor, eta: Tensor, alpha: Tensor) -> Gates:
    """The coefficients of whole chunks, from their gates [..., C].

    Neighbouring blocks of tokens are joined, twice as long at each step. Across the joint a coefficient is an outer
    product of what the later block does to a state and what the earlier one left in it: no quotient, no C^3 product.
    """
    C = theta.shape[-1]
    size = 1 << (C - 1).bit_length()
    padding = (0, size - C)  # behind the last token: S keeps still, and the rows of M are cut off
    decay = 1 - F.pad(alpha, padding)[..., None]  # vectors [..., blocks, tokens of a block], at first one
    momentum = drift = F.pad(eta, padding, value=1.0)[..., None]
    to_S = F.pad(theta, padding)[..., None]
    step = to_S[..., None]  # [..., blocks, tokens, tokens]
    while step.shape[-1] < size:
        (decay, decay2), (momentum, momentum2), (drift, drift2), (to_S, to_S2) = (
            (x[..., ::2, :], x[..., 1::2, :]) for x in (decay, momentum, drift, to_S)
        )
        step, step2 = step[..., ::2, :, :], step[..., 1::2, :, :]
        across = decay2[..., None] * step[..., -1:, :] + drift2[..., None] * to_S[..., None, :]
        step = torch.cat((F.pad(step, (0, step.shape[-1])), torch.cat((across, step2), dim=-1)), dim=-2)
        to_S = torch.cat((momentum2[..., -1:] * to_S, to_S2), dim=-1)
        drift = torch.cat((drift, decay2 * drift[..., -1:] + drift2 * momentum[..., -1:]), dim=-1)
        decay = torch.cat((decay, decay2 * decay[..., -1:]), dim=-1)
        momentum = torch.cat((momentum, momentum2 * momentum[..., -1:]), dim=-1)
    step, to_S, decay, drift = step[..., 0, :C, :C], to_S[..., 0, :C], decay[..., 0, :C], drift[..., 0, :C]
    return Gates(*map(without_dust, (step, to_S, decay, drift, momentum[..., 0, -1])))


def without_dust(x: Tensor) -> Tensor:
    """Coefficients too small to matter become exact zeros: their products would be subnormal, and slow a CPU down.

    Gradients pass as they would: a gate of 0 has one.
    """
    dust = 1e-24 if x.dtype == torch.float64 else 1e-16
    return x - torch.where(x < dust, x, 0.0).detach()


def _rows_scaled(x: Tensor, row: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of `x^T diag(row) y`, the narrower one scaled."""
    row = row[..., None]
    return ((x * row).mT, y) if x.shape[-1] <= y.shape[-1] else (x.mT, row * y)


def _dots(x: Tensor, y: Tensor) -> Tensor:
    """[G] inner products of whole matrices, without a product of their size in memory."""
    return torch.bmm(x.flatten(1)[:, None], y.flatten(1)[..., None])[:, 0, 0]


class Chunk:
    """One chunk from its start state: the keys' way forward, the errors' way back, and the read.

    Args:
        weights, momentum: per layer [G, in, out].
        q, k, v: [G, C, D].
    """

    def __init__(self, weights, momentum, q, k, v, gates: Gates, max_surprise: float | None):
        self.weights, self.momentum, self.gates, self.max_surprise = weights, momentum, gates, max_surprise
        self.depth, self.X, self.Xb = len(weights), [k], [q]
        self._write(v)
        if max_surprise is not None:
            self.x_norm, self.d_norm = ([torch.linalg.vector_norm(x, dim=-1) for x in xs] for xs in (self.X, self.D))
            norms = [x * d for x, d in zip(self.x_norm, self.d_norm, strict=True)]
            self.scale = [max_surprise / norm.clamp(min=max_surprise) for norm in norms]
        self._read()

    def _write(self, v: Tensor) -> None:
        """Each layer's input and the error at its output, at the chunk-start weights (Eq. 12)."""
        self.Z, self.U = [], []
        for W in self.weights[:-1]:
            self.Z.append(torch.bmm(self.X[-1], W))
            self.X.append(F.silu(self.Z[-1]))
        self.D = [torch.baddbmm(v, self.X[-1], self.weights[-1], beta=-2, alpha=2)]
        for W, z in zip(reversed(self.weights[1:]), reversed(self.Z), strict=True):
            self.U.insert(0, torch.bmm(self.D[0], W.mT))
            self.D.insert(0, torch.ops.aten.silu_backward(self.U[0], z))

    def _read(self) -> None:
        """Each query through its own token's memory (Eq. 15), without forming that memory."""
        decay, drift = self.gates.decay[..., None], self.gates.drift[..., None]
        self.Zb, self.overlap, self.of_W, self.of_S = [], [], [], []
        for i, (x, d, W, S) in enumerate(zip(self.X, self.D, self.weights, self.momentum, strict=True)):
            xb = self.Xb[-1]
            self.overlap.append(torch.bmm(xb, x.mT))
            if xb.shape[-1] <= W.shape[-1]:
                z = torch.bmm(xb * decay, W).baddbmm_(xb * drift, S)
            else:
                self.of_W.append(torch.bmm(xb, W))
                self.of_S.append(torch.bmm(xb, S))
                z = (self.of_W[-1] * decay).addcmul_(self.of_S[-1], drift)
            z.baddbmm_(self.overlap[-1] * self._capped(self.gates.step, i), d, alpha=-1)
            if i < self.depth - 1:
                self.Zb.append(z)
                self.Xb.append(F.silu(z))
        self.y = z

    def _capped(self, row: Tensor, layer: int) -> Tensor:
        """Coefficients [G, C] or [G, t, C] of the gradients, with the cap."""
        if self.max_surprise is None:
            return row
        return row * (self.scale[layer] if row.dim() == 2 else self.scale[layer][:, None])

    def after(self) -> list[Tensor]:
        """Weights, then momentum, after the last token (Eqs. 13 and 14)."""
        g = self.gates
        decay, drift, kept = (end[:, None, None] for end in (g.decay[:, -1], g.drift[:, -1], g.momentum))
        weights, momentum = [], []
        for i, (x, d, W, S) in enumerate(zip(self.X, self.D, self.weights, self.momentum, strict=True)):
            to_M, to_S = self._capped(g.step[:, -1], i), self._capped(g.to_S, i)
            weights.append((W * decay).addcmul_(S, drift).baddbmm_(*_rows_scaled(x, to_M, d), alpha=-1))
            momentum.append((S * kept).baddbmm_(*_rows_scaled(x, to_S, d), alpha=-1))
        return [*weights, *momentum]

    def backward(self, dy: Tensor, d_weights: list[Tensor], d_momentum: list[Tensor]):
        """From the gradients of outputs and state after to those of state before, q, k, v and gates."""
        d_gates = Gates(*(torch.zeros_like(x) for x in self.gates))
        dX, dD, dW, dS, dz = [], [], [], [], dy
        for i in reversed(range(self.depth)):
            d_xb, *found = self._layer_backward(i, dz, d_weights[i], d_momentum[i], d_gates)
            for parts, part in zip((dX, dD, dW, dS), found, strict=True):
                parts.insert(0, part)
            dz = torch.ops.aten.silu_backward(d_xb, self.Zb[i - 1]) if i else d_xb
        dk, dv = self._write_backward(dX, dD, dW)
        return [*dW, *dS], dz, dk, dv, d_gates

    def _layer_backward(self, i: int, dz: Tensor, dW_end: Tensor, dS_end: Tensor, d_gates: Gates):
        """Through one layer's read, its update and its cap; the gates' share is added to `d_gates`.

        Returns gradients of the read's input, the keys' input, the error before the cap, weights and momentum. What is
        summed over a layer's width is summed on its narrower side.
        """
        g, x, d, xb, W, S = self.gates, self.X[i], self.D[i], self.Xb[i], self.weights[i], self.momentum[i]
        overlap, widens = self.overlap[i], x.shape[-1] <= d.shape[-1]
        to_M, to_S = (self._capped(row, i)[..., None] for row in (g.step[:, -1], g.to_S))
        decay, drift = g.decay[..., None], g.drift[..., None]

        agreement = torch.bmm(dz, d.mT)  # [G, C, C]
        d_step = self._capped(agreement, i)
        d_gates.step.addcmul_(d_step, overlap, value=-1)
        d_overlap = d_step * g.step  # of minus the overlap
        used = overlap * g.step
        dx = torch.bmm(d_overlap.mT, xb).neg_()
        dD = torch.bmm(self._capped(used, i).mT, dz).neg_()
        if widens:
            of_W, of_S = torch.bmm(dz, W.mT), torch.bmm(dz, S.mT)
            d_gates.decay.add_((xb * of_W).sum(-1))
            d_gates.drift.add_((xb * of_S).sum(-1))
            d_xb = of_W.mul_(decay).addcmul_(of_S, drift)
            of_W, of_S = torch.bmm(d, dW_end.mT), torch.bmm(d, dS_end.mT)
            along_M, along_S = (x * of_W).sum(-1), (x * of_S).sum(-1)
            dx.addcmul_(of_W, to_M, value=-1).addcmul_(of_S, to_S, value=-1)
            dD.baddbmm_(x * to_M, dW_end, alpha=-1).baddbmm_(x * to_S, dS_end, alpha=-1)
        else:
            d_gates.decay.add_((dz * self.of_W.pop()).sum(-1))
            d_gates.drift.add_((dz * self.of_S.pop()).sum(-1))
            d_xb = torch.bmm(dz * decay, W.mT).baddbmm_(dz * drift, S.mT)
            of_W, of_S = torch.bmm(x, dW_end), torch.bmm(x, dS_end)
            along_M, along_S = (d * of_W).sum(-1), (d * of_S).sum(-1)
            dx.baddbmm_(d * to_M, dW_end.mT, alpha=-1).baddbmm_(d * to_S, dS_end.mT, alpha=-1)
            dD.addcmul_(of_W, to_M, value=-1).addcmul_(of_S, to_S, value=-1)
        d_xb.baddbmm_(d_overlap, x, alpha=-1)
        d_gates.step[:, -1].sub_(self._capped(along_M, i))
        d_gates.to_S.sub_(self._capped(along_S, i))
        if self.max_surprise is not None:
            along = -(used * agreement).sum(-2) - g.step[:, -1] * along_M - g.to_S * along_S
            self._cap_backward(i, along, dx, dD)

        end_decay, end_drift, kept = (end[:, None, None] for end in (g.decay[:, -1], g.drift[:, -1], g.momentum))
        dW = (dW_end * end_decay).baddbmm_(*_rows_scaled(xb, g.decay, dz))
        dS = (dW_end * end_drift).addcmul_(dS_end, kept).baddbmm_(*_rows_scaled(xb, g.drift, dz))
        d_gates.decay[:, -1].add_(_dots(dW_end, W))
        d_gates.drift[:, -1].add_(_dots(dW_end, S))
        d_gates.momentum.add_(_dots(dS_end, S))
        return d_xb, dx, dD, dW, dS

    def _cap_backward(self, i: int, along: Tensor, dx: Tensor, dD: Tensor) -> None:
        """Both the input and the error set the cap. `along` [G, C]: the inner product of the error and its gradient."""
        x_norm, d_norm = self.x_norm[i], self.d_norm[i]
        capped = x_norm * d_norm > self.max_surprise
        along = torch.where(capped, along * self.scale[i], 0.0)
        dx.addcmul_(self.X[i], (along / x_norm.square().where(capped, 1.0))[..., None], value=-1)
        dD.addcmul_(self.D[i], (along / d_norm.square().where(capped, 1.0))[..., None], value=-1)

    def _write_backward(self, dX: list[Tensor], dD: list[Tensor], dW: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Through the chain of errors (a double backward) and the keys' way forward."""
        dZ = []
        for i, (z, u) in enumerate(zip(self.Z, self.U, strict=True)):
            dH = torch.ops.aten.silu_backward(dD[i], z)
            dZ.append(_silu_curve_times(dD[i].mul_(u), z, self.X[i + 1]))
            dD[i + 1].baddbmm_(dH, self.weights[i + 1])
            dW[i + 1].baddbmm_(dH.mT, self.D[i + 1])
        dZ.append(dD[-1].mul_(2))
        for i in reversed(range(self.depth)):
            dX[i].baddbmm_(dZ[i], self.weights[i].mT)
            dW[i].baddbmm_(self.X[i].mT, dZ[i])
            if i:
                dZ[i - 1].add_(torch.ops.aten.silu_backward(dX[i], self.Z[i - 1]))
        return dX[0], dZ[-1].neg()


def _silu_curve_times(factor: Tensor, z: Tensor, activation: Tensor) -> Tensor:
    """`factor` times the second derivative of SiLU, `s (1 - s) (2 + z - 2 z s)`; `activation` is `z s`."""
    slope = torch.ops.aten.sigmoid_backward(factor, torch.sigmoid(z))  # factor s (1 - s)
    return torch.add(z, activation, alpha=-2).add_(2).mul_(slope)


class _Scan(torch.autograd.Function):
    """Chunks one after the other. Kept for the backward: the tokens, and the state at every chunk's start."""

    @staticmethod
    def forward(ctx, max_surprise, chunks, depth, q, k, v, theta, eta, alpha, *state):
        starts = []
        y, end = _forward(max_surprise, chunks, depth, (q, k, v, theta, eta, alpha), list(state), starts)
        ctx.max_surprise, ctx.depth = max_surprise, depth
        ctx.save_for_backward(chunks, q, k, v, theta, eta, alpha, *(x for start in starts for x in start))
        return y, *end

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, *d_end):
        chunks, *tokens = ctx.saved_tensors
        tokens, states = tokens[:6], tokens[6:]
        starts = [states[i : i + 2 * ctx.depth] for i in range(0, len(states), 2 * ctx.depth)]
        with without_autocast(dy):
            d_tokens, d_start = _backward(ctx.max_surprise, chunks, ctx.depth, tokens, starts, dy, list(d_end))
        return None, None, None, *d_tokens, *d_start


def scan(max_surprise: float | None, chunks: Tensor | None, weights, momentum, *tokens: Tensor):
    """`memory_ops.scan_chunks`; see there."""
    depth, inputs = len(weights), (*tokens, *weights, *momentum)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        y, *end = _Scan.apply(max_surprise, chunks, depth, *inputs)
    else:
        y, end = _forward(max_surprise, chunks, depth, tokens, [*weights, *momentum])
    return y, tuple(end[:depth]), tuple(end[depth:])


def _chunk_first(x: Tensor) -> Tensor:
    """[B, H, N, C, ...] to [N, B H, C, ...], contiguous."""
    return x.movedim(2, 0).flatten(1, 2).contiguous()


def _chunk_third(x: Tensor, B: int) -> Tensor:
    """Back again."""
    return x.unflatten(1, (B, -1)).movedim(0, 2)


def _pieces(N: int) -> list[range]:
    starts = range(0, N, CHUNKS_AT_A_TIME)
    return [range(n, min(n + CHUNKS_AT_A_TIME, N)) for n in starts]


def _select(more: Tensor | None, new: list[Tensor], old: list[Tensor]) -> list[Tensor]:
    """`new` in the rows [G] that have the chunk, `old` in the others."""
    if more is None:
        return new
    return [torch.where(more[:, None, None], x, y) for x, y in zip(new, old, strict=True)]


def _rows_with(chunks: Tensor | None, N: int, H: int) -> list[Tensor | None]:
    """For every chunk the rows [G] that have it; None where all do."""
    if chunks is None:
        return [None] * N
    return list((torch.arange(N, device=chunks.device)[:, None] < chunks).repeat_interleave(H, dim=1))


def _forward(max_surprise, chunks, depth: int, tokens, state: list[Tensor], starts: list | None = None):
    """Outputs, and the state at the end [B, H, in, out]; `starts` collects that [G, in, out] before every chunk."""
    B, H, N = tokens[0].shape[:3]
    q, k, v, theta, eta, alpha = map(_chunk_first, tokens)
    state, outputs, rows = [x.flatten(0, 1) for x in state], [], _rows_with(chunks, N, H)
    for piece in _pieces(N):
        gates = gates_of(*(x[piece.start : piece.stop] for x in (theta, eta, alpha)))
        for n in piece:
            now = Gates(*(x[n - piece.start] for x in gates))
            chunk = Chunk(state[:depth], state[depth:], q[n], k[n], v[n], now, max_surprise)
            if starts is not None:
                starts.append(state)
            outputs.append(chunk.y)
            state = _select(rows[n], chunk.after(), state)
    return _chunk_third(torch.stack(outputs), B), [x.unflatten(0, (B, H)) for x in state]


def _backward(max_surprise, chunks, depth: int, tokens, starts, dy: Tensor, d_state: list[Tensor]):
    """Gradients of tokens and gates, and of the start state."""
    B, H, N = tokens[0].shape[:3]
    q, k, v, *gates = map(_chunk_first, tokens)
    dy, d_state, rows = _chunk_first(dy), [x.flatten(0, 1) for x in d_state], _rows_with(chunks, N, H)
    found = [torch.empty_like(x) for x in (q, k, v, *gates)]
    for piece in reversed(_pieces(N)):
        here = slice(piece.start, piece.stop)
        with torch.enable_grad():
            leaves = [x[here].detach().requires_grad_() for x in gates]
            coefficients = gates_of(*leaves)
        d_coefficients = [torch.empty_like(x) for x in coefficients]
        for n in reversed(piece):
            now = Gates(*(x[n - piece.start].detach() for x in coefficients))
            chunk = Chunk(starts[n][:depth], starts[n][depth:], q[n], k[n], v[n], now, max_surprise)
            d_start, *d_tokens, d_gates = chunk.backward(dy[n], d_state[:depth], d_state[depth:])
            d_state = _select(rows[n], d_start, d_state)
            for buffer, new in zip(found[:3], d_tokens, strict=True):
                buffer[n] = new if rows[n] is None else new.where(rows[n][:, None, None], 0.0)
            for buffer, new in zip(d_coefficients, d_gates, strict=True):
                buffer[n - piece.start] = (
                    new if rows[n] is None else torch.where(rows[n].view(-1, *[1] * (new.dim() - 1)), new, 0.0)
                )
        for buffer, new in zip(found[3:], torch.autograd.grad(coefficients, leaves, d_coefficients), strict=True):
            buffer[here] = new
    d_tokens = [_chunk_third(x, B) for x in found]
    return d_tokens, [x.unflatten(0, (B, H)) for x in d_state]
