"""The closed form of a chunk (Section 3.2): the memory after every token, without a loop over tokens.

Inside a chunk the update is linear in the gradients `u_i`, which are all taken at the chunk's start. So

    M_t = A_t M_0 + B_t S_0 - sum_{i<=t} C_{t,i} u_i      and      S_t = m_t S_0 - sum_{i<=t} N_{t,i} u_i

and every `u_i` is an outer product `a_i g_i^T` of a layer's input and the error at its output. A query then passes each
layer by matrix products; no per-token weight is ever formed. Autograd differentiates these functions;
`memory_chunks` and `memory_step` compute the same faster.

Axis letters: B batch, H heads, n tokens of one chunk, Q queries of one call. Weights are [B, H, in, out], `M(x) = x W`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Coefficients(NamedTuple):
    """What the memory after each token is made of; see the module's docstring."""

    A: Tensor  # [B, H, Q, 1]
    B: Tensor  # [B, H, Q, 1]
    C: Tensor  # [B, H, Q, n]
    m: Tensor  # [B, H, Q, 1]
    N: Tensor  # [B, H, Q, n]

    def last(self) -> "Coefficients":
        return Coefficients(*(field[..., -1:, :] for field in self))


def chunk_coefficients(theta: Tensor, eta: Tensor, alpha: Tensor, rows: Tensor | None = None) -> Coefficients:
    """Coefficients of the tokens of one chunk, from its gates [B, H, n]; `rows` [B, Q] picks tokens, None means all."""
    decay, momentum = segment_products(1 - alpha), segment_products(eta)
    end = momentum
    if rows is not None:
        index = rows[:, None, :, None].expand(-1, decay.shape[1], -1, decay.shape[-1])
        decay, end = decay.gather(2, index), momentum.gather(2, index)
    mixed = decay[..., 1:] @ momentum  # [B, H, Q, 1 + n]
    step = theta[..., None, :]
    return Coefficients(decay[..., :1], mixed[..., :1], mixed[..., 1:] * step, end[..., :1], end[..., 1:] * step)


def segment_products(gate: Tensor) -> Tensor:
    """Products of a gate [..., n] over every segment that ends at a token.

    Returns [..., n, 1 + n]: column 0 holds the product over tokens 0..t, column 1 + i over tokens i+1..t (1 for i = t,
    0 for i > t). A running product, never a difference of logarithms: gates of exactly 0 and 1 are ordinary values.
    """
    n = gate.shape[-1]
    token = torch.arange(n, device=gate.device)[:, None]
    column = torch.arange(n + 1, device=gate.device)
    factors = torch.where(token >= column, gate[..., None], gate.new_ones(()))
    return flush_underflow(factors.cumprod(-2).masked_fill(column > token + 1, 0.0))


def flush_underflow(x: Tensor) -> Tensor:
    """Set coefficients that are about to underflow to exact zero: subnormal products slow a CPU down several times.

    Gradients pass unchanged, because a gate of exactly 0 has one.
    """
    return x - torch.where(x < negligible(x.dtype), x, 0.0).detach()


def negligible(dtype: torch.dtype) -> float:
    """Shares of a state below this do not matter."""
    return 1e-24 if dtype == torch.float64 else 1e-16


def gradient_factors(rule, weights, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Factors `a`, `g` of every token's gradient `u = a g^T` at the given weights (Eq. 12), after the rule's cap."""
    inputs, slopes, x = [], [], k
    for depth, W in enumerate(weights, 1):
        inputs.append(x)
        z = x @ W  # [B, H, n, out]
        if depth < len(weights):
            sigmoid = torch.sigmoid(z)
            x = z * sigmoid
            slopes.append(sigmoid * (1 + z * (1 - sigmoid)))
    errors = [rule.error(z, v)]
    for W, slope in zip(reversed(weights[1:]), reversed(slopes), strict=True):
        errors.insert(0, (errors[0] @ W.mT) * slope)
    scales = [rule.scale(_squared_norm(a) * _squared_norm(g)) for a, g in zip(inputs, errors, strict=True)]
    return tuple(inputs), tuple(g * scale for g, scale in zip(errors, scales, strict=True))


def _squared_norm(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True)


def read_tokens(weights, momentum, inputs, errors, coefficients: Coefficients, q: Tensor) -> Tensor:
    """Each query through its own token's memory (Eq. 15), without forming that memory."""
    A, B, C = coefficients[:3]
    x = q
    for depth, (W, S, a, g) in enumerate(zip(weights, momentum, inputs, errors, strict=True), 1):
        x = A * (x @ W) + B * (x @ S) - (C * (x @ a.mT)) @ g
        if depth < len(weights):
            x = F.silu(x)
    return x


def advance(weights, momentum, inputs, errors, end: Coefficients) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Weights and momentum after the one token whose coefficients are given."""
    new_weights, new_momentum = [], []
    for W, S, a, g in zip(weights, momentum, inputs, errors, strict=True):
        written = a.mT @ torch.cat((end.C.mT * g, end.N.mT * g), dim=-1)  # [B, H, in, 2 out]
        write_M, write_S = written.chunk(2, dim=-1)
        new_weights.append(end.A * W + end.B * S - write_M)
        new_momentum.append(end.m * S - write_S)
    return tuple(new_weights), tuple(new_momentum)


def read_chunk(rule, weights, momentum, start, q, k, v, theta, eta, alpha):
    """One whole chunk from its boundary: outputs, and weights and momentum at the next boundary."""
    inputs, errors = gradient_factors(rule, weights, k, v)
    coefficients = chunk_coefficients(theta, eta, alpha)
    y = read_tokens(weights, momentum, inputs, errors, coefficients, q)
    end = coefficients.last()
    weights, momentum = advance(weights, momentum, inputs, errors, end)
    return y, rule.at_boundary(weights, start, end.A), momentum
