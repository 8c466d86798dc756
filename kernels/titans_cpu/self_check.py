"""Compares the operators with plain formulas on a small case, once per process (`TITANS_KERNEL_CHECK=0` skips it).

They are compiled on a machine, by a compiler, that we do not know. The tests compare them with the forms in torch that
define them; this says whether they compute here at all, in milliseconds.

Axis letters: G heads of all rows, D head width, F hidden width, C tokens of a chunk.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

G, D, F, C = 2, 19, 37, 3
CAP, SHARE = 4.5, 0.8  # of the rule: cap on surprise, and the share of a step that hidden layers take
TOLERANCE = 1e-4  # largest difference in a tensor, relative to its largest entry


@torch.inference_mode(False)
@torch.no_grad()
def difference(operators) -> str | None:
    """Which operator differs by more than the tolerance; None if none does."""
    for name, check in (("step", _step), ("gated_norm", _norm), ("heads", _heads), ("attend", _attention)):
        for found, expected in check(operators, torch.Generator().manual_seed(0)):
            gap = ((found - expected).abs().max() / expected.abs().max()).item()
            if not gap <= TOLERANCE:
                return f"the operator `{name}` is off by {gap:.1e} of its largest number, allowed {TOLERANCE:.0e}"
    return None


def _normal(generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


def _step(operators, generator) -> list[tuple[Tensor, Tensor]]:
    """Outputs of a chunk of tokens, and of the same in torch, by whole matrices."""
    W, S, start = ([_normal(generator, G, *layer) / 5 for layer in ((D, F), (F, D))] for _ in range(3))
    layers = [torch.cat((*each, torch.zeros(G, C, each[0].shape[2])), dim=1) for each in zip(W, S, start)]
    slots, shares = torch.zeros(G, C, D + F + 3), torch.eye(2, 2 + C).expand(G, -1, -1)
    of_M, of_S, M, pairs = shares[:, 0].contiguous(), shares[:, 1].contiguous(), W, []
    for token in range(C):
        q, k, v = (_normal(generator, G, D) / scale for scale in (5, 5, 0.3))
        gates = theta, eta, alpha = _normal(generator, 3, G).sigmoid().unbind()
        options = (token, CAP, True, SHARE, True)
        y, of_M, of_S = operators.step(q, k, v, theta, eta, alpha, layers, slots, of_M, of_S, *options)
        M, S = _written(W, M, S, start, k[:, None], v[:, None], [gate[:, None, None] for gate in gates])
        pairs.append((y, (silu(q[:, None] @ M[0]) @ M[1])[:, 0]))
    return pairs


def _written(W, M, S, start, k: Tensor, v: Tensor, gates) -> tuple[list[Tensor], list[Tensor]]:
    """Memory and momentum after a token: Eqs. 12-14, the last layer's error taken at the present memory."""
    theta, eta, alpha = gates
    z = k @ W[0]
    error = 2 * (silu(z) @ M[1] - v)
    slope = z.sigmoid() * (1 + z * (1 - z.sigmoid()))
    factors = ((k, (error @ M[1].mT) * slope, SHARE), (silu(z), error, 1 / silu(z).square().sum(-1, True).clamp(min=1)))
    u = [a.mT @ g * share for a, g, share in factors]
    u = [x * CAP / x.square().sum((1, 2), True).sqrt().clamp(min=CAP) for x in u]
    S = [eta * own - theta * x for own, x in zip(S, u)]
    M = [(1 - alpha) * own + after + alpha * back for own, after, back in zip(M, S, start)]
    return M, S


def _norm(operators, generator) -> list[tuple[Tensor, Tensor]]:
    x, weight, gate = _normal(generator, G, 1, 3, D), _normal(generator, D), _normal(generator, G, 1, 3 * D)
    normed = x * (x.square().mean(-1, True) + 0.1).rsqrt() * weight
    return [(operators.gated_norm(x, weight, 0.1, gate), normed.flatten(2) * silu(gate))]


def _heads(operators, generator) -> list[tuple[Tensor, Tensor]]:
    extended, taps = _normal(generator, G, 4, 3 * 2 * D), _normal(generator, 4, 3 * 2 * D)
    expected = silu((extended * taps).sum(1)).unflatten(-1, (6, D))
    length = expected.norm(dim=-1, keepdim=True)
    length[:, 4:] = length[:, 4:].clamp(min=1)
    return [(operators.heads(extended, taps, 3, 2, 1.0), (expected / length)[:, None])]


def _attention(operators, generator) -> list[tuple[Tensor, Tensor]]:
    """A query over a prefix, and over keys at angles that grow from one to the next."""
    rows, keys, heads, width = 2, 5, 3, 22
    q, k, v = (_normal(generator, rows, count, heads, width) for count in (1, keys, keys))
    prefix_k, prefix_v = (_normal(generator, rows, 2, heads, width) for _ in range(2))
    angle = (torch.arange(keys)[:, None, None] * torch.linspace(0.1, 1, width // 2)).repeat(1, 1, 2)
    cos, sin, first = angle.cos(), angle.sin(), torch.tensor([0, 3])
    turn = lambda x, c, s: x * c + torch.cat((-x[..., width // 2 :], x[..., : width // 2]), dim=-1) * s  # noqa: E731
    scores = torch.cat((prefix_k * q, turn(k, cos, sin) * turn(q, cos[-1:], sin[-1:])), dim=1).sum(-1, True) / 4
    scores[1, 2:5] = -torch.inf
    expected = (scores.softmax(1) * torch.cat((prefix_v, v), dim=1)).sum(1, True).flatten(2)
    return [(operators.attend(q, k, v, first, 0.25, prefix_k, prefix_v, cos, sin), expected)]
