"""The parts of a whole chunk, forward and backward: what a write, a read and an update of the state compute.

`memory_closed_form.read_chunk` defines the numbers. Here they are arranged for speed: products accumulate into their
result, rows are scaled on their narrower side, and the rule's scale is folded into the coefficients. Nothing divides by
a gate: gates of exactly 0 and 1 work. `memory_chunks` puts the parts together.

Where forgetting leads to a `start`, `weights` are the differences from it, and their sums with it are `full`.

Axis letters: B batch, H heads, C tokens of a chunk, K chunks of a piece; G = B H sequences, or K B H where a piece's
chunks are computed together. Per layer, `X` are the keys' inputs, `Z = X W`, `D` the errors before the rule's scale,
`U` those before the slope; `Xb` and `Zb` belong to the read. Weights are [G, in, out].
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .memory_closed_form import negligible
from .memory_rule import Rule


class Gates(NamedTuple):
    """What the state after each token of a chunk is made of.

    `M_t = decay_t M_0 + drift_t S_0 - sum_i step[t, i] u_i`. After the last token that is `M`, and
    `S = momentum S_0 - sum_i last[1, i] u_i`.
    """

    step: Tensor  # [..., C, C]
    last: Tensor  # [..., 2, C]: the last row of `step`, and the same for S
    decay: Tensor  # [..., C]
    drift: Tensor  # [..., C]
    momentum: Tensor  # [...]

    def ends(self) -> tuple[Tensor, Tensor, Tensor]:
        """What is left of `M_0` and `S_0` in `M`, and of `S_0` in `S`: [G, 1, 1] each."""
        return tuple(end[:, None, None] for end in (self.decay[:, -1], self.drift[:, -1], self.momentum))


class Coefficients:
    """The coefficients of whole chunks from their gates, [G, C] each, and their backward.

    What `M_t` and `S_t` are made of follows Eqs. 13 and 14 themselves, `N_t = eta_t N_(t-1) + theta_t e_t` and
    `L_t = (1 - alpha_t) L_(t-1) + N_t`: a matrix product with the gates' products over every segment of the chunk. The
    backward is a product with its transpose. There is no quotient: gates of exactly 0 work.

    Attributes:
        L, N: [G, C, C + 2], the shares of the chunk's gradients, of `S_0` and of `M_0` in `M_t` and `S_t`.
    """

    def __init__(self, theta: Tensor, eta: Tensor, alpha: Tensor):
        keep, C = 1 - alpha, eta.shape[-1]
        self.of_M, self.of_S = _products_between(torch.stack((keep, eta)))
        self.N = self.of_S.new_zeros(*eta.shape, C + 2)
        torch.mul(self.of_S, theta[:, None], out=self.N[..., :C])
        torch.mul(self.of_S[..., 0], eta[:, :1], out=self.N[..., C])
        self.L = torch.bmm(self.of_M, self.N)
        torch.mul(self.of_M[..., 0], keep[:, :1], out=self.L[..., C + 1])
        F.threshold_(self.L, negligible(self.L.dtype), 0.0)
        step, drift, decay = self.L.split((C, 1, 1), dim=-1)
        last = torch.stack((step[:, -1], self.N[:, -1, :C]), dim=1)
        self.gates = Gates(step, last, decay[..., 0], drift[..., 0], self.N[:, -1, C])

    def backward(self, d: Gates) -> tuple[Tensor, Tensor, Tensor]:
        """From the gradients of the coefficients to those of theta, eta and alpha."""
        dL = torch.cat((d.step, d.drift[..., None], d.decay[..., None]), dim=-1)
        dL[:, -1, :-2] += d.last[:, 0]
        dL = torch.bmm(self.of_M.mT, dL)
        d_alpha = _along_row_before(dL, self.L, -1).neg_()
        dL[:, -1, :-2] += d.last[:, 1]
        dL[:, -1, -2] += d.momentum
        dN = torch.bmm(self.of_S.mT, dL)
        return dN.diagonal(dim1=-2, dim2=-1), _along_row_before(dN, self.N, -2), d_alpha


def _products_between(gate: Tensor) -> Tensor:
    """[..., C] to [..., C, C]: at (t, i) the product over tokens i+1..t, 1 on the diagonal and 0 above it."""
    token = torch.arange(gate.shape[-1], device=gate.device)
    factors = torch.where(token[:, None] > token, gate[..., None], gate.new_ones(()))
    return F.threshold_(factors.cumprod(-2).tril_(), negligible(gate.dtype), 0.0)


def _along_row_before(dX: Tensor, X: Tensor, start: int) -> Tensor:
    """[G, C] inner products of each row of dX with the row of X before it; before the first, column `start` is 1."""
    return torch.cat((dX[:, 0, start, None], (dX[:, 1:] * X[:, :-1]).sum(-1)), dim=-1)


def _rows_scaled(x: Tensor, row: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of `x^T diag(row) y`, the narrower one scaled."""
    row = row[..., None]
    return ((x * row).mT, y) if x.shape[-1] <= y.shape[-1] else (x.mT, row * y)


