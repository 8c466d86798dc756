"""The closed form of a chunk (Section 3.2): the memory after every token, without a loop over tokens.

Inside a chunk the update is linear in the gradients `u_i`, which are all taken at the chunk's start. So

    M_t = A_t M_0 + B_t S_0 - sum_{i<=t} C_{t,i} u_i      and      S_t = m_t S_0 - sum_{i<=t} N_{t,i} u_i

and every `u_i` is an outer product `a_i g_i^T` of a layer's input and the error at its output. A query then passes each
layer by matrix products; no per-token weight is ever formed. Where forgetting leads to a `start` in place of zero,
`M_t` has `(1 - A_t) start` besides. Autograd differentiates these functions; `memory_chunks` and `memory_step` compute
the same faster.

Axis letters: B batch, H heads, n tokens of one chunk, Q queries of one call. Weights are [B, H, in, out], `M(x) = x W`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .fast_paths import inside_functorch, without_values
from .rows import fill_slots


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


class OpenChunk(NamedTuple):
    """The tokens of a chunk so far, in slots: see `memory_state.MemoryState` for the fields."""

    inputs: tuple[Tensor, ...]
    errors: tuple[Tensor, ...]
    gates: tuple[Tensor, Tensor, Tensor]
    length: Tensor

    @classmethod
    def empty(cls, weights: tuple[Tensor, ...], size: int) -> "OpenChunk":
        """A chunk of that size without tokens."""
        slots = (*weights[0].shape[:2], size)
        inputs, errors = (tuple(W.new_zeros(*slots, W.shape[axis]) for W in weights) for axis in (2, 3))
        length = torch.zeros(slots[0], dtype=torch.long, device=weights[0].device)
        return cls(inputs, errors, tuple(weights[0].new_zeros(slots) for _ in range(3)), length)


def coefficients_before(gates, slots: Tensor) -> Coefficients:
    """What the memory before the tokens in the given slots [B, n] is made of: for the first slot, the chunk's start."""
    before = chunk_coefficients(*gates, rows=(slots - 1).clamp(min=0))
    first = (slots == 0)[:, None, :, None]
    start = Coefficients(1.0, 0.0, 0.0, 1.0, 0.0)
    return Coefficients(*(torch.where(first, x.new_tensor(at_start), x) for at_start, x in zip(start, before)))


