"""The parts of a chunk that is written by delta (`memory_rule.DeltaRule`), forward and backward.

The last layer's error of a token is taken after the writes of the tokens before it. With `O = X X^T` of that layer's
inputs, and what the state before each token is made of (`Before`), the errors solve a triangular system,

    D + 2 (step O) G = 2 (decay X W + drift X S - V),    G = scale D,

and go back to the hidden layers through the weights that the token finds: `U = decay D W^T + drift D S^T - step (D G^T)
X`. `memory_closed_form.delta_factors` defines the numbers. A `start` of the last layer adds its own answer, `X start`,
and its own way back, `D start^T`.

Axis letters as in `memory_parts`: G = B H or K B H sequences, C tokens of a chunk.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .fast_paths import without_values
from .memory_parts import Gates, Updates, Write, joined
from .memory_rule import Rule


class Before(NamedTuple):
    """What the state before each token is made of: `Gates`, one token later."""

    step: Tensor  # [G, C, C]
    decay: Tensor  # [G, C, 1]
    drift: Tensor  # [G, C, 1]

    @classmethod
    def of(cls, gates: Gates) -> "Before":
        earlier = lambda x, first: F.pad(x[:, :-1], (1, 0), value=first)[..., None]  # noqa: E731
        return cls(F.pad(gates.step[:, :-1], (0, 0, 1, 0)), earlier(gates.decay, 1.0), earlier(gates.drift, 0.0))

    @staticmethod
    def add_to(d_gates: Gates, d_step: Tensor, d_decay: Tensor, d_drift: Tensor) -> None:
        """From the gradients of the fields, the latter two [G, C], to those of the gates."""
        d_gates.step[:, :-1].add_(d_step[:, 1:])
        d_gates.decay[:, :-1].add_(d_decay[:, 1:])
        d_gates.drift[:, :-1].add_(d_drift[:, 1:])


class DeltaWrite(Write):
    """A `Write` whose last layer's errors follow one another.

    Attributes:
        G: the scaled errors of the last layer, [G, C, D].
        share: [G, C, C], the weight of each earlier token's `G` in each token's answer.
        system: [G, C, C], what is below the diagonal of the triangular system.
        acted: whether the cap has changed an error, so that the system is no longer linear.
    """

    def __init__(self, rule: Rule, weights, S: Tensor, start: Tensor | None, k: Tensor, v: Tensor, before: Before):
        self.S, self.start, self.before = S, start, before
        super().__init__(rule, weights, k, v)

    def last_errors(self, W: Tensor, v: Tensor) -> Tensor:
        x, step = self.X[-1], self.before.step
        self.of_W, self.of_S, self.overlap = torch.bmm(x, W), torch.bmm(x, self.S), torch.bmm(x, x.mT)
        self.share = step * self.overlap
        known = (self.of_W * self.before.decay).addcmul_(self.of_S, self.before.drift).sub_(v)
        if self.start is not None:
            known.baddbmm_(x, self.start)
        known.mul_(2)
        squared = self.overlap.diagonal(dim1=-2, dim2=-1)[..., None]
        scale = self.rule.step_scale(len(self.Z), len(self.X), squared)
        self.system = 2 * self.share * (scale.mT if isinstance(scale, Tensor) else scale)
        D = torch.linalg.solve_triangular(self.system, known, upper=False, unitriangular=True)
        self.G, self.acted = D * scale, False
        if self.rule.max_surprise is not None and not without_values(x):
            sizes = self.G.square().sum(-1, keepdim=True) * squared
            self.acted = bool((sizes > self.rule.max_surprise**2).any())
        return self._token_by_token(known, squared) if self.acted else D

    def _token_by_token(self, known: Tensor, squared: Tensor) -> Tensor:
        """The errors where the cap acts; `known` is what they are without the chunk's own writes."""
        found, self.G = [], torch.zeros_like(known)
        for t in range(known.shape[1]):
            d = known[:, t] - 2 * (self.share[:, t, None] @ self.G)[:, 0]
            scale = self.rule.scale(len(self.Z), len(self.X), squared[:, t], d.square().sum(-1, keepdim=True))
            self.G[:, t] = d * scale
            found.append(d)
        return torch.stack(found, dim=1)

    def through_last(self, W: Tensor) -> Tensor:
        (D,), before = self.D, self.before
        self.back_W, self.back_S = torch.bmm(D, W.mT), torch.bmm(D, self.S.mT)
        self.agreement = torch.bmm(D, self.G.mT)
        U = (self.back_W * before.decay).addcmul_(self.back_S, before.drift)
        if self.start is not None:
            U.baddbmm_(D, self.start.mT)
        return U.baddbmm_(before.step * self.agreement, self.X[-1], alpha=-1)