class Write:
    """The keys of chunks at the full weights of their chunks' starts (Eq. 12): G sequences of C tokens.

    Attributes:
        full: per layer the weights that the keys pass.
        X, D: per layer its input and the error at its output, unscaled, [G, C, in] and [G, C, out].
        Z, U: per hidden layer its output before, and the error after, the nonlinearity.
        scale: per layer [G, C], what the rule leaves of each error; None where it leaves everything.
    """

    def __init__(self, rule: Rule, full, k: Tensor, v: Tensor):
        self.rule, self.full, self.X, self.Z, self.U = rule, full, [k], [], []
        for W in full[:-1]:
            self.Z.append(torch.bmm(self.X[-1], W))
            self.X.append(F.silu(self.Z[-1]))
        self.D = [self.last_errors(full[-1], v)]
        for i in reversed(range(len(self.Z))):
            last = i + 1 == len(self.Z)
            self.U.insert(0, self.through_last(full[-1]) if last else torch.bmm(self.D[0], full[i + 1].mT))
            self.D.insert(0, torch.ops.aten.silu_backward(self.U[0], self.Z[i]))
        self.scale = self.norms = None
        if rule.max_surprise is not None or rule.normalised or rule.hidden_step != 1:
            self._measure(rule)

    def last_errors(self, W: Tensor, v: Tensor) -> Tensor:
        """The errors at the last layer's output, [G, C, D]."""
        return torch.baddbmm(v, self.X[-1], W, beta=-2, alpha=2)

    def through_last(self, W: Tensor) -> Tensor:
        """The errors at the last layer's input, [G, C, in]."""
        return torch.bmm(self.D[0], W.mT)

    def _measure(self, rule: Rule) -> None:
        """The norms of all inputs and errors, and `Rule.scale` from them."""
        norm = torch.linalg.vector_norm
        self.norms = [(norm(x, dim=-1), norm(d, dim=-1)) for x, d in zip(self.X, self.D, strict=True)]
        self.scale, self.step_scale = [], []  # after and before the cap
        for layer, (x, d) in enumerate(self.norms):
            step = rule.step_scale(layer, len(self.X), x.square())
            self.step_scale.append(step)
            if rule.max_surprise is not None:
                step = step * rule.max_surprise / (x * d * step).clamp_(min=rule.max_surprise)
            self.scale.append(step if isinstance(step, Tensor) else torch.full_like(x, step))

    def shares(self, layer: int) -> tuple[Tensor, Tensor]:
        """[G, C] each: minus the derivative of the scale's logarithm by the input, over the input; same for the error.

        Where the cap acts the scale is `cap / (|x| |d|)`; elsewhere it is in proportion to `1 / |x|^2`, or constant.
        """
        rule, (x, d), step = self.rule, self.norms[layer], self.step_scale[layer]
        of_x, of_d = torch.zeros_like(x), torch.zeros_like(d)
        if rule.normalised and layer:
            of_x = torch.where(x > 1, 2 / x.square(), of_x)
        if rule.max_surprise is not None:
            acts = x * d * step > rule.max_surprise
            of_x, of_d = (torch.where(acts, n.square().reciprocal(), of) for n, of in ((x, of_x), (d, of_d)))
        return of_x, of_d

    def after(self, weights, momentum, gates: Gates) -> list[Tensor]:
        """Weights, then momentum, after the last token (Eqs. 13 and 14)."""
        decay, drift, kept = gates.ends()
        found = [], []
        for i, (x, d, W, S) in enumerate(zip(self.X, self.D, weights, momentum, strict=True)):
            to_M, to_S = self.scaled(gates.last, i).unbind(1)
            found[0].append((W * decay).addcmul_(S, drift).baddbmm_(*_rows_scaled(x, to_M, d), alpha=-1))
            found[1].append((S * kept).baddbmm_(*_rows_scaled(x, to_S, d), alpha=-1))
        return [*found[0], *found[1]]

    def scaled_errors(self) -> list[Tensor]:
        """Per layer the errors as they are written, [G, C, out]."""
        if self.scale is None:
            return self.D
        return [d * scale[..., None] for d, scale in zip(self.D, self.scale, strict=True)]

    def scaled(self, coefficients: Tensor, layer: int) -> Tensor:
        """Coefficients [G, t, C] of the gradients, times their scale."""
        return coefficients if self.scale is None else coefficients * self.scale[layer][:, None]


