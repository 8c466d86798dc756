"""One chunk of the memory's update and its derivative, written out in torch: what the kernels compute, and how.

The forward is the chunk form of `titans_hf.memory_ops`. The backward uses no autograd: it is what a backward kernel
computes, step by step. Nothing divides by a gate, so gates of exactly 0 and 1 are ordinary values.

Axis letters: B batch, H heads, C tokens of the chunk, L layers of the memory. Per layer i, `X` are inputs, `Z = X W`,
`D` errors before the cap and `E` after it; barred names (`Xb`, `zb`) belong to the read path.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Coefficients(NamedTuple):
    """What the state after each token is made of: `M_t = decay M_0 + drift S_0 - sum_i mixed[t, i] theta_i u_i`."""

    forget: Tensor  # [B, H, C, C] products of 1 - alpha over tokens i+1..t, 1 on the diagonal, 0 above
    keep: Tensor  # [B, H, C, C] products of eta, likewise
    mixed: Tensor  # [B, H, C, C] forget @ keep
    decay: Tensor  # [B, H, C] product of 1 - alpha over tokens 0..t
    momentum: Tensor  # [B, H, C] product of eta over tokens 0..t
    drift: Tensor  # [B, H, C] forget @ momentum


def segment_products(gate: Tensor) -> Tensor:
    """[B, H, C] to [B, H, C, C]: the gate's product over tokens i+1..t, a running product and never a quotient."""
    token = torch.arange(gate.shape[-1], device=gate.device)
    factors = torch.where(token[:, None] > token, gate[..., None], gate.new_ones(()))
    return factors.cumprod(-2).tril()


def coefficients(eta: Tensor, alpha: Tensor) -> Coefficients:
    forget, keep = segment_products(1 - alpha), segment_products(eta)
    decay, momentum = (1 - alpha).cumprod(-1), eta.cumprod(-1)
    return Coefficients(forget, keep, forget @ keep, decay, momentum, (forget @ momentum[..., None])[..., 0])