class DeltaUpdates(Updates):
    """`Updates` of chunks where the cap has not acted on the last layer."""

    def __init__(self, K: int, write: DeltaWrite, weights, momentum, gates: Gates, *found):
        super().__init__(K, write, weights, momentum, gates, *found)
        self.G, self.share, self.system = (self.by_chunk(K, [x]) for x in (write.G, write.share, write.system))
        self.before, self.S = self.by_chunk(K, write.before), self.by_chunk(K, momentum[-1:])
        self.start = self.by_chunk(K, [write.start]) if self.d_start else None
        self.agreement = self.by_chunk(K, [write.agreement]) if self.curves[0] else None
        normalised = write.rule.normalised and len(weights) > 1
        self.step_scale = self.by_chunk(K, [write.step_scale[-1]]) if normalised else None
        self.passed = []  # of all chunks passed: the gradients that `finish` makes those of the gates from

    def hidden_error_backward(self, n: int, i: int, dU: Tensor) -> None:
        if i + 2 < len(self.weights):
            return super().hidden_error_backward(n, i, dU)
        # U = decay D W^T + drift D S^T - step (D G^T) X, the weights that each token finds
        (step, decay, drift), (S,), (G,) = self.before[n], self.S[n], self.G[n]
        D, X = self.D[n][-1], self.X[n][-1]
        by_decay, by_drift, towards = dU * decay, dU * drift, torch.bmm(dU, X.mT)
        shared = step * towards
        dD = self.dD_of[n][-1].baddbmm_(by_decay, self.W[n][-1]).baddbmm_(by_drift, S)
        dD.baddbmm_(shared, G, alpha=-1)
        self._scale_backward(n, torch.bmm(shared.mT, D).neg_(), to_errors=True)
        self.dX_of[n][-1].baddbmm_((step * self.agreement[n][0]).mT, dU, alpha=-1)
        self.dW_of[n][-1].baddbmm_(by_decay.mT, D)
        self.dS_of[n][-1].baddbmm_(by_drift.mT, D)
        if self.start is not None:
            dD.baddbmm_(dU, self.start[n][0])
            self.d_start_of[n][-1].baddbmm_(dU.mT, D)
        self.passed.append((dU, towards))

    def last_error_backward(self, n: int) -> None:
        (step, decay, drift), (S,), (G,), (share,) = self.before[n], self.S[n], self.G[n], self.share[n]
        X, dX, W, dD = self.X[n][-1], self.dX_of[n][-1], self.W[n][-1], self.dD_of[n][-1]
        # the transposed system; dD becomes the gradient of `decay X W + drift X S - V - share G`
        dD.copy_(torch.linalg.solve_triangular(self.system[n][0].mT, dD, upper=True, unitriangular=True)).mul_(2)
        self._scale_backward(n, torch.bmm(share.mT, dD).neg_(), to_errors=False)
        d_overlap = torch.bmm(dD, G.mT).mul_(step)
        by_decay, by_drift = dD * decay, dD * drift
        dX.baddbmm_(d_overlap + d_overlap.mT, X, alpha=-1).baddbmm_(by_decay, W.mT).baddbmm_(by_drift, S.mT)
        self.dW_of[n][-1].baddbmm_(X.mT, by_decay)
        self.dS_of[n][-1].baddbmm_(X.mT, by_drift)
        if self.start is not None:
            dX.baddbmm_(dD, self.start[n][0].mT)
            self.d_start_of[n][-1].baddbmm_(X.mT, dD)

    def _scale_backward(self, n: int, dG: Tensor, to_errors: bool) -> None:
        """Through `G = scale D` of the last layer; the triangular system has the errors' part already."""
        if to_errors:
            scale = None if self.step_scale is None else self.step_scale[n][0][..., None]
            self.dD_of[n][-1].add_(dG if scale is None else dG * scale)
        if self.step_scale is not None:
            along = (self.G[n][0] * dG).sum(-1) * self.shares[0][n][-1]
            self.dX_of[n][-1].addcmul_(self.X[n][-1], along[..., None], value=-1)

    def finish(self, d_gates: Gates) -> tuple[Tensor, Tensor]:
        write, dD = self.write, self.dD[-1]
        d_step = torch.bmm(dD, write.G.mT).mul_(write.overlap).neg_()
        d_decay, d_drift = (dD * write.of_W).sum(-1), (dD * write.of_S).sum(-1)
        if self.passed:
            dU, towards = (joined(xs) for xs in zip(*reversed(self.passed), strict=True))
            d_step.addcmul_(write.agreement, towards, value=-1)
            d_decay.add_((dU * write.back_W).sum(-1))
            d_drift.add_((dU * write.back_S).sum(-1))
        Before.add_to(d_gates, d_step, d_decay, d_drift)
        return super().finish(d_gates)

    def keys_gradient(self) -> Tensor:
        return self.dX[0] if len(self.weights) == 1 else super().keys_gradient()