class Read:
    """Each query through its own token's memory (Eq. 15), without forming that memory.

    Args:
        X, D: of the `Write` of the same chunks.
        start: per layer where forgetting leads; empty for zero.
        steps: per layer [G, C, C], `Gates.step` times the rule's scale.
    """

    def __init__(self, weights, momentum, start, X, D, steps, gates: Gates, q: Tensor):
        self.weights, self.momentum, self.start, self.X, self.D, self.steps = weights, momentum, start, X, D, steps
        self.decay, self.drift = gates.decay[..., None], gates.drift[..., None]
        self.Xb, self.Zb, self.overlap, self.used, self.of_W, self.of_S = [q], [], [], [], {}, {}
        for i, (x, d, W, S) in enumerate(zip(X, D, weights, momentum, strict=True)):
            xb = self.Xb[-1]
            self.overlap.append(torch.bmm(xb, x.mT))
            self.used.append(self.overlap[-1] * steps[i])
            if xb.shape[-1] <= W.shape[-1]:
                z = torch.bmm(xb * self.decay, W).baddbmm_(xb * self.drift, S)
            else:
                self.of_W[i], self.of_S[i] = torch.bmm(xb, W), torch.bmm(xb, S)
                z = (self.of_W[i] * self.decay).addcmul_(self.of_S[i], self.drift)
            z.baddbmm_(self.used[-1], d, alpha=-1)
            if start:
                z.baddbmm_(xb, start[i])
            if i < len(weights) - 1:
                self.Zb.append(z)
                self.Xb.append(F.silu(z))
        self.y = z

    def backward(self, dz: Tensor, write: Write, d_gates: Gates):
        """From the gradient of the outputs to those of q and, per layer, X, D, weights, momentum, start and scale.

        The scale's is the inner product [G, C] of each scaled error and its gradient. Gates add up in `d_gates`.
        """
        found = []
        for i in reversed(range(len(self.weights))):
            d_xb, *of_layer = self._layer_backward(i, dz, write, d_gates)
            found.insert(0, of_layer)
            dz = torch.ops.aten.silu_backward(d_xb, self.Zb[i - 1]) if i else d_xb
        return dz, *map(list, zip(*found, strict=True))

    def _layer_backward(self, i: int, dz: Tensor, write: Write, d_gates: Gates):
        x, d, xb, W, S = self.X[i], self.D[i], self.Xb[i], self.weights[i], self.momentum[i]
        agreement = torch.bmm(dz, d.mT)  # [G, C, C]
        d_overlap = agreement * self.steps[i]  # of minus the overlap
        agreement.mul_(self.overlap[i])
        d_gates.step.sub_(write.scaled(agreement, i))
        along = None if write.scale is None else agreement.mul_(self.steps[i]).sum(-2).neg_()
        dx = torch.bmm(d_overlap.mT, xb).neg_()
        dD = torch.bmm(self.used[i].mT, dz).neg_()
        if i in self.of_W:
            d_gates.decay.add_((dz * self.of_W[i]).sum(-1))
            d_gates.drift.add_((dz * self.of_S[i]).sum(-1))
            by_decay, by_drift = dz * self.decay, dz * self.drift
            d_xb = torch.bmm(by_decay, W.mT).baddbmm_(by_drift, S.mT)
            dW, dS = torch.bmm(xb.mT, by_decay), torch.bmm(xb.mT, by_drift)
        else:
            of_W, of_S = torch.bmm(dz, W.mT), torch.bmm(dz, S.mT)
            d_gates.decay.add_((xb * of_W).sum(-1))
            d_gates.drift.add_((xb * of_S).sum(-1))
            d_xb = of_W.mul_(self.decay).addcmul_(of_S, self.drift)
            dW, dS = torch.bmm((xb * self.decay).mT, dz), torch.bmm((xb * self.drift).mT, dz)
        d_xb.baddbmm_(d_overlap, x, alpha=-1)
        d_start = None
        if self.start:
            d_xb.baddbmm_(dz, self.start[i].mT)
            d_start = torch.bmm(xb.mT, dz)
        return d_xb, dx, dD, dW, dS, d_start, along