def _sigmoid_derivatives(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """SiLU, its first and its second derivative."""
    s = torch.sigmoid(z)
    first = s * (1 + z * (1 - s))
    return z * s, first, s * (1 - s) * (2 + z * (1 - 2 * s))


def _cap(x: Tensor, error: Tensor, max_surprise: float | None) -> Tensor:
    """[B, H, C, 1] scale that brings the norm of each token's gradient `x error^T` to `max_surprise` at most."""
    if max_surprise is None:
        return error.new_ones(*error.shape[:-1], 1)
    squared = x.square().sum(-1, keepdim=True) * error.square().sum(-1, keepdim=True)
    return max_surprise * squared.clamp(min=max_surprise**2).rsqrt()


class Chunk:
    """The forward of one chunk, with everything that the backward asks for again.

    Args:
        weights, momentum: per layer [B, H, in, out], at the chunk's start.
        q, k, v: [B, H, C, D]; theta, eta, alpha: [B, H, C].
    """

    def __init__(self, weights, momentum, q, k, v, theta, eta, alpha, max_surprise):
        self.weights, self.momentum, self.theta, self.eta, self.alpha = weights, momentum, theta, eta, alpha
        self.depth, self.max_surprise = len(weights), max_surprise
        self.c = coefficients(eta, alpha)
        self._write_path(k, v)
        self._read_path(q)

    def _write_path(self, k: Tensor, v: Tensor) -> None:
        self.X, self.Z, self.slope, self.curve = [k], [], [], []
        for W in self.weights:
            z = self.X[-1] @ W
            x, slope, curve = _sigmoid_derivatives(z)
            self.Z.append(z)
            self.X.append(x)
            self.slope.append(slope)
            self.curve.append(curve)
        self.D = [2 * (self.Z[-1] - v)]
        for W, slope in zip(reversed(self.weights[1:]), reversed(self.slope[:-1]), strict=True):
            self.D.insert(0, (self.D[0] @ W.mT) * slope)
        self.scale = [_cap(x, d, self.max_surprise) for x, d in zip(self.X, self.D, strict=False)]
        self.E = [scale * d for scale, d in zip(self.scale, self.D, strict=True)]

    def _read_path(self, q: Tensor) -> None:
        step = self.c.mixed * self.theta[..., None, :]
        decay, drift = self.c.decay[..., None], self.c.drift[..., None]
        self.Xb, self.zb = [q], []
        for x, error, W, S in zip(self.X, self.E, self.weights, self.momentum, strict=False):
            xb = self.Xb[-1]
            self.zb.append(decay * (xb @ W) + drift * (xb @ S) - ((xb @ x.mT) * step) @ error)
            self.Xb.append(_sigmoid_derivatives(self.zb[-1])[0])
        self.y = self.zb[-1]

    def after(self) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and momentum after the chunk's last token."""
        decay, drift, momentum = (x[..., -1, None, None] for x in (self.c.decay, self.c.drift, self.c.momentum))
        write_M, write_S = (x[..., -1, :, None] * self.theta[..., None] for x in (self.c.mixed, self.c.keep))
        layers = list(zip(self.X, self.E, self.weights, self.momentum, strict=False))
        weights = [decay * W + drift * S - x.mT @ (write_M * error) for x, error, W, S in layers]
        return weights, [momentum * S - x.mT @ (write_S * error) for x, error, _, S in layers]

    def backward(self, dy: Tensor, d_weights: list[Tensor], d_momentum: list[Tensor]):
        """Gradients of everything the chunk was made from, given those of its outputs.

        Returns:
            `(d_weights, d_momentum, dq, dk, dv, d_theta, d_eta, d_alpha)`.
        """
        gates = _GateGradients(self)
        dX, dE, dW, dS, dz = [None] * self.depth, [None] * self.depth, [None] * self.depth, [None] * self.depth, dy
        for i in reversed(range(self.depth)):
            dxb, dX[i], dE[i], dW[i], dS[i] = self._layer_backward(i, dz, d_weights[i], d_momentum[i], gates)
            dz = dxb * _sigmoid_derivatives(self.zb[i - 1])[1] if i else dxb
        dk, dv = self._write_backward(dX, dE, dW)
        return dW, dS, dz, dk, dv, *gates.finish()

    def _layer_backward(self, i: int, dz: Tensor, dW_end: Tensor, dS_end: Tensor, gates: "_GateGradients"):
        """Through one layer's read and update; the gates' share goes to `gates`."""
        c, theta = self.c, self.theta
        xb, x, error, W, S = self.Xb[i], self.X[i], self.E[i], self.weights[i], self.momentum[i]
        step, overlap = c.mixed * theta[..., None, :], xb @ x.mT
        write_M, write_S = (row[..., -1, :, None] * theta[..., None] for row in (c.mixed, c.keep))
        x_dW, x_dS = x @ dW_end, x @ dS_end
        d_error = -((overlap * step).mT @ dz) - write_M * x_dW - write_S * x_dS
        d_product = -(dz @ error.mT).tril()
        d_overlap = d_product * step
        through_W, through_S = dz @ W.mT, dz @ S.mT
        decay, drift = c.decay[..., None], c.drift[..., None]
        dxb = decay * through_W + drift * through_S + d_overlap @ x
        dx = d_overlap.mT @ xb - (write_M * error) @ dW_end.mT - (write_S * error) @ dS_end.mT
        end = lambda gate: gate[..., -1, None, None]  # noqa: E731
        dW = xb.mT @ (decay * dz) + end(c.decay) * dW_end
        dS = xb.mT @ (drift * dz) + end(c.drift) * dW_end + end(c.momentum) * dS_end
        gates.decay += (xb * through_W).sum(-1)
        gates.drift += (xb * through_S).sum(-1)
        gates.step += d_product * overlap
        gates.add_end((dW_end * W).sum((-2, -1)), (dW_end * S).sum((-2, -1)), (dS_end * S).sum((-2, -1)))
        gates.add_writes(-(error * x_dW).sum(-1), -(error * x_dS).sum(-1))
        return dxb, dx, d_error, dW, dS

    def _write_backward(self, dX: list[Tensor], dE: list[Tensor], dW: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Through the cap, the chain of errors (a double backward) and the forward of the keys."""
        dD = []
        for i in range(self.depth):
            d, x_share = self._cap_backward(i, dE[i])
            dD.append(d)
            dX[i] = dX[i] + x_share
        dZ = []
        for i in range(self.depth - 1):
            W, upstream = self.weights[i + 1], self.D[i + 1]
            dH = dD[i] * self.slope[i]
            dZ.append(dD[i] * (upstream @ W.mT) * self.curve[i])
            dD[i + 1] = dD[i + 1] + dH @ W
            dW[i + 1] = dW[i + 1] + dH.mT @ upstream
        dZ.append(2 * dD[-1])
        for i in reversed(range(self.depth)):
            dX[i] = dX[i] + dZ[i] @ self.weights[i].mT
            dW[i] = dW[i] + self.X[i].mT @ dZ[i]
            if i:
                dZ[i - 1] = dZ[i - 1] + dX[i] * self.slope[i - 1]
        return dX[0], -2 * dD[-1]

    def _cap_backward(self, i: int, dE: Tensor) -> tuple[Tensor, Tensor]:
        """From the capped errors to the errors and the inputs, both of which set the cap."""
        x, d, scale = self.X[i], self.D[i], self.scale[i]
        if self.max_surprise is None:
            return dE, torch.zeros_like(x)
        x_squared, d_squared = (t.square().sum(-1, keepdim=True) for t in (x, d))
        capped = x_squared * d_squared > self.max_surprise**2
        share = torch.where(capped, (dE * d).sum(-1, keepdim=True) * scale, 0.0)
        dD = scale * dE - torch.where(capped, share / d_squared, 0.0) * d
        return dD, -torch.where(capped, share / x_squared, 0.0) * x


class _GateGradients:
    """Collects what every layer says about the coefficients, and passes it on to the gates."""

    def __init__(self, chunk: Chunk):
        self.c, self.theta, self.eta, self.alpha = chunk.c, chunk.theta, chunk.eta, chunk.alpha
        self.decay, self.drift, self.momentum = (torch.zeros_like(chunk.theta) for _ in range(3))
        self.step, self.keep_end = torch.zeros_like(chunk.c.mixed), torch.zeros_like(chunk.theta)

    def add_end(self, decay: Tensor, drift: Tensor, momentum: Tensor) -> None:
        self.decay[..., -1] += decay
        self.drift[..., -1] += drift
        self.momentum[..., -1] += momentum

    def add_writes(self, write_M: Tensor, write_S: Tensor) -> None:
        self.step[..., -1, :] += write_M
        self.keep_end += write_S

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of theta, eta and alpha."""
        c, theta = self.c, self.theta
        d_theta = (self.step * c.mixed).sum(-2) + self.keep_end * c.keep[..., -1, :]
        d_mixed = self.step * theta[..., None, :]
        d_forget = (d_mixed @ c.keep.mT + self.drift[..., None] * c.momentum[..., None, :]).tril()
        d_keep = (c.forget.mT @ d_mixed).tril()
        d_keep[..., -1, :] += self.keep_end * theta
        d_momentum = self.momentum + (c.forget.mT @ self.drift[..., None])[..., 0]
        d_eta = _product_backward(c.keep, c.momentum, d_keep, d_momentum)
        return d_theta, d_eta, -_product_backward(c.forget, c.decay, d_forget, self.decay)


def _product_backward(products: Tensor, running: Tensor, d_products: Tensor, d_running: Tensor) -> Tensor:
    """The gradient of a gate from those of its segment products [B, H, C, C] and its running product [B, H, C].

    A product over i+1..t holds gate k between its parts over k+1..t and i+1..k-1: both are products themselves.
    """
    before = torch.nn.functional.pad(products[..., :-1, :], (0, 0, 1, 0))  # row k holds the products that end at k - 1
    first = torch.nn.functional.pad(running[..., :-1], (1, 0), value=1.0)
    inner = ((products.mT @ d_products) * before).sum(-1)
    return inner + (products.mT @ d_running[..., None])[..., 0] * first