def gradient_factors(rule, weights, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Factors `a`, `g` of every token's gradient `u = a g^T` at the given weights (Eq. 12), scaled as the rule says."""
    inputs, slopes = _hidden_layers(weights, k)
    errors = [rule.error(inputs[-1] @ weights[-1], v)]
    if slopes:
        errors = [*_hidden_errors(weights, errors[0] @ weights[-1].mT, slopes), *errors]
    return tuple(inputs), _scaled(rule, inputs, errors)


def delta_factors(rule, weights, momentum, start, chunk: OpenChunk, gates, k: Tensor, v: Tensor):
    """The same where the last layer's error is taken after the writes of the tokens before it in the chunk.

    Hidden layers stay at the chunk's start, so the inputs `a` of the last layer are known for all tokens at once, and
    each error follows from the ones before it, with `g_i` the scaled `2 e_i`:
    `e_t = A_{t-1} a_t W + B_{t-1} a_t S - v_t - sum_{i<t} C_{t-1,i} (a_t . a_i) g_i`.
    """
    inputs, slopes = _hidden_layers(weights, k)
    a, W, S = inputs[-1], weights[-1], momentum[-1]
    slots = chunk.length[:, None] + torch.arange(k.shape[2], device=k.device)  # [B, n]
    gates = [fill_slots(old, new, chunk.length) for old, new in zip(chunk.gates, gates, strict=True)]
    slots = slots.clamp(max=gates[0].shape[-1] - 1)
    A, B, C, *_ = coefficients_before(gates, slots)
    a_slots = fill_slots(chunk.inputs[-1], a, chunk.length)
    known, share = _old(A, B, a, W, S, start and start[-1]), C * (a @ a_slots.mT)
    errors = _solve_errors(rule, weights, a, known - v, share, chunk, slots)
    found = [errors]
    if slopes:
        g_slots = fill_slots(chunk.errors[-1], _scaled_last(rule, weights, a, errors), chunk.length)
        through = _old(A, B, errors, W.mT, S.mT, start and start[-1].mT) - (C * (errors @ g_slots.mT)) @ a_slots
        found = [*_hidden_errors(weights, through, slopes), errors]
    return tuple(inputs), _scaled(rule, inputs, found)


def _solve_errors(rule, weights, a: Tensor, known: Tensor, share: Tensor, chunk: OpenChunk, slots: Tensor) -> Tensor:
    """`2 e` of every token, unscaled: [B, H, n, D]. A triangular solve, or a loop where the cap acts.

    Args:
        known: [B, H, n, D] what the errors are without the chunk's own writes.
        share: [B, H, n, C] the weight of each slot's `g` in each token's answer, 0 from the token's own slot on.
    """
    slot = torch.arange(share.shape[-1], device=a.device)
    g = torch.where((slot < chunk.length[:, None])[:, None, :, None], chunk.errors[-1], 0.0)  # [B, H, C, D]
    own = share.gather(-1, slots[:, None, None].expand(*share.shape[:3], -1))  # [B, H, n, n]
    own = 2 * own * rule.step_scale(len(weights) - 1, len(weights), _squared_norm(a).mT)
    errors = torch.linalg.solve_triangular(own, 2 * (known - share @ g), upper=False, unitriangular=True)
    if rule.max_surprise is None or (
        not without_values(a) and not inside_functorch() and _within_cap(rule, weights, a, errors)
    ):
        return errors
    found = []
    for t in range(a.shape[2]):
        found.append(2 * (known[:, :, t] - (share[:, :, t, None] @ g)[:, :, 0]))
        here = (slot == slots[:, t, None])[:, None, :, None]
        g = torch.where(here, _scaled_last(rule, weights, a[:, :, t], found[-1])[:, :, None], g)
    return torch.stack(found, dim=2)


def _within_cap(rule, weights, a: Tensor, g: Tensor) -> bool:
    a, g = _squared_norm(a), _squared_norm(g)
    return bool((a * g * rule.step_scale(len(weights) - 1, len(weights), a) ** 2 <= rule.max_surprise**2).all())


def _hidden_layers(weights, k: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Every layer's input for keys [B, H, n, D], and the slope of every hidden layer's activation."""
    inputs, slopes = [k], []
    for W in weights[:-1]:
        z = inputs[-1] @ W
        sigmoid = torch.sigmoid(z)
        inputs.append(z * sigmoid)
        slopes.append(sigmoid * (1 + z * (1 - sigmoid)))
    return inputs, slopes


def _hidden_errors(weights, through: Tensor, slopes: list[Tensor]) -> list[Tensor]:
    """The errors of the hidden layers, from the error behind the last of them (after its activation)."""
    errors = [through * slopes[-1]]
    for W, slope in zip(reversed(weights[1:-1]), reversed(slopes[:-1]), strict=True):
        errors.insert(0, (errors[0] @ W.mT) * slope)
    return errors


def _scaled(rule, inputs, errors) -> tuple[Tensor, ...]:
    sizes = zip(map(_squared_norm, inputs), map(_squared_norm, errors), strict=True)
    depth = len(inputs)
    return tuple(g * rule.scale(i, depth, *pair) for g, (i, pair) in zip(errors, enumerate(sizes), strict=True))


def _scaled_last(rule, weights, a: Tensor, g: Tensor) -> Tensor:
    return g * rule.scale(len(weights) - 1, len(weights), _squared_norm(a), _squared_norm(g))


def _squared_norm(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True)


def _old(A: Tensor, B: Tensor, x: Tensor, W: Tensor, S: Tensor, start: Tensor | None) -> Tensor:
    """`x` [B, H, n, in] through what is left, at its own token, of a layer's weights and momentum at the boundary."""
    old = A * (x @ W) + B * (x @ S)
    return old if start is None else old + (1 - A) * (x @ start)


def read_tokens(weights, momentum, start, inputs, errors, coefficients: Coefficients, q: Tensor) -> Tensor:
    """Each query through its own token's memory (Eq. 15), without forming that memory."""
    A, B, C = coefficients[:3]
    x = q
    for i, (W, S, a, g) in enumerate(zip(weights, momentum, inputs, errors, strict=True)):
        x = F.silu(x) if i else x
        x = _old(A, B, x, W, S, start and start[i]) - (C * (x @ a.mT)) @ g
    return x


def advance(weights, momentum, start, inputs, errors, end: Coefficients):
    """Weights and momentum after the one token whose coefficients are given."""
    new_weights, new_momentum = [], []
    for i, (W, S, a, g) in enumerate(zip(weights, momentum, inputs, errors, strict=True)):
        written = a.mT @ torch.cat((end.C.mT * g, end.N.mT * g), dim=-1)  # [B, H, in, 2 out]
        write_M, write_S = written.chunk(2, dim=-1)
        old = end.A * W + end.B * S
        new_weights.append((old if start is None else old + (1 - end.A) * start[i]) - write_M)
        new_momentum.append(end.m * S - write_S)
    return tuple(new_weights), tuple(new_momentum)


def read_chunk(rule, weights, momentum, start, q, k, v, theta, eta, alpha):
    """One whole chunk from its boundary: outputs, and weights and momentum at the next boundary."""
    chunk = OpenChunk.empty(weights, k.shape[2])
    inputs, errors = rule.factors(weights, momentum, start, chunk, (theta, eta, alpha), k, v)
    coefficients = chunk_coefficients(theta, eta, alpha)
    y = read_tokens(weights, momentum, start, inputs, errors, coefficients, q)
    return y, *advance(weights, momentum, start, inputs, errors, coefficients.last())