class Updates:
    """The backward through the updates of K chunks, from the last to the first: all that needs the state's gradient.

    Args:
        write: of all K chunks, with their start `weights` and `momentum`.
        dX, dD, dW, dS, d_start, along: what `Read.backward` found. They are completed in place.
    """

    def __init__(self, K: int, write: Write, weights, momentum, gates: Gates, dX, dD, dW, dS, d_start, along):
        self.write, self.weights, self.momentum, self.dX, self.dD = write, weights, momentum, dX, dD
        self.d_start = [] if d_start[0] is None else d_start
        self.widens = [x.shape[-1] <= d.shape[-1] for x, d in zip(write.X, write.D, strict=True)]

        def by_chunk(xs):
            return self.by_chunk(K, xs)

        rows = [write.scaled(gates.last, i)[..., None].unbind(1) for i in range(len(weights))]  # to M and to S
        narrow = [x if widens else d for x, d, widens in zip(write.X, write.D, self.widens, strict=True)]
        self.narrow, self.rows = narrow, [by_chunk(row) for row in zip(*rows, strict=True)]
        self.scaled = [by_chunk([x * row[i] for x, row in zip(narrow, rows, strict=True)]) for i in range(2)]
        slopes, curves = _silu_derivatives(write)
        self.X, self.D, self.W, self.slopes, self.curves = map(by_chunk, (write.X, write.D, write.full, slopes, curves))
        self.dX_of, self.dD_of, self.dW_of, self.dS_of = map(by_chunk, (dX, dD, dW, dS))
        self.d_full_of = self.dW_of  # of the sums of weights and start
        if self.d_start:
            self.d_full_of, self.d_start_of = by_chunk([torch.zeros_like(x) for x in dW]), by_chunk(d_start)
        self.ends, self.decay = by_chunk(gates.ends()), gates.ends()[0]
        if write.scale is not None:
            self.along = by_chunk(along)
            self.shares = [by_chunk(xs) for xs in zip(*map(write.shares, range(len(weights))), strict=True)]
        self.steps = []  # of all chunks passed: the gradients they started from, and their products

    @staticmethod
    def by_chunk(K: int, xs) -> list[list[Tensor]]:
        """Tensors [K B H, ...] as those of every chunk: views, so that what is added to them is added to the whole."""
        parts = [x.unflatten(0, (K, -1)).unbind(0) for x in xs]
        return [[part[n] for part in parts] for n in range(K)]

    def back(self, n: int, dW_end: list[Tensor], dS_end: list[Tensor]) -> list[Tensor]:
        """From the gradients of chunk n's end state to those of its start state."""
        products = [self._layer(n, i, *ends) for i, ends in enumerate(zip(dW_end, dS_end, strict=True))]
        self.steps.append((*dW_end, *dS_end, *(x for pair in products for x in pair)))
        self._write(n)
        return [*self.dW_of[n], *self.dS_of[n]]

    def _layer(self, n: int, i: int, dW_end: Tensor, dS_end: Tensor) -> tuple[Tensor, Tensor]:
        """Through one layer's update and its scale. Rows are scaled and summed on the layer's narrower side."""
        x, d, dx, dd = (xs[n][i] for xs in (self.X, self.D, self.dX_of, self.dD_of))
        wide, d_wide, d_narrow = (d, dd, dx) if self.widens[i] else (x, dx, dd)
        (by_M, by_S), (to_M, to_S) = ([xs[n][i] for xs in pair] for pair in (self.scaled, self.rows))
        to_wide = (dW_end, dS_end) if self.widens[i] else (dW_end.mT, dS_end.mT)
        d_wide.baddbmm_(by_M, to_wide[0], alpha=-1).baddbmm_(by_S, to_wide[1], alpha=-1)
        of_M, of_S = (torch.bmm(wide, to.mT) for to in to_wide)
        d_narrow.addcmul_(of_M, to_M, value=-1).addcmul_(of_S, to_S, value=-1)
        if self.write.scale is not None:
            along = self.along[n][i].sub_((by_M * of_M).addcmul_(by_S, of_S).sum(-1))
            x_share, d_share = (shares[n][i] for shares in self.shares)
            dx.addcmul_(x, (along * x_share)[..., None], value=-1)
            dd.addcmul_(d, (along * d_share)[..., None], value=-1)
        decay, drift, kept = self.ends[n]
        self.dW_of[n][i].addcmul_(dW_end, decay)
        self.dS_of[n][i].addcmul_(dW_end, drift).addcmul_(dS_end, kept)
        return of_M, of_S

    def _write(self, n: int) -> None:
        """Through the chain of errors (a double backward) and the keys' forward pass; dD becomes the gradient of Z."""
        X, W, dX, dD, d_full = (xs[n] for xs in (self.X, self.W, self.dX_of, self.dD_of, self.d_full_of))
        for i, (slope, curve) in enumerate(zip(self.slopes[n], self.curves[n], strict=True)):
            self.hidden_error_backward(n, i, dD[i] * slope)
            dD[i].mul_(curve)
        self.last_error_backward(n)
        for i in reversed(range(len(W) - 1)):
            dD[i].addcmul_(dX[i + 1], self.slopes[n][i])
            d_full[i].baddbmm_(X[i].mT, dD[i])
            if i:
                dX[i].baddbmm_(dD[i], W[i].mT)
        if self.d_start:
            for x, *to in zip(d_full, self.dW_of[n], self.d_start_of[n], strict=True):
                for d in to:
                    d.add_(x)

    def hidden_error_backward(self, n: int, i: int, dU: Tensor) -> None:
        """Through `U = D W^T`, of the errors behind layer i."""
        self.dD_of[n][i + 1].baddbmm_(dU, self.W[n][i + 1])
        self.d_full_of[n][i + 1].baddbmm_(dU.mT, self.D[n][i + 1])

    def last_error_backward(self, n: int) -> None:
        """Through `D = 2 (X W - V)` of the last layer; dD becomes the gradient of `X W`."""
        dD = self.dD_of[n][-1].mul_(2)
        self.d_full_of[n][-1].baddbmm_(self.X[n][-1].mT, dD)
        if len(self.weights) > 1:
            self.dX_of[n][-1].baddbmm_(dD, self.W[n][-1].mT)

    def finish(self, d_gates: Gates) -> tuple[Tensor, Tensor]:
        """After the first chunk: the gradients of k and v; those of the gates are added to `d_gates`."""
        depth = len(self.weights)
        found = [joined(xs) for xs in zip(*reversed(self.steps), strict=True)]
        dW_end, dS_end, products = found[:depth], found[depth : 2 * depth], found[2 * depth :]
        for i, (W, S) in enumerate(zip(self.weights, self.momentum, strict=True)):
            along = torch.stack([(self.narrow[i] * of).sum(-1) for of in products[2 * i : 2 * i + 2]], dim=1)
            d_gates.last.sub_(self.write.scaled(along, i))
            d_gates.decay[:, -1].add_((dW_end[i] * W).sum((-2, -1)))
            d_gates.drift[:, -1].add_((dW_end[i] * S).sum((-2, -1)))
            d_gates.momentum.add_((dS_end[i] * S).sum((-2, -1)))
        return self.keys_gradient(), self.dD[-1].neg()

    def keys_gradient(self) -> Tensor:
        """The gradient of k, where those of all the layers before are complete."""
        return self.dX[0].baddbmm_(self.dD[0], self.write.full[0].mT)


def _silu_derivatives(write: Write) -> tuple[list[Tensor], list[Tensor]]:
    """Per hidden layer SiLU's slope `s + x (1 - s)` with `s` the sigmoid, `x = z s`, and its second derivative by U."""
    slopes, curves = [], []
    for z, x, u in zip(write.Z, write.X[1:], write.U, strict=True):
        s = torch.sigmoid(z)
        slopes.append((s + x).addcmul_(x, s, value=-1))
        curves.append(torch.add(z, x, alpha=-2).add_(2).mul_(torch.ops.aten.sigmoid_backward(u, s)))
    return slopes, curves


def joined(xs) -> Tensor:
    return xs[0] if len(xs) == 1 else torch.cat(xs)


def zero_outside(more: Tensor | None, x: Tensor) -> Tensor:
    """`x` [K B H, ...] in the sequences that have the chunk, 0 in the others; None means all have it."""
    return x if more is None else torch.where(more.view(-1, *[1] * (x.dim() - 1)), x, 0.0)
